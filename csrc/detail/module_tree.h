#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/module_traits.h>
#include <dataparallel/state_dict.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace dataparallel::detail {

struct NamedModule;

/// A module and its children as Python's `state_dict` sees them, whatever its
/// kind.
struct ModuleNode {
  /// The class's own name, as Python would have it: `Linear`, not
  /// `torch::nn::LinearImpl`.
  std::string type_name;
  /// Python's `_version`.
  int64_t version = 1;
  /// Batch norms and their like: files older than version 2 lack the counter
  /// `num_batches_tracked`, which is then left alone.
  bool tolerates_missing_counter = false;
  /// Parameters, then persistent buffers; none undefined.
  std::vector<NamedTensor> tensors;
  std::vector<NamedModule> children;
  /// Puts another tensor in the place of that name; only where the module
  /// itself is the one place that holds it.
  std::function<void(const std::string& name, at::Tensor tensor)> replace;
};

struct NamedModule {
  NamedModule(std::string module_name, ModuleNode module_node)
      : name(std::move(module_name)), node(std::move(module_node)) {}

  std::string name;
  ModuleNode node;
};

ModuleNode module_tree(const torch::nn::Module& module);
DATAPARALLEL_EXPORT ModuleNode module_tree(const torch::jit::Module& module);

/// `load_state_dict` into a module of any kind.
DATAPARALLEL_EXPORT LoadStateDictResult
load_state_dict(const ModuleNode& module, const StateDict& state_dict,
                const LoadStateDictOptions& options);

}  // namespace dataparallel::detail
