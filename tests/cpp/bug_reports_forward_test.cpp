#include <ATen/autocast_mode.h>
#include <dataparallel/dataparallel.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// What people reported of data parallelism in torch, one test a report, and
// what is right instead: inside forward, its arguments and its errors. See
// bug_reports_test.cpp.

namespace {

namespace dp = dataparallel;
using test::batch_on;
using test::Mlp;
using test::on;

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

/// Changes its first argument, then reads the second.
struct ChangesImpl : torch::nn::Cloneable<ChangesImpl> {
  ChangesImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& y) {
    x.mul_(3);
    return layer(x + y);
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Changes);

}  // namespace

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
  // torch's C++ ParameterList and ParameterDict cannot be cloned.
  dp::DataParallel<Introspective> model(
      net, on(devices), [](torch::Device) { return Introspective(); });
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
  CHECK_THROWS_WITH(model(bad),
                    Catch::Contains("a negative sample") &&
                        Catch::Contains("replica 1 on " + devices[1].str()));
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

TEST_CASE("tables are copied and lists split by sample when asked for",
          "[R39]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
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
                    Catch::Contains("args[0]") && Catch::Contains("args[1]"));
}

TEST_CASE("forward may change a trained input in place", "[R39]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::nn::Sequential net(
      torch::nn::ReLU6(torch::nn::ReLU6Options().inplace(true)),
      torch::nn::Functional([](torch::Tensor x) { return x.mul_(3).add_(1); }),
      torch::nn::Linear(4, 3));
  net->to(devices[0], torch::kDouble);
  const auto single =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  dp::DataParallel<torch::nn::Sequential> model(net, on(devices));
  for (int round = 0; round < 20; ++round) {
    const auto x = batch_on(devices[0]).requires_grad_();
    const auto y = batch_on(devices[0]).requires_grad_();
    net->zero_grad();
    single->zero_grad();
    model(x * 1.0).pow(2).mean().backward();
    single->forward(y * 1.0).pow(2).mean().backward();
    test::check_same_gradients(*net, *single);
    test::check_equal("input", x.grad(), y.grad());
  }
}

TEST_CASE("a trained input passed twice is one tensor in forward too",
          "[R39]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Changes>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Changes> model(net, on(devices));
  const auto x = batch_on(devices[0]).requires_grad_();
  const auto y = x.detach().clone().requires_grad_();
  const auto xs = x * 1.0;
  const auto ys = y * 1.0;
  const auto result = model(xs, xs);
  const auto expected = single->forward(ys, ys);
  test::check_equal("result", result, expected);
  result.pow(2).mean().backward();
  expected.pow(2).mean().backward();
  test::check_equal("input", x.grad(), y.grad());
}

TEST_CASE("a batch filled anew before backward never gives wrong gradients",
          "[R39]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(net, on(devices));
  const auto x = batch_on(devices[0]);
  const auto y = model(x).pow(2).mean();
  const auto expected = single->forward(x.clone()).pow(2).mean();
  x.fill_(100);
  // One device cannot go on; replicas with copies can.
  if (std::count(devices.begin(), devices.end(), devices[0]) == 1) {
    CHECK_THROWS_WITH(y.backward(), Catch::Contains("inplace operation"));
  } else {
    y.backward();
    expected.backward();
    test::check_same_gradients(*net, *single);
  }
}

TEST_CASE("forward may change a batch in place", "[R39]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::nn::Sequential net(
      torch::nn::Functional([](torch::Tensor x) { return x.sub_(0.5); }),
      torch::nn::Linear(4, 3));
  net->to(devices[0], torch::kDouble);
  const auto single =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  dp::DataParallel<torch::nn::Sequential> model(net, on(devices));
  for (int round = 0; round < 20; ++round) {
    model(batch_on(devices[0])).pow(2).mean().backward();
    model->forward_backward(
        [](const torch::Tensor& y, const torch::Tensor&) {
          return y.pow(2).mean();
        },
        batch_on(devices[0]), batch_on(devices[0]));
    single->forward(batch_on(devices[0])).pow(2).mean().backward();
    single->forward(batch_on(devices[0])).pow(2).mean().backward();
    test::check_same_gradients(*net, *single);
    const torch::NoGradGuard no_grad;
    test::check_equal("evaluated", model(batch_on(devices[0])),
                      single->forward(batch_on(devices[0])));
  }
}

TEST_CASE("a scalar that goes to all replicas may be changed in place",
          "[R39]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  torch::nn::Sequential net(torch::nn::Linear(4, 3));
  struct AddsImpl : torch::nn::Cloneable<AddsImpl> {
    void reset() override {}
    torch::Tensor forward(const torch::Tensor& x, torch::Tensor count) {
      return x + count.add_(1);
    }
  };
  dp::DataParallel<std::shared_ptr<AddsImpl>> model(
      std::make_shared<AddsImpl>(), on(devices));
  const auto x = batch_on(devices[0]);
  const auto count = torch::zeros({}, test::float64_on(devices[0]));
  test::check_equal("output", model(x, count), x + 1);
  CHECK(count.item<double>() == 1);
}

TEST_CASE("a parameter written in forward is an error where it is shared",
          "[R05]") {
  struct CodebookImpl : torch::nn::Cloneable<CodebookImpl> {
    CodebookImpl() { reset(); }
    void reset() override {
      book = register_parameter("book", torch::ones({4}, torch::kDouble),
                                /*requires_grad=*/false);
    }
    torch::Tensor forward(const torch::Tensor& x) {
      torch::NoGradGuard no_grad;
      book.mul_(0.9).add_(x.mean(0), 0.1);
      return x * book;
    }
    torch::Tensor book;
  };
  const auto x = batch_on(torch::kCPU);
  {
    auto net = std::make_shared<CodebookImpl>();
    dp::DataParallel<std::shared_ptr<CodebookImpl>> model(net,
                                                          on(test::cpu(2)));
    CHECK_THROWS_WITH(model(x),
                      Catch::Contains("book was written while forward ran"));
    CHECK_NOTHROW(model(x.narrow(0, 0, 1)));  // the module itself does it
  }
  const auto devices = test::sim(2);
  auto net = std::make_shared<CodebookImpl>();
  net->to(devices[0]);
  dp::DataParallel<std::shared_ptr<CodebookImpl>> model(net, on(devices));
  CHECK_NOTHROW(model(x.to(devices[0])));
}
