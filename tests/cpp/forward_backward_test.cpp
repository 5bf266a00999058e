#include <ATen/autocast_mode.h>
#include <dataparallel/data_parallel.h>
#include <torch/torch.h>

#include <cmath>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// The loss computed in the replicas: `loss` and `forward_backward`.

namespace {

namespace dp = dataparallel;
namespace F = torch::nn::functional;
using Catch::Contains;
using test::Mlp;

struct Setup {
  explicit Setup(const test::Devices& devices, int64_t samples = 7)
      : device(devices[0]),
        net(test::make<Mlp>(device)),
        single(test::twin(net)),
        model(net, dp::DataParallelOptions().devices(devices)) {
    torch::manual_seed(9);
    x = torch::randn({samples, 4}, test::float64_on(device));
    y = torch::randint(3, {samples}, torch::TensorOptions(torch::kLong))
            .to(device);
  }
  torch::Device device;
  Mlp net;
  Mlp single;
  dp::DataParallel<Mlp> model;
  torch::Tensor x;
  torch::Tensor y;
};

torch::Tensor cross_entropy(const torch::Tensor& output,
                            const torch::Tensor& target) {
  return F::cross_entropy(output, target);
}

constexpr int64_t kIgnored = -100;

/// The mean over the targets that count, and how many those are.
std::pair<torch::Tensor, torch::Tensor> counted(const torch::Tensor& output,
                                                const torch::Tensor& target) {
  return {F::cross_entropy(output, target), (target != kIgnored).sum()};
}

/// Computes something aside that is not a part of its result.
struct LeavesBehindImpl : torch::nn::Cloneable<LeavesBehindImpl> {
  inline static std::vector<torch::Tensor> left;  // [replica]
  LeavesBehindImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
    aside = register_module("aside", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    left[*dp::current_replica()] = aside(x).sum();
    return layer(x);
  }
  torch::nn::Linear layer{nullptr};
  torch::nn::Linear aside{nullptr};
};
TORCH_MODULE(LeavesBehind);

}  // namespace

