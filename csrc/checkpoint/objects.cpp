#include "checkpoint/objects.h"

#include <utility>

#include "checkpoint/arguments.h"
#include "checkpoint/dropped.h"
#include "checkpoint/numpy.h"
#include "checkpoint/problem.h"
#include "checkpoint/rebuild.h"
#include "checkpoint/text.h"
#include "checkpoint/walk.h"

namespace dataparallel::checkpoint {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

/// A tensor of torch before 0.4, whose state follows.
class EmptyTensor : public Opaque {
 public:
  using Opaque::Opaque;
};

bool can_be_key(const c10::IValue& key) {
  return key.isString() || key.isInt() || key.isDouble() || key.isBool() ||
         key.isComplexDouble() || key.isDevice() ||
         (key.isTensor() && key.toTensor().defined());
}

c10::impl::GenericDict new_dict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

c10::IValue name_of(const c10::IValue& callable) {
  const Reference* reference = as_reference(callable);
  return reference != nullptr ? reference->name : python_type_name(callable);
}

std::vector<std::pair<c10::IValue, c10::IValue>> items_of(
    const c10::impl::GenericDict& dict) {
  std::vector<std::pair<c10::IValue, c10::IValue>> items;
  items.reserve(dict.size());
  for (const auto& item : dict) {
    items.emplace_back(item.key(), item.value());
  }
  return items;
}

void add_attributes(const c10::IValue& mapping, const c10::IValue& state) {
  auto target = mapping.toGenericDict();
  auto all = attributes(target);
  for (const auto& item : state.toGenericDict()) {
    if (!item.key().isString()) {
      fail("an attribute's name is of type " + python_type_name(item.key()));
    }
    all.insert_or_assign(item.key(), item.value());
  }
  set_attributes(target, all);
}

}  // namespace

c10::IValue Objects::python2_string(std::string bytes) {
  if (is_utf8(bytes)) {
    return bytes;
  }
  c10::IValue text = latin1_to_utf8(bytes);
  const void* pointer = text.internalToPointer();
  latin1_.emplace(pointer, std::pair(text, std::move(bytes)));
  return text;
}

const std::string* Objects::bytes_of(const c10::IValue& value) {
  if (value.isString()) {
    const auto found = latin1_.find(value.internalToPointer());
    return found == latin1_.end() ? &value.toStringRef()
                                  : &found->second.second;
  }
  const Opaque* opaque = as_opaque(value);
  if (opaque != nullptr &&
      (opaque->class_name == "builtins.bytes" ||
       opaque->class_name == "builtins.bytearray") &&
      opaque->args.size() == 1 && opaque->args[0].isString()) {
    return &opaque->args[0].toStringRef();
  }
  return nullptr;
}

c10::IValue Objects::opaque_call(const std::string& name, Arguments args) {
  heap_.spend(name.size() + args.size() * sizeof(c10::IValue));
  auto opaque = c10::make_intrusive<Opaque>(name);
  opaque->args = args.vec();
  c10::IValue value = from_opaque(std::move(opaque));
  heap_.note(value);
  return value;
}

c10::IValue Objects::collection(const char* class_name, Arguments args) {
  auto opaque = c10::make_intrusive<Opaque>(class_name);
  if (!args.empty()) {
    const Arguments elements = to_elements(args[0], "a collection's elements");
    heap_.spend(elements.size() * sizeof(c10::IValue));
    opaque->elements = elements.vec();
  }
  c10::IValue value = from_opaque(std::move(opaque));
  heap_.note(value);
  return value;
}

