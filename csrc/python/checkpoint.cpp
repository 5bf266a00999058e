#include <dataparallel/checkpoint.h>
#include <dataparallel/save.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>

#include <memory>

#include "python/bindings.h"
#include "python/devices.h"
#include "python/values.h"

namespace dataparallel::python {
namespace {

/// Thrown where a callable of the user's has thrown; see `Callback::check`.
struct CallbackFailed : std::exception {};

/// `map_location` where it is a callable. It is called with a storage without
/// bytes, of which only the device counts: what it returns tells where the
/// bytes shall go.
class Callback {
 public:
  explicit Callback(py::object function) : function_(std::move(function)) {}

  /// Without the interpreter lock.
  std::optional<at::Device> operator()(const std::string& tag) {
    py::gil_scoped_acquire lock;
    try {
      const py::object stand_in =
          py::module_::import("torch").attr("UntypedStorage")(0);
      const py::object result = function_(stand_in, tag);
      if (result.is_none()) {
        return std::nullopt;
      }
      if (PyUnicode_Check(result.ptr()) || THPDevice_Check(result.ptr())) {
        return to_device("load", "map_location's result", result);
      }
      if (!py::hasattr(result, "device")) {
        throw py::type_error("load: map_location returned " +
                             py::repr(result).cast<std::string>() +
                             ", expected a storage, a device or None");
      }
      return to_device("load", "map_location's result", result.attr("device"));
    } catch (...) {
      error_ = std::current_exception();
      throw CallbackFailed();
    }
  }