TEST_CASE("the loss in the replicas equals that of the whole batch", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const int64_t samples = GENERATE(1, 2, 3, 5, 8);
  INFO(test::name(devices) << samples << " samples");
  Setup s(devices, samples);
  const auto loss = s.model->loss(cross_entropy, s.x, s.y);
  const auto expected = cross_entropy(s.single(s.x), s.y);
  test::check_equal("loss", loss, expected);
  loss.backward();
  expected.backward();
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("forward_backward leaves the whole batch's loss and gradients",
          "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const int64_t samples = GENERATE(1, 2, 3, 5, 8);
  INFO(test::name(devices) << samples << " samples");
  Setup s(devices, samples);
  const auto loss = s.model->forward_backward(cross_entropy, s.x, s.y);
  CHECK_FALSE(loss.requires_grad());
  const auto expected = cross_entropy(s.single(s.x), s.y);
  test::check_equal("loss", loss, expected);
  expected.backward();
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("targets can have a rule of their own", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  Setup s(devices);
  const auto options = [&] {
    return dp::DataParallelOptions().devices(devices).dim(1).inputs(
        {{0, dp::split(0)}, {1, dp::split(0)}});
  };
  dp::DataParallel<Mlp> model(s.net, options());
  const auto loss = model->forward_backward(cross_entropy, s.x, s.y);
  const auto expected = cross_entropy(s.single(s.x), s.y);
  expected.backward();
  test::check_equal("loss", loss, expected);
  test::check_same_gradients(*s.net, *s.single);
  // Or by sample.
  dp::DataParallel<Mlp> listed(
      s.net, options().inputs({{0, dp::split(0)}, {1, dp::split_by_sample()}}));
  const std::vector<int64_t> list(s.y.numel(), 1);
  listed->loss(
      [](const torch::Tensor& y, const std::vector<int64_t>& targets) {
        CHECK(static_cast<int64_t>(targets.size()) == y.size(0));
        return y.mean();
      },
      s.x, list);
}

TEST_CASE("forward_backward adds to the gradients that are there", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  for (int pass = 0; pass < 3; ++pass) {
    s.model->forward_backward(cross_entropy, s.x * pass, s.y);
    cross_entropy(s.single(s.x * pass), s.y).backward();
  }
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("forward_backward trains as on one device", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  torch::optim::Adam optimizer(s.model->parameters());
  torch::optim::Adam single_optimizer(s.single->parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    single_optimizer.zero_grad();
    s.model->forward_backward(cross_entropy, s.x, s.y);
    cross_entropy(s.single(s.x), s.y).backward();
    optimizer.step();
    single_optimizer.step();
    test::check_same_values(*s.net, *s.single);
  }
}

TEST_CASE("forward, loss and forward_backward may alternate", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  for (int pass = 0; pass < 2; ++pass) {
    const auto early = cross_entropy(s.model(s.x), s.y);
    s.model->forward_backward(cross_entropy, s.x, s.y);
    s.model->loss(cross_entropy, s.x, s.y).backward();
    early.backward();
  }
  (cross_entropy(s.single(s.x), s.y) * 6).backward();
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("a loss with its weight is weighted by it, a weight of 0 too",
          "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const auto ignored = GENERATE(std::pair(1, 4), std::pair(4, 8));
  INFO(test::name(devices));
  Setup s(devices, 8);
  s.y.index_put_({torch::indexing::Slice(ignored.first, ignored.second)},
                 kIgnored);
  const auto expected = cross_entropy(s.single(s.x), s.y);
  expected.backward();
  SECTION("loss") {
    const auto loss = s.model->loss(counted, s.x, s.y);
    test::check_equal("loss", loss, expected);
    loss.backward();
  }
  SECTION("forward_backward") {
    const auto loss = s.model->forward_backward(counted, s.x, s.y);
    test::check_equal("loss", loss, expected);
  }
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("a batch of ignored targets alone is not a number, as on one device",
          "[loss]") {
  Setup s(test::cpu(3), 8);
  s.y.fill_(kIgnored);
  CHECK(s.model->loss(counted, s.x, s.y).isnan().item<bool>());
}

TEST_CASE("a batch without any weight is what the loss says all the same",
          "[loss]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  const int64_t samples = GENERATE(7, 1);
  INFO(test::name(devices));
  Setup s(devices, samples);
  // Padding counts for nothing, and a batch of it is 0.
  const auto masked = [](const torch::Tensor& y, const torch::Tensor& mask) {
    const auto count = mask.sum();
    return std::pair((y.sum(1) * mask).sum() / count.clamp_min(1), count);
  };
  const auto none = torch::zeros({samples}, test::float64_on(devices[0]));
  CHECK(s.model->loss(masked, s.x, none).item<double>() == 0);
  CHECK(s.model->forward_backward(masked, s.x, none).item<double>() == 0);
  for (const torch::Tensor& parameter : s.net->parameters()) {
    CHECK(parameter.grad().count_nonzero().item<int64_t>() == 0);
  }
}

TEST_CASE("forward may change a trained input in place in forward_backward",
          "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::nn::Sequential net(
      torch::nn::Functional([](torch::Tensor x) { return x.mul_(3).add_(1); }),
      torch::nn::Linear(4, 3));
  net->to(devices[0], torch::kDouble);
  const auto single =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  dp::DataParallel<torch::nn::Sequential> model(net, test::on(devices));
  const auto x = test::batch_on(devices[0]).requires_grad_();
  const auto y = test::batch_on(devices[0]).requires_grad_();
  model->forward_backward(
      [](const torch::Tensor& output, const torch::Tensor&) {
        return output.pow(2).mean();
      },
      x * 1.0, x);
  single->forward(y * 1.0).pow(2).mean().backward();
  test::check_same_gradients(*net, *single);
  test::check_equal("input", x.grad(), y.grad());
}

TEST_CASE("a hook in forward_backward that calls the wrapper is an error",
          "[loss][errors]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  const int64_t samples = GENERATE(7, 1);
  INFO(test::name(devices));
  Setup s(devices, samples);
  const auto calls = [&](const torch::Tensor& gradient) {
    const torch::NoGradGuard no_grad;
    s.model(s.x);
    return gradient;
  };
  const auto refused = Contains("called from inside");
  const auto plain = [](const torch::Tensor& y, const torch::Tensor&) {
    return y.pow(2).mean();
  };
  SECTION("on a parameter") {
    const auto hook = s.net->second->weight.register_hook(calls);
    s.model(s.x).sum().backward();  // not inside a call
    CHECK_THROWS_WITH(s.model->forward_backward(plain, s.x, s.y), refused);
    s.net->second->weight.remove_hook(hook);
  }
  SECTION("in the graph") {
    const auto hooked = [&](const torch::Tensor& y, const torch::Tensor&) {
      const auto square = y.pow(2);
      square.register_hook(calls);
      return square.mean();
    };
    CHECK_THROWS_WITH(s.model->forward_backward(hooked, s.x, s.y), refused);
  }
  s.net->zero_grad();
  s.model->forward_backward(plain, s.x, s.y);
  s.single->forward(s.x).pow(2).mean().backward();
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("a replica without any weight gives no gradient, not NaN", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices, /*samples=*/4);
  const auto masked = [](const torch::Tensor& y, const torch::Tensor& mask) {
    return std::pair((y.pow(2).sum(1) * mask).sum() / mask.sum(), mask.sum());
  };
  const auto mask =
      torch::tensor({1., 1., 0., 0.}, torch::kDouble).to(devices[0]);
  s.model->loss(masked, s.x, mask).backward();
  masked(s.single->forward(s.x), mask).first.backward();
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("a graph that forward leaves behind is no loss in silence",
          "[loss][errors]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  INFO(test::name(devices));
  auto net = test::make<LeavesBehind>(devices[0]);
  dp::DataParallel<LeavesBehind> model(net, test::on(devices));
  LeavesBehindImpl::left.assign(devices.size(), torch::Tensor());
  const auto x = test::batch_on(devices[0]);
  model->forward_backward(
      [](const torch::Tensor& y, const torch::Tensor&) { return y.mean(); }, x,
      x);
  CHECK_THROWS_WITH(LeavesBehindImpl::left[1].backward(),
                    Contains("comes after the call"));
  LeavesBehindImpl::left.clear();
}

TEST_CASE("gradients flow through weights that the network computes",
          "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const int64_t samples = GENERATE(7, 1);
  INFO(test::name(devices));
  Setup s(devices, samples);
  const auto confident = [](const torch::Tensor& y, const torch::Tensor& t) {
    const auto weight = y.select(1, 0).sigmoid();
    const auto each = F::cross_entropy(
        y, t, F::CrossEntropyFuncOptions().reduction(torch::kNone));
    return std::pair((weight * each).sum() / weight.sum(), weight.sum());
  };
  const auto expected = confident(s.single(s.x), s.y).first;
  expected.backward();
  SECTION("loss") {
    const auto loss = s.model->loss(confident, s.x, s.y);
    test::check_equal("loss", loss, expected);
    loss.backward();
  }
  SECTION("forward_backward") {
    const auto loss = s.model->forward_backward(confident, s.x, s.y);
    test::check_equal("loss", loss, expected);
    CHECK_FALSE(loss.requires_grad());
  }
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("a tensor that is input and target is one tensor in the loss",
          "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  const auto penalty = [](const torch::Tensor& y, const torch::Tensor& x) {
    const auto slope =
        torch::autograd::grad({y.sum()}, {x}, /*grad_outputs=*/{},
                              /*retain_graph=*/std::nullopt,
                              /*create_graph=*/true)[0];
    return slope.pow(2).sum(1).mean();
  };
  const auto x = s.x.clone().requires_grad_();
  const auto single_x = s.x.clone().requires_grad_();
  s.model->forward_backward(penalty, x, x);
  penalty(s.single(single_x), single_x).backward();
  test::check_same_gradients(*s.net, *s.single);
  test::check_equal("input", x.grad(), single_x.grad());
}

TEST_CASE("a weight may be a number", "[loss]") {
  Setup s(test::cpu(3), 8);
  const auto halves = [](const torch::Tensor& output,
                         const torch::Tensor& target) {
    return std::pair<torch::Tensor, double>(
        F::cross_entropy(output, target), static_cast<double>(target.size(0)));
  };
  test::check_equal("loss", s.model->loss(halves, s.x, s.y),
                    cross_entropy(s.single(s.x), s.y));
  const auto as_tuple = [&](const torch::Tensor& output,
                            const torch::Tensor& target) {
    return std::tuple(F::cross_entropy(output, target), target.size(0));
  };
  test::check_equal("loss", s.model->loss(as_tuple, s.x, s.y),
                    cross_entropy(s.single(s.x), s.y));
}

TEST_CASE("inputs that have a graph get their gradients", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  const auto before = torch::eye(4, test::float64_on(s.device));
  const auto leaf = before.clone().requires_grad_();
  const auto single_leaf = before.clone().requires_grad_();
  s.model->forward_backward(cross_entropy, s.x.matmul(leaf), s.y);
  cross_entropy(s.single(s.x.matmul(single_leaf)), s.y).backward();
  test::check_equal("input", leaf.grad(), single_leaf.grad());
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("targets that need a gradient get it", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  const auto target = torch::zeros({7, 3}, test::float64_on(s.device));
  const auto leaf = target.clone().requires_grad_();
  const auto single_leaf = target.clone().requires_grad_();
  const auto squares = [](const torch::Tensor& a, const torch::Tensor& b) {
    return (a - b).pow(2).mean();
  };
  s.model->forward_backward(squares, s.x, leaf);
  squares(s.single(s.x), single_leaf).backward();
  test::check_equal("target", leaf.grad(), single_leaf.grad());
}

TEST_CASE("several inputs come as a tuple", "[loss]") {
  Setup s(test::cpu(3));
  const auto loss = s.model->loss(cross_entropy, std::tuple(s.x, 2.0), s.y);
  test::check_equal("loss", loss, cross_entropy(s.single(s.x, 2.0), s.y));
}

TEST_CASE("hooks run once with the whole gradient in forward_backward",
          "[loss][hooks]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  int calls = 0;
  torch::Tensor seen;
  s.net->second->weight.register_hook([&](const torch::Tensor& gradient) {
    ++calls;
    seen = gradient.clone();
  });
  s.model->forward_backward(cross_entropy, s.x, s.y);
  cross_entropy(s.single(s.x), s.y).backward();
  CHECK(calls == 1);
  test::check_equal("seen", seen, s.single->second->weight.grad());
}

TEST_CASE("an error in the loss function leaves no gradient",
          "[loss][errors]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  const auto last = static_cast<int64_t>(devices.size()) - 1;
  const auto fails_late = [&](const torch::Tensor& output,
                              const torch::Tensor& target) {
    if (dp::current_replica().value_or(0) == last) {
      throw std::domain_error("no loss");
    }
    return F::cross_entropy(output, target);
  };
  CHECK_THROWS_AS(s.model->forward_backward(fails_late, s.x, s.y),
                  std::domain_error);
  for (const torch::Tensor& parameter : s.net->parameters()) {
    CHECK_FALSE(parameter.grad().defined());
  }
  s.model->forward_backward(cross_entropy, s.x, s.y);
  cross_entropy(s.single(s.x), s.y).backward();
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("a plain backward is whole after a forward_backward that failed",
          "[loss][errors]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Setup s(devices);
  const auto fails = [](const torch::Tensor&,
                        const torch::Tensor&) -> torch::Tensor {
    throw std::domain_error("no loss");
  };
  CHECK_THROWS_AS(s.model->forward_backward(fails, s.x, s.y),
                  std::domain_error);
  cross_entropy(s.model(s.x), s.y).backward();
  cross_entropy(s.single(s.x), s.y).backward();
  test::check_same_gradients(*s.net, *s.single);
}

TEST_CASE("forward_backward without gradients is refused", "[loss][errors]") {
  Setup s(test::cpu(2));
  torch::NoGradGuard no_grad;
  CHECK_THROWS_WITH(s.model->forward_backward(cross_entropy, s.x, s.y),
                    Contains("forward_backward: gradients are switched off"));
  test::check_equal("loss", s.model->loss(cross_entropy, s.x, s.y),
                    cross_entropy(s.single(s.x), s.y));
}

TEST_CASE("a loss that is no scalar is refused", "[loss][errors]") {
  Setup s(test::cpu(2));
  const auto each = [](const torch::Tensor& output, const torch::Tensor&) {
    return output.sum(1);
  };
  CHECK_THROWS_AS(s.model->loss(each, s.x, s.y), c10::ValueError);
  CHECK_THROWS_WITH(s.model->loss(each, s.x, s.y),
                    Contains("returned a Double tensor of shape [4], expected "
                             "a floating-point scalar"));
}

TEST_CASE("targets of another batch size are refused by name",
          "[loss][errors]") {
  Setup s(test::cpu(2));
  CHECK_THROWS_WITH(s.model->loss(cross_entropy, s.x, s.y.slice(0, 1)),
                    Contains("targets") && Contains("args[0]"));
}

TEST_CASE("autocast may stay on over forward_backward and plain backwards",
          "[loss][amp]") {
  // Its cache keeps casts of the module's weights, with their graph.
  const bool plain_first = GENERATE(false, true);
  torch::manual_seed(3);
  Mlp net;
  auto single = test::twin(net);
  dp::DataParallel<Mlp> model(net,
                              dp::DataParallelOptions().devices(test::cpu(2)));
  const auto x = torch::randn({6, 4});
  const auto mean_square = [](const torch::Tensor& y, const torch::Tensor&) {
    return y.to(torch::kFloat).pow(2).mean();
  };
  const auto plain = [&](auto& m) { mean_square(m(x), x).backward(); };
  at::autocast::set_autocast_dtype(at::kCPU, torch::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  if (plain_first) {
    plain(model);
  }
  model->forward_backward(mean_square, x, x);
  if (!plain_first) {
    plain(model);
  }
  plain(single);
  plain(single);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  for (const auto& item : net->named_parameters()) {
    test::check_equal(item.key(), item.value().grad(),
                      single->named_parameters()[item.key()].grad(), 1e-2);
  }
}

TEST_CASE("a replica whose loss has no graph adds nothing", "[loss]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  Setup s(devices, 8);
  s.x.slice(0, 4).fill_(-1);  // the last replicas' samples are not wanted
  const auto wanted = [](const torch::Tensor& y, const torch::Tensor& x) {
    const auto rows = x.sum(1).ne(-4).nonzero().flatten();
    return rows.numel() == 0 ? torch::zeros({}, y.options())
                             : y.index_select(0, rows).pow(2).sum() /
                                   static_cast<double>(y.size(0));
  };
  const auto loss = s.model->forward_backward(wanted, s.x, s.x);
  const auto expected = wanted(s.single(s.x), s.x);
  expected.backward();
  test::check_equal("loss", loss, expected);
  test::check_same_gradients(*s.net, *s.single);
  CHECK_THROWS_WITH(s.model->forward_backward(
                        [](const torch::Tensor& y, const torch::Tensor&) {
                          return torch::zeros({}, y.options());
                        },
                        s.x, s.x),
                    Contains("does not require grad"));
}

TEST_CASE("one chunk's weight is checked as well", "[loss][errors]") {
  Setup s(test::cpu(2), /*samples=*/1);
  const auto negative = [](const torch::Tensor& y, const torch::Tensor&) {
    return std::pair(y.mean(), -1.0);
  };
  CHECK_THROWS_WITH(s.model->forward_backward(negative, s.x, s.y),
                    Contains("the weight -1 in replica 0"));
  s.net->eval();
  for (auto& parameter : s.net->parameters()) {
    parameter.requires_grad_(false);
  }
  CHECK_THROWS_WITH(s.model->forward_backward(cross_entropy, s.x, s.y),
                    Contains("the loss does not require grad"));
}

TEST_CASE("a loss that is no mean is refused", "[loss][errors]") {
  Setup s(test::cpu(2));
  CHECK_THROWS_WITH(
      s.model->loss(
          [](const torch::Tensor& y, const torch::Tensor&) {
            return torch::complex(y, y).mean();
          },
          s.x, s.y),
      Contains("a ComplexDouble tensor") && Contains("floating-point scalar"));
  const auto count = [](const torch::Tensor& y, const torch::Tensor& t) {
    return y.argmax(1).eq(t).sum();
  };
  CHECK_THROWS_WITH(
      s.model->loss(count, s.x, s.y),
      Contains("returned a Long tensor") && Contains("floating-point scalar"));
  const auto many_weights = [](const torch::Tensor& y, const torch::Tensor&) {
    return std::pair(y.mean(), torch::ones({3}));
  };
  CHECK_THROWS_WITH(s.model->loss(many_weights, s.x, s.y),
                    Contains("as weight a Float tensor of shape [3]"));
}

TEST_CASE("a weight below 0, or in some replicas only, is refused",
          "[loss][errors]") {
  const auto devices = GENERATE(test::cpu(2), test::sim(2));
  Setup s(devices);
  const auto refused = [&](auto loss_fn, const char* message) {
    CHECK_THROWS_WITH(s.model->loss(loss_fn, s.x, s.y), Contains(message));
    CHECK_THROWS_WITH(s.model->forward_backward(loss_fn, s.x, s.y),
                      Contains(message));
    CHECK_FALSE(s.net->first->weight.grad().defined());
  };
  refused(
      [](const torch::Tensor& y, const torch::Tensor&) {
        return std::pair(y.mean(), -1.0);
      },
      "returned the weight -1 in replica 0, expected a number of 0 or more");
  refused(
      [](const torch::Tensor& y, const torch::Tensor&) {
        return std::pair(
            y.mean(), torch::full({}, dp::current_replica() == 0 ? 1.0 : -1.0,
                                  y.options()));
      },
      "returned the weight -1 in replica 1, expected a number of 0 or more");
  refused(
      [](const torch::Tensor& y, const torch::Tensor&) {
        return std::pair(y.mean(), std::nan(""));
      },
      "returned the weight nan");
  refused(
      [](const torch::Tensor& y, const torch::Tensor&) {
        return std::pair(y.mean(), dp::current_replica() == 0
                                       ? torch::ones({})
                                       : torch::Tensor());
      },
      "a weight in some replicas and None in others");
}
