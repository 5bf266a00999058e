#include <dataparallel/data_parallel.h>
#include <dataparallel/simulated.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// Links that lie. What is known of a pair of devices is known for the whole
// process, so each test here has a pair of its own.

namespace {

namespace dp = dataparallel;
namespace simulated = dataparallel::simulated;
using Catch::Contains;
using test::Mlp;

/// Keeps torch's warnings while it lives.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : before_(c10::WarningUtils::get_warning_handler()) {
    c10::WarningUtils::set_warning_handler(this);
  }
  ~Warnings() override { c10::WarningUtils::set_warning_handler(before_); }
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;

 private:
  c10::WarningHandler* before_;
};

}  // namespace

TEST_CASE("a link that lies is named once, and the numbers stay right",
          "[links]") {
  const auto devices = test::sim(2);
  const simulated::CorruptCopies lies(devices[1], devices[0]);
  Warnings warnings;
  auto net = test::make<Mlp>(devices[0]);
  {
    dp::DataParallel<Mlp> model(net, test::on(devices));
    REQUIRE(warnings.texts.size() == 1);
    CHECK_THAT(warnings.texts[0],
               Contains("between sim:0 and sim:1 arrives wrong"));
  }
  test::check_trains_as_on_one_device(
      net, test::on(devices), [&](auto& model, int) {
        return model(test::batch_on(devices[0])).pow(2).mean();
      });
  CHECK(warnings.texts.size() == 1);
}

TEST_CASE("scatter and gather go round a link that lies, backward too",
          "[links]") {
  const test::Devices devices{torch::Device("sim:2"), torch::Device("sim:3")};
  Warnings warnings;
  const simulated::CorruptCopies there(devices[0], devices[1]);
  const auto x = test::batch_on(devices[0]).requires_grad_();
  const auto parts = dp::scatter(x, devices);
  const auto y = dp::gather(parts, devices[0]);
  CHECK(y.equal(x));
  y.pow(2).sum().backward();
  CHECK(x.grad().equal(2 * x.detach()));
  CHECK(warnings.texts.size() == 1);
  CHECK(simulated::bytes_copied(devices[1], torch::kCPU) > 0);
}

TEST_CASE("sound links are used directly, without a warning", "[links]") {
  const test::Devices devices{torch::Device("sim:0"), torch::Device("sim:3")};
  Warnings warnings;
  auto net = test::make<Mlp>(devices[0]);
  dp::DataParallel<Mlp> model(net, test::on(devices));
  simulated::reset_counters();
  model(test::batch_on(devices[0])).sum().backward();
  CHECK(simulated::bytes_copied(devices[0], devices[1]) > 0);
  CHECK(simulated::bytes_copied(devices[0], torch::kCPU) == 0);
  CHECK(simulated::bytes_copied(devices[1], torch::kCPU) == 0);
  CHECK(warnings.texts.empty());
}
