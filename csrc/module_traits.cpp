#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <dataparallel/module_traits.h>
#include <dataparallel/nested.h>
#include <torch/nn/modules.h>

#include <map>
#include <set>
#include <unordered_map>

namespace dataparallel::detail {
namespace {

using Tensors = torch::OrderedDict<std::string, at::Tensor>;
// What a module itself has registered, read where it is: torch's functions give
// copies, which would cost more than all else in a refresh. The members are not
// public; an explicit instantiation may name them all the same.
template <auto Member, class Tag>
struct Open {
  friend auto member(Tag) { return Member; }
};
struct Parameters {
  friend auto member(Parameters);
};
struct Buffers {
  friend auto member(Buffers);
};
struct Children {
  friend auto member(Children);
};
template struct Open<&torch::nn::Module::parameters_, Parameters>;
template struct Open<&torch::nn::Module::buffers_, Buffers>;
template struct Open<&torch::nn::Module::children_, Children>;

const void* address(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}
const void* address(const std::shared_ptr<torch::nn::Module>& module) {
  return module.get();
}

/// Calls `act` with the address of all that `module` has registered, and once
/// with null after each kind.
template <class Act>
void each_registered(const torch::nn::Module& module, Act&& act) {
  const auto all = [&](const auto& dictionary) {
    for (const auto& item : dictionary) {
      act(address(item.value()));
    }
    act(nullptr);
  };
  all(module.*member(Parameters()));
  all(module.*member(Buffers()));
  all(module.*member(Children()));
}

/// Whether a layer of torch's has a member that is not what is registered.
template <class Layer>
std::optional<std::string> unregistered_of(const torch::nn::Module& module) {
  const auto* layer = dynamic_cast<const Layer*>(&module);
  if (layer == nullptr) {
    return std::nullopt;
  }
  const auto differs = [&](const char* name, const at::Tensor& held) {
    const at::Tensor* found = (module.*member(Parameters())).find(name);
    return found != nullptr && !found->is_same(held);
  };
  if (differs("weight", layer->weight)) {
    return "weight";
  }
  if constexpr (requires { layer->bias; }) {
    if (differs("bias", layer->bias)) {
      return "bias";
    }
  }
  return std::nullopt;
}

template <class... Layers>
std::optional<std::string> unregistered_in(const torch::nn::Module& module) {
  std::optional<std::string> found;
  ((found = unregistered_of<Layers>(module), found.has_value()) || ...);
  return found;
}

std::vector<NamedTensor> named(const Tensors& tensors) {
  std::vector<NamedTensor> result;
  for (const auto& item : tensors) {
    if (item.value().defined()) {
      result.push_back({item.key(), item.value()});
    }
  }
  return result;
}

class NNAccess : public ModuleAccess {
 public:
  explicit NNAccess(std::shared_ptr<torch::nn::Module> module)
      : root_(std::move(module)),
        modules_(root_->modules(/*include_self=*/true)) {}

  std::string type_name() const override {
    return c10::demangle(typeid(*root_).name());
  }

  std::vector<NamedTensor> parameters() override {
    seen_.clear();
    for (const auto& module : modules_) {
      each_registered(*module, [&](const void* one) { seen_.push_back(one); });
    }
    return named(root_->named_parameters());
  }

  std::vector<NamedTensor> buffers() override {
    return named(root_->named_buffers());
  }

  bool replaced() const override {
    size_t at = 0;
    bool same = true;
    for (const auto& module : modules_) {
      each_registered(*module, [&](const void* one) {
        same = same && at < seen_.size() && seen_[at++] == one;
      });
    }
    return !same || at != seen_.size();
  }

  std::optional<std::string> unregistered() const override {
    for (const auto& item : root_->named_modules()) {
      const auto name = unregistered_in<
          torch::nn::LinearImpl, torch::nn::BilinearImpl,
          torch::nn::EmbeddingImpl, torch::nn::EmbeddingBagImpl,
          torch::nn::Conv1dImpl, torch::nn::Conv2dImpl, torch::nn::Conv3dImpl,
          torch::nn::ConvTranspose1dImpl, torch::nn::ConvTranspose2dImpl,
          torch::nn::ConvTranspose3dImpl, torch::nn::LayerNormImpl,
          torch::nn::GroupNormImpl, torch::nn::BatchNorm1dImpl,
          torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl,
          torch::nn::PReLUImpl>(*item.value());
      if (name.has_value()) {
        return item.key().empty() ? *name : item.key() + "." + *name;
      }
    }
    return std::nullopt;
  }

