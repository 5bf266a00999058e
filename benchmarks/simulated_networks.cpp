#include "simulated_networks.h"

#include <cmath>

namespace bench {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kClasses = 1000;
constexpr int64_t kPixels = 224;
constexpr int64_t kWords = 30522;
constexpr int64_t kSentence = 128;
constexpr int64_t kHeads = 12;

struct ConvImpl : nn::Cloneable<ConvImpl> {
  ConvImpl(int64_t in, int64_t out, int64_t size, int64_t stride)
      : in(in), out(out), size(size), stride(stride) {
    reset();
  }
  void reset() override {
    weight = register_parameter("weight", torch::empty({out, in, size, size}));
  }
  Tensor forward(const Tensor& x) {
    return torch::conv2d(x, weight, {}, stride, size / 2);
  }
  int64_t in, out, size, stride;
  Tensor weight;
};
TORCH_MODULE(Conv);

struct NormImpl : nn::Cloneable<NormImpl> {
  explicit NormImpl(int64_t channels) : channels(channels) { reset(); }
  void reset() override {
    weight = register_parameter("weight", torch::empty({channels}));
    bias = register_parameter("bias", torch::empty({channels}));
    mean = register_buffer("running_mean", torch::empty({channels}));
    variance = register_buffer("running_var", torch::empty({channels}));
  }
  Tensor forward(const Tensor& x) {
    return torch::batch_norm(x, weight, bias, mean, variance, is_training(),
                             /*momentum=*/0.1, /*eps=*/1e-5,
                             /*cudnn_enabled=*/true);
  }
  int64_t channels;
  Tensor weight, bias, mean, variance;
};
TORCH_MODULE(Norm);

struct DenseImpl : nn::Cloneable<DenseImpl> {
  DenseImpl(int64_t in, int64_t out) : in(in), out(out) { reset(); }
  void reset() override {
    weight = register_parameter("weight", torch::empty({out, in}));
    bias = register_parameter("bias", torch::empty({out}));
  }
  Tensor forward(const Tensor& x) { return torch::linear(x, weight, bias); }
  int64_t in, out;
  Tensor weight, bias;
};
TORCH_MODULE(Dense);

struct LayerNormImpl : nn::Cloneable<LayerNormImpl> {
  explicit LayerNormImpl(int64_t width) : width(width) { reset(); }
  void reset() override {
    weight = register_parameter("weight", torch::empty({width}));
    bias = register_parameter("bias", torch::empty({width}));
  }
  Tensor forward(const Tensor& x) {
    return torch::layer_norm(x, {width}, weight, bias);
  }
  int64_t width;
  Tensor weight, bias;
};
TORCH_MODULE(LayerNorm);

struct BottleneckImpl : nn::Cloneable<BottleneckImpl> {
  BottleneckImpl(int64_t in, int64_t width, int64_t stride)
      : in(in), width(width), stride(stride) {
    reset();
  }
  void reset() override {
    const int64_t out = 4 * width;
    body = register_module(
        "body", nn::Sequential(Conv(in, width, 1, 1), Norm(width),
                               nn::Functional(torch::relu),
                               Conv(width, width, 3, stride), Norm(width),
                               nn::Functional(torch::relu),
                               Conv(width, out, 1, 1), Norm(out)));
    shortcut = register_module("shortcut", nn::Sequential());
    if (stride != 1 || in != out) {
      shortcut->push_back(Conv(in, out, 1, stride));
      shortcut->push_back(Norm(out));
    }
  }
  Tensor forward(const Tensor& x) {
    return torch::relu(body->forward(x) +
                       (shortcut->is_empty() ? x : shortcut->forward(x)));
  }
  int64_t in, width, stride;
  nn::Sequential body{nullptr};
  nn::Sequential shortcut{nullptr};
};
TORCH_MODULE(Bottleneck);

/// Attention by hand: LibTorch's reads values, which a dry run has not.
struct EncoderImpl : nn::Cloneable<EncoderImpl> {
  explicit EncoderImpl(int64_t width) : width(width) { reset(); }
  void reset() override {
    projections = register_module("projections", Dense(width, 3 * width));
    output = register_module("output", Dense(width, width));
    norm = register_module("norm", LayerNorm(width));
    feed = register_module("feed",
                           nn::Sequential(Dense(width, 4 * width), nn::GELU(),
                                          Dense(4 * width, width)));
    feed_norm = register_module("feed_norm", LayerNorm(width));
  }
  Tensor forward(const Tensor& x) {
    // [N, words, 3, heads, width / heads] to 3 of [N, heads, words, …]
    const auto parts = projections->forward(x)
                           .view({x.size(0), x.size(1), 3, kHeads, -1})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const double scale = 1 / std::sqrt(static_cast<double>(width / kHeads));
    const Tensor scores =
        torch::matmul(parts[0], parts[1].transpose(-2, -1)) * scale;
    const Tensor mixed = torch::matmul(torch::softmax(scores, -1), parts[2])
                             .transpose(1, 2)
                             .reshape(x.sizes());
    const Tensor y = norm->forward(x + output->forward(mixed));
    return feed_norm->forward(y + feed->forward(y));
  }
  int64_t width;
  Dense projections{nullptr};
  Dense output{nullptr};
  LayerNorm norm{nullptr};
  nn::Sequential feed{nullptr};
  LayerNorm feed_norm{nullptr};
};
TORCH_MODULE(Encoder);

struct EmbeddingsImpl : nn::Cloneable<EmbeddingsImpl> {
  explicit EmbeddingsImpl(int64_t width) : width(width) { reset(); }
  void reset() override {
    words = register_parameter("words", torch::empty({kWords, width}));
    places = register_parameter("places", torch::empty({kSentence, width}));
    norm = register_module("norm", LayerNorm(width));
  }
  Tensor forward(const Tensor& tokens) {
    return norm->forward(torch::embedding(words, tokens) + places);
  }
  int64_t width;
  Tensor words, places;
  LayerNorm norm{nullptr};
};
TORCH_MODULE(Embeddings);

Tensor first_word(const Tensor& x) {
  return x.select(/*dim=*/1, /*index=*/0);
}

void add_resnet(nn::Sequential& layers, int64_t blocks, int64_t width) {
  // ResNet-50's stages have 3, 4, 6 and 3 blocks.
  const std::vector<int64_t> stages = blocks == 16
                                          ? std::vector<int64_t>{3, 4, 6, 3}
                                          : std::vector<int64_t>(1, blocks);
  layers->push_back(Conv(3, width, 7, 2));
  layers->push_back(Norm(width));
  layers->push_back(nn::Functional(torch::relu));
  layers->push_back(
      nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  int64_t in = width;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    for (int64_t i = 0; i < stages[stage]; ++i) {
      layers->push_back(
          Bottleneck(in, width << stage, stage > 0 && i == 0 ? 2 : 1));
      in = 4 * (width << stage);
    }
  }
  layers->push_back(nn::AdaptiveAvgPool2d(1));
  layers->push_back(nn::Flatten());
  layers->push_back(Dense(in, kClasses));
}

void add_bert(nn::Sequential& layers, int64_t count, int64_t width) {
  layers->push_back(Embeddings(width));
  for (int64_t i = 0; i < count; ++i) {
    layers->push_back(Encoder(width));
  }
  layers->push_back(nn::Functional(first_word));
  layers->push_back(Dense(width, width));
  layers->push_back(nn::Functional(torch::tanh));
  layers->push_back(Dense(width, 2));
}

void add_small(nn::Sequential& layers, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    layers->push_back(Dense(width, width));
    layers->push_back(nn::Functional(torch::tanh));
  }
}

}  // namespace