c10::IValue Objects::call_mapping(const Reference& type, Arguments args) {
  const bool has_factory = type.callable == Callable::kDefaultDict;
  auto given = new_dict();
  if (has_factory) {
    given.insert("default_factory",
                 args.empty() ? c10::IValue() : args.front());
    args = args.empty() ? args : args.slice(1);
  }
  const bool plain = type.callable == Callable::kDict;
  c10::IValue mapping = given.empty() ? make_mapping(plain ? "dict" : type.name)
                                      : make_mapping(type.name, given);
  if (has_factory) {
    heap_.note(mapping);
  }
  if (args.empty()) {
    return mapping;
  }
  std::vector<c10::IValue> pairs;
  const Opaque* unhashable = as_opaque(args[0]);
  if (args[0].isGenericDict()) {
    for (const auto& item : args[0].toGenericDict()) {
      pairs.push_back(item.key());
      pairs.push_back(item.value());
    }
  } else if (unhashable != nullptr &&
             unhashable->class_name == "builtins.dict") {
    for (const auto& [key, value] : unhashable->items) {
      pairs.push_back(key);
      pairs.push_back(value);
    }
  } else {
    for (const c10::IValue& pair :
         to_elements(args[0], "a dictionary's items")) {
      const Arguments parts = to_elements(pair, "a dictionary's item");
      if (parts.size() != 2) {
        fail("a dictionary's item has " + std::to_string(parts.size()) +
             " parts, expected key and value");
      }
      pairs.push_back(parts[0]);
      pairs.push_back(parts[1]);
    }
  }
  heap_.spend(pairs.size() * 3 * sizeof(c10::IValue));
  return set_items(mapping, pairs);
}

c10::IValue Objects::bytes_object(const Reference& type, Arguments args) {
  const char* name = type.callable == Callable::kBytes ? "builtins.bytes"
                                                       : "builtins.bytearray";
  if (args.empty()) {
    return make_opaque(name, {std::string()});
  }
  const std::string* bytes = bytes_of(args[0]);
  if (bytes == nullptr) {
    return opaque_call(type.name, args);
  }
  heap_.spend(bytes->size());
  if (args.size() == 2 && args[0].isString()) {  // (text, "latin-1")
    const auto encoded = utf8_to_latin1(args[0].toStringRef());
    if (!encoded) {
      fail("a byte string has a character beyond Latin-1");
    }
    return make_opaque(name, {*encoded});
  }
  return make_opaque(name, {*bytes});
}

c10::IValue Objects::encode(Arguments args) {
  if (args.size() != 2 || !args[0].isString() || !args[1].isString()) {
    return opaque_call("_codecs.encode", args);
  }
  heap_.spend(args[0].toStringRef().size());
  const std::string& encoding = args[1].toStringRef();
  if (encoding == "latin1" || encoding == "latin-1") {
    const auto encoded = utf8_to_latin1(args[0].toStringRef());
    if (!encoded) {
      fail("a byte string has a character beyond Latin-1");
    }
    return make_opaque("builtins.bytes", {*encoded});
  }
  if (encoding == "utf-8" || encoding == "utf8" || encoding == "ascii") {
    return make_opaque("builtins.bytes", {args[0]});
  }
  return opaque_call("_codecs.encode", args);
}

/// How protocols 0 and 1 make objects: (class, its built-in base, what of it).
c10::IValue Objects::reconstruct(Arguments args) {
  const Reference* base = args.size() == 3 ? as_reference(args[1]) : nullptr;
  if (base == nullptr) {
    return opaque_call("copyreg._reconstructor", args);
  }
  if (base->name == "builtins.object") {
    return make(args[0], {}, c10::IValue());
  }
  if (base->callable == Callable::kDict && args[2].isGenericDict()) {
    const c10::IValue object = make(args[0], {}, c10::IValue());
    std::vector<c10::IValue> pairs;
    for (const auto& item : args[2].toGenericDict()) {
      pairs.push_back(item.key());
      pairs.push_back(item.value());
    }
    heap_.spend(pairs.size() * 3 * sizeof(c10::IValue));
    return set_items(object, pairs);
  }
  if (base->callable == Callable::kList && args[2].isList()) {
    const c10::IValue object = make(args[0], {}, c10::IValue());
    heap_.spend(args[2].toListRef().size() * sizeof(c10::IValue));
    append(object, args[2].toListRef());
    return object;
  }
  return make(args[0], {args[2]}, c10::IValue());
}

