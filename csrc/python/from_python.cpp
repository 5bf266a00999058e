#include <c10/util/Exception.h>
#include <dataparallel/python_values.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>
#include <unordered_set>

#include "python/python_object.h"
#include "python/values.h"

namespace dataparallel::python {
namespace {

c10::impl::GenericDict new_dict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

std::string full_name(py::handle type) {
  return py::str(type.attr("__module__")).cast<std::string>() + "." +
         py::str(type.attr("__qualname__")).cast<std::string>();
}

/// Kinds that `c10::Dict` can hash.
bool can_be_key(const c10::IValue& key) {
  return key.isString() || key.isInt() || key.isDouble() || key.isBool() ||
         key.isComplexDouble() || key.isDevice() || key.isTensor();
}

class FromPython {
 public:
  explicit FromPython(std::string function) : function_(std::move(function)) {}

  c10::IValue convert(py::handle value, const std::string& path) {
    PyObject* object = value.ptr();
    if (object == Py_None) {
      return {};
    }
    if (PyBool_Check(object)) {
      return object == Py_True;
    }
    if (PyFloat_CheckExact(object)) {
      return PyFloat_AS_DOUBLE(object);
    }
    if (const auto found = done_.find(object); found != done_.end()) {
      return found->second;
    }
    const bool entered = open_.insert(object).second;
    TORCH_CHECK_VALUE(entered, function_, ": ", path, " contains itself");
    kept_.push_back(py::reinterpret_borrow<py::object>(value));
    c10::IValue result = convert_object(value, path);
    open_.erase(object);
    done_.emplace(object, result);
    return result;
  }

 private:
  c10::IValue convert_object(py::handle value, const std::string& path) {
    PyObject* object = value.ptr();
    if (PyUnicode_CheckExact(object)) {
      return value.cast<std::string>();
    }
    if (THPVariable_Check(object)) {
      return THPVariable_Unpack(object);
    }
    if (PyLong_CheckExact(object)) {
      return integer(value);
    }
    if (PyComplex_CheckExact(object)) {
      return c10::complex<double>(PyComplex_RealAsDouble(object),
                                  PyComplex_ImagAsDouble(object));
    }
    if (PyList_CheckExact(object)) {
      auto list = c10::impl::GenericList(c10::AnyType::get());
      for (c10::IValue& element : elements(value, path)) {
        list.push_back(std::move(element));
      }
      return list;
    }
    if (PyTuple_CheckExact(object)) {
      return c10::ivalue::Tuple::create(elements(value, path));
    }
    if (PyDict_Check(object)) {
      return mapping(value, path);
    }
    if (THPDevice_Check(object)) {
      return reinterpret_cast<THPDevice*>(object)->device;
    }
    return other(value, path);
  }

  static c10::IValue integer(py::handle value) {
    int overflow = 0;
    const auto number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow == 0) {
      return static_cast<int64_t>(number);
    }
    // Python limits the decimal digits that it turns into an int.
    constexpr size_t kMostBits = 2048;
    const bool huge = value.attr("bit_length")().cast<size_t>() > kMostBits;
    return opaque("builtins.int", {huge ? py::module_::import("builtins")
                                              .attr("hex")(value)
                                              .cast<std::string>()
                                        : py::str(value).cast<std::string>()});
  }

  static c10::IValue opaque(std::string name,
                            std::vector<c10::IValue> args = {},
                            std::vector<c10::IValue> elements = {}) {
    auto result = c10::make_intrusive<Opaque>(std::move(name));
    result->args = std::move(args);
    result->elements = std::move(elements);
    return from_opaque(std::move(result));
  }

  std::vector<c10::IValue> elements(py::handle values,
                                    const std::string& path) {
    std::vector<c10::IValue> result;
    size_t index = 0;
    for (const py::handle& value : values) {
      result.push_back(
          convert(value, path + "[" + std::to_string(index++) + "]"));
    }
    return result;
  }

  c10::IValue mapping(py::handle value, const std::string& path) {
    const std::string name = full_name(py::type::handle_of(value));
    const bool plain = name == "builtins.dict";
    if (!plain && name != "collections.OrderedDict" &&
        name != "collections.defaultdict" && name != "collections.Counter") {
      return other(value, path);
    }
    std::vector<std::pair<c10::IValue, c10::IValue>> items;
    bool hashable = true;
    for (const auto& item : value.attr("items")()) {
      const auto pair = item.cast<py::tuple>();
      const std::string at =
          path + "[" + py::repr(pair[0]).cast<std::string>() + "]";
      items.emplace_back(convert(pair[0], at), convert(pair[1], at));
      hashable = hashable && can_be_key(items.back().first);
    }
    auto carried = new_dict();
    if (name == "collections.defaultdict") {
      carried.insert("default_factory",
                     convert(value.attr("default_factory"), path));
    } else if (!plain) {
      for (const auto& item : value.attr("__dict__").cast<py::dict>()) {
        const auto key = py::str(item.first).cast<std::string>();
        carried.insert(key, convert(item.second, path + "." + key));
      }
    }
    if (hashable) {
      auto dict = make_mapping(plain ? "dict" : name, carried);
      for (auto& [key, element] : items) {
        dict.insert(std::move(key), std::move(element));
      }
      return dict;
    }
    auto result = c10::make_intrusive<Opaque>(name);
    result->items = std::move(items);
    if (name == "collections.defaultdict") {
      const auto factory = carried.at("default_factory");
      if (!factory.isNone()) {
        result->args = {factory};
      }
    } else if (!carried.empty()) {
      result->state = carried;
    }
    return from_opaque(std::move(result));
  }

