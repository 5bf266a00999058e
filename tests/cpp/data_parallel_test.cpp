#include <dataparallel/dataparallel.h>
#include <dataparallel/simulated.h>
#include <torch/torch.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

namespace {

namespace dp = dataparallel;
using Catch::Contains;
using test::batch_on;
using test::Mlp;

/// Every kind of argument and of result at once.
struct ManyImpl : torch::nn::Cloneable<ManyImpl> {
  using Named = std::map<std::string, torch::Tensor>;
  using Result = std::tuple<torch::Tensor, std::vector<torch::Tensor>, Named,
                            std::optional<torch::Tensor>, std::string>;
  ManyImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  Result forward(const torch::Tensor& x, const Named& more,
                 std::optional<torch::Tensor> mask, const std::string& name,
                 const std::pair<torch::Tensor, double>& scaled = {{}, 1.0},
                 int64_t power = 1) {
    torch::Tensor y = layer(x + more.at("a")) * more.at("scalar");
    if (mask.has_value()) {
      y = y * mask->unsqueeze(1);
    }
    if (scaled.first.defined()) {
      y = y + scaled.first * scaled.second;
    }
    y = y.pow(power);
    return {y, {y.sum(1), y * 2}, {{"half", y / 2}}, mask, name};
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Many);

/// Counts how many are alive.
struct CountedImpl : torch::nn::Cloneable<CountedImpl> {
  inline static std::atomic<int> alive = 0;
  CountedImpl() {
    ++alive;
    reset();
  }
  CountedImpl(const CountedImpl& other) : Cloneable(other) {
    ++alive;
    layer = other.layer;
  }
  ~CountedImpl() override { --alive; }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Counted);

/// Joins [2, N] inputs along their second dimension.
struct ColumnsImpl : torch::nn::Cloneable<ColumnsImpl> {
  void reset() override {}
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    return {x * 2, x.t() * 3};
  }
};
TORCH_MODULE(Columns);

}  // namespace

TEST_CASE("three optimizer steps are those of one device, for any batch size",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const int64_t samples = GENERATE(1, 2, 3, 5, 8);
  INFO(test::name(devices) << samples << " samples");
  const auto x = batch_on(devices[0], samples);
  test::check_trains_as_on_one_device(
      test::make<Mlp>(devices[0]), dp::DataParallelOptions().devices(devices),
      [&](auto& model, int) { return model(x).pow(2).mean(); });
}

TEST_CASE("training in float32 is that of one device within 1e-5",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  net->to(torch::kFloat);
  const auto x = batch_on(devices[0]).to(torch::kFloat);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(net, dp::DataParallelOptions().devices(devices));
  test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
}

TEST_CASE("a convolution in eval mode trains as on one device",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<test::ConvNet>(devices[0]);
  net->eval();
  torch::manual_seed(5);
  const auto x = torch::randn({6, 2, 5, 5}, test::float64_on(devices[0]));
  test::check_trains_as_on_one_device(
      net, dp::DataParallelOptions().devices(devices),
      [&](auto& model, int) { return model(x).pow(2).mean(); });
}

TEST_CASE("an empty batch is one call, its result as it is",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  dp::DataParallel<Mlp> model(net, dp::DataParallelOptions().devices(devices));
  const auto y = model(batch_on(devices[0], 0));
  CHECK(y.sizes() == at::IntArrayRef({0, 3}));
  y.sum().backward();
  CHECK(net->first->weight.grad().count_nonzero().item<int64_t>() == 0);
}

TEST_CASE("any nesting of arguments and results works", "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Many>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Many> model(net, dp::DataParallelOptions().devices(devices));
  const auto x = batch_on(devices[0]);
  const ManyImpl::Named more{
      {"a", x * 0.5},
      {"scalar", torch::full({}, 1.5, test::float64_on(devices[0]))}};
  const auto check = [&](const auto&... rest) {
    net->zero_grad();
    single->zero_grad();
    const auto got = model(x, more, rest...);
    const auto expected = single->forward(x, more, rest...);
    test::check_equal("first", std::get<0>(got), std::get<0>(expected));
    for (size_t i = 0; i < 2; ++i) {
      test::check_equal("list", std::get<1>(got)[i], std::get<1>(expected)[i]);
    }
    test::check_equal("map", std::get<2>(got).at("half"),
                      std::get<2>(expected).at("half"));
    CHECK(std::get<3>(got).has_value() == std::get<3>(expected).has_value());
    CHECK(std::get<4>(got) == "name");
    std::get<0>(got).pow(2).sum().backward();
    std::get<0>(expected).pow(2).sum().backward();
    test::check_same_gradients(*net, *single);
  };
  const std::optional<torch::Tensor> mask = x.select(1, 0);
  const std::pair<torch::Tensor, double> scaled(x.slice(1, 0, 3), 0.25);
  check(std::optional<torch::Tensor>(), std::string("name"));
  check(mask, std::string("name"));
  check(mask, std::string("name"), scaled);
  check(mask, std::string("name"), scaled, int64_t{2});
}

