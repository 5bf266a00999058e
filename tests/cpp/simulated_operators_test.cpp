// The oracle: the same operator, or the same module, on the CPU.

#include <dataparallel/simulated.h>
#include <torch/torch.h>

#include <functional>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/warnings.h"

namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

struct Operator {
  std::string name;
  std::function<Tensors(const Tensors&)> run;
};

Operator one(std::string name, std::function<Tensor(const Tensors&)> run) {
  return {std::move(name),
          [run](const Tensors& in) -> Tensors { return {run(in)}; }};
}

// Inputs: x [4, 6] positive, y [4, 6], m [6, 5], image [2, 3, 8, 8].
const std::vector<Operator> kOperators{
    one("add", [](auto& in) { return in[0] + in[1]; }),
    one("sub scalar", [](auto& in) { return in[0] - 2; }),
    one("mul", [](auto& in) { return in[0] * in[1]; }),
    one("div", [](auto& in) { return in[1] / in[0]; }),
    one("pow", [](auto& in) { return in[0].pow(2.5); }),
    one("exp", [](auto& in) { return in[1].exp(); }),
    one("log", [](auto& in) { return in[0].log(); }),
    one("sqrt", [](auto& in) { return in[0].sqrt(); }),
    one("sigmoid", [](auto& in) { return in[1].sigmoid(); }),
    one("tanh", [](auto& in) { return in[1].tanh(); }),
    one("relu", [](auto& in) { return in[1].relu(); }),
    one("gelu", [](auto& in) { return torch::gelu(in[1]); }),
    one("silu", [](auto& in) { return torch::silu(in[1]); }),
    one("softplus", [](auto& in) { return torch::softplus(in[1]); }),
    one("abs", [](auto& in) { return in[1].abs(); }),
    one("clamp", [](auto& in) { return in[1].clamp(-0.5, 0.5); }),
    one("where",
        [](auto& in) { return torch::where(in[1] > 0, in[0], in[1]); }),
    one("masked_fill",
        [](auto& in) { return in[0].masked_fill(in[1] > 0, 3); }),
    one("mm", [](auto& in) { return in[0].mm(in[2]); }),
    one("matmul", [](auto& in) { return in[0].matmul(in[2]); }),
    one("bmm",
        [](auto& in) { return in[0].unsqueeze(0).bmm(in[2].unsqueeze(0)); }),
    one("addmm",
        [](auto& in) {
          return torch::addmm(in[0].narrow(1, 0, 5), in[0], in[2]);
        }),
    one("einsum",
        [](auto& in) {
          return torch::einsum("ij,jk->ki", {in[0], in[2]});
        }),
    one("sum", [](auto& in) { return in[0].sum(1); }),
    one("mean", [](auto& in) { return in[0].mean(0, true); }),
    one("var", [](auto& in) { return in[0].var(1); }),
    one("norm", [](auto& in) { return in[0].norm(); }),
    one("logsumexp", [](auto& in) { return in[1].logsumexp(1); }),
    one("softmax", [](auto& in) { return in[1].softmax(1); }),
    one("log_softmax", [](auto& in) { return in[1].log_softmax(0); }),
    one("cumsum", [](auto& in) { return in[1].cumsum(1); }),
    one("prod", [](auto& in) { return in[0].prod(1); }),
    one("amax", [](auto& in) { return in[1].amax(1); }),
    {"max", [](auto& in) -> Tensors { return {std::get<0>(in[1].max(1))}; }},
    {"topk", [](auto& in) -> Tensors { return {std::get<0>(in[1].topk(3))}; }},
    {"sort", [](auto& in) -> Tensors { return {std::get<0>(in[1].sort(1))}; }},
    one("argmax", [](auto& in) { return in[1].argmax(1); }),
    one("cat",
        [](auto& in) {
          return torch::cat({in[0], in[1]}, 1);
        }),
    one("stack",
        [](auto& in) {
          return torch::stack({in[0], in[1]});
        }),
    {"split",
     [](auto& in) {
       return in[0].split_with_sizes({2, 4}, 1);
     }},
    {"chunk", [](auto& in) { return in[0].chunk(3, 1); }},
    one("transpose", [](auto& in) { return in[0].t().contiguous(); }),
    one("permute",
        [](auto& in) {
          return in[3].permute({0, 2, 3, 1}).contiguous();
        }),
    one("view",
        [](auto& in) {
          return in[0].view({6, 4}) * 2;
        }),
    one("expand",
        [](auto& in) {
          return in[0].unsqueeze(0).expand({3, 4, 6});
        }),
    one("index_select",
        [](auto& in) {
          return in[0].index_select(
              1, torch::tensor({0, 5, 2}).to(in[0].device()));
        }),
    one("gather",
        [](auto& in) {
          return in[0].gather(
              1, torch::tensor({{0}, {1}, {2}, {3}}).to(in[0].device()));
        }),
    one("index mask", [](auto& in) { return in[0].index({in[1] > 0}); }),
    one("scatter_add",
        [](auto& in) {
          const auto index = torch::zeros({4, 6}, torch::kLong);
          return in[0].scatter_add(1, index.to(in[0].device()), in[1]);
        }),
    one("nonzero", [](auto& in) { return (in[1] > 0).nonzero(); }),
    one("unique",
        [](auto& in) {
          return std::get<0>(at::_unique((in[1] > 0).to(torch::kInt)));
        }),
    one("flip", [](auto& in) { return in[0].flip({1}); }),
    one("roll", [](auto& in) { return in[0].roll(2, 1); }),
    one("tril", [](auto& in) { return in[0].tril(); }),
    one("pad",
        [](auto& in) {
          return at::constant_pad_nd(in[0], {1, 2}, 3);
        }),
    one("in-place",
        [](auto& in) {
          return in[0].clone().add_(1).mul_(in[1]).clamp_min_(0);
        }),
    one("slice write",
        [](auto& in) {
          auto x = in[0].clone();
          x.narrow(1, 1, 2).zero_();
          return x;
        }),
    one("out",
        [](auto& in) {
          const torch::NoGradGuard no_grad;
          auto out = torch::empty({0}, in[0].options());
          return at::add_out(out, in[0], in[1]);
        }),
    one("max_pool2d", [](auto& in) { return torch::max_pool2d(in[3], 2); }),
    one("avg_pool2d", [](auto& in) { return torch::avg_pool2d(in[3], 2); }),
    one("adaptive_avg_pool2d",
        [](auto& in) {
          return torch::adaptive_avg_pool2d(in[3], {3, 3});
        }),
    one("interpolate",
        [](auto& in) {
          return at::upsample_bilinear2d(in[3], {5, 7}, false);
        }),
    one("layer_norm", [](auto& in) { return torch::layer_norm(in[0], {6}); }),
    one("group_norm", [](auto& in) { return torch::group_norm(in[3], 3); }),
    one("cdist", [](auto& in) { return torch::cdist(in[0], in[1]); }),
    one("attention",
        [](auto& in) {
          return at::scaled_dot_product_attention(in[3], in[3], in[3]);
        }),
    one("mse_loss", [](auto& in) { return torch::mse_loss(in[0], in[1]); }),
    one("cross_entropy",
        [](auto& in) {
          return torch::cross_entropy_loss(
              in[0], torch::tensor({0, 1, 2, 3}).to(in[0].device()));
        }),
    one("bce",
        [](auto& in) {
          return torch::binary_cross_entropy_with_logits(in[1],
                                                         in[0].sigmoid());
        }),
    one("to bfloat16",
        [](auto& in) { return in[0].to(torch::kBFloat16).to(torch::kDouble); }),
    one("complex",
        [](auto& in) {
          return torch::real(torch::complex(in[0], in[1]) *
                             torch::complex(in[1], in[0]).conj());
        }),
    one("svd", [](auto& in) { return std::get<1>(at::linalg_svd(in[0])); }),
};

