#include <ATen/core/class_type.h>
#include <dataparallel/python_values.h>

#include <charconv>
#include <unordered_set>

#include "checkpoint/dropped.h"
#include "checkpoint/heap.h"
#include "checkpoint/known.h"
#include "checkpoint/walk.h"
#include "detail/wording.h"

// Note [Mappings of other classes]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// c10 has one kind of dictionary. So that users can always write
// value.toGenericDict(), an OrderedDict, a defaultdict and a Counter are such
// dictionaries too, and their class is noted where it costs nothing to read
// and survives a copy: in the type of the values, which nothing else looks at
// in a generic dictionary. It is a ClassType of Python's class name, without
// members; its constants are the attributes that the mapping carries.
namespace dataparallel {
namespace {

const c10::ClassType* mapping_type(const c10::impl::GenericDict& mapping) {
  // The type is owned by the dictionary, which the caller holds.
  return mapping.valueType()->castRaw<c10::ClassType>();
}

c10::TypePtr new_mapping_type(const std::string& name) {
  return c10::ClassType::create(c10::QualifiedName(name), {});
}

/// A value built in C++ may be nested deeper than the stack is.
void check_depth(size_t depth) {
  TORCH_CHECK_VALUE(depth <= checkpoint::kMaxDepth,
                    "the value is nested more than ", checkpoint::kMaxDepth,
                    " deep, which no checkpoint is");
}

void collect_opaque(const c10::IValue& value, const std::string& path,
                    size_t depth, std::unordered_set<const void*>& seen,
                    std::vector<OpaqueEntry>& entries) {
  check_depth(depth);
  if (!checkpoint::is_container(value) ||
      !seen.insert(value.internalToPointer()).second) {
    return;
  }
  if (const Opaque* opaque = checkpoint::as_opaque(value)) {
    if (!opaque->known()) {
      const auto* reference = checkpoint::as_reference(value);
      entries.push_back(
          {path, reference == nullptr ? opaque->class_name : reference->name});
    }
  }
  for (const checkpoint::Child& child : checkpoint::container_children(value)) {
    collect_opaque(child.value,
                   detail::shortened(path + checkpoint::step_text(child)),
                   depth + 1, seen, entries);
  }
}

void collect_dropped(const c10::IValue& value, const std::string& path,
                     size_t depth, std::unordered_set<const void*>& seen,
                     std::vector<OpaqueEntry>& entries) {
  check_depth(depth);
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    const auto* dropped =
        tensor.defined() ? checkpoint::dropped_of(tensor) : nullptr;
    if (dropped == nullptr ||
        !seen.insert(tensor.unsafeGetTensorImpl()).second) {
      return;
    }
    if (!dropped->class_name.empty()) {
      entries.push_back({path, dropped->class_name});
    }
    for (const auto& [name, type] : dropped->attributes) {
      entries.push_back({path + "." + name, type});
    }
    return;
  }
  if (checkpoint::is_container(value) &&
      seen.insert(value.internalToPointer()).second) {
    for (const checkpoint::Child& child : checkpoint::children(value)) {
      if (child.value.isTensor() || checkpoint::is_container(child.value)) {
        collect_dropped(child.value,
                        detail::shortened(path + checkpoint::step_text(child)),
                        depth + 1, seen, entries);
      }
    }
  }
}

/// The child of `value` at `key`; none: there is none.
std::optional<c10::IValue> child_at(const c10::IValue& value,
                                    const std::string& key) {
  if (value.isGenericDict()) {
    const auto mapping = value.toGenericDict();
    const auto found = mapping.find(key);
    if (found != mapping.end()) {
      return found->value();
    }
  }
  int64_t index = -1;
  const char* end = key.data() + key.size();
  if (std::from_chars(key.data(), end, index).ptr != end) {
    return std::nullopt;
  }
  if (value.isGenericDict()) {
    const auto mapping = value.toGenericDict();
    const auto found = mapping.find(index);
    return found == mapping.end() ? std::nullopt
                                  : std::optional(found->value());
  }
  c10::ArrayRef<c10::IValue> elements;
  if (value.isList()) {
    elements = value.toListRef();
  } else if (value.isTuple()) {
    elements = value.toTupleRef().elements().asArrayRef();
  }
  if (index < 0 || index >= static_cast<int64_t>(elements.size())) {
    return std::nullopt;
  }
  return elements[static_cast<size_t>(index)];
}

}  // namespace

Opaque::~Opaque() = default;

bool Opaque::known() const {
  if (class_name == "builtins.type") {
    return args.size() == 1 && args[0].isString() &&
           checkpoint::is_known_reference(args[0].toStringRef());
  }
  return checkpoint::is_known_class(class_name) ||
         checkpoint::is_storage_class(class_name);
}

bool is_opaque(const c10::IValue& value) {
  return checkpoint::as_opaque(value) != nullptr;
}

