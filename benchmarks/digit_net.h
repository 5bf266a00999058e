#pragma once

#include <torch/nn.h>

#include <atomic>
#include <memory>

namespace demo {

/// A small convolutional network with batch norm and dropout.
///
/// An ordinary LibTorch module: it knows nothing of devices. `Cloneable` and
/// `reset()` are what lets a wrapper make replicas of it.
class DigitNetImpl : public torch::nn::Cloneable<DigitNetImpl> {
 public:
  DigitNetImpl();

  void reset() override;

  /// images: [N, 1, 8, 8]; returns logits, [N, 10], on the same device.
  torch::Tensor forward(const torch::Tensor& images);

  /// Whether each replica prints a line in forward: its device, its number and
  /// the samples it was given. Thread safe; replicas share the setting.
  void announce_forward(bool announce) { *announce_ = announce; }

 private:
  torch::nn::Sequential features_{nullptr};
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::Linear classifier_{nullptr};
  std::shared_ptr<std::atomic<bool>> announce_;  // copied by clone(): shared
};

TORCH_MODULE(DigitNet);

}  // namespace demo