TEST_CASE("default arguments of forward are used", "[data_parallel]") {
  auto net = test::make<Mlp>(torch::kCPU);
  dp::DataParallel<Mlp> model(net,
                              dp::DataParallelOptions().devices(test::cpu(3)));
  const auto x = batch_on(torch::kCPU);
  test::check_equal("default", model(x), net(x));
  test::check_equal("given", model(x, 2.5), net(x, 2.5));
}

TEST_CASE("arguments of different batch sizes are refused by name",
          "[data_parallel][errors]") {
  auto net = test::make<Many>(torch::kCPU);
  dp::DataParallel<Many> model(net,
                               dp::DataParallelOptions().devices(test::cpu(2)));
  CHECK_THROWS_WITH(model(batch_on(torch::kCPU, 4),
                          ManyImpl::Named{{"a", batch_on(torch::kCPU, 3)}},
                          std::nullopt, std::string("name")),
                    Contains("args[0]") && Contains("args[1][\"a\"]") &&
                        Contains("4") && Contains("3"));
}

TEST_CASE("shares of the batch give the gradients of one device",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  const auto x = batch_on(devices[0], 9);
  test::check_trains_as_on_one_device(
      test::make<Mlp>(devices[0]),
      dp::DataParallelOptions().devices(devices).chunk_shares({1, 5, 3}),
      [&](auto& model, int) { return model(x).pow(2).mean(); });
}

TEST_CASE("as many shares as devices are expected", "[data_parallel][errors]") {
  CHECK_THROWS_AS(dp::DataParallel<Mlp>(Mlp(), dp::DataParallelOptions()
                                                   .devices(test::cpu(2))
                                                   .chunk_shares({1, 2, 3})),
                  c10::ValueError);
}

TEST_CASE("results lie on the output device, whatever it is",
          "[data_parallel]") {
  const test::Devices devices = test::sim(3);
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  const auto x = batch_on(devices[0]);
  for (const torch::Device target : {devices[1], torch::Device(torch::kCPU)}) {
    dp::DataParallel<Mlp> model(
        net, dp::DataParallelOptions().devices(devices).output_device(target));
    CHECK(model->output_device() == target);
    CHECK(model(x).device() == target);
    CHECK(model(batch_on(devices[0], 0)).device() == target);
    CHECK(model(batch_on(devices[0], 1)).device() == target);
    net->zero_grad();
    single->zero_grad();
    model(x).pow(2).mean().backward();
    single(x).pow(2).mean().backward();
    test::check_same_gradients(*net, *single);
  }
}

TEST_CASE("another batch dimension, and one for each output",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  Columns net;
  const auto x = torch::arange(14, test::float64_on(devices[0])).view({2, 7});
  dp::DataParallel<Columns> model(
      net,
      dp::DataParallelOptions().devices(devices).dim(1).output_dims({1, 0}));
  const auto [wide, tall] = model(x);
  test::check_equal("wide", wide, x * 2);
  test::check_equal("tall", tall, x.t() * 3);
}

TEST_CASE("names have the prefix module. and modes reach the module",
          "[data_parallel]") {
  auto net = test::make<test::ConvNet>(torch::kCPU);
  dp::DataParallel<test::ConvNet> model(
      net, dp::DataParallelOptions().devices(test::cpu(2)));
  for (const auto& item : model->named_parameters()) {
    CHECK_THAT(item.key(), Catch::Matchers::StartsWith("module."));
    CHECK(item.value().is_same(net->named_parameters()[item.key().substr(7)]));
  }
  CHECK(model->named_buffers().contains("module.norm.running_mean"));
  model->eval();
  CHECK_FALSE(net->norm->is_training());
  model->train();
  CHECK(net->norm->is_training());
  model->to(torch::kFloat);
  CHECK(net->last->weight.scalar_type() == torch::kFloat);
  const auto y = model(torch::randn({4, 2, 5, 5}));
  CHECK(y.scalar_type() == torch::kFloat);
  y.sum().backward();
  CHECK(net->last->weight.grad().scalar_type() == torch::kFloat);
}