c10::IValue Objects::numpy_call(const Reference& function, Arguments args) {
  switch (function.callable) {
    case Callable::kNumpyReconstruct: {
      // An array whose state follows.
      const Reference* type = args.empty() ? nullptr : as_reference(args[0]);
      return opaque_call(type == nullptr ? "numpy.ndarray" : type->name, {});
    }
    case Callable::kNumpyScalar:
      if (args.size() == 2) {
        const auto type = numpy_type(args[0]);
        const std::string* bytes = bytes_of(args[1]);
        if (type && bytes != nullptr) {
          if (auto number = numpy_scalar(*type, *bytes)) {
            return *number;
          }
        }
      }
      break;
    case Callable::kNumpyFromBuffer:  // (buffer, dtype, shape, order[, axes])
      if (args.size() >= 4) {
        const auto type = numpy_type(args[1]);
        const std::string* bytes = bytes_of(args[0]);
        const std::string order =
            args[3].isString() ? args[3].toStringRef() : "";
        const bool has_axes =
            order == "K" && args.size() == 5 && !args[4].isNone();
        if (type && bytes != nullptr &&
            (order == "C" || order == "F" || has_axes)) {
          heap_.spend(bytes->size());
          const at::Tensor array =
              numpy_array(*type, to_ints(args[2], "a NumPy array's shape"),
                          order == "F", *bytes);
          return has_axes ? numpy_transpose(
                                array, to_ints(args[4], "a NumPy array's axes"))
                          : array;
        }
      }
      break;
    default:
      break;
  }
  return opaque_call(function.name, args);
}

c10::IValue Objects::call_known(Reference& function, Arguments args) {
  switch (function.callable) {
    case Callable::kUnknown:
    case Callable::kWrapperSubclass:
    case Callable::kStorage:
      return opaque_call(function.name, args);
    case Callable::kDict:
    case Callable::kOrderedDict:
    case Callable::kDefaultDict:
    case Callable::kCounter:
      return call_mapping(function, args);
    case Callable::kList: {
      c10::impl::GenericList list(c10::AnyType::get());
      if (!args.empty()) {
        const Arguments elements = to_elements(args[0], "a list's elements");
        heap_.spend(elements.size() * sizeof(c10::IValue));
        for (const c10::IValue& element : elements) {
          list.push_back(element);
        }
      }
      heap_.note(list);
      return list;
    }
    case Callable::kSet:
      return collection("builtins.set", args);
    case Callable::kFrozenSet:
      return collection("builtins.frozenset", args);
    case Callable::kSize:
      return collection("torch.Size", args);
    case Callable::kSlice:
      return opaque_call("builtins.slice", args);
    case Callable::kBytes:
    case Callable::kBytearray:
      return bytes_object(function, args);
    case Callable::kEncode:
      return encode(args);
    case Callable::kComplex:
      if (args.size() == 2 && args[0].isScalar() && args[1].isScalar()) {
        return c10::complex<double>(args[0].toScalar().toDouble(),
                                    args[1].toScalar().toDouble());
      }
      return opaque_call(function.name, args);
    case Callable::kNewObject:
      if (args.empty()) {
        fail("an object is made without a class");
      }
      return make(args[0], args.slice(1), c10::IValue());
    case Callable::kNewObjectEx:
      if (args.size() != 3) {
        fail("an object is made without a class");
      }
      return make(args[0], to_elements(args[1], "an object's arguments"),
                  args[2]);
    case Callable::kReconstructor:
      return reconstruct(args);
    case Callable::kDevice:
      try {
        if (args.size() == 1 && args[0].isString()) {
          return at::Device(args[0].toStringRef());
        }
        if (args.size() == 2 && args[0].isString() && args[1].isInt()) {
          return at::Device(args[0].toStringRef() + ":" +
                            std::to_string(args[1].toInt()));
        }
      } catch (const c10::Error&) {  // of a kind that this torch lacks
      }
      return opaque_call(function.name, args);
    case Callable::kGetLayout:
      if (args.size() == 1 && args[0].isString() &&
          args[0].toStringRef().rfind("torch.", 0) == 0) {
        return make_opaque("torch.layout", {args[0].toStringRef().substr(6)});
      }
      return opaque_call(function.name, args);
    case Callable::kJitList:
    case Callable::kJitTypeTag:
      if (args.empty()) {
        fail("a TorchScript value has no content");
      }
      return args[0];
    case Callable::kNumpyArray:
    case Callable::kNumpyDtype:
    case Callable::kNumpyFromBuffer:
    case Callable::kNumpyReconstruct:
    case Callable::kNumpyScalar:
      return numpy_call(function, args);
    case Callable::kTensorClass:
      if (args.empty()) {
        return from_opaque(c10::make_intrusive<EmptyTensor>(function.name));
      }
      return opaque_call(function.name, args);
    default:
      if (storages_ == nullptr) {
        fail("a tensor where there can be none");
      }
      return rebuild(function.callable, args, heap_, *storages_);
  }
}

