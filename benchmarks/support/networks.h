#pragma once

#include <torch/torch.h>

namespace bench {

/// Convolution and BatchNorm around a shortcut: 3 parameters, 3 buffers.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  explicit BlockImpl(int64_t channels) : channels_(channels) { reset(); }
  void reset() override;
  torch::Tensor forward(torch::Tensor features);

  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};

 private:
  int64_t channels_;
};
TORCH_MODULE(Block);

/// A convolution, `blocks` blocks and a linear head: images
/// `[N, 3, height, width]` to logits `[N, kClasses]`, `4 + 3 * blocks`
/// parameters.
struct ConvNetImpl : torch::nn::Cloneable<ConvNetImpl> {
  static constexpr int64_t kClasses = 10;

  ConvNetImpl(int64_t blocks, int64_t channels)
      : blocks_(blocks), channels_(channels) {
    reset();
  }
  void reset() override;
  torch::Tensor forward(torch::Tensor images);

  torch::nn::Conv2d stem{nullptr};
  torch::nn::Sequential body{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  int64_t blocks_;
  int64_t channels_;
};
TORCH_MODULE(ConvNet);

/// A `ConvNet` of exactly so many parameters, `4 + 3 * n` of them, on `device`.
ConvNet conv_net(int64_t parameters, int64_t channels, torch::Device device);

}  // namespace bench
