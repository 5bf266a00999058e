#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/module_traits.h>

#include <memory>
#include <string>
#include <vector>

namespace dataparallel::detail {

/// One tensor of the original, and what stands for it in the replicas.
struct Counterpart {
  /// The first of its names.
  std::string name;
  bool parameter;
  at::Tensor original;
  /// `[replica]`, 0 empty. Names that share a tensor: one each.
  std::vector<std::vector<at::Tensor>> copies;
};

/// The tensors of `modules[0]`, the original, parameters first, with those of
/// the replicas after it. Throws `c10::TypeError` where a replica differs in
/// names, shapes or ties, or shares a tensor with another. `made_by_user`: by a
/// factory.
std::vector<Counterpart> match_replicas(
    const std::string& function,
    const std::vector<std::unique_ptr<ModuleAccess>>& modules,
    bool made_by_user);

}  // namespace dataparallel::detail
