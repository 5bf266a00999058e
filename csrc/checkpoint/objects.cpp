#include "checkpoint/objects.h"

#include <utility>

#include "checkpoint/arguments.h"
#include "checkpoint/containers.h"
#include "checkpoint/problem.h"
#include "checkpoint/rebuild.h"
#include "checkpoint/walk.h"
#include "detail/device_name.h"

namespace dataparallel::checkpoint {
namespace {

/// A tensor of torch before 0.4, whose state follows.
class EmptyTensor : public Opaque {
 public:
  using Opaque::Opaque;
};

c10::IValue name_of(const c10::IValue& callable) {
  const Reference* reference = as_reference(callable);
  return reference != nullptr ? reference->name : python_type_name(callable);
}

/// None: one that this torch lacks.
std::optional<at::Device> device_of(c10::ArrayRef<c10::IValue> args) {
  if (args.size() == 1 && args[0].isString()) {
    return detail::parse_device(args[0].toStringRef());
  }
  if (args.size() == 2 && args[0].isString() && args[1].isInt()) {
    return detail::parse_device(args[0].toStringRef() + ":" +
                                std::to_string(args[1].toInt()));
  }
  return std::nullopt;
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

c10::IValue Objects::opaque_call(const std::string& name, Arguments args) {
  heap_.spend(name.size() + args.size() * sizeof(c10::IValue));
  auto opaque = c10::make_intrusive<Opaque>(name);
  opaque->args = args.vec();
  c10::IValue value = from_opaque(std::move(opaque));
  heap_.note(value);
  return value;
}

c10::IValue Objects::call_known(Reference& function, Arguments args) {
  switch (function.callable) {
    case Callable::kUnknown:
      if (is_constant_class(function.name)) {
        fail(function.name + " is called, which has constants only");
      }
      return opaque_call(function.name, args);
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
      if (const auto device = device_of(args)) {
        return *device;
      }
      return opaque_call(function.name, args);
    case Callable::kGetLayout:
      if (args.size() == 1 && args[0].isString() &&
          args[0].toStringRef().rfind("torch.", 0) == 0 &&
          is_constant("torch.layout", args[0].toStringRef().substr(6))) {
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
  if (const auto array = numpy_state(*opaque, state)) {
    return *array;
  }
  if (opaque->class_name == "argparse.Namespace" &&
      opaque->state.isGenericDict() && state.isGenericDict()) {
    // Python adds to what is there; the state itself may be used elsewhere.
    std::vector<c10::IValue> pairs;
    for (const c10::IValue& part : {opaque->state, state}) {
      for (const auto& item : part.toGenericDict()) {
        pairs.push_back(item.key());
        pairs.push_back(item.value());
      }
    }
    heap_.spend(pairs.size() * 3 * sizeof(c10::IValue));
    const c10::IValue merged = new_dict();
    heap_.note(merged);
    opaque->state = set_items(merged, pairs);
    heap_.note(object);
    return object;
  }
  opaque->state = state;
  heap_.note(object);
  return object;
}

}  // namespace dataparallel::checkpoint
