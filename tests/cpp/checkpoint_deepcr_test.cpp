// The weights of deepCR 0.3.1, saved in Python from a torch.nn.DataParallel on
// a GPU: every key starts "module.", every storage says "cuda:0". They must
// load into a plain C++ module, on a machine without CUDA. The file is fetched
// by tests/checkpoints/fetch.sh (test_checkpoint_real.py calls it); without it
// the test is skipped.
#include <dataparallel/checkpoint.h>
#include <dataparallel/data_parallel.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>

#include "support/catch.h"

using dataparallel::find_state_dict;
using dataparallel::LoadOptions;
using dataparallel::strip_prefix;
using torch::Tensor;

namespace {

namespace nn = torch::nn;

std::string weights() {
  const char* given = std::getenv("DATAPARALLEL_CHECKPOINTS");
  const std::string folder = given != nullptr ? given : CHECKPOINTS;
  const std::string path =
      folder + "/deepCR-0.3.1/learned_models/mask/ACS-WFC.pth";
  if (!std::filesystem::exists(path)) {
    std::cout << "skipped: there is no " << path << "\n";
    std::exit(77);
  }
  return path;
}

nn::Conv2d convolution(int64_t in, int64_t out) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1));
}

struct DoubleConvImpl : nn::Module {
  DoubleConvImpl(int64_t in, int64_t out)
      : conv(convolution(in, out), nn::BatchNorm2d(out), nn::ReLU(),
             convolution(out, out), nn::BatchNorm2d(out), nn::ReLU()) {
    register_module("conv", conv);
  }
  Tensor forward(const Tensor& x) { return conv->forward(x); }
  nn::Sequential conv;
};
TORCH_MODULE(DoubleConv);

struct InImpl : nn::Module {
  InImpl() : conv(1, 32) { register_module("conv", conv); }
  Tensor forward(const Tensor& x) { return conv(x); }
  DoubleConv conv;
};
TORCH_MODULE(In);

struct DownImpl : nn::Module {
  DownImpl() : mpconv(nn::MaxPool2d(2), DoubleConv(32, 64)) {
    register_module("mpconv", mpconv);
  }
  Tensor forward(const Tensor& x) { return mpconv->forward(x); }
  nn::Sequential mpconv;
};
TORCH_MODULE(Down);

struct UpImpl : nn::Module {
  UpImpl() : up(nn::ConvTranspose2dOptions(64, 32, 2).stride(2)), conv(64, 32) {
    register_module("up", up);
    register_module("conv", conv);
  }
  Tensor forward(const Tensor& x, const Tensor& skipped) {
    return conv(torch::cat({skipped, up(x)}, 1));
  }
  nn::ConvTranspose2d up;
  DoubleConv conv;
};
TORCH_MODULE(Up);

struct OutImpl : nn::Module {
  OutImpl() : conv(nn::Conv2dOptions(32, 1, 1)) {
    register_module("conv", conv);
  }
  Tensor forward(const Tensor& x) { return conv(x); }
  nn::Conv2d conv;
};
TORCH_MODULE(Out);

/// deepCR's smaller network.
struct UNetImpl : nn::Module {
  UNetImpl() {
    register_module("inc", inc);
    register_module("down1", down1);
    register_module("up8", up8);
    register_module("outc", outc);
  }
  Tensor forward(const Tensor& x) {
    const Tensor first = inc(x);
    return torch::sigmoid(outc(up8(down1(first), first)));
  }
  In inc;
  Down down1;
  Up up8;
  Out outc;
};
TORCH_MODULE(UNet);

}  // namespace

TEST_CASE("deepCR's weights load into a C++ module on any machine",
          "[checkpoint][deepCR]") {
  const std::string path = weights();
  const auto info = dataparallel::inspect(path);
  REQUIRE(info.tensors.size() == 46);
  for (const auto& tensor : info.tensors) {
    CHECK(tensor.key.rfind("module.", 0) == 0);
    CHECK(tensor.device == "cuda:0");
  }

  const auto wrapped = find_state_dict(
      dataparallel::load(path, LoadOptions().map_location("cpu")));
  UNet net;
  const auto result =
      dataparallel::load_state_dict(*net, strip_prefix(wrapped));
  CHECK(result.loaded_keys.size() == 46);
  for (const auto& parameter : net->named_parameters()) {
    CHECK(torch::equal(parameter.value(),
                       wrapped.at("module." + parameter.key())));
  }
  for (const auto& buffer : net->named_buffers()) {
    const Tensor saved = wrapped.at("module." + buffer.key());
    CHECK(torch::equal(buffer.value(), saved.to(buffer.value().dtype())));
  }

  // The wrapped keys fit the wrapped module.
  UNet other;
  dataparallel::DataParallel<UNet> model(other,
                                         dataparallel::DataParallelOptions(),
                                         [](at::Device) { return UNet(); });
  dataparallel::load_state_dict(model, wrapped);
  net->eval();
  other->eval();
  const torch::NoGradGuard no_grad;
  const Tensor image = torch::rand({2, 1, 32, 32});
  const Tensor mask = net->forward(image);
  CHECK(mask.sizes() == image.sizes());
  CHECK(torch::equal(mask, other->forward(image)));
}
