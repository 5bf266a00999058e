#include "python/nested.h"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

namespace dataparallel::python {
namespace {

namespace rnn = torch::nn::utils::rnn;

/// Classes that decide how a value is walked; looked up once.
struct Classes {
  py::object packed_sequence =
      py::module_::import("torch.nn.utils.rnn").attr("PackedSequence");
  py::object size = py::module_::import("torch").attr("Size");
  py::object ordered_dict =
      py::module_::import("collections").attr("OrderedDict");
  py::object mapping = py::module_::import("collections.abc").attr("Mapping");
  py::object copy = py::module_::import("copy").attr("copy");
};

const Classes& classes() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Classes> all;
  return all.call_once_and_store_result([] { return Classes(); }).get_stored();
}

enum class Kind {
  kTensor,
  kPacked,
  kTuple,
  kNamedTuple,
  kOtherTuple,
  kList,
  kOtherList,
  kDict,
  kMapping,
  kDataclass,
  kPlain,
};

Kind kind_of(const py::handle& value) {
  PyObject* object = value.ptr();
  if (THPVariable_Check(object)) {
    return Kind::kTensor;
  }
  if (PyTuple_Check(object)) {
    if (PyTuple_CheckExact(object)) {
      return Kind::kTuple;
    }
    if (py::isinstance(value, classes().packed_sequence)) {
      return Kind::kPacked;
    }
    if (py::isinstance(value, classes().size)) {
      return Kind::kPlain;
    }
    return py::hasattr(value, "_fields") ? Kind::kNamedTuple
                                         : Kind::kOtherTuple;
  }
  if (PyList_Check(object)) {
    return PyList_CheckExact(object) ? Kind::kList : Kind::kOtherList;
  }
  if (PyDict_Check(object)) {
    return PyDict_CheckExact(object) ||
                   py::type::handle_of(value).is(classes().ordered_dict)
               ? Kind::kDict
               : Kind::kMapping;
  }
  if (PyUnicode_Check(object) || PyLong_Check(object) ||
      PyFloat_Check(object) || object == Py_None || PyType_Check(object)) {
    return Kind::kPlain;
  }
  if (py::hasattr(py::type::handle_of(value), "__dataclass_fields__")) {
    return Kind::kDataclass;
  }
  return py::isinstance(value, classes().mapping) ? Kind::kMapping
                                                  : Kind::kPlain;
}

std::string key_path(const std::string& path, const py::handle& key) {
  return PyUnicode_Check(key.ptr())
             ? detail::key_path(path, key.cast<std::string>())
             : path + "[" + py::repr(key).cast<std::string>() + "]";
}

rnn::PackedSequence to_packed(const py::handle& value) {
  const auto part = [&](const char* name) {
    const py::object tensor = value.attr(name);
    return tensor.is_none() ? at::Tensor() : THPVariable_Unpack(tensor.ptr());
  };
  return rnn::PackedSequence(part("data"), part("batch_sizes"),
                             part("sorted_indices"), part("unsorted_indices"));
}

py::object from_packed(const rnn::PackedSequence& sequence) {
  const auto part = [](const at::Tensor& tensor) {
    return tensor.defined() ? py::cast(tensor) : py::object(py::none());
  };
  return classes().packed_sequence(
      part(sequence.data()), part(sequence.batch_sizes()),
      part(sequence.sorted_indices()), part(sequence.unsorted_indices()));
}

/// Names of a dataclass's fields that the object has.
std::vector<std::string> fields_of(const py::handle& value) {
  std::vector<std::string> names;
  for (const auto& field : value.attr("__dataclass_fields__")) {
    if (py::hasattr(value, field)) {
      names.push_back(field.cast<std::string>());
    }
  }
  return names;
}

/// Also where the class is frozen.
void set_field(const py::object& object, const std::string& name,
               const py::object& value) {
  if (PyObject_GenericSetAttr(object.ptr(), py::str(name).ptr(), value.ptr()) !=
      0) {
    throw py::error_already_set();
  }
}

/// A sequence of `like`'s type.
py::object sequence_like(const py::object& like, Kind kind, py::list parts) {
  switch (kind) {
    case Kind::kTuple:
      return py::tuple(parts);
    case Kind::kNamedTuple:
      return py::type::of(like).attr("_make")(parts);
    case Kind::kOtherTuple:
      return py::type::of(like)(parts);
    case Kind::kOtherList: {
      py::object result = classes().copy(like);
      result[py::slice(std::nullopt, std::nullopt, std::nullopt)] = parts;
      return result;
    }
    default:
      return parts;
  }
}

/// A mapping of `like`'s type with its keys and other values.
py::object mapping_like(const py::object& like, Kind kind,
                        const py::dict& parts) {
  if (kind == Kind::kDict) {
    return PyDict_CheckExact(like.ptr()) ? py::object(parts)
                                         : classes().ordered_dict(parts);
  }
  if (!py::hasattr(like, "__setitem__")) {
    return py::type::of(like)(parts);
  }
  py::object result = classes().copy(like);
  for (const auto& [key, value] : parts) {
    result[key] = value;
  }
  return result;
}

/// Guards against values that contain themselves.
struct Deeper {
  Deeper() {
    if (Py_EnterRecursiveCall(" while walking a nested value") != 0) {
      throw py::error_already_set();
    }
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;
};

py::list elements_of(const py::handle& sequence) {
  return py::list(py::reinterpret_borrow<py::object>(sequence));
}

/// How an error calls the value.
std::string describe(const py::handle& value, Kind kind) {
  const auto type =
      py::type::handle_of(value).attr("__name__").cast<std::string>();
  switch (kind) {
    case Kind::kTensor:
      return "a tensor";
    case Kind::kTuple:
    case Kind::kOtherTuple:
    case Kind::kNamedTuple:
    case Kind::kList:
    case Kind::kOtherList:
      return "a " + type + " of length " + std::to_string(py::len(value));
    case Kind::kDict:
    case Kind::kMapping: {
      std::string text = "a " + type + " with keys";
      for (const auto& key : value) {
        text += " " + key_path("", key);
      }
      return text;
    }
    default:
      return value.is_none() ? "None" : "a value of type " + type;
  }
}

bool equal(const py::handle& a, const py::handle& b) {
  if (a.is(b)) {
    return true;
  }
  if (PyFloat_Check(a.ptr()) && PyFloat_Check(b.ptr()) &&
      std::isnan(PyFloat_AsDouble(a.ptr())) &&
      std::isnan(PyFloat_AsDouble(b.ptr()))) {
    return true;
  }
  const int result = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  PyErr_Clear();  // what cannot be compared is not equal
  return result == 1;
}

/// Values that can stand in a list, one a replica.
bool is_simple(const py::handle& value) {
  PyObject* object = value.ptr();
  return PyLong_Check(object) || PyFloat_Check(object) ||
         PyUnicode_Check(object) || PyComplex_Check(object) ||
         PyBytes_Check(object) || THPDevice_Check(object) ||
         THPDtype_Check(object);
}

py::object merge_plain(const std::vector<py::object>& values,
                       const std::string& path) {
  bool same = true;
  bool simple = true;
  for (const py::object& value : values) {
    same = same && equal(values.front(), value);
    simple = simple && is_simple(value);
  }
  if (same) {
    return values.front();
  }
  TORCH_CHECK_TYPE(
      simple, "gather: ", path, " is of type ",
      py::type::handle_of(values.front()).attr("__name__").cast<std::string>(),
      ", which is not walked, and differs between replicas; expected tensors, "
      "numbers, texts or None, in tuples, lists, mappings or dataclasses");
  return py::cast(values);
}

}  // namespace

py::object visit(const py::object& value, const std::string& path,
                 LeafVisitor& visitor) {
  const Kind kind = kind_of(value);
  if (kind == Kind::kPlain) {
    return value;
  }
  if (kind == Kind::kTensor) {
    at::Tensor tensor = THPVariable_Unpack(value.ptr());
    {
      py::gil_scoped_release unlocked;
      visitor.tensor(tensor, path);
    }
    return py::cast(tensor);
  }
  const Deeper deeper;
  switch (kind) {
    case Kind::kPacked: {
      rnn::PackedSequence sequence = to_packed(value);
      {
        py::gil_scoped_release unlocked;
        visitor.packed(sequence, path);
      }
      return from_packed(sequence);
    }
    case Kind::kDict:
    case Kind::kMapping: {
      py::dict parts;
      for (const auto& key : py::list(value)) {
        parts[key] = visit(value[key], key_path(path, key), visitor);
      }
      return mapping_like(value, kind, parts);
    }
    case Kind::kDataclass: {
      py::object result = classes().copy(value);
      for (const std::string& name : fields_of(value)) {
        set_field(result, name,
                  visit(value.attr(name.c_str()), path + "." + name, visitor));
      }
      return result;
    }
    default: {
      py::list parts;
      for (const auto& element : elements_of(value)) {
        parts.append(visit(py::reinterpret_borrow<py::object>(element),
                           detail::index_path(path, py::len(parts)), visitor));
      }
      return sequence_like(value, kind, std::move(parts));
    }
  }
}

void look(const py::object& value, const std::string& path,
          LeafVisitor& visitor) {
  const Kind kind = kind_of(value);
  if (kind == Kind::kPlain) {
    return;
  }
  if (kind == Kind::kTensor || kind == Kind::kPacked) {
    visit(value, path, visitor);
    return;
  }
  const Deeper deeper;
  if (kind == Kind::kDict || kind == Kind::kMapping) {
    for (const auto& key : py::list(value)) {
      look(value[key], key_path(path, key), visitor);
    }
  } else if (kind == Kind::kDataclass) {
    for (const std::string& name : fields_of(value)) {
      look(value.attr(name.c_str()), path + "." + name, visitor);
    }
  } else {
    size_t index = 0;
    for (const auto& element : elements_of(value)) {
      look(py::reinterpret_borrow<py::object>(element),
           detail::index_path(path, index++), visitor);
    }
  }
}

py::object merge(const std::vector<py::object>& values, const std::string& path,
                 LeafMerger& merger) {
  const py::object& first = values.front();
  const Kind kind = kind_of(first);
  const bool plain = kind == Kind::kPlain && !first.is_none();
  std::vector<std::string> descriptions;
  bool same = true;
  for (const py::object& value : values) {
    const Kind its = kind_of(value);
    descriptions.push_back(plain && its == Kind::kPlain && !value.is_none()
                               ? "a plain value"
                               : describe(value, its));
    same = same && descriptions.back() == descriptions.front();
  }
  const bool keyed = kind == Kind::kDict || kind == Kind::kMapping;
  if (keyed && !same) {
    // The order of the keys does not matter.
    same = true;
    for (const py::object& value : values) {
      same = same && py::type::of(value).is(py::type::of(first)) &&
             py::len(value) == py::len(first);
      for (const auto& key : py::list(first)) {
        same = same && value.contains(key);
      }
    }
  }
  if (!same) {
    merger.differ(path, descriptions);
  }
  if (first.is_none()) {
    return first;
  }
  const auto each = [&](auto&& part) {
    std::vector<py::object> parts;
    for (const py::object& value : values) {
      parts.push_back(part(value));
    }
    return parts;
  };
  const Deeper deeper;
  switch (kind) {
    case Kind::kPlain:
      return merge_plain(values, path);
    case Kind::kTensor: {
      std::vector<at::Tensor> tensors;
      for (const py::object& value : values) {
        tensors.push_back(THPVariable_Unpack(value.ptr()));
      }
      at::Tensor joined;
      {
        py::gil_scoped_release unlocked;
        joined = merger.tensors(tensors, path);
      }
      return py::cast(joined);
    }
    case Kind::kPacked: {
      std::vector<rnn::PackedSequence> sequences;
      for (const py::object& value : values) {
        sequences.push_back(to_packed(value));
      }
      std::optional<rnn::PackedSequence> joined;
      {
        py::gil_scoped_release unlocked;
        joined.emplace(merger.packed(sequences, path));
      }
      return from_packed(*joined);
    }
    case Kind::kDict:
    case Kind::kMapping: {
      py::dict parts;
      for (const auto& key : py::list(first)) {
        parts[key] =
            merge(each([&](const py::object& v) { return py::object(v[key]); }),
                  key_path(path, key), merger);
      }
      return mapping_like(first, kind, parts);
    }
    case Kind::kDataclass: {
      py::object result = classes().copy(first);
      for (const std::string& name : fields_of(first)) {
        set_field(result, name,
                  merge(each([&](const py::object& v) {
                          return py::object(v.attr(name.c_str()));
                        }),
                        path + "." + name, merger));
      }
      return result;
    }
    default: {
      const auto lists =
          each([](const py::object& v) { return elements_of(v); });
      py::list parts;
      for (size_t i = 0; i < py::len(first); ++i) {
        std::vector<py::object> at;
        for (const py::object& list : lists) {
          at.push_back(list[py::int_(i)]);
        }
        parts.append(merge(at, detail::index_path(path, i), merger));
      }
      return sequence_like(first, kind, std::move(parts));
    }
  }
}

void TensorsInside::tensor(at::Tensor& tensor, const std::string&) {
  tensors.push_back(tensor);
}

void TensorsInside::packed(rnn::PackedSequence& sequence, const std::string&) {
  tensors.push_back(sequence.data());
}

}  // namespace dataparallel::python
