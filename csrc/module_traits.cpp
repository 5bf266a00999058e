#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <dataparallel/module_traits.h>
#include <dataparallel/nested.h>

#include <set>

namespace dataparallel::detail {
namespace {

using Parameters = torch::OrderedDict<std::string, at::Tensor>;

/// A module's own registered parameters. The member is protected; naming it
/// through a derived class is how C++ lets one have a pointer to it.
struct OwnParameters : torch::nn::Module {
  static const Parameters& of(const torch::nn::Module& module) {
    return module.*&OwnParameters::parameters_;
  }
};

std::vector<NamedTensor> named(const Parameters& tensors) {
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
      const Parameters& own = OwnParameters::of(*module);
      Own seen{&own, {}};
      for (const auto& item : own) {
        seen.tensors.push_back(item.value().unsafeGetTensorImpl());
      }
      seen_.push_back(std::move(seen));
    }
    return named(root_->named_parameters());
  }

  std::vector<NamedTensor> buffers() override {
    return named(root_->named_buffers());
  }

  bool replaced() const override {
    for (const Own& seen : seen_) {
      if (seen.dict->size() != seen.tensors.size()) {
        return true;
      }
      for (size_t i = 0; i < seen.tensors.size(); ++i) {
        if ((*seen.dict)[i].value().unsafeGetTensorImpl() != seen.tensors[i]) {
          return true;
        }
      }
    }
    return false;
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
  struct Own {
    const Parameters* dict;
    std::vector<const at::TensorImpl*> tensors;
  };
  std::shared_ptr<torch::nn::Module> root_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<Own> seen_;
};

/// Copies every tensor to `device`; nothing is shared with the original.
class CopyTo : public LeafVisitor {
 public:
  explicit CopyTo(at::Device device) : device_(device) {}
  void tensor(at::Tensor& tensor, const std::string&) override {
    if (tensor.defined()) {
      tensor = tensor.detach().to(device_, /*non_blocking=*/!device_.is_cpu(),
                                  /*copy=*/true);
    }
  }
  void packed(torch::nn::utils::rnn::PackedSequence&,
              const std::string&) override {}

 private:
  at::Device device_;
};

bool is_container(const c10::IValue& value) {
  return value.isList() || value.isGenericDict() || value.isTuple();
}

/// Follows the attributes that are neither parameters nor tensors.
void follow_attributes(const torch::jit::Module& from,
                       const torch::jit::Module& to, at::Device device) {
  const auto type = from.type();
  const auto source = from._ivalue();
  const auto target = to._ivalue();
  for (size_t i = 0; i < type->numAttributes(); ++i) {
    c10::IValue value = source->getSlot(i);
    if (type->getAttribute(i)->is_module()) {
      follow_attributes(torch::jit::Module(value.toObject()),
                        torch::jit::Module(target->getSlot(i).toObject()),
                        device);
    } else if (is_container(value)) {
      CopyTo copy(device);
      visit_ivalue(value, type->getAttributeName(i), copy);
      target->setSlot(i, std::move(value));
    } else if (!value.isTensor() && !value.isObject() && !value.isCapsule()) {
      target->setSlot(i, std::move(value));
    } else if (value.isTensor() != target->getSlot(i).isTensor()) {
      // An optional tensor that was None when the replica was made.
      CopyTo copy(device);
      visit_ivalue(value, type->getAttributeName(i), copy);
      target->setSlot(i, std::move(value));
    }
  }
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
    torch::nn::Module::train(script_.is_training());
  }

  void train(bool on = true) override {
    script_.train(on);
    torch::nn::Module::train(on);
  }
  bool is_training() const noexcept override {
    return script_.hasattr("training") ? script_.is_training()
                                       : torch::nn::Module::is_training();
  }

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

WrapperBase::~WrapperBase() = default;

std::shared_ptr<torch::nn::Module> clone_module(const std::string& function,
                                                const torch::nn::Module& module,
                                                at::Device device) {
  const std::string type = c10::demangle(typeid(module).name());
  std::shared_ptr<torch::nn::Module> clone;
  try {
    clone = module.clone(device);
  } catch (const c10::Error& error) {
    TORCH_CHECK_TYPE(
        false, function, ": ", type,
        " cannot be replicated, its clone() says: ",
        error.what_without_backtrace(), "\nEither derive it from ",
        "torch::nn::Cloneable<", type,
        "> and register everything in reset(), or pass a factory that makes "
        "one for a device");
  }
  const torch::nn::Module& made = *clone;
  TORCH_CHECK_TYPE(typeid(made) == typeid(module), function, ": the clone of ",
                   type, " is a ", c10::demangle(typeid(made).name()),
                   ": derive it from torch::nn::Cloneable<", type,
                   ">, or pass a factory");
  return clone;
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