TEST_CASE("a module moved off the first device is refused, whatever the batch",
          "[data_parallel][errors]") {
  auto net = test::make<Mlp>(torch::Device("sim:0"));
  dp::DataParallel<Mlp> model(net, test::on(test::sim(2)));
  model->to(torch::Device("sim:1"));
  const auto loss = [](const torch::Tensor& y, const torch::Tensor&) {
    return y.mean();
  };
  for (const int64_t samples : {0, 1, 5}) {
    const auto x =
        torch::randn({samples, 4}, test::float64_on(torch::Device("sim:0")));
    const auto refused = Contains("is on sim:1, expected sim:0 (the first of");
    CHECK_THROWS_WITH(model(x), refused);
    CHECK_THROWS_WITH(model->loss(loss, x, x), refused);
    CHECK_THROWS_WITH(model->forward_backward(loss, x, x), refused);
  }
}

TEST_CASE("a wrapper saves and loads as its module under module.",
          "[data_parallel]") {
  auto net = test::make<Mlp>(torch::kCPU);
  dp::DataParallel<Mlp> model(net,
                              dp::DataParallelOptions().devices(test::cpu(2)));
  std::stringstream file;
  torch::save(model, file);
  const auto before = net->first->weight.detach().clone();
  net->first->weight.data().zero_();
  torch::load(model, file);
  CHECK(test::same_bits(net->first->weight, before));
  const auto x = batch_on(torch::kCPU);
  test::check_equal("output", model(x), net(x));
}

TEST_CASE("values are followed when asked for only, modes always",
          "[data_parallel]") {
  const test::Devices devices = test::sim(2);
  auto net = test::make<Mlp>(devices[0]);
  dp::DataParallel<Mlp> model(
      net, dp::DataParallelOptions().devices(devices).refresh(
               dp::RefreshPolicy::kWhenAsked));
  const auto x = batch_on(devices[0], 4);
  const auto before = model(x).cpu();
  for (torch::Tensor& parameter : net->parameters()) {
    parameter.data().mul_(2);
  }
  const auto stale = model(x).cpu();
  const auto fresh = net(x).cpu();
  test::check_equal("replica 0", stale.slice(0, 0, 2), fresh.slice(0, 0, 2));
  test::check_equal("replica 1", stale.slice(0, 2), before.slice(0, 2));
  model->refresh();
  test::check_equal("refreshed", model(x).cpu(), fresh);
  net->first->weight.requires_grad_(false);
  model(x).sum().backward();
  CHECK_FALSE(net->first->weight.grad().defined());
  CHECK(net->second->weight.grad().defined());
}

TEST_CASE("a child replaced after wrapping is followed, asked or not",
          "[data_parallel]") {
  for (const test::Devices& devices : {test::cpu(2), test::sim(2)}) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4));
    net->to(devices[0], torch::kDouble);
    dp::DataParallel<torch::nn::Sequential> model(
        net, test::on(devices).refresh(dp::RefreshPolicy::kWhenAsked));
    const auto x = batch_on(devices[0]);
    model(x);
    net->push_back(torch::nn::Linear(4, 3));
    net->to(devices[0], torch::kDouble);
    auto single =
        std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    const auto y = model(x);
    test::check_equal("output", y, single->forward(x));
    y.pow(2).sum().backward();
    single->forward(x).pow(2).sum().backward();
    test::check_same_gradients(*net, *single);
  }
}

TEST_CASE("a wrapper has the mode of its module", "[data_parallel]") {
  auto net = test::make<Mlp>(torch::kCPU);
  net->eval();
  const dp::DataParallel<Mlp> model(net, test::on(test::cpu(2)));
  CHECK_FALSE(model->is_training());
  CHECK_FALSE(net->is_training());
}

TEST_CASE("a rule for an argument that is left out is for other calls",
          "[data_parallel]") {
  torch::nn::LSTM net(4, 3);
  dp::DataParallel<torch::nn::LSTM> model(
      net, test::on(test::cpu(2)).dim(1).inputs({{1, dp::split(1)}}));
  const auto x = torch::randn({5, 4, 4});
  const auto state =
      std::tuple(torch::randn({1, 4, 3}), torch::randn({1, 4, 3}));
  test::check_equal("without", std::get<0>(model(x)), std::get<0>(net(x)));
  test::check_equal("with", std::get<0>(model(x, state)),
                    std::get<0>(net(x, state)));
}

