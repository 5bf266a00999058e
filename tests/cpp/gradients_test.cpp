#include <dataparallel/data_parallel.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/meeting.h"
#include "support/networks.h"
#include "support/oracle.h"
#include "support/streams.h"

// "Like autograd, not beside it": everything that one can do with a graph and
// with parameters, on one device and on several.

namespace {

namespace dp = dataparallel;
using Catch::Contains;
using test::batch_on;
using test::Mlp;

/// A network, its oracle, and the network wrapped on `devices`.
template <class Net>
struct Pair {
  template <class... Args>
  explicit Pair(const test::Devices& devices, Args&&... args)
      : device(devices[0]),
        net(test::make<Net>(device, std::forward<Args>(args)...)),
        single(test::twin(net)),
        model(net, dp::DataParallelOptions().devices(devices)) {}
  torch::Device device;
  Net net;
  Net single;
  dp::DataParallel<Net> model;
};

/// Two layers of which `which` chooses: 1, 2 or both.
struct BranchesImpl : torch::nn::Cloneable<BranchesImpl> {
  BranchesImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(4, 3));
    second = register_module("second", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x, int which) {
    return which == 1   ? first(x)
           : which == 2 ? second(x)
                        : first(x) + second(x);
  }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};
TORCH_MODULE(Branches);

/// The same with buffers that are computed from parameters outside forward.
struct ComputedImpl : torch::nn::Cloneable<ComputedImpl> {
  ComputedImpl() { reset(); }
  void reset() override {
    first = register_parameter("first", torch::ones({4}));
    second = register_parameter("second", torch::full({4}, 2.0));
    of_first = register_buffer("of_first", torch::zeros({4}));
    of_second = register_buffer("of_second", torch::zeros({4}));
  }
  void compute() {
    of_first.detach_();
    of_first.zero_().add_(first.pow(2));
    of_second.detach_();
    of_second.zero_().add_(second.pow(3));
  }
  torch::Tensor forward(const torch::Tensor& x, int which) {
    return which == 1   ? x * of_first
           : which == 2 ? x * of_second
                        : x * of_first * of_second;
  }
  torch::Tensor first, second, of_first, of_second;
};
TORCH_MODULE(Computed);

/// (|d output / d input| - 1)^2.
template <class Model>
torch::Tensor gradient_penalty(Model& model, const torch::Tensor& batch) {
  const torch::Tensor x = batch.detach().clone().requires_grad_();
  const auto gradient = torch::autograd::grad({model(x).pow(2).sum()}, {x}, {},
                                              /*retain_graph=*/true,
                                              /*create_graph=*/true);
  return (gradient[0].norm() - 1).pow(2);
}

/// Layers of which each tells `in_backward`, by its number, when backward has
/// come to it, on the thread of its device.
struct WatchedImpl : torch::nn::Cloneable<WatchedImpl> {
  static constexpr int kLayers = 6;
  inline static std::function<void(int, torch::Device)> in_backward;

  struct Watch : torch::autograd::Function<Watch> {
    static torch::Tensor forward(torch::autograd::AutogradContext* context,
                                 const torch::Tensor& x, int64_t layer) {
      context->saved_data["layer"] = layer;
      return x.clone();
    }
    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext* context,
        torch::autograd::variable_list gradients) {
      in_backward(static_cast<int>(context->saved_data["layer"].toInt()),
                  gradients[0].device());
      return {gradients[0], torch::Tensor()};
    }
  };

  /// Layers are used in their order, and registered in `order`.
  explicit WatchedImpl(std::array<int, kLayers> order = {0, 1, 2, 3, 4, 5})
      : order(order) {
    reset();
  }
  void reset() override {
    layers = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < kLayers; ++i) {
      layers->push_back(torch::nn::Linear(4, 4));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto at = std::find(order.begin(), order.end(), layer);
      x = Watch::apply(
          torch::tanh(
              layers[at - order.begin()]->as<torch::nn::Linear>()->forward(x)),
          static_cast<int64_t>(layer));
    }
    return x;
  }
  std::array<int, kLayers> order;
  torch::nn::ModuleList layers{nullptr};
};
TORCH_MODULE(Watched);

