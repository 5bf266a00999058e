#include "python/replicas.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/module_python.h>

#include <algorithm>
#include <unordered_map>

#include "python/bindings.h"
#include "python/devices.h"

// Note [Replicas of Python modules]
//
// What torch.nn.parallel.replicate does in Python on every forward is done here
// in two parts.
//
// The tensors are kept. A replica's parameters and buffers are tensors of one
// `ReplicaSet`, as those of a C++ module are: in flat buffers that one copy a
// bucket brings up to date, with gradient edges that lead to the originals. It
// is made anew when the module's own tensors are others than they were.
//
// The objects are not kept. Python modules hold anything, and any of it may
// have changed since the last forward, so each forward makes new objects: of
// each module one of its class, with a copy of its `__dict__` in which the
// tensors, the children and what is bound to the module are the replica's. That
// is torch's own way (`_replicate_for_data_parallel`, which classes override,
// and which is called where they do), save three things:
//
// - Parameters are entries of `_parameters`, so that `parameters()`,
// ParameterList
//   and what iterates over them work in a replica.
// - Tables of hooks are copied, so that a hook that is added or removed while
//   forward runs meets no other replica's.
// - What is bound to the original, above all a `forward` that was replaced on
//   the instance, is bound to the replica.
//
// Replica 0 is the module itself: what its forward writes stays.

namespace dataparallel::python {
namespace {

/// Tables of hooks that a forward looks at.
constexpr const char* kHookTables[] = {"_backward_pre_hooks",
                                       "_backward_hooks",
                                       "_forward_hooks",
                                       "_forward_hooks_with_kwargs",
                                       "_forward_hooks_always_called",
                                       "_forward_pre_hooks",
                                       "_forward_pre_hooks_with_kwargs"};

struct Names {
  py::object module_class = py::module_::import("torch.nn").attr("Module");
  py::object ordered_dict =
      py::module_::import("collections").attr("OrderedDict");
  py::object own_replica = module_class.attr("_replicate_for_data_parallel");
  py::object own_setattr = module_class.attr("__setattr__");
  py::object lazy = py::module_::import("torch.nn.parameter")
                        .attr("UninitializedTensorMixin");
  py::str parameters{"_parameters"};
  py::str buffers{"_buffers"};
  py::str modules{"_modules"};
  py::str is_replica{"_is_replica"};
  py::str former_parameters{"_former_parameters"};
  py::str forward{"forward"};
  py::str replicate{"_replicate_for_data_parallel"};
  std::vector<py::str> hook_tables{std::begin(kHookTables),
                                   std::end(kHookTables)};
};

const Names& names() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Names> all;
  return all.call_once_and_store_result([] { return Names(); }).get_stored();
}

void set_item(const py::dict& dict, const py::handle& key,
              const py::handle& value) {
  if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

py::dict copy_of(const py::handle& dict) {
  auto result = py::reinterpret_steal<py::dict>(PyDict_Copy(dict.ptr()));
  if (!result) {
    throw py::error_already_set();
  }
  return result;
}

/// Of that tensor's shape and dtype; values and memory come later.
at::Tensor placeholder(const at::Tensor& tensor, at::Device device) {
  c10::InferenceMode normal_mode(false);
  at::NoGradGuard no_grad;
  if (tensor.layout() != at::kStrided || tensor.is_nested() ||
      tensor.is_quantized()) {
    return tensor.detach().to(device, /*non_blocking=*/false, /*copy=*/true);
  }
  return at::empty_strided(
      tensor.sizes(), std::vector<int64_t>(tensor.dim(), 0),
      at::TensorOptions().dtype(tensor.scalar_type()).device(device));
}

/// The tensors of a Python module, or of one of its replicas.
class PythonAccess : public detail::ModuleAccess {
 public:
  explicit PythonAccess(std::string type) : type_(std::move(type)) {}

  std::string type_name() const override { return type_; }
  std::vector<detail::NamedTensor> parameters() override {
    return of_kind(true);
  }
  std::vector<detail::NamedTensor> buffers() override { return of_kind(false); }
  bool replaced() const override {
    return std::any_of(scripts.begin(), scripts.end(), [](const auto& script) {
      return script.second->replaced();
    });
  }
  std::optional<std::string> unregistered() const override { return {}; }
  const torch::nn::Module* wrapper_inside() const override { return nullptr; }
  void follow(ModuleAccess& original, at::Device device) override {
    auto& other = static_cast<PythonAccess&>(original);
    for (size_t i = 0; i < scripts.size(); ++i) {
      scripts[i].second->follow(*other.scripts[i].second, device);
    }
  }

  std::vector<std::pair<bool, detail::NamedTensor>> tensors;
  /// TorchScript modules in the tree, by their paths with a dot.
  std::vector<std::pair<std::string, std::unique_ptr<detail::ModuleAccess>>>
      scripts;

 private:
  std::vector<detail::NamedTensor> of_kind(bool parameters) {
    std::vector<detail::NamedTensor> result;
    for (const auto& [parameter, named] : tensors) {
      if (parameter == parameters) {
        result.push_back(named);
      }
    }
    for (const auto& [prefix, script] : scripts) {
      for (const auto& named :
           parameters ? script->parameters() : script->buffers()) {
        result.push_back({prefix + named.name, named.tensor});
      }
    }
    return result;
  }

  std::string type_;
};

}  // namespace

Replicas::~Replicas() {
  py::gil_scoped_release unlocked;
  team_.reset();
}

void Replicas::enter(const std::string& function) {
  std::unique_ptr<detail::OneCall::Scope> scope;
  {
    py::gil_scoped_release unlocked;
    if (team_ != nullptr) {
      team_->refuse_inside(function);
    }
    scope = std::make_unique<detail::OneCall::Scope>(*calls_, function);
  }
  scope_ = std::move(scope);
}

void Replicas::exit() {
  const auto scope = std::move(scope_);
}

detail::ReplicaSet& Replicas::set() {
  TORCH_INTERNAL_ASSERT(set_ != nullptr);
  return *set_;
}

WorkerTeam& Replicas::team(const std::vector<at::Device>& devices) {
  if (team_ == nullptr || team_->devices() != devices) {
    py::gil_scoped_release unlocked;
    team_ = std::make_unique<WorkerTeam>(devices);
  }
  return *team_;
}

bool Replicas::same(const ModuleWalk& walk,
                    const std::vector<at::Device>& devices) const {
  const auto& slots = walk.slots();
  if (set_ == nullptr || devices != devices_ || slots.size() != seen_.size() ||
      !set_->same_structure()) {
    return false;
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!slots[i].tensor.is_same(seen_[i]) ||
        slots[i].parameter != seen_parameter_[i]) {
      return false;
    }
  }
  size_t script = 0;
  for (const ModuleWalk::Node& node : walk.nodes()) {
    if (node.script.has_value() &&
        (script == scripts_.size() ||
         scripts_[script++].original._ivalue() != node.script->_ivalue())) {
      return false;
    }
  }
  return script == scripts_.size();
}