// Each of torch's losses that has a kernel of its own, with each reduction.
const std::vector<Operator> kLosses = [] {
  std::vector<Operator> losses;
  for (const auto reduction :
       {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const auto add = [&](const std::string& name, auto loss) {
      losses.push_back(one(name + " " + std::to_string(reduction),
                           [=](auto& in) { return loss(in, reduction); }));
    };
    add("mse_loss", [](auto& in, int64_t reduction) {
      return torch::mse_loss(in[0], in[1], reduction);
    });
    add("l1_loss", [](auto& in, int64_t reduction) {
      return torch::l1_loss(in[0], in[1], reduction);
    });
    add("smooth_l1_loss", [](auto& in, int64_t reduction) {
      return torch::smooth_l1_loss(in[0], in[1], reduction);
    });
    add("huber_loss", [](auto& in, int64_t reduction) {
      return torch::huber_loss(in[0], in[1], reduction);
    });
    add("binary_cross_entropy", [](auto& in, int64_t reduction) {
      return torch::binary_cross_entropy(in[1].sigmoid(), in[0] - 0.5, {},
                                         reduction);
    });
    add("binary_cross_entropy_with_logits", [](auto& in, int64_t reduction) {
      return torch::binary_cross_entropy_with_logits(in[1], in[0], {}, {},
                                                     reduction);
    });
    add("soft_margin_loss", [](auto& in, int64_t reduction) {
      return torch::soft_margin_loss(in[1], in[0].detach(), reduction);
    });
    add("kl_div", [](auto& in, int64_t reduction) {
      return torch::kl_div(in[1], in[0], reduction);
    });
    add("nll_loss", [](auto& in, int64_t reduction) {
      return torch::nll_loss(in[1], torch::arange(4).to(in[1].device()), {},
                             reduction);
    });
    add("multi_margin_loss", [](auto& in, int64_t reduction) {
      return at::multi_margin_loss(in[1], torch::arange(4).to(in[1].device()),
                                   1, 1, {}, reduction);
    });
    add("multilabel_margin_loss", [](auto& in, int64_t reduction) {
      return torch::multilabel_margin_loss(
          in[1], torch::ones({4, 6}, torch::kLong).to(in[1].device()),
          reduction);
    });
  }
  return losses;
}();

Tensors inputs(torch::Device device) {
  torch::manual_seed(3);
  Tensors result{torch::rand({4, 6}, torch::kDouble) + 0.5,
                 torch::randn({4, 6}, torch::kDouble),
                 torch::randn({6, 5}, torch::kDouble),
                 torch::randn({2, 3, 8, 8}, torch::kDouble)};
  for (Tensor& input : result) {
    input = input.to(device).requires_grad_();
  }
  return result;
}

/// The results, then the inputs' gradients.
Tensors run(const Operator& op, torch::Device device) {
  const Tensors in = inputs(device);
  Tensors all = op.run(in);
  Tensor loss;
  for (const Tensor& result : Tensors(all)) {
    if (result.requires_grad()) {
      const Tensor part = (result * result).sum();
      loss = loss.defined() ? loss + part : part;
    }
  }
  if (loss.defined()) {
    loss.backward();
  }
  for (const Tensor& input : in) {
    all.push_back(input.grad());
  }
  return all;
}

}  // namespace