/// Uses one of its layers.
struct HalfUsedImpl : torch::nn::Cloneable<HalfUsedImpl> {
  HalfUsedImpl() { reset(); }
  void reset() override {
    used = register_module("used", torch::nn::Linear(4, 3));
    unused = register_module("unused", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return used(x); }
  torch::nn::Linear used{nullptr};
  torch::nn::Linear unused{nullptr};
};
TORCH_MODULE(HalfUsed);

/// Parameters made as views of other tensors, and a conjugated buffer.
struct ViewsImpl : torch::nn::Cloneable<ViewsImpl> {
  ViewsImpl() { reset(); }
  void reset() override {
    weight = register_parameter("weight", torch::randn({12}).view({4, 3}));
    bias = register_parameter("bias", torch::zeros({3, 1}).t());
    turned = register_buffer("turned",
                             torch::randn({3}, torch::kComplexDouble).conj());
    minus = register_buffer("minus", torch::imag(turned));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x.mm(weight) + bias + torch::imag(turned * 1.0) + minus * 2;
  }
  torch::Tensor weight;
  torch::Tensor bias;
  torch::Tensor turned;
  torch::Tensor minus;
};
TORCH_MODULE(Views);

}  // namespace

/// How many copies from the second replica have been made when replica 0's
/// backward has come to each layer, and in all.
struct Reduced {
  std::array<int64_t, WatchedImpl::kLayers> at_layer{};
  int64_t in_all = 0;
};

// The replicas go layer by layer together; so when replica 0 has come to a
// layer, what is ready two layers behind it has been reduced.
Reduced watch_backward(dp::DataParallel<Watched>& model,
                       const test::Devices& devices) {
  const auto copies = [&] {
    return dataparallel::simulated::copies(devices[1], devices[0]);
  };
  Reduced reduced;
  std::vector<test::Meeting> meetings(WatchedImpl::kLayers);
  const auto loss = model(batch_on(devices[0])).pow(2).mean();
  dataparallel::simulated::reset_counters();
  WatchedImpl::in_backward = [&](int layer, torch::Device device) {
    meetings[layer].arrive();
    if (device == devices[0]) {
      reduced.at_layer[layer] = copies();
    }
  };
  loss.backward();
  reduced.in_all = copies();
  return reduced;
}

TEST_CASE("gradients are reduced while backward still computes",
          "[gradients][overlap]") {
  constexpr int kLayers = WatchedImpl::kLayers;
  const test::Devices devices = test::sim(2);
  auto net = test::make<Watched>(devices[0]);
  dp::DataParallel<Watched> model(net, test::on(devices).bucket_bytes(1));
  const Reduced reduced = watch_backward(model, devices);
  constexpr int kTensors = 2;  // of a layer, each in a bucket of its own
  for (int layer = 0; layer < kLayers - 2; ++layer) {
    INFO("layer " << layer);
    CHECK(reduced.at_layer[layer] >= kTensors * (kLayers - 2 - layer));
  }
  CHECK(reduced.in_all >= kTensors * kLayers);
}

TEST_CASE("buckets follow the order in which backward has gradients ready",
          "[gradients][overlap]") {
  const test::Devices devices = test::sim(2);
  // Registered so, neighbours are used far from each other.
  auto net =
      test::make<Watched>(devices[0], std::array<int, 6>{0, 3, 1, 4, 2, 5});
  auto single = test::twin(net);
  // Two layers of 20 numbers a bucket.
  dp::DataParallel<Watched> model(net, test::on(devices).bucket_bytes(2 * 160));
  watch_backward(model, devices);
  const Reduced reduced = watch_backward(model, devices);
  CHECK(reduced.in_all == 3);
  CHECK(reduced.at_layer[2] >= 1);  // layers 5 and 4
  CHECK(reduced.at_layer[0] >= 2);  // and 3 and 2
  WatchedImpl::in_backward = [](int, torch::Device) {};
  for (int i = 0; i < 2; ++i) {
    single->forward(batch_on(devices[0])).pow(2).mean().backward();
  }
  test::check_same_gradients(*net, *single);
}

