#include "weights.h"

#include <torch/serialize/archive.h>

namespace demo {
namespace {

void read_into(torch::Tensor& target, torch::serialize::InputArchive& archive,
               const std::string& name, bool is_buffer) {
  torch::Tensor value;
  archive.read(name, value, is_buffer);
  TORCH_CHECK_VALUE(value.sizes() == target.sizes(), "load_weights: ", name,
                    " has shape ", value.sizes(), ", expected ",
                    target.sizes());
  target.copy_(value);
}

}  // namespace

void save_weights(const torch::nn::Module& module, const std::string& path) {
  torch::serialize::OutputArchive archive;
  for (const auto& parameter : module.named_parameters()) {
    archive.write(parameter.key(), parameter.value().detach().cpu());
  }
  for (const auto& buffer : module.named_buffers()) {
    archive.write(buffer.key(), buffer.value().cpu(), /*is_buffer=*/true);
  }
  archive.save_to(path);
}

void load_weights(torch::nn::Module& module, const std::string& path,
                  const std::string& prefix) {
  const torch::NoGradGuard no_grad;
  torch::serialize::InputArchive archive;
  archive.load_from(path, torch::kCPU);
  for (auto& parameter : module.named_parameters()) {
    read_into(parameter.value(), archive, prefix + parameter.key(),
              /*is_buffer=*/false);
  }
  for (auto& buffer : module.named_buffers()) {
    read_into(buffer.value(), archive, prefix + buffer.key(),
              /*is_buffer=*/true);
  }
}

}  // namespace demo
