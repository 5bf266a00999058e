#include "digit_net.h"

#include <dataparallel/dataparallel.h>
#include <fmt/core.h>

namespace demo {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 32;
constexpr int64_t kDigits = 10;
constexpr double kDropout = 0.25;

void push_convolution(nn::Sequential& layers, int64_t in, int64_t out) {
  layers->push_back(nn::Conv2d(
      nn::Conv2dOptions(in, out, /*kernel_size=*/3).padding(1).bias(false)));
  layers->push_back(nn::BatchNorm2d(out));
  layers->push_back(nn::ReLU());
}

}  // namespace

DigitNetImpl::DigitNetImpl()
    : announce_(std::make_shared<std::atomic<bool>>(false)) {
  reset();
}

void DigitNetImpl::reset() {
  nn::Sequential features;
  push_convolution(features, 1, kWidth);
  push_convolution(features, kWidth, kWidth);
  features->push_back(nn::MaxPool2d(2));  // [N, 32, 4, 4]
  push_convolution(features, kWidth, 2 * kWidth);
  features->push_back(nn::MaxPool2d(2));  // [N, 64, 2, 2]
  features->push_back(nn::Flatten());

  features_ = register_module("features", features);
  dropout_ = register_module("dropout", nn::Dropout(kDropout));
  classifier_ = register_module(
      "classifier", nn::Linear(2 * kWidth * 2 * 2, /*out_features=*/kDigits));
}

torch::Tensor DigitNetImpl::forward(const torch::Tensor& images) {
  if (*announce_) {
    if (const auto replica = dataparallel::current_replica()) {
      fmt::print("Forward on {} (replica {}), batch size: {}\n",
                 images.device().str(), *replica, images.size(0));
    }
  }
  return classifier_(dropout_(features_->forward(images)));
}

}  // namespace demo