std::vector<Workload> workloads(bool quick) {
  if (quick) {
    return {{"resnet", 2, 1, 8}, {"bert", 2, 1, 24}, {"small", 2, 3, 8}};
  }
  return {
      {"resnet", 128, 16, 64}, {"bert", 32, 12, 768}, {"small", 256, 200, 256}};
}

NetworkImpl::NetworkImpl(Workload given) : workload(std::move(given)) {
  reset();
}

void NetworkImpl::reset() {
  layers = register_module("layers", nn::Sequential());
  const auto& [name, samples, count, width] = workload;
  name == "resnet" ? add_resnet(layers, count, width)
  : name == "bert" ? add_bert(layers, count, width)
                   : add_small(layers, count, width);
}

Tensor NetworkImpl::forward(const Tensor& batch) {
  return layers->forward(batch);
}

Tensor inputs(const Workload& workload, int64_t devices) {
  const int64_t samples = workload.samples * devices;
  const auto pinned = torch::TensorOptions().pinned_memory(true);
  if (workload.name == "resnet") {
    return torch::empty({samples, 3, kPixels, kPixels}, pinned);
  }
  return workload.name == "bert"
             ? torch::empty({samples, kSentence}, pinned.dtype(torch::kLong))
             : torch::empty({samples, workload.width}, pinned);
}

Tensor labels(const Workload& workload, int64_t devices) {
  return torch::empty({workload.samples * devices},
                      torch::TensorOptions(torch::kLong).pinned_memory(true));
}

}  // namespace bench
