#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/module_python.h>

#include "detail/module_tree.h"
#include "python/bindings.h"
#include "python/values.h"

namespace dataparallel::python {
namespace {

/// Whether the module's class takes part in loading by code of its own, which
/// is not run here. torch's norms do, for old files that the library knows.
std::string own_loading(const py::handle& module, const py::object& base) {
  const py::object type = py::type::of(module);
  for (const char* name :
       {"load_state_dict", "_load_from_state_dict", "set_extra_state"}) {
    const py::object own = type.attr(name);
    if (own.is(base.attr(name))) {
      continue;
    }
    const auto from = py::str(own.attr("__module__")).cast<std::string>();
    if (from != "torch.nn.modules.batchnorm" &&
        from != "torch.nn.modules.instancenorm") {
      return std::string("overrides ") + name;
    }
  }
  return py::len(module.attr("_load_state_dict_pre_hooks")) > 0
             ? "has a hook for loading"
             : "";
}

class Walk {
 public:
  Walk()
      : base_(py::module_::import("torch.nn").attr("Module")),
        is_lazy_(py::module_::import("torch.nn.parameter").attr("is_lazy")) {}

  detail::ModuleNode node(const py::handle& module, const std::string& path) {
    const std::string name = path.empty() ? "module" : "module." + path;
    if (const auto script = torch::jit::as_module(module)) {
      return detail::module_tree(*script);
    }
    if (!py::isinstance(module, base_)) {
      throw py::type_error("load_state_dict: " + name + " is " +
                           py::repr(module).cast<std::string>() +
                           ", expected a torch.nn.Module");
    }
    detail::ModuleNode result;
    result.type_name =
        py::str(py::type::of(module).attr("__name__")).cast<std::string>();
    const std::string own = own_loading(module, base_);
    if (!own.empty()) {
      throw py::type_error("load_state_dict: " + name + " (" +
                           result.type_name + ") " + own +
                           ", which this function does not run: use the "
                           "module's own load_state_dict");
    }
    const py::object version = module.attr("_version");
    result.version = version.is_none() ? 1 : version.cast<int64_t>();
    const auto buffers = module.attr("_buffers").cast<py::dict>();
    result.tolerates_missing_counter = buffers.contains("num_batches_tracked");
    add(result, module.attr("_parameters").cast<py::dict>(), {}, name);
    add(result, buffers, module.attr("_non_persistent_buffers_set"), name);
    for (const auto& item : module.attr("_modules").cast<py::dict>()) {
      if (!item.second.is_none()) {
        const auto key = item.first.cast<std::string>();
        result.children.emplace_back(
            key, node(item.second, path + (path.empty() ? "" : ".") + key));
      }
    }
    return result;
  }

 private:
  void add(detail::ModuleNode& node, const py::dict& tensors,
           const py::object& left_out, const std::string& path) {
    for (const auto& item : tensors) {
      if (item.second.is_none() ||
          (left_out && left_out.contains(item.first))) {
        continue;
      }
      const auto key = item.first.cast<std::string>();
      if (is_lazy_(item.second).cast<bool>()) {
        throw py::value_error("load_state_dict: " + path + "." + key +
                              " is not initialized: run a forward first");
      }
      node.tensors.push_back({key, THPVariable_Unpack(item.second.ptr())});
    }
  }

  py::object base_;
  py::object is_lazy_;
};

LoadStateDictResult load_state_dict_python(const py::object& module,
                                           const py::object& state_dict,
                                           bool strict, bool assign,
                                           const py::object& rename) {
  const detail::ModuleNode node = Walk().node(module, "");
  const StateDict given = StateDict::from_ivalue(
      to_ivalue(state_dict, "load_state_dict", "state_dict"));
  LoadStateDictOptions options;
  options.strict(strict).assign(assign);
  if (!rename.is_none()) {
    options.rename([&rename](const std::string& name) {
      py::gil_scoped_acquire lock;
      return rename(name).cast<std::string>();
    });
  }
  torch::PyWarningHandler warnings;
  py::gil_scoped_release unlocked;
  return detail::load_state_dict(node, given, options);
}

}  // namespace

void bind_load_state_dict(py::module_& module) {
  using Result = LoadStateDictResult;
  py::class_<Result>(module, "LoadStateDictResult",
                     "What became of the names, all as the module has them.")
      .def_readonly("missing_keys", &Result::missing_keys,
                    "In the module, not in the dictionary.")
      .def_readonly("unexpected_keys", &Result::unexpected_keys,
                    "In the dictionary, not in the module.")
      .def_readonly("mismatched_keys", &Result::mismatched_keys,
                    "In both, but of another shape: always an error.")
      .def_readonly("loaded_keys", &Result::loaded_keys, "Written.")
      .def_readonly("converted_keys", &Result::converted_keys,
                    "Written with a conversion to another dtype.")
      .def("__repr__", [](const Result& result) {
        const auto list = [](const std::vector<std::string>& keys) {
          return py::repr(py::cast(keys)).cast<std::string>();
        };
        return "LoadStateDictResult(missing_keys=" + list(result.missing_keys) +
               ", unexpected_keys=" + list(result.unexpected_keys) +
               ", mismatched_keys=" + list(result.mismatched_keys) + ", " +
               std::to_string(result.loaded_keys.size()) + " loaded)";
      });
  module.def("load_state_dict", &load_state_dict_python, py::arg("module"),
             py::arg("state_dict"), py::arg("strict"), py::arg("assign"),
             py::arg("rename"));
}

}  // namespace dataparallel::python
