#include <dataparallel/dataparallel.h>
#include <torch/torch.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/meeting.h"
#include "support/networks.h"
#include "support/oracle.h"

// What people reported of data parallelism in torch, one test a report, and
// what is right instead: replicas and training. What happens inside forward
// (R09, R13, R31, R33, R39) is in bug_reports_forward_test.cpp, scripted
// modules (R23) in module_kinds_test.cpp, dtypes and layouts (R41) in
// dtypes_test.cpp.

namespace {

namespace dp = dataparallel;
using test::batch_on;
using test::Mlp;
using test::on;

/// Counts `reset` and `clone`, and may wait for the other replicas.
struct WatchedImpl : torch::nn::Cloneable<WatchedImpl> {
  inline static std::atomic<int> resets = 0;
  WatchedImpl() { reset(); }
  void reset() override {
    ++resets;
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x,
                        test::Meeting* meeting = nullptr) {
    if (meeting != nullptr && !meeting->arrive()) {
      throw std::runtime_error("the other replicas did not come");
    }
    return layer(x);
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Watched);

struct LstmNetImpl : torch::nn::Cloneable<LstmNetImpl> {
  explicit LstmNetImpl(bool flatten = false) : flatten(flatten) { reset(); }
  void reset() override {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 5)
                                                       .num_layers(2)
                                                       .bidirectional(true)
                                                       .batch_first(true)));
    gru = register_module(
        "gru", torch::nn::GRU(torch::nn::GRUOptions(10, 3).batch_first(true)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (flatten) {
      lstm->flatten_parameters();
      gru->flatten_parameters();
    }
    return std::get<0>(gru(std::get<0>(lstm(x))));
  }
  bool flatten;
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
};
TORCH_MODULE(LstmNet);

}  // namespace

TEST_CASE(
    "100 steps clone the module once a replica and allocate no parameters",
    "[R03]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Watched net;
  net->to(devices[0], torch::kDouble);
  const int before = WatchedImpl::resets;
  dp::DataParallel<Watched> model(net, on(devices));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto x = batch_on(devices[0], 8);
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    model(x).pow(2).mean().backward();
    optimizer.step();
  }
  CHECK(WatchedImpl::resets - before == static_cast<int>(devices.size()) - 1);
}

TEST_CASE("replicas run at the same time, whatever the number of threads",
          "[R03]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Watched net;
  net->to(devices[0], torch::kDouble);
  dp::DataParallel<Watched> model(net, on(devices));
  const auto x = batch_on(devices[0], 8);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  test::Meeting meeting(devices.size());
  CHECK_NOTHROW(model(x, &meeting));
  std::atomic<int> failed = 0;
  at::parallel_for(0, 1, 1, [&](int64_t, int64_t) {
    test::Meeting inside(devices.size());
    try {
      model(x, &inside);
    } catch (const std::exception&) {
      ++failed;
    }
  });
  CHECK(failed == 0);
  at::set_num_threads(threads);
}

TEST_CASE("batch statistics are the first chunk's and stay in the module",
          "[R05]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<test::ConvNet>(devices[0]);
  auto first = test::twin(net);
  dp::DataParallel<test::ConvNet> model(net, on(devices));
  const auto x = torch::randn({7, 2, 5, 5}, test::float64_on(devices[0]));
  const int64_t chunk = dp::chunk_sizes(7, devices.size())[0];
  for (int64_t step = 1; step <= 3; ++step) {
    model(x * step);
    first(x.slice(0, 0, chunk) * step);
    CHECK(net->norm->num_batches_tracked.item<int64_t>() == step);
    test::check_equal("mean", net->norm->running_mean,
                      first->norm->running_mean);
    test::check_equal("variance", net->norm->running_var,
                      first->norm->running_var);
  }
  model->eval();
  const auto before = net->norm->running_mean.clone();
  first->eval();
  // Every replica starts from the module's values, or this would differ.
  test::check_equal("evaluation", model(x), first(x));
  CHECK(test::same_bits(net->norm->running_mean, before));
  CHECK(net->norm->num_batches_tracked.item<int64_t>() == 3);
}