void Replicas::rebuild(const ModuleWalk& walk,
                       const std::vector<at::Device>& devices, bool detach) {
  set_.reset();
  copies_.assign(devices.size(), {});
  seen_.clear();
  seen_parameter_.clear();
  unique_.clear();
  scripts_.clear();
  devices_ = devices;
  const py::object root = walk.nodes().front().module;
  const auto type = py::str(py::type::of(root).attr("__name__"));
  std::vector<std::unique_ptr<PythonAccess>> access;
  for (size_t i = 0; i < devices.size(); ++i) {
    access.push_back(std::make_unique<PythonAccess>(type));
  }
  std::unordered_map<const void*, size_t> known;
  std::vector<std::pair<bool, detail::NamedTensor>> originals;
  for (const ModuleWalk::Slot& slot : walk.slots()) {
    const at::Tensor& tensor = slot.tensor;
    const auto [at, fresh] =
        known.emplace(tensor.unsafeGetTensorImpl(), originals.size());
    seen_.push_back(tensor);
    seen_parameter_.push_back(slot.parameter);
    unique_.push_back(at->second);
    if (!fresh) {
      continue;
    }
    const std::string name =
        walk.full_name(slot.node, py::handle(slot.name).cast<std::string>());
    TORCH_CHECK_VALUE(
        !py::isinstance(slot.object, names().lazy), function_, ": ", name,
        " is not initialized; run a forward of the module itself first");
    TORCH_CHECK_TYPE(
        !tensor.key_set().has(c10::DispatchKey::Python), function_, ": ", name,
        " is a ",
        py::type::handle_of(slot.object).attr("__name__").cast<std::string>(),
        ", a tensor with code of its own, which cannot be replicated");
    originals.push_back({slot.parameter, {name, tensor}});
  }
  {
    py::gil_scoped_release unlocked;
    for (const auto& [parameter, named] : originals) {
      access[0]->tensors.push_back(
          {parameter,
           {named.name, detach ? named.tensor.detach() : named.tensor}});
      for (size_t r = 1; r < devices.size(); ++r) {
        access[r]->tensors.push_back(
            {parameter, {named.name, placeholder(named.tensor, devices[r])}});
      }
    }
  }
  for (size_t node = 0; node < walk.nodes().size(); ++node) {
    const auto& script = walk.nodes()[node].script;
    if (!script.has_value()) {
      continue;
    }
    scripts_.push_back({*script, {walk.nodes()[node].module}});
    const std::string prefix = walk.full_name(node, "");
    access[0]->scripts.emplace_back(prefix, detail::access_module(*script));
    for (size_t r = 1; r < devices.size(); ++r) {
      std::optional<torch::jit::Module> clone;
      {
        py::gil_scoped_release unlocked;
        detail::keep_random_state(devices[r], [&] {
          clone.emplace(detail::clone_module(function_, *script, devices[r]));
        });
      }
      access[r]->scripts.emplace_back(prefix, detail::access_module(*clone));
      scripts_.back().copies.push_back(
          py::module_::import("torch.jit._recursive")
              .attr("wrap_cpp_module")(py::cast(*clone)));
    }
  }
  std::vector<std::unique_ptr<detail::ModuleAccess>> modules;
  for (size_t r = 0; r < devices.size(); ++r) {
    for (const auto& [parameter, named] : access[r]->tensors) {
      copies_[r].push_back(py::cast(named.tensor));
    }
    modules.push_back(std::move(access[r]));
  }
  py::gil_scoped_release unlocked;
  set_ = std::make_unique<detail::ReplicaSet>(
      function_, devices, kDefaultBucketBytes, std::move(modules),
      /*made_by_user=*/true);
}