TEST_CASE("a bucket's gradients travel together, however many they are",
          "[gradients]") {
  const test::Devices devices = test::sim(3);
  const auto copied = [&](int layers, auto&& backward) {
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i) {
      net->push_back(torch::nn::Linear(4, 4));
    }
    net->to(devices[0], torch::kDouble);
    dp::DataParallel<torch::nn::Sequential> model(net, test::on(devices));
    const auto x = batch_on(devices[0]);
    model(x);
    net->zero_grad();
    dataparallel::simulated::reset_counters();
    backward(model, x);
    return std::pair(dataparallel::simulated::copies(devices[1], devices[0]),
                     dataparallel::simulated::copies(devices[2], devices[0]));
  };
  const auto plain = [](auto& model, const torch::Tensor& x) {
    const auto loss = model(x).pow(2).mean();
    dataparallel::simulated::reset_counters();
    loss.backward();
  };
  const auto together = [](auto& model, const torch::Tensor& x) {
    model->forward_backward(
        [](const torch::Tensor& y, const torch::Tensor& t) {
          return (y - t).pow(2).mean();
        },
        x, x);
  };
  CHECK(copied(3, plain) == std::pair<int64_t, int64_t>(1, 1));
  CHECK(copied(30, plain) == copied(3, plain));
  CHECK(copied(30, together) == copied(3, together));
}

TEST_CASE("with many devices values and gradients go along a tree",
          "[gradients]") {
  const test::Devices devices = test::sim(4);
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(net, test::on(devices));
  const auto x = batch_on(devices[0]);
  dataparallel::simulated::reset_counters();
  model->refresh();
  const auto copies = [&](int from, int to) {
    return dataparallel::simulated::copies(devices[from], devices[to]);
  };
  CHECK(copies(0, 1) == 1);
  CHECK(copies(0, 2) == 1);
  CHECK(copies(0, 3) == 0);
  CHECK(copies(1, 3) == 1);
  const auto loss = model(x).pow(2).sum();
  dataparallel::simulated::reset_counters();
  loss.backward();
  single->forward(x).pow(2).sum().backward();
  test::check_same_gradients(*net, *single);
  CHECK(copies(3, 2) == 1);
  CHECK(copies(3, 0) == 0);
  CHECK(copies(2, 0) == 1);
  CHECK(copies(1, 0) == 1);
}

TEST_CASE("on streams of the caller's own nothing races", "[gradients]") {
  const test::Devices devices = test::sim(3);
  std::vector<std::unique_ptr<test::OnNewStream>> own;
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(net, test::on(devices));
  const auto step = [&](int round) {
    INFO("round " << round);
    const auto x = batch_on(devices[0]);
    model(x).pow(2).mean().backward();
    single->forward(x).pow(2).mean().backward();
    model->forward_backward(
        [](const torch::Tensor& y, const torch::Tensor&) {
          return y.pow(2).mean();
        },
        x, x);
    single->forward(x).pow(2).mean().backward();
    test::check_same_gradients(*net, *single);
  };
  const auto synchronize = [&] {
    for (const torch::Device& device : devices) {
      test::guard().synchronizeDevice(device.index());
    }
  };
  step(0);
  synchronize();
  for (const torch::Device& device : devices) {
    own.push_back(std::make_unique<test::OnNewStream>(device));
  }
  step(1);
  step(2);
  synchronize();
}

TEST_CASE("anomaly mode looks for NaN in sums that are finished",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> p(devices);
  const auto x = batch_on(p.device);
  const torch::autograd::DetectAnomalyGuard anomaly;
  p.model(x).pow(2).sum().backward();
  p.single(x).pow(2).sum().backward();
  test::check_same_gradients(*p.net, *p.single);
  // And finds them where they are.
  auto sum = (p.model(x) * std::nan("")).sum();
  CHECK_THROWS_WITH(sum.backward(), Contains("returned nan values"));
}

TEST_CASE("a penalty on the weights themselves adds to what replicas give",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  const auto loss = [&](auto& model, Mlp& net) {
    auto penalty = net->first->weight.pow(2).sum();
    for (const torch::Tensor& parameter : net->parameters()) {
      penalty = penalty + parameter.pow(3).sum();
    }
    return model(x).pow(2).mean() + penalty;
  };
  for (int pass = 0; pass < 2; ++pass) {
    loss(both.model, both.net).backward();
    loss(both.single, both.single).backward();
    test::check_same_gradients(*both.net, *both.single);
  }
}

TEST_CASE("parameters that were made as views train as on one device",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  test::sim(1);
  Views net;
  net->weight.set_data(net->weight.to(devices[0], torch::kDouble));
  net->bias.set_data(net->bias.to(devices[0], torch::kDouble));
  net->turned.set_data(net->turned.to(devices[0]).conj_physical().conj());
  net->minus.set_data(net->minus.to(devices[0]));
  test::check_trains_as_on_one_device(
      net, test::on(devices), [&](auto& model, int step) {
        return step == 1 ? model(batch_on(devices[0])).pow(2).mean()
                         : model(batch_on(devices[0])).pow(2).sum();
      });
}