  /// Rethrows what the function has thrown.
  void check() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  py::object function_;
  std::exception_ptr error_;
};

/// `map_location` as `torch.load` takes it; `callback` is set where it is a
/// callable.
LoadOptions::LocationFunction location_function(
    const py::object& value, std::shared_ptr<Callback>& callback) {
  if (value.is_none()) {
    return {};
  }
  if (PyDict_Check(value.ptr())) {
    std::map<std::string, at::Device> targets;
    for (const auto& item : value.cast<py::dict>()) {
      const auto key = py::str(item.first).cast<std::string>();
      targets.emplace(
          key, to_device("load", "map_location['" + key + "']", item.second));
    }
    return [targets](const std::string& tag) -> std::optional<at::Device> {
      const auto found = targets.find(tag);
      return found == targets.end() ? std::nullopt
                                    : std::optional(found->second);
    };
  }
  if (PyCallable_Check(value.ptr())) {
    callback = std::make_shared<Callback>(value);
    return [callback](const std::string& tag) { return (*callback)(tag); };
  }
  TORCH_CHECK_TYPE(
      PyUnicode_Check(value.ptr()) || THPDevice_Check(value.ptr()),
      "load: map_location is ", py::repr(value).cast<std::string>(),
      ", expected a torch.device, a str, a dict, a callable or None");
  const at::Device device = to_device("load", "map_location", value);
  return [device](const std::string&) { return device; };
}

/// What a file object still holds; none: `source` is a path.
std::optional<std::string> content_of(const py::object& source) {
  if (!py::hasattr(source, "read")) {
    return std::nullopt;
  }
  const py::object bytes = source.attr("read")();
  if (!PyBytes_Check(bytes.ptr())) {
    throw py::type_error(
        "load: the file is opened as text, expected one opened as bytes");
  }
  return bytes.cast<std::string>();
}

std::string path_of(const char* function, const char* argument,
                    const py::object& path) {
  if (!PyUnicode_Check(path.ptr()) && !py::hasattr(path, "__fspath__")) {
    throw py::type_error(
        std::string(function) + ": " + argument + " is " +
        py::repr(path).cast<std::string>().substr(0, 80) + ", expected a path" +
        (std::string(function) == "load" ? " or a file opened for reading bytes"
                                         : ""));
  }
  return py::module_::import("os").attr("fsencode")(path).cast<std::string>();
}

py::object load_python(const py::object& source, const py::object& map_location,
                       bool mmap) {
  std::shared_ptr<Callback> callback;
  LoadOptions options;
  options.mmap(mmap).map_location(location_function(map_location, callback));
  const auto content = content_of(source);
  const std::string path =
      content ? std::string() : path_of("load", "source", source);
  c10::IValue value;
  try {
    py::gil_scoped_release unlocked;
    value = content ? load(content->data(), content->size(), options)
                    : load(path, options);
  } catch (...) {
    if (callback) {
      callback->check();
    }
    throw;
  }
  return to_python(value);
}

void save_python(const py::object& object, const py::object& path) {
  const std::string name = path_of("save", "path", path);
  const c10::IValue value = to_ivalue(object, "save", "obj");
  py::gil_scoped_release unlocked;
  save(value, name);
}

StateDict state_dict_of(const py::object& object, const std::string& function) {
  return StateDict::from_ivalue(to_ivalue(object, function, "state_dict"));
}

void save_safetensors_python(const py::object& state_dict,
                             const py::object& path,
                             std::map<std::string, std::string> metadata,
                             bool copy_shared) {
  const std::string name = path_of("save_safetensors", "path", path);
  const StateDict tensors = state_dict_of(state_dict, "save_safetensors");
  SaveSafetensorsOptions options;
  options.metadata(std::move(metadata)).copy_shared(copy_shared);
  py::gil_scoped_release unlocked;
  save_safetensors(tensors, name, options);
}

CheckpointInfo inspect_python(const py::object& path) {
  const std::string name = path_of("inspect", "path", path);
  py::gil_scoped_release unlocked;
  return inspect(name);
}

py::object dtype_of(const TensorInfo& info) {
  return py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(torch::getTHPDtype(info.dtype)));
}

py::object size_of(const TensorInfo& info) {
  return py::module_::import("torch").attr("Size")(info.shape);
}

void bind_results(py::module_& module) {
  py::class_<OpaqueEntry>(module, "OpaqueEntry",
                          "Something in a checkpoint that Python's own "
                          "torch.load would need code for.")
      .def_readonly("path", &OpaqueEntry::path,
                    "Where it lies: \"['extra'][3]\".")
      .def_readonly("class_name", &OpaqueEntry::class_name,
                    "Its class, as the file names it.")
      .def("__repr__", [](const OpaqueEntry& entry) {
        return "OpaqueEntry(path=" +
               py::repr(py::str(entry.path)).cast<std::string>() +
               ", class_name='" + entry.class_name + "')";
      });
  py::class_<TensorInfo>(module, "TensorInfo",
                         "A tensor of a checkpoint, as `inspect` sees it.")
      .def_readonly("key", &TensorInfo::key,
                    "\"layer.weight\"; \"model.layer.weight\" where nested.")
      .def_property_readonly("dtype", &dtype_of)
      .def_property_readonly("shape", &size_of)
      .def_readonly("device", &TensorInfo::device, "The tag in the file.")
      .def_readonly("nbytes", &TensorInfo::nbytes, "Of its elements.")
      .def_readonly("requires_grad", &TensorInfo::requires_grad)
      .def("__repr__", [](const TensorInfo& info) {
        return "TensorInfo(key='" + info.key +
               "', dtype=" + py::repr(dtype_of(info)).cast<std::string>() +
               ", shape=" +
               py::repr(py::list(size_of(info))).cast<std::string>() +
               ", device='" + info.device + "')";
      });
  py::class_<CheckpointInfo>(module, "CheckpointInfo",
                             "What a checkpoint holds; see `inspect`.")
      .def_readonly("kind", &CheckpointInfo::kind,
                    "\"zip\", \"legacy\", \"TorchScript\", \"C++ archive\" or "
                    "\"safetensors\".")
      .def_readonly("tensors", &CheckpointInfo::tensors)
      .def_readonly("unknown_classes", &CheckpointInfo::unknown_classes,
                    "Sorted, each once.")
      .def_readonly("opaque", &CheckpointInfo::opaque,
                    "The objects of unknown classes.")
      .def_readonly("dropped", &CheckpointInfo::dropped,
                    "What tensors have in Python alone, which is not read.")
      .def_readonly("metadata", &CheckpointInfo::metadata, "Of safetensors.");
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_results(module);
  module.def("load", &load_python, py::arg("source"), py::arg("map_location"),
             py::arg("mmap"));
  module.def("save", &save_python, py::arg("obj"), py::arg("path"));
  module.def("save_safetensors", &save_safetensors_python,
             py::arg("state_dict"), py::arg("path"), py::arg("metadata"),
             py::arg("copy_shared"));
  module.def("inspect", &inspect_python, py::arg("path"));
  module.def(
      "opaque_entries",
      [](const py::object& object) {
        return opaque_entries(to_ivalue(object, "opaque_entries", "obj"));
      },
      py::arg("obj"));
  module.def(
      "find_state_dict",
      [](const py::object& object, const std::string& key) {
        return to_python(
            find_state_dict(to_ivalue(object, "find_state_dict", "obj"), key)
                .to_ivalue());
      },
      py::arg("obj"), py::arg("key"));
  module.def(
      "strip_prefix",
      [](const py::object& state_dict, const std::string& prefix) {
        return to_python(
            strip_prefix(state_dict_of(state_dict, "strip_prefix"), prefix)
                .to_ivalue());
      },
      py::arg("state_dict"), py::arg("prefix"));
  module.def(
      "add_prefix",
      [](const py::object& state_dict, const std::string& prefix) {
        return to_python(
            add_prefix(state_dict_of(state_dict, "add_prefix"), prefix)
                .to_ivalue());
      },
      py::arg("state_dict"), py::arg("prefix"));
}

}  // namespace dataparallel::python
