#pragma once

#include <torch/torch.h>

#include <utility>
#include <vector>

// Small networks that several tests share. All are smooth, so that second
// derivatives exist, and small enough for float64 everywhere.

namespace test {

/// Two linear layers: [N, 4] to [N, 3].
struct MlpImpl : torch::nn::Cloneable<MlpImpl> {
  explicit MlpImpl(int64_t width = 5) : width(width) { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(4, width));
    second = register_module("second", torch::nn::Linear(width, 3));
  }
  torch::Tensor forward(const torch::Tensor& x, double scale = 1.0) {
    return second(torch::tanh(first(x))) * scale * plain;
  }
  int64_t width;
  double plain = 1.0;  // what the library cannot see from outside
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};
TORCH_MODULE(Mlp);

/// Convolution, batch norm, linear: [N, 2, 5, 5] to [N, 3].
struct ConvNetImpl : torch::nn::Cloneable<ConvNetImpl> {
  ConvNetImpl() { reset(); }
  void reset() override {
    convolution = register_module(
        "convolution",
        torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    last = register_module("last", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::tanh(norm(convolution(x))).mean({2, 3}));
  }
  torch::nn::Conv2d convolution{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(ConvNet);

/// One layer for all samples and one for positive sums only: replicas whose
/// samples are all negative do not use `some`; nobody uses `none`.
struct PartlyUsedImpl : torch::nn::Cloneable<PartlyUsedImpl> {
  PartlyUsedImpl() { reset(); }
  void reset() override {
    all = register_module("all", torch::nn::Linear(4, 3));
    some = register_module("some", torch::nn::Linear(4, 3));
    none = register_module("none", torch::nn::Linear(4, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor positive = (x.sum(1) > 0).nonzero().squeeze(1);
    torch::Tensor y = all(x);
    if (positive.numel() > 0) {
      y = y.index_add(0, positive, some(x.index_select(0, positive)));
    }
    return y;
  }
  torch::nn::Linear all{nullptr};
  torch::nn::Linear some{nullptr};
  torch::nn::Linear none{nullptr};
};
TORCH_MODULE(PartlyUsed);

/// [N, 4], with as many rows of positive sum as asked for, then negative ones.
inline torch::Tensor rows_of_sign(int64_t positive, int64_t negative,
                                  torch::TensorOptions options) {
  return torch::cat({torch::rand({positive, 4}, options) + 0.1,
                     -torch::rand({negative, 4}, options) - 0.1});
}

inline torch::TensorOptions float64_on(torch::Device device) {
  return torch::TensorOptions().dtype(torch::kDouble).device(device);
}

/// [samples, 4] in float64, the same every time.
inline torch::Tensor batch_on(torch::Device device, int64_t samples = 7) {
  torch::manual_seed(7);
  return torch::randn({samples, 4}, float64_on(device));
}

/// A network in float64 on `device`, the same one every time.
template <class Net, class... Args>
Net make(torch::Device device, Args&&... args) {
  torch::manual_seed(3);
  Net net(std::forward<Args>(args)...);
  net->to(device, torch::kDouble);
  return net;
}

}  // namespace test