TEST_CASE("a gradient penalty gives the gradients of one device",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  const auto got = gradient_penalty(both.model, x);
  const auto expected = gradient_penalty(both.single, x);
  test::check_equal("penalty", got, expected, 1e-9);
  got.backward();
  expected.backward();
  test::check_same_gradients(*both.net, *both.single, 1e-9);
}

TEST_CASE("grad over parameters with the graph kept can be differentiated",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  const auto second_order = [&](auto& model, Mlp& net) {
    const auto gradients = torch::autograd::grad(
        {model(x).pow(2).sum()}, net->parameters(), {}, true, true);
    torch::Tensor norm = torch::zeros({}, test::float64_on(both.device));
    for (const torch::Tensor& gradient : gradients) {
      norm = norm + gradient.pow(2).sum();
    }
    norm.backward();
    return gradients;
  };
  const auto got = second_order(both.model, both.net);
  const auto expected = second_order(both.single, both.single);
  for (size_t i = 0; i < got.size(); ++i) {
    test::check_equal("first order", got[i], expected[i]);
  }
  test::check_same_gradients(*both.net, *both.single, 1e-9);
}

TEST_CASE("a second derivative is whole after a forward_backward in between",
          "[gradients]") {
  // Its product saves the weight itself, not a view of it.
  struct ScaleImpl : torch::nn::Cloneable<ScaleImpl> {
    ScaleImpl() { reset(); }
    void reset() override {
      weight = register_parameter("weight", torch::rand({4}));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return torch::tanh(x * weight);
    }
    torch::Tensor weight;
  };
  TORCH_MODULE(Scale);
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Scale> both(devices);
  const auto x = batch_on(both.device).requires_grad_();
  const auto penalty = [&](auto& model, auto&& between) {
    const auto y = model(x);
    between();
    const auto gradient =
        torch::autograd::grad({y.pow(2).sum()}, {x}, {}, true, true);
    gradient[0].pow(2).sum().backward();
  };
  penalty(both.model, [&] {
    both.model->forward_backward(
        [](const torch::Tensor& y, const torch::Tensor&) { return y.mean(); },
        x.detach(), x.detach());
    both.net->zero_grad();
  });
  penalty(both.single, [] {});
  test::check_same_gradients(*both.net, *both.single, 1e-9);
}

TEST_CASE("backward twice over a retained graph adds the same again",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  const auto twice = [&](auto& model) {
    const auto loss = model(x).pow(2).mean();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  twice(both.model);
  twice(both.single);
  test::check_same_gradients(*both.net, *both.single);
}

TEST_CASE("backward twice over a graph not retained is an error",
          "[gradients][errors]") {
  Pair<Mlp> both(test::cpu(3));
  const auto loss = both.model(batch_on(both.device)).pow(2).mean();
  loss.backward();
  CHECK_THROWS_WITH(loss.backward(),
                    Contains("backward through the graph a second time"));
}

TEST_CASE("two forwards before one backward, in train and in eval mode",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const bool training = GENERATE(false, true);
  INFO(test::name(devices) << (training ? "train" : "eval"));
  Pair<test::ConvNet> both(devices);
  both.net->train(training);
  both.single->train(training);
  const auto x = torch::randn({4, 2, 5, 5}, test::float64_on(both.device));
  if (training) {
    // Each replica normalizes its own chunk: the oracle is one chunk.
    const auto loss = both.model(x).sum() + both.model(x * 2).sum();
    CHECK_NOTHROW(loss.backward());
    CHECK(both.net->norm->num_batches_tracked.item<int64_t>() == 2);
    return;
  }
  const auto step = [&](auto& model) {
    (model(x).pow(2).mean() + model(x * 2).pow(2).mean()).backward();
  };
  step(both.model);
  step(both.single);
  test::check_same_gradients(*both.net, *both.single);
}

TEST_CASE("an update between forward and backward is an error",
          "[gradients][errors]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto update_between = [&](auto& model, Mlp& net) {
    const auto loss = model(batch_on(both.device)).pow(2).mean();
    {
      torch::NoGradGuard no_grad;
      net->second->weight.mul_(2);
    }
    loss.backward();
  };
  const auto text = Contains("modified by an inplace operation");
  CHECK_THROWS_WITH(update_between(both.single, both.single), text);
  CHECK_THROWS_WITH(update_between(both.model, both.net), text);
}

