#include <dataparallel/python_values.h>
#include <torch/csrc/DynamicTypes.h>

#include <unordered_map>

#include "python/python_object.h"
#include "python/values.h"

namespace dataparallel::python {
namespace {

PyObject* const kTuple = reinterpret_cast<PyObject*>(&PyTuple_Type);
PyObject* const kList = reinterpret_cast<PyObject*>(&PyList_Type);

class ToPython {
 public:
  py::object convert(const c10::IValue& value) {
    if (value.isNone()) {
      return py::none();
    }
    if (value.isTensor()) {
      return py::cast(value.toTensor());
    }
    if (value.isBool()) {
      return py::bool_(value.toBool());
    }
    if (value.isInt()) {
      return py::int_(value.toInt());
    }
    if (value.isDouble()) {
      return py::float_(value.toDouble());
    }
    if (value.isString()) {
      return once(value, [&] { return py::str(value.toStringRef()); });
    }
    if (value.isComplexDouble()) {
      const auto number = value.toComplexDouble();
      return py::reinterpret_steal<py::object>(
          PyComplex_FromDoubles(number.real(), number.imag()));
    }
    if (value.isDevice()) {
      return py::cast(value.toDevice());
    }
    if (value.isTuple()) {
      return once(value, [&] { return tuple(value.toTupleRef()); });
    }
    if (const auto found = done_.find(value.internalToPointer());
        found != done_.end()) {
      return found->second;
    }
    if (value.isList()) {
      py::list result;
      done_.emplace(value.internalToPointer(), result);
      for (const c10::IValue& element : value.toListRef()) {
        result.append(convert(element));
      }
      return result;
    }
    if (value.isGenericDict()) {
      return mapping(value);
    }
    return once(value, [&] { return object(*to_opaque(value)); });
  }

 private:
  template <class Make>
  py::object once(const c10::IValue& value, Make&& make) {
    const void* key = value.internalToPointer();
    const auto found = done_.find(key);
    if (found != done_.end()) {
      return found->second;
    }
    py::object made = make();
    done_.emplace(key, made);
    return made;
  }

  py::object tuple(const c10::ivalue::Tuple& tuple) {
    return elements(tuple.elements().vec(), kTuple);
  }

  py::object elements(const std::vector<c10::IValue>& values, py::handle type) {
    py::list list;
    for (const c10::IValue& value : values) {
      list.append(convert(value));
    }
    return type(list);
  }

  py::object mapping(const c10::IValue& value) {
    const auto items = value.toGenericDict();
    auto carried = attributes(items);
    const std::string name = class_name(items);
    py::object result;
    if (name == "collections.defaultdict") {
      const auto factory = carried.find("default_factory");
      result = empty_mapping(
          name, factory == carried.end() ? c10::IValue() : factory->value());
      (void)carried.erase("default_factory");
    } else {
      result = empty_mapping(name, {});
    }
    done_.emplace(value.internalToPointer(), result);
    for (const auto& item : items) {
      result[convert(item.key())] = convert(item.value());
    }
    for (const auto& item : carried) {
      py::setattr(result, convert(item.key()), convert(item.value()));
    }
    return result;
  }

  py::object empty_mapping(const std::string& name,
                           const c10::IValue& default_factory) {
    if (name == "dict" || name == "builtins.dict") {
      return py::dict();
    }
    if (name == "collections.defaultdict") {
      return named(name)(convert(default_factory));
    }
    return named(name)();
  }

  /// `collections.OrderedDict` → that class. Only for names the library knows.
  static py::object named(const std::string& name) {
    const size_t dot = name.rfind('.');
    return py::module_::import(name.substr(0, dot).c_str())
        .attr(name.substr(dot + 1).c_str());
  }

  py::object object(const Opaque& opaque) {
    if (const auto* python = dynamic_cast<const PythonObject*>(&opaque)) {
      return python->object();
    }
    const std::string& name = opaque.class_name;
    if (!opaque.known()) {
      return unknown(opaque);
    }
    if (name == "builtins.bytes" || name == "builtins.bytearray") {
      return named(name)(py::bytes(opaque.args[0].toStringRef()));
    }
    if (name == "builtins.type") {
      return named(opaque.args[0].toStringRef());
    }
    if (name == "builtins.int") {
      return named(name)(opaque.args[0].toStringRef(), 0);
    }
    if (name == "builtins.slice") {
      return named(name)(*elements(opaque.args, kTuple));
    }
    if (name == "builtins.set" || name == "builtins.frozenset" ||
        name == "torch.Size") {
      return elements(opaque.elements, named(name));
    }
    if (name == "argparse.Namespace") {
      return with_state(named(name)(), opaque.state);
    }
    if (name == "builtins.dict" || name.starts_with("collections.")) {
      py::object result = empty_mapping(
          name, opaque.args.empty() ? c10::IValue() : opaque.args[0]);
      for (const auto& [key, value] : opaque.items) {
        result[convert(key)] = convert(value);
      }
      return with_state(std::move(result), opaque.state);
    }
    if (name.ends_with("Storage")) {
      return storage(name, opaque.args[0].toTensor());
    }
    return py::module_::import("torch").attr(
        opaque.args[0].toStringRef().c_str());
  }

  py::object with_state(py::object object, const c10::IValue& state) {
    if (!state.isNone()) {
      object.attr("__dict__").attr("update")(convert(state));
    }
    return object;
  }

  static py::object storage(const std::string& name, const at::Tensor& whole) {
    const py::object bytes = py::cast(whole).attr("untyped_storage")();
    if (name.ends_with("UntypedStorage")) {
      return bytes;
    }
    return py::module_::import("torch.storage")
        .attr("TypedStorage")(
            py::arg("wrap_storage") = bytes,
            py::arg("dtype") =
                py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(
                    torch::getTHPDtype(whole.scalar_type()))),
            py::arg("_internal") = true);
  }

  py::object pairs(
      const std::vector<std::pair<c10::IValue, c10::IValue>>& items) {
    py::list list;
    for (const auto& [key, value] : items) {
      list.append(py::make_tuple(convert(key), convert(value)));
    }
    return list;
  }

  py::object unknown(const Opaque& opaque) {
    const py::object type =
        py::module_::import("dataparallel.opaque").attr("Opaque");
    return type(opaque.class_name, elements(opaque.args, kTuple),
                py::dict(pairs(opaque.kwargs)), convert(opaque.state),
                pairs(opaque.items), elements(opaque.elements, kList));
  }

  std::unordered_map<const void*, py::object> done_;
};

}  // namespace

py::object to_python(const c10::IValue& value) {
  return ToPython().convert(value);
}

}  // namespace dataparallel::python