TEST_CASE("a name that is no device is refused with the option",
          "[data_parallel][errors]") {
  dp::DataParallelOptions options;
  CHECK_THROWS_WITH(options.devices({"cpu", "gpu0"}),
                    Contains("DataParallelOptions: devices[1] is \"gpu0\", "
                             "expected a device, such as"));
  CHECK_THROWS_WITH(options.output_device("gpu0"),
                    Contains("output_device is \"gpu0\""));
  // Which at::Device takes for cuda:0.
  CHECK_THROWS_WITH(options.devices({"cuda:256"}),
                    Contains("devices[0] is \"cuda:256\""));
  CHECK(options.output_device("cpu").output_device() == torch::kCPU);
  CHECK_THROWS_WITH(options.devices(test::Devices()),
                    Contains("DataParallelOptions: devices is empty"));
}

TEST_CASE("NCCL is refused where it does not serve the devices",
          "[data_parallel][errors]") {
  const auto refused = [](const test::Devices& devices, const char* list) {
    auto net = test::make<Mlp>(devices[0]);
    const auto options = test::on(devices).transport(dp::Transport::kNccl);
    CHECK_THROWS_WITH(
        dp::DataParallel<Mlp>(net, options),
        Contains("DataParallel: transport is kNccl, but devices are ") &&
            Contains(list) && Contains("expected CUDA devices, each once"));
  };
  refused(test::cpu(2), "cpu cpu,");
  refused(test::sim(2), "sim:0 sim:1,");
}

TEST_CASE("torch's copies can be asked for", "[data_parallel]") {
  const auto devices = test::sim(3);
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(
      net, test::on(devices).transport(dp::Transport::kPeerCopies));
  const auto x = test::batch_on(devices[0]);
  model(x).pow(2).sum().backward();
  single(x).pow(2).sum().backward();
  test::check_same_gradients(*net, *single);
}

TEST_CASE("a device without values is refused", "[data_parallel][errors]") {
  auto net = test::make<Mlp>(torch::kCPU);
  const auto refused =
      Contains("is meta, expected a device whose tensors hold");
  CHECK_THROWS_WITH(
      dp::DataParallel<Mlp>(net,
                            dp::DataParallelOptions().devices({"cpu", "meta"})),
      refused);
  CHECK_THROWS_WITH(dp::DataParallel<Mlp>(
                        net, test::on(test::cpu(2)).output_device(at::kMeta)),
                    refused);
}

TEST_CASE("an accumulation copies the parameters once, buffers as ever",
          "[data_parallel]") {
  const test::Devices devices = test::sim(2);
  const auto device = devices[0];
  auto net = test::make<test::ConvNet>(device);
  auto single = test::twin(net);
  dp::DataParallel<test::ConvNet> model(net, test::on(devices));
  const auto x = torch::randn({6, 2, 5, 5}, test::float64_on(device));
  const auto copied = [&] {
    dp::simulated::reset_counters();
    model->eval();
    model(x);
    return dp::simulated::copies(devices[0], devices[1]);
  };
  const auto every_time = copied();
  {
    const auto accumulation = model->accumulate();
    CHECK_THROWS_WITH(model->accumulate(), Contains("accumulates already"));
    CHECK(copied() == every_time);
    CHECK(copied() == every_time - 1);
    {
      const torch::NoGradGuard no_grad;
      net->last->weight.mul_(2);
      single->last->weight.mul_(2);
      net->norm->running_mean.add_(1);
      single->norm->running_mean.add_(1);
    }
    single->eval();
    test::check_equal("a changed parameter", model(x), single->forward(x));
    net->norm->running_mean.add_(1);
    single->norm->running_mean.add_(1);
    CHECK(copied() == every_time - 1);
    test::check_equal("a changed buffer", model(x), single->forward(x));
    model(x).pow(2).mean().backward();
    model(x).pow(2).mean().backward();
  }
  for (int i = 0; i < 2; ++i) {
    single->forward(x).pow(2).mean().backward();
  }
  test::check_same_gradients(*net, *single);
  CHECK(copied() == every_time);
}

