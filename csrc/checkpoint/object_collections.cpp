#include "checkpoint/objects.h"

#include "checkpoint/arguments.h"
#include "checkpoint/containers.h"
#include "checkpoint/problem.h"
#include "checkpoint/walk.h"
#include "detail/wording.h"

// The part of Objects that makes and fills lists, sets and mappings.

namespace dataparallel::checkpoint {
namespace {

bool can_be_key(const c10::IValue& key) {
  return key.isString() || key.isInt() || key.isDouble() || key.isBool() ||
         key.isComplexDouble() || key.isDevice() ||
         (key.isTensor() && key.toTensor().defined());
}

}  // namespace

c10::IValue Objects::collection(const char* class_name, Arguments args) {
  c10::IValue value = from_opaque(c10::make_intrusive<Opaque>(class_name));
  heap_.note(value);
  if (!args.empty()) {
    const Arguments elements = to_elements(args[0], "a collection's elements");
    heap_.spend(elements.size() * sizeof(c10::IValue));
    append(value, elements);
  }
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
        fail("a dictionary's item has " +
             detail::count_text(parts.size(), "part") +
             ", expected key and value");
      }
      pairs.push_back(parts[0]);
      pairs.push_back(parts[1]);
    }
  }
  heap_.spend(pairs.size() * 3 * sizeof(c10::IValue));
  return set_items(mapping, pairs);
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
  const bool is_set = opaque->class_name == "builtins.set" ||
                      opaque->class_name == "builtins.frozenset";
  auto& all = opaque->elements;
  const auto element_at = [&](size_t i) -> const c10::IValue& {
    return all[i];
  };
  for (const c10::IValue& element : elements) {
    if (!is_set || positions_[opaque].find(all.size(), element_at, element) ==
                       all.size()) {
      all.push_back(element);
    }
  }
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
        auto mapping = target.toGenericDict();
        const c10::IValue key = key_in(mapping, pairs[i]);
        if (!mapping.contains(key)) {
          heap_.spend(spreads_[target.internalToPointer()].add(mapping, key));
        }
        mapping.insert_or_assign(key, pairs[i + 1]);
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
    // What an unknown class does with a key twice, nobody knows.
    auto& items = opaque->items;
    const auto key_at = [&](size_t at) -> const c10::IValue& {
      return items[at].first;
    };
    const size_t at =
        is_known_class(opaque->class_name)
            ? positions_[opaque].find(items.size(), key_at, pairs[i])
            : items.size();
    if (at < items.size()) {
      items[at].second = pairs[i + 1];
    } else {
      items.emplace_back(pairs[i], pairs[i + 1]);
    }
    heap_.note(target);
  }
  return target;
}

}  // namespace dataparallel::checkpoint