  /// `torch.float32` → "float32".
  static std::string last_part(py::handle constant) {
    const auto text = py::str(constant).cast<std::string>();
    return text.substr(text.rfind('.') + 1);
  }

  c10::IValue other(py::handle value, const std::string& path) {
    PyObject* object = value.ptr();
    const std::string name = full_name(py::type::handle_of(value));
    if (name == "builtins.bytes" || name == "builtins.bytearray") {
      return opaque(name, {py::module_::import("builtins")
                               .attr("bytes")(value)
                               .cast<std::string>()});
    }
    if (name == "builtins.set" || name == "builtins.frozenset" ||
        name == "torch.Size") {
      return opaque(name, {}, elements(value, path));
    }
    if (name == "builtins.slice") {
      return opaque(name, {convert(value.attr("start"), path + ".start"),
                           convert(value.attr("stop"), path + ".stop"),
                           convert(value.attr("step"), path + ".step")});
    }
    if (THPDtype_Check(object) || THPLayout_Check(object) ||
        THPMemoryFormat_Check(object) || name == "torch.qscheme") {
      return opaque(name, {last_part(value)});
    }
    if (name == "argparse.Namespace") {
      auto result = c10::make_intrusive<Opaque>(name);
      result->state = convert(value.attr("__dict__"), path);
      return from_opaque(std::move(result));
    }
    if (name == "torch.storage.UntypedStorage" ||
        name == "torch.storage.TypedStorage") {
      return storage(value, name);
    }
    if (PyType_Check(object)) {
      auto result = c10::make_intrusive<Opaque>("builtins.type");
      result->args = {full_name(value)};
      if (result->known()) {
        return from_opaque(std::move(result));
      }
    }
    if (name == "dataparallel.opaque.Opaque") {
      return described(value, path);
    }
    if (const auto number = numpy_scalar(value)) {
      return convert(number, path);
    }
    return from_opaque(c10::make_intrusive<PythonObject>(
        name, py::reinterpret_borrow<py::object>(value)));
  }

  /// What `to_python` made of an object of an unknown class.
  c10::IValue described(py::handle value, const std::string& path) {
    auto result = c10::make_intrusive<PythonObject>(
        value.attr("class_name").cast<std::string>(),
        py::reinterpret_borrow<py::object>(value));
    result->args = elements(value.attr("args"), path + ".args");
    result->state = convert(value.attr("state"), path + ".state");
    result->elements = elements(value.attr("elements"), path);
    for (const auto& item : value.attr("items")) {
      const auto pair = item.cast<py::tuple>();
      result->items.emplace_back(convert(pair[0], path),
                                 convert(pair[1], path));
    }
    return from_opaque(std::move(result));
  }

  /// A NumPy scalar as a number of Python's, as `load` gives it; else null.
  static py::object numpy_scalar(py::handle value) {
    const auto modules = py::module_::import("sys").attr("modules");
    if (!modules.contains("numpy") ||
        !py::isinstance(value, modules["numpy"].attr("generic"))) {
      return {};
    }
    py::object number = value.attr("item")();
    return py::type::handle_of(number).is(py::type::handle_of(value))
               ? py::object()
               : number;
  }

  static c10::IValue storage(py::handle value, const std::string& name) {
    const auto torch = py::module_::import("torch");
    const bool typed = name == "torch.storage.TypedStorage";
    const py::object dtype =
        typed ? value.attr("dtype") : py::object(torch.attr("uint8"));
    const py::object bytes = typed ? value.attr("_untyped_storage")
                                   : py::reinterpret_borrow<py::object>(value);
    const py::object tensor =
        torch
            .attr("empty")(0, py::arg("dtype") = dtype,
                           py::arg("device") = bytes.attr("device"))
            .attr("set_")(bytes);
    const std::string class_name =
        typed ? "torch." +
                    value.attr("_pickle_storage_type")().cast<std::string>()
              : name;
    return opaque(class_name, {THPVariable_Unpack(tensor.ptr())});
  }

  std::string function_;
  std::unordered_map<PyObject*, c10::IValue> done_;
  std::unordered_set<PyObject*> open_;
  std::vector<py::object> kept_;  // so that no address is used twice
};

}  // namespace

c10::IValue to_ivalue(py::handle value, const std::string& function,
                      const std::string& name) {
  return FromPython(function).convert(value, name);
}

}  // namespace dataparallel::python
