#include "support/by_hand.h"

#include <ATen/Parallel.h>

namespace bench {

ByHand::ByHand(const ConvNet& net)
    : modules_{net, ConvNet(std::dynamic_pointer_cast<ConvNetImpl>(
                        net->clone(torch::kCPU)))} {
  for (size_t i = 0; i < threads_.size(); ++i) {
    threads_[i] = std::thread([this, i] { work(i); });
  }
}

ByHand::~ByHand() {
  stopping_ = true;
  start_.arrive_and_wait();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void ByHand::work(size_t replica) {
  at::set_num_threads(1);
  while (true) {
    start_.arrive_and_wait();
    if (stopping_) {
      return;
    }
    const auto loss = torch::nn::functional::cross_entropy(
        modules_[replica](images_[replica]), labels_[replica]);
    (loss * 0.5).backward();
    losses_[replica] = loss.detach();
    done_.arrive_and_wait();
  }
}

torch::Tensor ByHand::step(const torch::Tensor& images,
                           const torch::Tensor& labels) {
  const auto image_parts = images.chunk(2);
  const auto label_parts = labels.chunk(2);
  for (size_t i = 0; i < modules_.size(); ++i) {
    modules_[i]->zero_grad();
    images_[i] = image_parts[i];
    labels_[i] = label_parts[i];
  }
  start_.arrive_and_wait();
  done_.arrive_and_wait();
  const auto first = modules_[0]->parameters();
  const auto second = modules_[1]->parameters();
  for (size_t i = 0; i < first.size(); ++i) {
    first[i].mutable_grad().add_(second[i].grad());
  }
  return (losses_[0] + losses_[1]) * 0.5;
}

}  // namespace bench