c10::IValue Objects::call(const c10::IValue& callable, Arguments args) {
  if (Reference* function = as_reference(callable)) {
    return call_known(*function, args);
  }
  // An object that is called: a bound method, say. What for, nobody knows.
  std::vector<c10::IValue> all = {callable};
  all.insert(all.end(), args.begin(), args.end());
  return opaque_call(name_of(callable).toStringRef(), all);
}

c10::IValue Objects::make(const c10::IValue& type, Arguments args,
                          const c10::IValue& kwargs) {
  const bool has_kwargs =
      kwargs.isGenericDict() && !kwargs.toGenericDict().empty();
  Reference* reference = as_reference(type);
  if (reference != nullptr && !has_kwargs) {
    return call_known(*reference, args);
  }
  const c10::IValue value = opaque_call(name_of(type).toStringRef(), args);
  if (has_kwargs) {
    heap_.spend(kwargs.toGenericDict().size() * 2 * sizeof(c10::IValue));
    as_opaque(value)->kwargs = items_of(kwargs.toGenericDict());
  }
  return value;
}

c10::IValue Objects::build(const c10::IValue& object,
                           const c10::IValue& state) {
  if (object.isGenericDict()) {
    const auto mapping = object.toGenericDict();
    if (state.isGenericDict() && class_name(mapping) != "dict") {
      heap_.spend(state.toGenericDict().size() * 4 * sizeof(c10::IValue));
      add_attributes(object, state);
      heap_.note(object);
      return object;
    }
    if (state.isNone()) {
      return object;
    }
    fail("a " + class_name(mapping) + " has a state of type " +
         python_type_name(state));
  }
  if (object.isTensor() || dynamic_cast<EmptyTensor*>(as_opaque(object))) {
    if (storages_ == nullptr) {
      fail("a tensor where there can be none");
    }
    return set_tensor_state(object, state, heap_, *storages_);
  }
  Opaque* opaque = as_opaque(object);
  if (opaque == nullptr || as_reference(object) != nullptr) {
    fail("a value of type " + python_type_name(object) + " has a state");
  }
  const bool is_array = opaque->class_name == "numpy.ndarray" ||
                        opaque->class_name == "numpy.memmap" ||
                        opaque->class_name == "numpy.matrix";
  if (is_array && state.isTuple()) {
    Arguments parts = state.toTupleRef().elements();
    if (parts.size() == 5) {
      parts = parts.slice(1);  // the version
    }
    const auto type = parts.size() == 4 ? numpy_type(parts[1]) : std::nullopt;
    const std::string* bytes = parts.size() == 4 ? bytes_of(parts[3]) : nullptr;
    if (type && bytes != nullptr) {
      heap_.spend(bytes->size());
      const bool fortran = parts[2].isBool()  ? parts[2].toBool()
                           : parts[2].isInt() ? parts[2].toInt() != 0
                                              : false;
      const at::Tensor array = numpy_array(
          *type, to_ints(parts[0], "a NumPy array's shape"), fortran, *bytes);
      drop_class(array, opaque->class_name, heap_);
      return array;
    }
  }
  opaque->state = state;
  heap_.note(object);
  return object;
}

void Objects::append(const c10::IValue& object, Arguments elements) {
  if (object.isList()) {
    auto list = object.toList();
    for (const c10::IValue& element : elements) {
      list.push_back(element);
      heap_.note(object, element);
    }
    return;
  }
  Opaque* opaque = as_opaque(object);
  if (opaque == nullptr || as_reference(object) != nullptr) {
    fail("elements are added to a value of type " + python_type_name(object));
  }
  opaque->elements.insert(opaque->elements.end(), elements.begin(),
                          elements.end());
  heap_.note(object);
}

