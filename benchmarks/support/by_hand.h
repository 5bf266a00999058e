#pragma once

#include <array>
#include <barrier>
#include <thread>

#include "support/networks.h"

namespace bench {

/// Two modules on two threads of one intra-op thread each, as one writes it
/// without a library: each half of the batch through forward, loss and
/// backward, then the second module's gradients added to the first's. The
/// second module's values are its own: nothing keeps them up to date.
class ByHand {
 public:
  explicit ByHand(const ConvNet& net);
  ~ByHand();
  ByHand(const ByHand&) = delete;
  ByHand& operator=(const ByHand&) = delete;

  torch::Tensor step(const torch::Tensor& images, const torch::Tensor& labels);

 private:
  void work(size_t replica);

  std::array<ConvNet, 2> modules_;
  std::array<torch::Tensor, 2> images_;
  std::array<torch::Tensor, 2> labels_;
  std::array<torch::Tensor, 2> losses_;
  bool stopping_ = false;
  std::barrier<> start_{3};
  std::barrier<> done_{3};
  std::array<std::thread, 2> threads_;
};

}  // namespace bench