  void follow(ModuleAccess& original, at::Device) override {
    // Parents come before their children, and `train` goes down to these; so
    // the last word on each module is its own.
    const auto& from = static_cast<NNAccess&>(original).modules_;
    for (size_t i = 0; i < modules_.size() && i < from.size(); ++i) {
      if (modules_[i]->is_training() != from[i]->is_training()) {
        modules_[i]->train(from[i]->is_training());
      }
    }
  }

  const torch::nn::Module* wrapper_inside() const override {
    for (const auto& module : modules_) {
      if (dynamic_cast<const WrapperBase*>(module.get()) != nullptr) {
        return module.get();
      }
    }
    return nullptr;
  }

 private:
  std::shared_ptr<torch::nn::Module> root_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<const void*> seen_;
};

/// The original's tensors, and what stands for each in a replica.
using Counterparts = std::unordered_map<const at::TensorImpl*, at::Tensor>;

/// Replaces every tensor by its counterpart, or copies it to `device`; nothing
/// is shared with the original.
class CopyTo : public LeafVisitor {
 public:
  CopyTo(at::Device device, const Counterparts& counterparts)
      : device_(device), counterparts_(counterparts) {}
  void tensor(at::Tensor& tensor, const std::string& path) override {
    if (!tensor.defined()) {
      return;
    }
    const auto found = counterparts_.find(tensor.unsafeGetTensorImpl());
    if (found != counterparts_.end()) {
      tensor = found->second;
      return;
    }
    TORCH_CHECK_VALUE(!tensor.requires_grad(), "replicate: the attribute ",
                      path,
                      " holds a tensor that needs a gradient, but is no "
                      "parameter of the module: in the replicas its gradient "
                      "would be lost");
    tensor = tensor.detach().to(device_, /*non_blocking=*/!device_.is_cpu(),
                                /*copy=*/true);
  }
  void packed(torch::nn::utils::rnn::PackedSequence&,
              const std::string&) override {}

 private:
  at::Device device_;
  const Counterparts& counterparts_;
};

bool is_container(const c10::IValue& value) {
  return value.isList() || value.isGenericDict() || value.isTuple();
}

/// Calls `act(name, value in from, object of to, slot)` for each attribute that
/// is no module, children's too.
template <class Act>
void each_attribute(const torch::jit::Module& from,
                    const torch::jit::Module& to, Act&& act) {
  const auto type = from.type();
  const auto source = from._ivalue();
  const auto target = to._ivalue();
  for (size_t i = 0; i < type->numAttributes(); ++i) {
    if (type->getAttribute(i)->is_module()) {
      each_attribute(torch::jit::Module(source->getSlot(i).toObject()),
                     torch::jit::Module(target->getSlot(i).toObject()), act);
    } else {
      act(type->getAttributeName(i), source->getSlot(i), *target, i);
    }
  }
}

/// Follows the attributes that are neither parameters nor tensors.
void follow_attributes(const torch::jit::Module& from,
                       const torch::jit::Module& to, at::Device device) {
  Counterparts counterparts;
  each_attribute(from, to,
                 [&](const std::string&, const c10::IValue& value,
                     c10::ivalue::Object& target, size_t i) {
                   if (value.isTensor() && target.getSlot(i).isTensor()) {
                     counterparts.emplace(
                         value.toTensor().unsafeGetTensorImpl(),
                         target.getSlot(i).toTensor());
                   }
                 });
  each_attribute(
      from, to,
      [&](const std::string& name, c10::IValue value,
          c10::ivalue::Object& target, size_t i) {
        // An optional tensor may have been None when the replica was made.
        const bool new_tensor =
            value.isTensor() != target.getSlot(i).isTensor();
        if (is_container(value) || (value.isTensor() && new_tensor)) {
          CopyTo copy(device, counterparts);
          visit_ivalue(value, name, copy);
          target.setSlot(i, std::move(value));
        } else if (new_tensor || (!value.isTensor() && !value.isObject() &&
                                  !value.isCapsule())) {
          target.setSlot(i, std::move(value));
        }
      });
}

class ScriptAccess : public ModuleAccess {
 public:
  explicit ScriptAccess(torch::jit::Module module)
      : module_(std::move(module)) {}

