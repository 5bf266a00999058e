#include "support/networks.h"

namespace bench {

namespace nn = torch::nn;

void BlockImpl::reset() {
  conv = register_module(
      "conv",
      nn::Conv2d(
          nn::Conv2dOptions(channels_, channels_, 3).padding(1).bias(false)));
  norm = register_module("norm", nn::BatchNorm2d(channels_));
}

torch::Tensor BlockImpl::forward(torch::Tensor features) {
  return features + torch::relu(norm(conv(features)));
}

void ConvNetImpl::reset() {
  stem = register_module(
      "stem", nn::Conv2d(nn::Conv2dOptions(3, channels_, 3).padding(1)));
  body = register_module("body", nn::Sequential());
  for (int64_t i = 0; i < blocks_; ++i) {
    body->push_back(Block(channels_));
  }
  head = register_module("head", nn::Linear(channels_, kClasses));
}

torch::Tensor ConvNetImpl::forward(torch::Tensor images) {
  return head(body->forward(stem(images)).mean({2, 3}));
}

ConvNet conv_net(int64_t parameters, int64_t channels, torch::Device device) {
  ConvNet net((parameters - 4) / 3, channels);
  TORCH_INTERNAL_ASSERT(net->parameters().size() ==
                        static_cast<size_t>(parameters));
  net->to(device);
  return net;
}

}  // namespace bench