TEST_CASE("no change of the module after the first forward is ignored",
          "[R07]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  dp::DataParallel<Mlp> model(net, on(devices));
  auto x = batch_on(devices[0]);
  const auto check = [&](const std::string& change) {
    auto single = test::twin(net);
    single->plain = net->plain;
    INFO(change);
    test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
  };
  check("nothing");
  {
    torch::NoGradGuard no_grad;
    net->first->weight.add_(1);
  }
  check("edited under no-grad");
  torch::optim::SGD(net->parameters(), 0.1).step();
  check("optimizer step");
  net->first->eval();
  check("eval of a child");
  net->first->bias.requires_grad_(false);
  check("frozen");
  net->first->bias.requires_grad_(true);
  check("unfrozen");
  net->plain = 3;
  model->refresh_structure();
  check("plain number");
  net->second = net->replace_module("second", torch::nn::Linear(5, 3));
  net->second->to(devices[0], torch::kDouble);
  model->refresh_structure();
  check("replaced child");
  net->to(torch::kFloat);
  x = x.to(torch::kFloat);
  check("float32");
}

TEST_CASE("recurrent layers train as on one device, flattened or not",
          "[R17]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  const bool flatten = GENERATE(false, true);
  INFO(test::name(devices));
  auto net = test::make<LstmNet>(devices[0], flatten);
  const auto x = torch::randn({5, 3, 4}, test::float64_on(devices[0]));
  test::check_trains_as_on_one_device(net, on(devices), [&](auto& model, int) {
    return model(x).pow(2).mean();
  });
  net->eval();
  torch::NoGradGuard no_grad;
  dp::DataParallel<LstmNet> model(net, on(devices));
  test::check_equal("evaluation", model(x), net(x));
}

TEST_CASE("weights that lie in one block lie so in the replicas", "[R17]") {
  const test::Devices devices = test::sim(3);
  auto net = test::make<LstmNet>(devices[0]);
  // As a fused kernel wants them: slices of one buffer.
  std::vector<torch::Tensor> weights = net->lstm->parameters();
  std::vector<torch::Tensor> flat;
  for (const torch::Tensor& weight : weights) {
    flat.push_back(weight.detach().view(-1));
  }
  const torch::Tensor block = torch::cat(flat);
  int64_t offset = 0;
  for (torch::Tensor& weight : weights) {
    weight.set_data(
        block.slice(0, offset, offset + weight.numel()).view(weight.sizes()));
    offset += weight.numel();
  }
  const int64_t bucket_bytes = GENERATE(int64_t{1} << 20, int64_t{64});
  dp::Replicas<LstmNet> replicas(net, devices, bucket_bytes);
  for (size_t i = 0; i < replicas.size(); ++i) {
    const auto copies = replicas[i]->lstm->parameters();
    for (size_t w = 1; w < copies.size(); ++w) {
      CHECK(copies[w].storage().is_alias_of(copies[0].storage()));
      CHECK(copies[w].storage_offset() ==
            copies[w - 1].storage_offset() + copies[w - 1].numel());
    }
  }
}

TEST_CASE("frozen parameters are frozen in the replicas", "[R19]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const bool before = GENERATE(false, true);
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  const auto freeze = [&] {
    for (torch::Tensor& parameter : net->first->parameters()) {
      parameter.requires_grad_(false);
    }
  };
  if (before) {
    freeze();
  }
  dp::DataParallel<Mlp> model(net, on(devices));
  if (!before) {
    freeze();
  }
  auto single = test::twin(net);
  const auto x = batch_on(devices[0]);
  test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
  CHECK_FALSE(net->first->weight.grad().defined());
  for (torch::Tensor& parameter : net->parameters()) {
    parameter.requires_grad_(false);
  }
  CHECK_FALSE(model(x).requires_grad());
}