TEST_CASE("operators give the CPU's results and gradients", "[simulated]") {
  const auto device = test::sim(2)[1];
  for (const std::vector<Operator>& operators : {kOperators, kLosses}) {
    for (const Operator& op : operators) {
      INFO(op.name);
      const Tensors expected = run(op, torch::kCPU);
      const Tensors found = run(op, device);
      REQUIRE(found.size() == expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        REQUIRE(found[i].defined() == expected[i].defined());
        if (found[i].defined()) {
          CHECK(found[i].device() == device);
          CHECK(torch::allclose(found[i].cpu(), expected[i], 1e-10, 1e-10));
        }
      }
    }
  }
}

TEST_CASE("operators warn where the CPU warns, and nowhere else",
          "[simulated]") {
  const auto device = test::sim(2)[1];
  const c10::WarningUtils::WarnAlways always(true);
  const auto warnings_of = [](const Operator& op, torch::Device on) {
    const test::Warnings warnings;
    run(op, on);
    return warnings.texts;
  };
  for (const std::vector<Operator>& operators : {kOperators, kLosses}) {
    for (const Operator& op : operators) {
      INFO(op.name);
      CHECK(warnings_of(op, device) == warnings_of(op, torch::kCPU));
    }
  }
}

namespace {

template <class Module>
void check_module(const std::string& name, Module module, const Tensor& input) {
  INFO(name);
  const auto device = test::sim(2)[1];
  module->to(torch::kDouble);
  auto other = std::dynamic_pointer_cast<typename Module::ContainedType>(
      module->clone(device));
  const auto first = [](auto&& result) -> Tensor {
    if constexpr (std::is_same_v<std::decay_t<decltype(result)>, Tensor>) {
      return result;
    } else {
      return std::get<0>(result);
    }
  };
  auto x = input.to(torch::kDouble).requires_grad_();
  auto y = input.to(torch::kDouble).to(device).requires_grad_();
  const Tensor expected = first(module->forward(x));
  const Tensor found = first(other->forward(y));
  CHECK(found.device() == device);
  CHECK(torch::allclose(found.cpu(), expected, 1e-10, 1e-10));
  (expected * expected).sum().backward();
  (found * found).sum().backward();
  CHECK(torch::allclose(y.grad().cpu(), x.grad(), 1e-10, 1e-10));
  const auto parameters = module->parameters();
  const auto others = other->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    CHECK(torch::allclose(others[i].grad().cpu(), parameters[i].grad(), 1e-10,
                          1e-10));
  }
  const auto buffers = module->buffers();
  const auto other_buffers = other->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) {
    CHECK(torch::allclose(other_buffers[i].cpu(), buffers[i], 1e-10, 1e-10));
  }
}

}  // namespace

