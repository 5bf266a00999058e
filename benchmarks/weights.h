#pragma once

#include <torch/nn/module.h>

#include <string>

namespace demo {

/// Writes the module's parameters and buffers by name, as CPU tensors, to a
/// LibTorch archive. Of a wrapped module the names begin with `module.`.
void save_weights(const torch::nn::Module& module, const std::string& path);

/// Copies what `save_weights` wrote into a module's parameters and buffers; in
/// the file each name has `prefix` before it.
///
/// Throws `c10::Error` if a name is missing or a shape differs.
void load_weights(torch::nn::Module& module, const std::string& path,
                  const std::string& prefix = "");

}  // namespace demo