TEST_CASE("the activations of frozen layers are not kept", "[R19]") {
  const test::Devices devices = test::sim(2);
  constexpr int64_t kSamples = 2000;  // a device; weights weigh little
  const auto peak_of = [&](auto& model, int64_t samples, torch::Device device) {
    const auto x = torch::randn({samples, 4}, test::float64_on(devices[0]));
    dataparallel::simulated::reset_counters();
    const auto before = dataparallel::simulated::memory_allocated(device);
    model->forward(x).sum().backward();
    return dataparallel::simulated::peak_memory(device) - before;
  };
  torch::nn::Sequential net(torch::nn::Linear(4, 32));
  for (int layer = 0; layer < 8; ++layer) {
    net->push_back(torch::nn::Tanh());
    net->push_back(torch::nn::Linear(32, layer < 7 ? 32 : 1));
  }
  net->to(devices[0], torch::kDouble);
  const auto unfrozen = peak_of(net, kSamples, devices[0]);
  for (torch::Tensor& parameter : net->parameters()) {
    parameter.requires_grad_(parameter.size(0) == 1);  // the head's
  }
  const auto single = peak_of(net, kSamples, devices[0]);
  REQUIRE(static_cast<double>(unfrozen) > 2 * static_cast<double>(single));
  dp::DataParallel<torch::nn::Sequential> model(
      net, on(devices).output_device(torch::kCPU));
  peak_of(model, 2 * kSamples, devices[1]);
  const auto replica = peak_of(model, 2 * kSamples, devices[1]);
  // The replica's own chunk of the input lies on its device too.
  const double input = kSamples * 4 * sizeof(double);
  CHECK(static_cast<double>(replica) <
        1.05 * static_cast<double>(single) + input);
}

TEST_CASE("nothing happens on devices outside the list", "[R33]") {
  const auto all = test::sim(4);
  auto net = test::make<Mlp>(all[2]);
  const auto x = batch_on(all[2]);
  dataparallel::simulated::reset_counters();
  dp::DataParallel<Mlp> model(net, on({all[2], all[3]}));
  torch::optim::Adam optimizer(model->parameters());
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    model(x).pow(2).mean().backward();
    model->forward_backward(
        [](const torch::Tensor& y, const torch::Tensor&) { return y.mean(); },
        x, x);
    optimizer.step();
  }
  for (const torch::Device outside : {all[0], all[1]}) {
    CHECK(dataparallel::simulated::peak_memory(outside) == 0);
    CHECK(dataparallel::simulated::kernels_launched(outside) == 0);
    for (const torch::Device other : {all[2], all[3], torch::Device("cpu")}) {
      CHECK(dataparallel::simulated::copies(outside, other) == 0);
      CHECK(dataparallel::simulated::copies(other, outside) == 0);
    }
  }
  CHECK(dataparallel::simulated::peak_memory(all[3]) > 0);
}

TEST_CASE("second derivatives are those of one device", "[R25]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(net, on(devices));
  const auto x = batch_on(devices[0]).requires_grad_();
  const auto step = [&](auto& m) {
    const auto gradient =
        torch::autograd::grad({m(x).pow(2).sum()}, {x}, {}, true, true)[0];
    (gradient.norm() - 1).pow(2).backward({}, /*retain_graph=*/true);
    (gradient.norm() - 1).pow(2).backward();
  };
  step(model);
  step(single);
  test::check_same_gradients(*net, *single, 1e-9);
}

TEST_CASE("a hook on a parameter fires once with the reduced gradient",
          "[R37]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  std::vector<torch::Tensor> seen;
  net->first->weight.register_hook(
      [&](const torch::Tensor& gradient) { seen.push_back(gradient.clone()); });
  dp::DataParallel<Mlp> model(net, on(devices));
  const auto x = batch_on(devices[0]);
  test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
  REQUIRE(seen.size() == 1);
  test::check_equal("seen", seen[0], single->first->weight.grad());
}