  std::string type_name() const override {
    return module_.type()->name()->qualifiedName();
  }

  std::vector<NamedTensor> parameters() override {
    std::vector<NamedTensor> result;
    seen_.clear();
    for (const auto& item : module_.named_parameters(/*recurse=*/true)) {
      if (item.value.defined()) {
        result.push_back({item.name, item.value});
        seen_.push_back(item.value.unsafeGetTensorImpl());
      }
    }
    return result;
  }

  std::vector<NamedTensor> buffers() override {
    std::set<std::string> parameters;
    for (const auto& item : module_.named_parameters(/*recurse=*/true)) {
      parameters.insert(item.name);
    }
    std::vector<NamedTensor> result;
    for (const auto& item : module_.named_attributes(/*recurse=*/true)) {
      if (item.value.isTensor() && item.value.toTensor().defined() &&
          parameters.count(item.name) == 0) {
        result.push_back({item.name, item.value.toTensor()});
      }
    }
    buffers_seen_.clear();
    for (const NamedTensor& buffer : result) {
      buffers_seen_.push_back(buffer.tensor.unsafeGetTensorImpl());
    }
    return result;
  }

  bool replaced() const override {
    ScriptAccess now(module_);
    now.parameters();
    now.buffers();
    return now.seen_ != seen_ || now.buffers_seen_ != buffers_seen_;
  }

  void follow(ModuleAccess& original, at::Device device) override {
    follow_attributes(static_cast<ScriptAccess&>(original).module_, module_,
                      device);
  }

  std::optional<std::string> unregistered() const override {
    return std::nullopt;
  }

  const torch::nn::Module* wrapper_inside() const override { return nullptr; }

 private:
  torch::jit::Module module_;
  std::vector<const at::TensorImpl*> seen_;
  std::vector<const at::TensorImpl*> buffers_seen_;
};

class ShownScriptModule : public torch::nn::Module {
 public:
  explicit ShownScriptModule(torch::jit::Module module)
      : torch::nn::Module("ScriptModule"), script_(std::move(module)) {
    // Before it has children, whose modes are their own.
    torch::nn::Module::train(is_training());
    for (const auto& item : script_.named_parameters(/*recurse=*/false)) {
      if (item.value.defined()) {
        register_parameter(item.name, item.value, item.value.requires_grad());
      }
    }
    for (const auto& item : script_.named_buffers(/*recurse=*/false)) {
      if (item.value.defined()) {
        register_buffer(item.name, item.value);
      }
    }
    for (const auto& child : script_.named_children()) {
      register_module(child.name,
                      std::make_shared<ShownScriptModule>(child.value));
    }
  }

  void train(bool on = true) override {
    script_.train(on);
    torch::nn::Module::train(on);
  }
  bool is_training() const noexcept override {
    return script_.hasattr("training") ? script_.is_training()
                                       : torch::nn::Module::is_training();
  }
  const torch::jit::Module& script() const { return script_; }

