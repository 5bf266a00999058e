#include "detail/module_tree.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

namespace dataparallel::detail {
namespace {

constexpr int64_t kVersionWithCounter = 2;

/// `ns::NetImpl<float>` → `Net`.
std::string short_type_name(std::string name) {
  name = name.substr(0, name.find('<'));
  if (const size_t colons = name.rfind("::"); colons != std::string::npos) {
    name = name.substr(colons + 2);
  }
  const std::string suffix = "Impl";
  if (name.size() > suffix.size() && name.ends_with(suffix)) {
    name.resize(name.size() - suffix.size());
  }
  return name;
}

template <class... Types>
bool is_any(const torch::nn::Module& module) {
  return (... || (dynamic_cast<const Types*>(&module) != nullptr));
}

bool is_norm(const torch::nn::Module& module) {
  using namespace torch::nn;
  return is_any<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl>(
             module) ||
         module.named_buffers(/*recurse=*/false)
             .contains("num_batches_tracked");
}

}  // namespace

ModuleNode module_tree(const torch::nn::Module& module) {
  if (const torch::jit::Module* script = shown_script_module(module)) {
    ModuleNode node = module_tree(*script);
    // A replaced tensor would be missing in the module that shows it.
    const auto forbid = [](auto& self, ModuleNode& at) -> void {
      at.replace = nullptr;
      for (auto& [name, child] : at.children) {
        self(self, child);
      }
    };
    forbid(forbid, node);
    return node;
  }
  ModuleNode node;
  node.type_name = short_type_name(module.name());
  if (is_norm(module)) {
    node.version = kVersionWithCounter;
    node.tolerates_missing_counter = true;
  }
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    node.tensors.push_back({item.key(), item.value()});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    node.tensors.push_back({item.key(), item.value()});
  }
  for (const auto& item : module.named_children()) {
    node.children.emplace_back(item.key(), module_tree(*item.value()));
  }
  return node;
}

ModuleNode module_tree(const torch::jit::Module& module) {
  ModuleNode node;
  node.type_name = module.type()->name()->name();
  const auto add = [&](const auto& list) {
    for (const auto& item : list) {
      if (item.value.defined()) {
        node.tensors.push_back({item.name, item.value});
      }
    }
  };
  add(module.named_parameters(/*recurse=*/false));
  add(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.named_children()) {
    node.children.emplace_back(child.name, module_tree(child.value));
  }
  node.replace = [script = torch::jit::Module(module)](
                     const std::string& name, at::Tensor tensor) mutable {
    script.setattr(name, std::move(tensor));
  };
  return node;
}

}  // namespace dataparallel::detail