TEST_CASE("an update, then a forward, then the old backward is an error",
          "[gradients][errors]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  const auto loss = both.model(x).pow(2).mean();
  {
    torch::NoGradGuard no_grad;
    both.net->second->weight.mul_(2);
    both.model(x);
  }
  CHECK_THROWS_WITH(loss.backward(),
                    Contains("modified by an inplace operation"));
}

TEST_CASE("backward works after the wrapper is gone", "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  const auto loss = both.model(x).pow(2).mean();
  both.model = nullptr;
  loss.backward();
  both.single(x).pow(2).mean().backward();
  test::check_same_gradients(*both.net, *both.single);
}

TEST_CASE("parameters that some or no replicas use", "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const int64_t positive = GENERATE(0, 1, 3, 8);
  INFO(test::name(devices) << positive << " positive rows");
  Pair<test::PartlyUsed> both(devices);
  auto x =
      test::rows_of_sign(positive, 8 - positive, test::float64_on(both.device));
  const bool last = GENERATE(false, true);
  x = last ? x.flip({0}) : x;
  test::check_same_step(both.model, both.net, both.single,
                        [&](auto& model) { return model(x); });
  CHECK_FALSE(both.net->none->weight.grad().defined());
  CHECK(both.net->some->weight.grad().defined() == (positive > 0));
}

TEST_CASE("grad of an unused parameter: undefined where allowed, else an error",
          "[gradients][errors]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  Pair<test::PartlyUsed> both(devices);
  const auto x = test::rows_of_sign(2, 6, test::float64_on(both.device));
  const std::vector<torch::Tensor> asked{both.net->all->weight,
                                         both.net->none->weight};
  const auto gradients = torch::autograd::grad({both.model(x).sum()}, asked, {},
                                               std::nullopt, false,
                                               /*allow_unused=*/true);
  CHECK(gradients[0].defined());
  CHECK_FALSE(gradients[1].defined());
  CHECK_THROWS_WITH(torch::autograd::grad({both.model(x).sum()}, asked),
                    Contains("not have been used in the graph"));
}

TEST_CASE("a hook on a parameter runs once with the whole gradient",
          "[gradients][hooks]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const bool before = GENERATE(false, true);
  INFO(test::name(devices) << (before ? "before" : "after") << " the forward");
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  int calls = 0;
  torch::Tensor seen;
  const auto add_hook = [&] {
    both.net->first->weight.register_hook([&](const torch::Tensor& gradient) {
      ++calls;
      seen = gradient.clone();
      return gradient * 2;
    });
  };
  if (before) {
    add_hook();
  }
  const auto loss = both.model(x).pow(2).mean();
  if (!before) {
    add_hook();
  }
  loss.backward();
  both.single(x).pow(2).mean().backward();
  CHECK(calls == 1);
  const torch::Tensor whole = both.single->first->weight.grad();
  test::check_equal("seen by the hook", seen, whole);
  test::check_equal("kept", both.net->first->weight.grad(), whole * 2);
}

TEST_CASE("a hook on a parameter that no replica uses is not called",
          "[gradients][hooks]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const bool early = GENERATE(false, true);
  INFO(test::name(devices) << (early ? "before" : "after") << " wrapping");
  int calls = 0;
  const auto hook = [&calls](test::PartlyUsed& net) {
    net->none->weight.register_hook([&calls](const torch::Tensor& gradient) {
      ++calls;
      return gradient * 2;  // fails for an undefined one
    });
  };
  auto net = test::make<test::PartlyUsed>(devices[0]);
  if (early) {
    hook(net);
  }
  dp::DataParallel<test::PartlyUsed> model(
      net, dp::DataParallelOptions().devices(devices));
  const auto x = test::rows_of_sign(2, 6, test::float64_on(devices[0]));
  if (!early) {
    model(x);
    hook(net);
  }
  model(x).pow(2).mean().backward();
  model->forward_backward(
      [](const torch::Tensor& y, const torch::Tensor&) { return y.mean(); }, x,
      x);
  CHECK(calls == 0);
  CHECK_FALSE(net->none->weight.grad().defined());
  CHECK(net->all->weight.grad().defined());
}

TEST_CASE("a hook added after forward on a parameter that was never used",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<HalfUsed> both(devices);
  const auto x = batch_on(both.device);
  both.model(x).sum().backward();
  const auto y = both.model(x).sum();
  int calls = 0;
  const auto unused = both.net->unused->weight;
  unused.register_hook([&](const torch::Tensor& gradient) {
    ++calls;
    return gradient * 0.5;
  });
  y.backward();
  CHECK(calls == 0);
  CHECK_FALSE(unused.grad().defined());
}