TEST_CASE("accumulation without refreshing gives whole gradients",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(
      net, dp::DataParallelOptions().devices(devices).refresh(
               dp::RefreshPolicy::kWhenAsked));
  const auto x = batch_on(devices[0]);
  for (int pass = 1; pass <= 3; ++pass) {
    model(x * pass).pow(2).mean().backward();
    single(x * pass).pow(2).mean().backward();
  }
  test::check_same_gradients(*net, *single);
}

TEST_CASE("grad mode and inference mode are the caller's", "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(net, dp::DataParallelOptions().devices(devices));
  const auto x = batch_on(devices[0]);
  {
    c10::InferenceMode inference;
    const auto y = model(x);
    CHECK(y.is_inference());
    test::check_equal("inference", y, single(x));
  }
  {
    torch::NoGradGuard no_grad;
    CHECK_FALSE(model(x).requires_grad());
  }
  test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
}

TEST_CASE("a module built in inference mode works there", "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  c10::InferenceMode inference;
  auto net = test::make<test::ConvNet>(devices[0]);
  net->eval();
  dp::DataParallel<test::ConvNet> model(
      net, dp::DataParallelOptions().devices(devices));
  const auto x = torch::randn({5, 2, 5, 5}, test::float64_on(devices[0]));
  test::check_equal("output", model(x), net(x));
  net->last->weight.mul_(2);
  test::check_equal("output", model(x), net(x));
  model->train();
  CHECK_NOTHROW(model(x));
  CHECK(net->norm->num_batches_tracked.item<int64_t>() == 1);
}

TEST_CASE("the function form is one call of a wrapper", "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  const auto x = batch_on(devices[0]);
  const auto y = dp::data_parallel(net, x, devices);
  test::check_equal("output", y, single(x));
  y.pow(2).mean().backward();
  single(x).pow(2).mean().backward();
  test::check_same_gradients(*net, *single);
  test::check_equal("tuple",
                    dp::data_parallel(net, std::tuple(x, 0.5), devices),
                    single(x, 0.5));
  const auto there =
      dp::data_parallel(net, x, devices, torch::Device(torch::kCPU));
  CHECK(there.device().is_cpu());
}

TEST_CASE("calls from two threads do not mix", "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  auto net = test::make<Mlp>(devices[0]);
  dp::DataParallel<Mlp> model(net, dp::DataParallelOptions().devices(devices));
  const auto x = batch_on(devices[0]);
  const std::vector<torch::Tensor> expected{net(x).detach(),
                                            net(x * 3).detach()};
  std::vector<int> wrong(2, 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      for (int call = 0; call < 30; ++call) {
        const auto y = model(i == 0 ? x : x * 3);
        wrong[i] += !torch::allclose(y.cpu(), expected[i].cpu());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == std::vector<int>{0, 0});
}

TEST_CASE("everything is freed with the wrapper", "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  REQUIRE(CountedImpl::alive == 0);
  std::weak_ptr<CountedImpl> watch;
  {
    Counted net;
    net->to(devices[0], torch::kDouble);
    watch = net.ptr();
    dp::DataParallel<Counted> model(net,
                                    dp::DataParallelOptions().devices(devices));
    for (int step = 0; step < 3; ++step) {
      model(batch_on(devices[0])).sum().backward();
      model->forward_backward(
          [](const torch::Tensor& y, const torch::Tensor&) { return y.sum(); },
          batch_on(devices[0]), batch_on(devices[0]));
    }
    CHECK(CountedImpl::alive == static_cast<int>(devices.size()));
    model->refresh_structure();
    CHECK(CountedImpl::alive == static_cast<int>(devices.size()));
  }
  CHECK(watch.expired());
  CHECK(CountedImpl::alive == 0);
}

TEST_CASE("a call from inside a call is an error, not a hang",
          "[data_parallel][errors]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  const int64_t samples = GENERATE(7, 1);
  auto net = test::make<Mlp>(devices[0]);
  dp::DataParallel<Mlp> model(net, dp::DataParallelOptions().devices(devices));
  const auto x = torch::randn({samples, 4}, test::float64_on(devices[0]));
  const auto calls_itself = [&](const torch::Tensor& y, const torch::Tensor&) {
    return y.mean() + model(x).mean();
  };
  CHECK_THROWS_WITH(model->loss(calls_itself, x, x),
                    Contains("DataParallel::forward: called from inside"));
  CHECK_THROWS_WITH(model->forward_backward(calls_itself, x, x),
                    Contains("DataParallel::forward: called from inside"));
  test::check_equal("afterwards", model(x), net(x));
}