c10::IValue Objects::set_items(const c10::IValue& object, Arguments pairs) {
  if (pairs.size() % 2 != 0) {
    fail("the pickle has a key without a value");
  }
  c10::IValue target = object;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    if (target.isGenericDict()) {
      if (can_be_key(pairs[i])) {
        target.toGenericDict().insert_or_assign(pairs[i], pairs[i + 1]);
        heap_.note(target, pairs[i + 1]);
        continue;
      }
      // c10 cannot hash this key: the whole mapping becomes opaque.
      const auto mapping = target.toGenericDict();
      const std::string name = class_name(mapping);
      auto opaque =
          c10::make_intrusive<Opaque>(name == "dict" ? "builtins.dict" : name);
      opaque->items = items_of(mapping);
      const auto carried = attributes(mapping);
      if (const auto factory = carried.find("default_factory");
          factory != carried.end()) {
        if (!factory->value().isNone()) {
          opaque->args = {factory->value()};  // all that a defaultdict carries
        }
      } else if (!carried.empty()) {
        opaque->state = carried;
      }
      target = from_opaque(std::move(opaque));
      heap_.note(target);
      heap_.forward(object, target);
    }
    Opaque* opaque = as_opaque(target);
    if (opaque == nullptr || as_reference(target) != nullptr) {
      fail("items are set in a value of type " + python_type_name(target));
    }
    opaque->items.emplace_back(pairs[i], pairs[i + 1]);
    heap_.note(target);
  }
  return target;
}

c10::IValue Objects::persistent(const c10::IValue& id) {
  if (id.isTuple() && storages_ != nullptr) {
    const Arguments parts = id.toTupleRef().elements();
    if (parts.size() >= 2 && parts[0].isString()) {
      if (parts[0].toStringRef() == "module") {
        return parts[1];  // a class, with its source
      }
      if (parts[0].toStringRef() == "storage") {
        return storage(parts);
      }
    }
  }
  fail("an object outside the pickle is named by a value of type " +
       python_type_name(id) + ", expected a storage's description");
}

c10::IValue Objects::storage(Arguments id) {
  const Reference* type = id.size() < 5 ? nullptr : as_reference(id[1]);
  if (type == nullptr || type->callable != Callable::kStorage ||
      !id[3].isString() || !id[4].isInt() ||
      !(id[2].isString() || id[2].isInt())) {
    fail("a storage's description is damaged");
  }
  StorageClaim claim;
  claim.class_name = type->name;
  claim.dtype = type->dtype;
  claim.key =
      id[2].isString() ? id[2].toStringRef() : std::to_string(id[2].toInt());
  claim.tag = id[3].toStringRef();
  const int64_t item =
      static_cast<int64_t>(c10::elementSize(type->dtype.value_or(at::kByte)));
  const auto to_bytes = [&](const c10::IValue& elements) {
    int64_t nbytes = 0;
    if (!elements.isInt() || elements.toInt() < 0 ||
        __builtin_mul_overflow(elements.toInt(), item, &nbytes)) {
      fail("storage \"" + claim.key + "\" has an impossible size");
    }
    return static_cast<uint64_t>(nbytes);
  };
  claim.nbytes = to_bytes(id[4]);
  auto root = storages_->get(claim);
  if (id.size() < 6 || id[5].isNone()) {
    return from_opaque(root);
  }
  // A view of a storage, as files before torch 0.4 have them.
  const Arguments view = to_elements(id[5], "a storage's view");
  if (view.size() != 3) {
    fail("a storage's description is damaged");
  }
  auto part = c10::make_intrusive<StorageRef>(root->class_name, root->storage);
  part->dtype = root->dtype;
  part->tag = root->tag;
  part->base_bytes = to_bytes(view[1]);
  part->nbytes = to_bytes(view[2]);
  if (part->base_bytes > root->nbytes ||
      part->nbytes > root->nbytes - part->base_bytes) {
    fail("a view of storage \"" + claim.key + "\" lies outside it");
  }
  return from_opaque(std::move(part));
}

}  // namespace dataparallel::checkpoint