TEST_CASE("modules give the CPU's results, gradients and running statistics",
          "[simulated]") {
  namespace nn = torch::nn;
  torch::manual_seed(5);
  const auto rows = torch::randn({5, 4});
  const auto image = torch::randn({3, 4, 6, 6});
  const auto steps = torch::randn({5, 3, 4});
  check_module("Linear", nn::Linear(4, 3), rows);
  check_module("Conv1d", nn::Conv1d(4, 3, 2), torch::randn({3, 4, 6}));
  check_module("Conv2d", nn::Conv2d(4, 3, 3), image);
  check_module("Conv2d groups",
               nn::Conv2d(nn::Conv2dOptions(4, 4, 3).groups(2).stride(2)),
               image);
  check_module("Conv3d", nn::Conv3d(2, 3, 2), torch::randn({2, 2, 4, 4, 4}));
  check_module("ConvTranspose2d", nn::ConvTranspose2d(4, 3, 3), image);
  check_module("BatchNorm1d", nn::BatchNorm1d(4), rows);
  check_module("BatchNorm2d", nn::BatchNorm2d(4), image);
  check_module("InstanceNorm2d", nn::InstanceNorm2d(4), image);
  check_module("LayerNorm", nn::LayerNorm(nn::LayerNormOptions({4})), rows);
  check_module("PReLU", nn::PReLU(), rows);
  check_module("Bilinear-free MLP",
               nn::Sequential(nn::Linear(4, 8), nn::ReLU(), nn::Linear(8, 2)),
               rows);
  check_module(
      "LSTM", nn::LSTM(nn::LSTMOptions(4, 3).num_layers(2).bidirectional(true)),
      steps);
  check_module("GRU", nn::GRU(nn::GRUOptions(4, 3).num_layers(2)), steps);
  check_module("RNN", nn::RNN(4, 3), steps);
  check_module("TransformerEncoderLayer",
               nn::TransformerEncoderLayer(
                   nn::TransformerEncoderLayerOptions(4, 2).dropout(0.0)),
               steps);
}