void Replicas::follow(const ModuleWalk& walk,
                      const std::vector<at::Device>& devices, bool detach) {
  if (!same(walk, devices)) {
    rebuild(walk, devices, detach);
  } else {
    py::gil_scoped_release unlocked;
    if (accumulating_ && parameters_fresh_) {
      set_->refresh_buffers();
    } else {
      set_->refresh();
    }
  }
  parameters_fresh_ = true;
}

void Replicas::begin_accumulation() {
  TORCH_CHECK(!accumulating_, "accumulate: the model accumulates already");
  accumulating_ = true;
  parameters_fresh_ = false;
}

namespace {

/// Makes the objects of one replica.
class Builder {
 public:
  Builder(const ModuleWalk& walk, const std::vector<size_t>& unique,
          const std::vector<py::object>& tensors)
      : walk_(walk), unique_(unique), tensors_(tensors) {}

  /// A TorchScript module's replica stands in `scripts`, in their order.
  py::object build(const std::vector<py::object>& scripts) {
    size_t script = 0;
    for (const ModuleWalk::Node& node : walk_.nodes()) {
      if (node.script.has_value()) {
        made_.push_back(scripts[script++]);
        attributes_.emplace_back();
      } else {
        make(node);
      }
    }
    size_t slot = 0;
    for (size_t node = 0; node < made_.size(); ++node) {
      if (!walk_.nodes()[node].script.has_value()) {
        fill(node, slot);
      }
    }
    return made_.front();
  }

 private:
  struct Own {
    bool replica;  ///< the class overrides `_replicate_for_data_parallel`
    bool setattr;  ///< and `__setattr__`
  };

  const Own& own(PyTypeObject* type) {
    const auto found = types_.find(type);
    if (found != types_.end()) {
      return found->second;
    }
    const py::handle handle(reinterpret_cast<PyObject*>(type));
    const py::object replica = handle.attr(names().replicate);
    const py::object setattr = handle.attr("__setattr__");
    return types_
        .emplace(type, Own{!replica.is(names().own_replica),
                           !setattr.is(names().own_setattr)})
        .first->second;
  }

  void make(const ModuleWalk::Node& node) {
    PyTypeObject* type = Py_TYPE(node.module.ptr());
    py::object replica;
    if (own(type).replica) {
      replica = node.module.attr(names().replicate)();
      attributes_.push_back(attributes_of(replica));
    } else {
      replica = py::reinterpret_steal<py::object>(
          type->tp_new(type, py::tuple().ptr(), nullptr));
      if (!replica) {
        throw py::error_already_set();
      }
      attributes_.push_back(copy_of(node.attributes));
      if (PyObject_GenericSetDict(replica.ptr(), attributes_.back().ptr(),
                                  nullptr) != 0) {
        throw py::error_already_set();
      }
      set_item(attributes_.back(), names().is_replica, py::bool_(true));
    }
    made_.push_back(std::move(replica));
  }

