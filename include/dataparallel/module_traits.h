#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/export.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// What the library needs to know of a kind of module. Users see these kinds:
// a module holder (TORCH_MODULE, `torch::nn::Sequential`), a `shared_ptr` to a
// module, `torch::nn::AnyModule`, `torch::jit::Module`.

namespace dataparallel::detail {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// One module's tensors and modes, whatever its type.
class DATAPARALLEL_EXPORT ModuleAccess {
 public:
  virtual ~ModuleAccess() = default;
  virtual std::string type_name() const = 0;
  /// As they are now; remembered for `replaced`.
  virtual std::vector<NamedTensor> parameters() = 0;
  virtual std::vector<NamedTensor> buffers() = 0;
  /// Whether others are registered, tensors or children, than at the last
  /// `parameters()`.
  virtual bool replaced() const = 0;
  /// A parameter of one of torch's own layers whose member holds a tensor that
  /// is not the registered one.
  virtual std::optional<std::string> unregistered() const = 0;
  /// Takes over what `original` has beside parameters and buffers.
  virtual void follow(ModuleAccess& original, at::Device device) = 0;
  /// A data-parallel module inside, or null.
  virtual const torch::nn::Module* wrapper_inside() const = 0;
};

DATAPARALLEL_EXPORT std::unique_ptr<ModuleAccess> access_module(
    std::shared_ptr<torch::nn::Module> module);
DATAPARALLEL_EXPORT std::unique_ptr<ModuleAccess> access_module(
    torch::jit::Module module);

/// A module of `torch::nn` that shows a TorchScript module's parameters,
/// buffers and mode under their own names.
DATAPARALLEL_EXPORT std::shared_ptr<torch::nn::Module> show_script_module(
    torch::jit::Module module);
/// Made by the default constructor.
DATAPARALLEL_EXPORT bool is_empty(const torch::jit::Module& module);
/// The TorchScript module that `module` shows, or null.
DATAPARALLEL_EXPORT const torch::jit::Module* shown_script_module(
    const torch::nn::Module& module);

/// The base of every wrapper, so that one is recognized inside another.
class DATAPARALLEL_EXPORT WrapperBase : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  ~WrapperBase() override;
};

DATAPARALLEL_EXPORT std::shared_ptr<torch::nn::Module> clone_module(
    const std::string& function, const torch::nn::Module& module,
    at::Device device);
DATAPARALLEL_EXPORT torch::jit::Module clone_module(
    const std::string& function, const torch::jit::Module& module,
    at::Device device);

/// Throws if `module` is no module that can be replica 0 on `device`.
DATAPARALLEL_EXPORT void check_replicable(const std::string& function,
                                          ModuleAccess& module,
                                          at::Device device);

/// Runs `make` and leaves the random number generators of the CPU and of
/// `device` as they were: making a module draws its initial values.
DATAPARALLEL_EXPORT void keep_random_state(at::Device device,
                                           const std::function<void()>& make);

template <class M>
consteval bool is_module_kind() {
  if constexpr (std::is_same_v<M, torch::nn::AnyModule> ||
                std::is_same_v<M, torch::jit::Module>) {
    return true;
  } else if constexpr (requires(M & m) {
                         static_cast<const torch::nn::Module&>(*m);
                       }) {
    using Impl = std::remove_cvref_t<decltype(*std::declval<M&>())>;
    return std::is_constructible_v<M, std::shared_ptr<Impl>>;
  } else {
    return false;
  }
}

/// Holders and shared pointers: `M(shared_ptr)` and `*m`, `m->`.
template <class M>
struct ModuleTraits {
  using Impl = std::remove_cvref_t<decltype(*std::declval<M&>())>;
  static std::shared_ptr<Impl> pointer(M& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;
    }
  }
  static std::shared_ptr<torch::nn::Module> shown(M& module) {
    return pointer(module);
  }
  static bool empty(M& module) {
    if constexpr (requires { module.is_empty(); }) {
      return module.is_empty();
    } else {
      return module == nullptr;
    }
  }
  static std::unique_ptr<ModuleAccess> access(M& module) {
    return access_module(pointer(module));
  }
  static M clone(const std::string& function, M& module, at::Device device) {
    return M(std::dynamic_pointer_cast<Impl>(
        clone_module(function, *pointer(module), device)));
  }
  static void move(M& module, at::Device device) { module->to(device); }
  template <class Result, class... Args>
  static decltype(auto) forward(M& module, Args&&... args) {
    if constexpr (std::is_void_v<Result>) {
      return module->forward(std::forward<Args>(args)...);
    } else {
      return module->template forward<Result>(std::forward<Args>(args)...);
    }
  }
};

template <>
struct ModuleTraits<torch::nn::AnyModule> {
  using M = torch::nn::AnyModule;
  static std::shared_ptr<torch::nn::Module> shown(M& module) {
    return module.ptr();
  }
  static bool empty(M& module) { return module.is_empty(); }
  static std::unique_ptr<ModuleAccess> access(M& module) {
    return access_module(module.ptr());
  }
  static M clone(const std::string& function, M& module, at::Device device) {
    // AnyModule::clone wraps the clone with the type it knows; `clone_module`
    // explains what went wrong.
    try {
      return module.clone(device);
    } catch (const c10::Error&) {
      clone_module(function, *module.ptr(), device);
      throw;
    }
  }
  static void move(M& module, at::Device device) { module.ptr()->to(device); }
  template <class Result, class... Args>
  static auto forward(M& module, Args&&... args) {
    using R = std::conditional_t<std::is_void_v<Result>, at::Tensor, Result>;
    return module.forward<R>(std::forward<Args>(args)...);
  }
};

template <>
struct ModuleTraits<torch::jit::Module> {
  using M = torch::jit::Module;
  static std::shared_ptr<torch::nn::Module> shown(M& module) {
    return show_script_module(module);
  }
  static bool empty(M& module) { return is_empty(module); }
  static std::unique_ptr<ModuleAccess> access(M& module) {
    return access_module(module);
  }
  static M clone(const std::string& function, M& module, at::Device device) {
    return clone_module(function, module, device);
  }
  static void move(M& module, at::Device device) { module.to(device); }
  /// `forward(a, b, …)` or torch's own `forward(vector<IValue>, kwargs)`.
  template <class Result, class... Args>
  static c10::IValue forward(M& module, Args&&... args) {
    if constexpr (requires { module.forward(std::forward<Args>(args)...); }) {
      return module.forward(std::forward<Args>(args)...);
    } else {
      std::vector<c10::IValue> inputs;
      (inputs.emplace_back(std::forward<Args>(args)), ...);
      return module.forward(std::move(inputs));
    }
  }
};

template <class M>
M make_replica(const std::string& function, M& module, at::Device device,
               const std::function<M(at::Device)>& factory) {
  std::optional<M> replica;
  keep_random_state(device, [&] {
    if (factory) {
      replica.emplace(factory(device));
      TORCH_CHECK_TYPE(!ModuleTraits<M>::empty(*replica), function,
                       ": the factory returned an empty module for ", device);
      ModuleTraits<M>::move(*replica, device);
    } else {
      replica.emplace(ModuleTraits<M>::clone(function, module, device));
    }
  });
  return std::move(*replica);
}

}  // namespace dataparallel::detail