TEST_CASE("batch norm in training really updates its running statistics",
          "[simulated]") {
  const auto device = test::sim(1)[0];
  torch::nn::BatchNorm2d norm(3);
  norm->to(device);
  norm(torch::randn({4, 3, 2, 2}).to(device) + 5);
  CHECK(norm->running_mean.cpu().min().item<float>() > 0.1f);
  CHECK(norm->num_batches_tracked.item<int64_t>() == 1);
}

TEST_CASE("embeddings give sparse gradients that add, copy and coalesce",
          "[simulated]") {
  const auto devices = test::sim(2);
  torch::nn::Embedding embedding(
      torch::nn::EmbeddingOptions(10, 3).sparse(true));
  embedding->to(devices[0]);
  embedding(torch::tensor({1, 2, 1}).to(devices[0])).sum().backward();
  const auto grad = embedding->weight.grad();
  REQUIRE(grad.is_sparse());
  auto expected = torch::zeros({10, 3});
  expected[1] = 2;
  expected[2] = 1;
  CHECK(torch::equal(grad.coalesce().to_dense().cpu(), expected));
  CHECK(torch::equal((grad + grad).to(devices[1]).to_dense().cpu(),
                     expected * 2));
  CHECK(torch::equal((torch::ones({10, 3}, devices[0]) + grad).cpu(),
                     expected + 1));
  torch::optim::SGD(embedding->parameters(), 0.1).step();
}

TEST_CASE("every dtype and channels-last survive the way there and back",
          "[simulated]") {
  const auto devices = test::sim(2);
  for (const auto dtype :
       {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt,
        torch::kLong, torch::kUInt16, torch::kHalf, torch::kBFloat16,
        torch::kFloat, torch::kDouble, torch::kComplexFloat,
        torch::kComplexDouble, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
    INFO(dtype);
    const auto x = torch::arange(6).to(dtype);
    const auto back = x.to(devices[0]).to(devices[1]).cpu();
    CHECK(back.dtype() == x.dtype());
    CHECK(std::memcmp(back.data_ptr(), x.data_ptr(), x.nbytes()) == 0);
  }
  const auto image =
      torch::randn({2, 3, 4, 4}).contiguous(torch::MemoryFormat::ChannelsLast);
  const auto there = image.to(devices[0]).to(devices[1]);
  CHECK(there.is_contiguous(torch::MemoryFormat::ChannelsLast));
  CHECK(torch::equal(there.cpu(), image));
}

TEST_CASE("optimizers step as on the CPU", "[simulated]") {
  const auto device = test::sim(1)[0];
  torch::nn::Linear a(3, 2);
  a->to(torch::kDouble);
  auto b = std::dynamic_pointer_cast<torch::nn::LinearImpl>(a->clone(device));
  const auto x = torch::randn({4, 3}, torch::kDouble);
  const auto check = [&](auto&& first, auto&& second) {
    for (int step = 0; step < 3; ++step) {
      first.zero_grad();
      second.zero_grad();
      a(x).pow(2).sum().backward();
      b->forward(x.to(device)).pow(2).sum().backward();
      first.step();
      second.step();
    }
    CHECK(torch::allclose(a->weight, b->weight.cpu(), 1e-10, 1e-10));
  };
  check(torch::optim::SGD(a->parameters(),
                          torch::optim::SGDOptions(0.1).momentum(0.9)),
        torch::optim::SGD(b->parameters(),
                          torch::optim::SGDOptions(0.1).momentum(0.9)));
  check(torch::optim::AdamW(a->parameters()),
        torch::optim::AdamW(b->parameters()));
}