  void fill(size_t node, size_t& slot) {
    const py::dict& original = walk_.nodes()[node].attributes;
    const py::dict& attributes = attributes_[node];
    for (const py::str& name : names().hook_tables) {
      if (PyObject* table = PyDict_GetItem(attributes.ptr(), name.ptr())) {
        set_item(attributes, name,
                 PyDict_GET_SIZE(table) == 0
                     ? names().ordered_dict()
                     : names().ordered_dict(py::handle(table)));
      }
    }
    const py::dict children = copy_of(entry(original, "_modules"));
    each(children, [&](PyObject* key, PyObject* child) {
      if (child != Py_None) {
        set_item(children, key, made_[walk_.find(child).value()]);
      }
    });
    set_item(attributes, names().modules, children);
    const py::dict parameters = tensors_of(original, "_parameters", slot);
    if (own(Py_TYPE(made_[node].ptr())).setattr) {
      set_one_by_one(node, parameters);
    }
    set_item(attributes, names().parameters, parameters);
    set_item(attributes, names().former_parameters, parameters);
    set_item(attributes, names().buffers,
             tensors_of(original, "_buffers", slot));
    rebind(node);
  }

  template <class Act>
  static void each(const py::dict& dict, Act&& act) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict.ptr(), &position, &key, &value) != 0) {
      act(key, value);
    }
  }

  py::dict tensors_of(const py::dict& original, const char* kind,
                      size_t& slot) {
    py::dict tensors = copy_of(entry(original, kind));
    each(tensors, [&](PyObject* key, PyObject* value) {
      if (THPVariable_Check(value)) {
        set_item(tensors, key, tensors_[unique_.at(slot++)]);
      }
    });
    return tensors;
  }

  /// Recurrent layers keep lists of their weights up to date in `__setattr__`.
  void set_one_by_one(size_t node, const py::dict& parameters) {
    const py::dict& attributes = attributes_[node];
    set_item(attributes, names().parameters, py::dict());
    each(parameters, [&](PyObject* key, PyObject* value) {
      if (value != Py_None) {
        py::setattr(made_[node], py::handle(key), py::handle(value));
        if (PyDict_Contains(attributes.ptr(), key) == 1) {
          PyDict_DelItem(attributes.ptr(), key);
        }
      }
    });
  }

  void rebind(size_t node) {
    const py::dict& attributes = attributes_[node];
    each(attributes, [&](PyObject* key, PyObject* value) {
      if (PyMethod_Check(value)) {
        if (const auto of = walk_.find(PyMethod_GET_SELF(value))) {
          set_item(attributes, key,
                   py::reinterpret_steal<py::object>(PyMethod_New(
                       PyMethod_GET_FUNCTION(value), made_[*of].ptr())));
        }
      } else if (Py_TYPE(value)->tp_dictoffset != 0 &&
                 !PyFunction_Check(value)) {
        if (const auto of = walk_.find(value)) {
          set_item(attributes, key, made_[*of]);
        }
      }
    });
    if (PyObject* forward =
            PyDict_GetItem(attributes.ptr(), names().forward.ptr())) {
      set_item(attributes, names().forward,
               py::module_::import("dataparallel._rebind")
                   .attr("rebind")(py::handle(forward), replicas()));
    }
  }

  /// Modules, and what stands for them here.
  py::dict replicas() const {
    py::dict result;
    for (size_t i = 0; i < made_.size(); ++i) {
      result[walk_.nodes()[i].module] = made_[i];
    }
    return result;
  }

  const ModuleWalk& walk_;
  const std::vector<size_t>& unique_;
  const std::vector<py::object>& tensors_;
  std::vector<py::object> made_;
  std::vector<py::dict> attributes_;
  std::unordered_map<PyTypeObject*, Own> types_;
};

}  // namespace

py::object Replicas::build(const ModuleWalk& walk, size_t replica) {
  std::vector<py::object> scripts;
  for (const auto& script : scripts_) {
    scripts.push_back(script.copies[replica]);
  }
  return Builder(walk, unique_, copies_[replica]).build(scripts);
}

py::list Replicas::replicate(const py::object& module,
                             const std::vector<at::Device>& devices,
                             const std::vector<int64_t>& used, bool itself,
                             bool detach) {
  const ModuleWalk walk(function_, module);
  follow(walk, devices, detach);
  py::list replicas;
  for (const int64_t replica : used) {
    if (replica == 0 && (itself || walk.nodes().front().script.has_value())) {
      replicas.append(module);
    } else {
      replicas.append(build(walk, static_cast<size_t>(replica)));
    }
  }
  return replicas;
}

void check_module_device(const py::object& module, at::Device device) {
  const ModuleWalk walk("DataParallel", module);
  const auto check = [&](const at::Tensor& tensor) {
    TORCH_CHECK(
        tensor.device() == device,
        "module must have its parameters and buffers on device ", device,
        " (device_ids[0]) but found one of them on device: ", tensor.device());
  };
  for (const ModuleWalk::Slot& slot : walk.slots()) {
    check(slot.tensor);
  }
}

}  // namespace dataparallel::python
