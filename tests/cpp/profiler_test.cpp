#include <ATen/record_function.h>
#include <dataparallel/data_parallel.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// The phases of a step as torch's profiler sees them.

namespace {

namespace dp = dataparallel;
using Counts = std::map<std::string, int>;
using test::batch_on;
using test::Mlp;

Counts seen;
std::mutex seen_mutex;

/// Counts the ranges that begin while it lives, in any thread.
class Recorded {
 public:
  Recorded() {
    seen.clear();
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& range)
                                       -> std::unique_ptr<at::ObserverContext> {
          std::lock_guard lock(seen_mutex);
          ++seen[range.name()];
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Recorded() { at::removeCallback(handle_); }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  at::CallbackHandle handle_;
};

torch::Tensor mean_square(const torch::Tensor& y, const torch::Tensor& t) {
  return (y - t.narrow(1, 0, y.size(1))).pow(2).mean();
}

}  // namespace

TEST_CASE("a trace shows every phase of a step", "[profiler]") {
  const auto devices = GENERATE(test::cpu(2), test::sim(2));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  const auto parameters = static_cast<int>(net->parameters().size());
  dp::DataParallel<Mlp> model(net, test::on(devices).bucket_bytes(1));
  const auto x = batch_on(devices[0]);
  const Counts forward{{"dataparallel::scatter", 1},
                       {"dataparallel::refresh", 1},
                       {"dataparallel::replica 0", 1},
                       {"dataparallel::replica 1", 1},
                       {"dataparallel::gather", 1}};
  torch::Tensor y;
  {
    const Recorded recorded;
    y = model(x);
  }
  CHECK(seen == forward);
  {
    const Recorded recorded;
    y.pow(2).mean().backward();
  }
  Counts buckets;
  for (int i = 0; i < parameters; ++i) {
    buckets["dataparallel::reduce bucket " + std::to_string(i)] = 1;
  }
  CHECK(seen == buckets);
  {
    const Recorded recorded;
    model->loss(mean_square, x, x);
  }
  CHECK(seen == forward);
  {
    const Recorded recorded;
    model->forward_backward(mean_square, x, x);
  }
  CHECK(seen["dataparallel::reduce bucket 0"] >= 1);
  CHECK(seen["dataparallel::scatter"] == 1);
}

TEST_CASE("a trace of one sample shows one replica", "[profiler]") {
  auto net = test::make<Mlp>(torch::kCPU);
  dp::DataParallel<Mlp> model(net, test::on(test::cpu(2)));
  const auto x = batch_on(torch::kCPU, /*samples=*/1);
  {
    const Recorded recorded;
    model(x);
  }
  CHECK(seen == Counts{{"dataparallel::scatter", 1},
                       {"dataparallel::replica 0", 1},
                       {"dataparallel::gather", 1}});
}
