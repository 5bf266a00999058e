#include "checkpoint/arguments.h"

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
void wrong(const char* what, const c10::IValue& value, const char* expected) {
  fail(std::string(what) + " is of type " + python_type_name(value) +
       ", expected " + expected);
}

int64_t to_int(const c10::IValue& value, const char* what) {
  if (!value.isInt()) {
    wrong(what, value, "int");
  }
  return value.toInt();
}

bool to_bool(const c10::IValue& value, const char* what) {
  if (value.isInt()) {
    return value.toInt() != 0;
  }
  if (!value.isBool()) {
    wrong(what, value, "bool");
  }
  return value.toBool();
}

const at::Tensor& to_tensor(const c10::IValue& value, const char* what) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    wrong(what, value, "Tensor");
  }
  return value.toTensor();
}

/// A tensor that another one is made of, whose elements are gone through: a
/// dense one that has no more of them than its memory.
const at::Tensor& to_part(const c10::IValue& value, const char* what) {
  const at::Tensor& tensor = to_tensor(value, what);
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    fail(std::string(what) + " is no dense tensor");
  }
  if (static_cast<uint64_t>(tensor.numel()) * tensor.element_size() >
      tensor.storage().nbytes()) {
    fail(std::string(what) + " has more elements than its memory");
  }
  return tensor;
}

StorageRef& to_storage(const c10::IValue& value) {
  auto* storage = dynamic_cast<StorageRef*>(as_opaque(value));
  if (storage == nullptr) {
    wrong("a tensor's storage", value, "a storage");
  }
  return *storage;
}

/// The text in an opaque constant: "float32" of `torch.float32`.
std::string to_constant(const c10::IValue& value, const char* class_name) {
  const Opaque* opaque = as_opaque(value);
  if (opaque == nullptr || opaque->class_name != class_name ||
      opaque->args.size() != 1 || !opaque->args[0].isString()) {
    wrong("an argument of a tensor", value, class_name);
  }
  return opaque->args[0].toStringRef();
}

at::ScalarType to_dtype(const c10::IValue& value) {
  const std::string name = to_constant(value, "torch.dtype");
  const auto dtype = dtype_from_name(name);
  if (!dtype) {
    fail("a tensor's dtype is " + name + ", which this torch does not have");
  }
  return *dtype;
}

void need(c10::ArrayRef<c10::IValue> args, size_t least, const char* what) {
  if (args.size() < least) {
    fail(std::string(what) + " is described by " +
         detail::count_text(args.size(), "argument") + ", expected " +
         std::to_string(least));
  }
}

c10::ArrayRef<c10::IValue> to_elements(const c10::IValue& value,
                                       const char* what) {
  if (value.isTuple()) {
    return value.toTupleRef().elements().asArrayRef();
  }
  if (value.isList()) {
    return value.toListRef();
  }
  wrong(what, value, "tuple");
}

std::vector<int64_t> to_ints(const c10::IValue& value, const char* what) {
  const Opaque* opaque = as_opaque(value);
  const c10::ArrayRef<c10::IValue> elements =
      opaque != nullptr && opaque->class_name == "torch.Size"
          ? c10::ArrayRef<c10::IValue>(opaque->elements)
          : to_elements(value, what);
  std::vector<int64_t> ints;
  ints.reserve(elements.size());
  for (const c10::IValue& element : elements) {
    ints.push_back(to_int(element, what));
  }
  return ints;
}

}  // namespace dataparallel::checkpoint