c10::intrusive_ptr<Opaque> to_opaque(const c10::IValue& value) {
  Opaque* opaque = checkpoint::as_opaque(value);
  TORCH_CHECK_TYPE(opaque != nullptr, "to_opaque: value is of type ",
                   python_type_name(value), ", expected an opaque object");
  return c10::intrusive_ptr<Opaque>::reclaim_copy(opaque);
}

c10::IValue from_opaque(c10::intrusive_ptr<Opaque> opaque) {
  return c10::IValue::make_capsule(std::move(opaque));
}

std::vector<OpaqueEntry> opaque_entries(const c10::IValue& value) {
  std::unordered_set<const void*> seen;
  std::vector<OpaqueEntry> entries;
  collect_opaque(value, "", 0, seen, entries);
  return entries;
}

std::vector<OpaqueEntry> dropped_entries(const c10::IValue& value) {
  std::unordered_set<const void*> seen;
  std::vector<OpaqueEntry> entries;
  collect_dropped(value, "", 0, seen, entries);
  return entries;
}

std::string class_name(const c10::impl::GenericDict& mapping) {
  const c10::ClassType* type = mapping_type(mapping);
  return type == nullptr ? "dict" : type->name()->qualifiedName();
}

c10::impl::GenericDict attributes(const c10::impl::GenericDict& mapping) {
  c10::impl::GenericDict result(c10::AnyType::get(), c10::AnyType::get());
  if (const c10::ClassType* type = mapping_type(mapping)) {
    for (size_t i = 0; i < type->numConstants(); ++i) {
      result.insert(type->getConstantName(i), type->getConstant(i));
    }
  }
  return result;
}

c10::impl::GenericDict make_mapping(const std::string& name) {
  static const c10::TypePtr ordered =
      new_mapping_type("collections.OrderedDict");
  static const c10::TypePtr defaulting =
      new_mapping_type("collections.defaultdict");
  static const c10::TypePtr counter = new_mapping_type("collections.Counter");
  const bool known = name == "dict" || name == "collections.OrderedDict" ||
                     name == "collections.defaultdict" ||
                     name == "collections.Counter";
  TORCH_CHECK_VALUE(known, "make_mapping: class_name is ", name,
                    ", expected dict, collections.OrderedDict, "
                    "collections.defaultdict or collections.Counter");
  const c10::TypePtr type = name == "dict" ? c10::TypePtr(c10::AnyType::get())
                            : name == "collections.OrderedDict" ? ordered
                            : name == "collections.Counter"     ? counter
                                                                : defaulting;
  return c10::impl::GenericDict(c10::AnyType::get(), type);
}

c10::impl::GenericDict make_mapping(const std::string& name,
                                    const c10::impl::GenericDict& attributes) {
  auto mapping = make_mapping(name);
  if (attributes.empty()) {
    return mapping;
  }
  TORCH_CHECK_VALUE(name != "dict",
                    "make_mapping: attributes are given for a dict, which "
                    "can have none");
  const auto type = new_mapping_type(name);
  for (const auto& item : attributes) {
    TORCH_CHECK_VALUE(item.key().isString(),
                      "make_mapping: an attribute's "
                      "name is of type ",
                      python_type_name(item.key()), ", expected str");
    type->expectRef<c10::ClassType>().addConstant(item.key().toStringRef(),
                                                  item.value());
  }
  mapping.unsafeSetValueType(type);
  return mapping;
}

at::Tensor tensor_at(const c10::IValue& value,
                     const std::vector<std::string>& keys) {
  c10::IValue current = value;
  std::string path;
  for (const std::string& key : keys) {
    const std::string step = "['" + key + "']";
    const auto next = child_at(current, key);
    TORCH_CHECK_VALUE(next.has_value(), "tensor_at: there is no ", step,
                      " in the ", python_type_name(current),
                      path.empty() ? "" : " at " + path);
    path += step;
    current = *next;
  }
  TORCH_CHECK_TYPE(
      current.isTensor(), "tensor_at: ", path.empty() ? "the value" : path,
      " is ",
      is_opaque(current)
          ? "an opaque object of class " + python_type_name(current)
          : detail::with_article(python_type_name(current)),
      ", expected a tensor");
  return current.toTensor();
}

std::string python_type_name(const c10::IValue& value) {
  if (value.isGenericDict()) {
    return class_name(value.toGenericDict());
  }
  if (const Opaque* opaque = checkpoint::as_opaque(value)) {
    return opaque->class_name;
  }
  return value.isNone()            ? "NoneType"
         : value.isBool()          ? "bool"
         : value.isInt()           ? "int"
         : value.isDouble()        ? "float"
         : value.isComplexDouble() ? "complex"
         : value.isString()        ? "str"
         : value.isTensor()        ? "Tensor"
         : value.isList()          ? "list"
         : value.isTuple()         ? "tuple"
         : value.isDevice()        ? "torch.device"
                                   : value.tagKind();
}

}  // namespace dataparallel