 private:
  torch::jit::Module script_;
};

class KeepGenerator {
 public:
  explicit KeepGenerator(at::Device device)
      : generator_(at::globalContext().defaultGenerator(device)) {
    std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepGenerator() {
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace

std::unique_ptr<ModuleAccess> access_module(
    std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<NNAccess>(std::move(module));
}

std::unique_ptr<ModuleAccess> access_module(torch::jit::Module module) {
  return std::make_unique<ScriptAccess>(std::move(module));
}

std::shared_ptr<torch::nn::Module> show_script_module(
    torch::jit::Module module) {
  return std::make_shared<ShownScriptModule>(std::move(module));
}

bool is_empty(const torch::jit::Module& module) {
  try {
    module._ivalue();
    return false;
  } catch (const c10::Error&) {  // its only way to say so
    return true;
  }
}

const torch::jit::Module* shown_script_module(const torch::nn::Module& module) {
  const auto* shown = dynamic_cast<const ShownScriptModule*>(&module);
  return shown == nullptr ? nullptr : &shown->script();
}

WrapperBase::~WrapperBase() = default;

namespace {

/// How many hold each of the module's layers and tensors.
std::map<std::string, int64_t> holders(const torch::nn::Module& module) {
  std::map<std::string, int64_t> counts;
  for (const auto& item : module.named_children()) {
    for (const auto& below : item.value()->named_modules(item.key())) {
      counts["layer " + below.key()] = below.value().use_count();
    }
  }
  const auto count = [&](const char* kind, const Tensors& tensors) {
    for (const auto& item : tensors) {
      if (item.value().defined()) {
        counts[kind + item.key()] =
            static_cast<int64_t>(item.value().use_count());
      }
    }
  };
  count("parameter ", module.named_parameters());
  count("buffer ", module.named_buffers());
  return counts;
}

/// `clone` copies the struct, then `reset` must put new ones in place of all:
/// what has more holders afterwards.
std::optional<std::string> held_by_clone(
    const std::map<std::string, int64_t>& before,
    const torch::nn::Module& module) {
  for (const auto& [name, count] : holders(module)) {
    if (before.at(name) < count) {
      return name;
    }
  }
  return std::nullopt;
}

std::shared_ptr<torch::nn::Module> checked_clone(
    const std::string& function, const torch::nn::Module& module,
    at::Device device) {
  const std::string type = c10::demangle(typeid(module).name());
  std::shared_ptr<torch::nn::Module> clone;
  try {
    clone = module.clone(device);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const bool has_none =
        text.find("clone() has not been implemented") != std::string::npos;
    TORCH_CHECK_TYPE(
        false, function, ": ", type,
        " cannot be replicated, its clone() says: ", text, "\nEither ",
        has_none ? "derive it from torch::nn::Cloneable<" + type + "> and "
                 : std::string(),
        "register everything in reset(), or pass a factory that makes one for "
        "a device");
  }
  const torch::nn::Module& made = *clone;
  TORCH_CHECK_TYPE(typeid(made) == typeid(module), function, ": the clone of ",
                   type, " is a ", c10::demangle(typeid(made).name()),
                   ": derive it from torch::nn::Cloneable<", type,
                   ">, or pass a factory");
  return clone;
}

}  // namespace

std::shared_ptr<torch::nn::Module> clone_module(const std::string& function,
                                                const torch::nn::Module& module,
                                                at::Device device) {
  // Another thread that copies a handle meanwhile is a holder too, for a while.
  for (int attempt = 1;; ++attempt) {
    const auto before = holders(module);
    auto clone = checked_clone(function, module, device);
    const auto held = held_by_clone(before, module);
    if (!held.has_value()) {
      return clone;
    }
    TORCH_CHECK_TYPE(
        attempt < 3, function, ": the clone of ",
        c10::demangle(typeid(module).name()), " still holds the original's ",
        *held,
        ": reset() must assign every member that leads to it anew (a list "
        "that it fills must be emptied first), or pass a factory that makes a "
        "replica for a device");
  }
}

torch::jit::Module clone_module(const std::string& function,
                                const torch::jit::Module& module,
                                at::Device device) {
  const auto tensors = [](const torch::jit::Module& of) {
    std::optional<at::Device> found;
    for (const auto& tensor : of.parameters(/*recurse=*/true)) {
      found = tensor.device();
    }
    return found;
  };
  try {
    // With its own device, deepcopy would share the tensors.
    return tensors(module).value_or(at::kCPU) == device
               ? module.deepcopy()
               : module.deepcopy(device);
  } catch (const std::exception& error) {
    TORCH_CHECK_TYPE(false, function, ": the TorchScript module ",
                     module.type()->name()->qualifiedName(),
                     " cannot be copied: ", error.what(),
                     "\nPass a factory that loads one for a device");
  }
}

void check_replicable(const std::string& function, ModuleAccess& module,
                      at::Device device) {
  TORCH_CHECK_VALUE(module.wrapper_inside() == nullptr, function, ": ",
                    module.type_name(),
                    " is data-parallel already or holds a module that is; wrap "
                    "the bare module once");
  const auto check = [&](const std::vector<NamedTensor>& tensors,
                         const char* kind) {
    for (const NamedTensor& item : tensors) {
      TORCH_CHECK_VALUE(item.tensor.device() == device, function, ": ", kind,
                        " ", item.name, " is on ", item.tensor.device(),
                        ", expected ", device, " (the first of devices)");
    }
  };
  check(module.parameters(), "parameter");
  check(module.buffers(), "buffer");
}

void keep_random_state(at::Device device, const std::function<void()>& make) {
  KeepGenerator cpu(at::kCPU);
  std::optional<KeepGenerator> accelerator;
  if (!device.is_cpu()) {
    accelerator.emplace(device);
  }
  make();
}

}  // namespace dataparallel::detail