TEST_CASE("post hooks of an accumulator that no replica uses are not called",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Branches> both(devices);
  const auto x = batch_on(both.device);
  both.model(x, 3).sum().backward();  // uses both branches
  struct Count : torch::autograd::FunctionPostHook {
    explicit Count(int& calls) : calls(calls) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list&) override {
      ++calls;
      return outputs;
    }
    int& calls;
  };
  int calls = 0;
  const auto accumulator =
      torch::autograd::impl::grad_accumulator(both.net->second->weight);
  accumulator->add_post_hook(std::make_unique<Count>(calls));
  both.model(x, 1).sum().backward();
  CHECK(calls == 0);
  both.model(x, 2).sum().backward();
  CHECK(calls == 1);
}

TEST_CASE("a backward leaves the graphs of buffers that it does not use",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Computed> both(devices);
  const auto x = batch_on(both.device);
  both.net->compute();
  both.model(x, 3);  // both are used, and share a bucket
  for (int step = 0; step < 2; ++step) {
    both.net->compute();
    both.single->compute();
    for (const int which : {1, 2}) {
      both.model(x, which).pow(2).mean().backward();
      both.single(x, which).pow(2).mean().backward();
    }
    test::check_same_gradients(*both.net, *both.single);
  }
}

TEST_CASE("a parameter used several times: a hundred runs agree bit for bit",
          "[gradients]") {
  struct ReusedImpl : torch::nn::Cloneable<ReusedImpl> {
    ReusedImpl() { reset(); }
    void reset() override {
      layer = register_module("layer", torch::nn::Linear(4, 4));
    }
    torch::Tensor forward(torch::Tensor x) {
      for (int i = 0; i < 4; ++i) {
        x = torch::tanh(layer(x));
      }
      return x;
    }
    torch::nn::Linear layer{nullptr};
  };
  TORCH_MODULE(Reused);
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::manual_seed(5);
  Reused net;
  net->to(devices[0]);
  dp::DataParallel<Reused> model(net,
                                 dp::DataParallelOptions().devices(devices));
  const auto x = torch::randn({13, 4}, devices[0]);
  const bool in_replicas = GENERATE(false, true);
  torch::Tensor first;
  int different = 0;
  for (int run = 0; run < 100; ++run) {
    net->zero_grad();
    if (in_replicas) {
      model->forward_backward(
          [](const torch::Tensor& y, const torch::Tensor&) {
            return y.pow(2).mean();
          },
          x, x);
    } else {
      model(x).pow(2).mean().backward();
    }
    const torch::Tensor gradient = net->layer->weight.grad().clone();
    first = first.defined() ? first : gradient;
    different += !test::same_bits(gradient, first);
  }
  CHECK(different == 0);
}

TEST_CASE("frozen parameters get no gradient, in any order of freezing",
          "[gradients]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Pair<Mlp> both(devices);
  const auto x = batch_on(both.device);
  const auto step = [&] {
    test::check_same_step(both.model, both.net, both.single,
                          [&](auto& model) { return model(x); });
  };
  const auto freeze = [&](const std::string& name, bool frozen) {
    both.net->named_parameters()[name].requires_grad_(!frozen);
    both.single->named_parameters()[name].requires_grad_(!frozen);
    both.net->zero_grad();
  };
  step();
  freeze("first.weight", true);
  step();
  freeze("second.bias", true);
  freeze("first.weight", false);
  step();
}

TEST_CASE("any bucket size gives the same gradients", "[gradients]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  const auto x = batch_on(devices[0]);
  std::vector<torch::Tensor> first;
  for (const int64_t bytes : {int64_t{1}, int64_t{200}, int64_t{1} << 30}) {
    net->zero_grad();
    dp::DataParallel<Mlp> model(
        net, dp::DataParallelOptions().devices(devices).bucket_bytes(bytes));
    model(x).pow(2).mean().backward();
    std::vector<torch::Tensor> gradients;
    for (const torch::Tensor& parameter : net->parameters()) {
      gradients.push_back(parameter.grad().clone());
    }
    first = first.empty() ? gradients : first;
    for (size_t i = 0; i < gradients.size(); ++i) {
      CHECK(test::same_bits(gradients[i], first[i]));
    }
  }
}
