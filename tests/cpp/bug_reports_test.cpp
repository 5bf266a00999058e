#include <ATen/autocast_mode.h>
#include <dataparallel/dataparallel.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// What people reported of data parallelism in torch, one test a report, and
// what is right instead. Scripted modules (R23) are in module_kinds_test.cpp;
// dtypes and sparse gradients (R41) in dtypes_test.cpp.

namespace {

namespace dp = dataparallel;
using test::Mlp;

dp::DataParallelOptions on(const test::Devices& devices) {
  return dp::DataParallelOptions().devices(devices);
}

torch::Tensor batch_on(torch::Device device, int64_t samples = 7) {
  torch::manual_seed(7);
  return torch::randn({samples, 4}, test::float64_on(device));
}

/// Waits until as many threads as asked for are here; false after 20 s.
class Meeting {
 public:
  explicit Meeting(size_t expected) : expected_(expected) {}
  bool arrive() {
    std::unique_lock lock(mutex_);
    ++here_;
    all_here_.notify_all();
    return all_here_.wait_for(lock, std::chrono::seconds(20),
                              [&] { return here_ >= expected_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  size_t expected_;
  size_t here_ = 0;
};

/// Counts `reset` and `clone`, and may wait for the other replicas.
struct WatchedImpl : torch::nn::Cloneable<WatchedImpl> {
  inline static std::atomic<int> resets = 0;
  WatchedImpl() { reset(); }
  void reset() override {
    ++resets;
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x, Meeting* meeting = nullptr) {
    if (meeting != nullptr && !meeting->arrive()) {
      throw std::runtime_error("the other replicas did not come");
    }
    return layer(x);
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Watched);

/// Reports the thread state that forward sees.
struct AutocastImpl : torch::nn::Cloneable<AutocastImpl> {
  using Seen = std::tuple<bool, torch::ScalarType, bool, bool>;
  AutocastImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  static Seen seen() {
    return {at::autocast::is_autocast_enabled(at::kCPU),
            at::autocast::get_autocast_dtype(at::kCPU),
            at::autocast::is_autocast_cache_enabled(),
            at::autocast::is_autocast_enabled(at::kCUDA)};
  }
  torch::Tensor forward(const torch::Tensor& x, std::vector<Seen>* states) {
    const torch::Tensor y = layer(x);
    (*states)[dp::current_replica().value_or(0)] = seen();
    dtypes[dp::current_replica().value_or(0)] = y.scalar_type();
    return y;
  }
  inline static std::vector<torch::ScalarType> dtypes =
      std::vector<torch::ScalarType>(4, torch::kFloat);
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Autocast);

/// Looks at its own parameters and buffers in forward.
struct IntrospectiveImpl : torch::nn::Cloneable<IntrospectiveImpl> {
  struct Seen {
    std::vector<std::string> names;
    std::vector<torch::Device> devices;
    size_t listed = 0;
  };
  IntrospectiveImpl() { reset(); }
  void reset() override {
    list = register_module("list", torch::nn::ParameterList());
    list->append(torch::ones({4}));
    list->append(torch::ones({4}) * 2);
    dict = register_module("dict", torch::nn::ParameterDict());
    dict->insert("a", torch::ones({4}) * 3);
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
  }
  torch::Tensor forward(const torch::Tensor& x, std::vector<Seen>* all) {
    Seen& seen = (*all)[dp::current_replica().value_or(0)];
    for (const auto& item : named_parameters()) {
      seen.names.push_back(item.key());
      seen.devices.push_back(item.value().device());
    }
    for (const auto& item : named_buffers()) {
      seen.names.push_back(item.key());
      seen.devices.push_back(item.value().device());
    }
    seen.listed = list->size() + dict->size();
    return norm(x.to(parameters().front().device()) * (*list)[0] * (*list)[1] *
                dict->get("a"));
  }
  torch::nn::ParameterList list{nullptr};
  torch::nn::ParameterDict dict{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Introspective);

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

/// Throws in the replica that gets a negative sample.
struct ThrowsImpl : torch::nn::Cloneable<ThrowsImpl> {
  ThrowsImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    TORCH_CHECK_INDEX(x.min().item<double>() >= 0, "a negative sample");
    return layer(x);
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Throws);

/// A table beside the batch, captions one a sample, and a number as a tensor.
struct TableImpl : torch::nn::Cloneable<TableImpl> {
  TableImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& rows, const torch::Tensor& table,
                        const std::vector<std::string>& captions,
                        const torch::Tensor& count) {
    TORCH_CHECK(static_cast<int64_t>(captions.size()) == rows.size(0));
    std::vector<double> lengths;
    for (const std::string& caption : captions) {
      lengths.push_back(static_cast<double>(caption.size()));
    }
    return layer(table.index_select(0, rows)) *
           torch::tensor(lengths, torch::kDouble)
               .to(rows.device())
               .unsqueeze(1) /
           count;
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Table);

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
  Meeting meeting(devices.size());
  CHECK_NOTHROW(model(x, &meeting));
  std::atomic<int> failed = 0;
  at::parallel_for(0, 1, 1, [&](int64_t, int64_t) {
    Meeting inside(devices.size());
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
  test::NoRaces no_races;
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
  test::NoRaces no_races;
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

TEST_CASE("autocast in the replicas is the caller's", "[R09]") {
  const size_t replicas = GENERATE(1, 2, 3);
  Autocast net;
  dp::DataParallel<Autocast> model(net, on(test::cpu(replicas)));
  const auto x = torch::randn({6, 4});
  std::vector<AutocastImpl::Seen> states(replicas);
  for (const bool cache : {true, false}) {
    at::autocast::set_autocast_dtype(at::kCPU, torch::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_cache_enabled(cache);
    const auto expected = AutocastImpl::seen();
    const auto y = model(x, &states);
    CHECK(AutocastImpl::seen() == expected);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::clear_cache();
    CHECK(y.scalar_type() == torch::kBFloat16);
    for (size_t i = 0; i < replicas; ++i) {
      CHECK((states[i] == expected));
      CHECK(AutocastImpl::dtypes[i] == torch::kBFloat16);
    }
  }
  CHECK(model(x, &states).scalar_type() == torch::kFloat);
  for (const auto& state : states) {
    CHECK_FALSE(std::get<0>(state));
  }
}

TEST_CASE("a replica lists its own parameters and buffers in forward",
          "[R13]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Introspective>(devices[0]);
  dp::DataParallel<Introspective> model(net, on(devices));
  std::vector<IntrospectiveImpl::Seen> seen(devices.size());
  model(batch_on(devices[0], 8), &seen);
  std::vector<std::string> names = net->named_parameters().keys();
  for (const std::string& name : net->named_buffers().keys()) {
    names.push_back(name);
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    CHECK(seen[i].names == names);
    CHECK(seen[i].devices ==
          std::vector<torch::Device>(names.size(), devices[i]));
    CHECK(seen[i].listed == 3);
  }
}

TEST_CASE("recurrent layers train as on one device, flattened or not",
          "[R17]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  const bool flatten = GENERATE(false, true);
  INFO(test::name(devices));
  test::NoRaces no_races;
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
  dp::Replicas<LstmNet> replicas(net, devices);
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

TEST_CASE("an error in one replica keeps its type and the next call works",
          "[R31]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Throws>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Throws> model(net, on(devices));
  const auto x = batch_on(devices[0], 6).abs();
  auto bad = x.clone();
  bad[3] = -1;
  CHECK_THROWS_AS(model(bad), c10::IndexError);
  CHECK_THROWS_WITH(
      model(bad),
      Catch::Matchers::Contains("a negative sample") &&
          Catch::Matchers::Contains("replica 1 on " + devices[1].str()));
  test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
}

TEST_CASE("the loss in the replicas leaves only losses on the first device",
          "[R33]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  auto net = test::make<Mlp>(devices[0]);
  dp::DataParallel<Mlp> model(net, on(devices).output_device(torch::kCPU));
  const auto x = batch_on(devices[0]);
  std::vector<torch::Device> seen(devices.size(), torch::kMeta);
  const auto loss = model->loss(
      [&](const torch::Tensor& y, const torch::Tensor&) {
        seen[dp::current_replica().value_or(0)] = y.device();
        return y.pow(2).mean();
      },
      x, x);
  CHECK(loss.device().is_cpu());
  CHECK(seen == devices);
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

TEST_CASE("tables are copied and lists split by sample when asked for",
          "[R39]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  test::NoRaces no_races;
  auto net = test::make<Table>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Table> model(
      net, on(devices).inputs({{1, dp::copy()}, {2, dp::split_by_sample()}}));
  const auto rows =
      torch::tensor({0, 2, 4, 1, 3, 0, 2}, torch::kLong).to(devices[0]);
  const auto table = batch_on(devices[0], 5);
  const std::vector<std::string> captions{"a", "bb",   "ccc", "dd",
                                          "e", "ffff", "gg"};
  const auto count = torch::full({}, 3.0, test::float64_on(devices[0]));
  test::check_same_step(model, net, single, [&](auto& m) {
    return m(rows, table, captions, count);
  });
  dp::DataParallel<Table> by_default(net, on(test::Devices(2, devices[0])));
  CHECK_THROWS_WITH(by_default(rows, table, captions, count),
                    Catch::Matchers::Contains("args[0]") &&
                        Catch::Matchers::Contains("args[1]"));
}
