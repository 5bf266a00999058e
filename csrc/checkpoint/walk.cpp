#include "checkpoint/walk.h"

#include <sstream>

#include "checkpoint/known.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

template <class Take>
void visit_children(const c10::IValue& value, Take&& take) {
  using Step = Child::Step;
  if (value.isList()) {
    size_t index = 0;
    for (const c10::IValue& element : value.toListRef()) {
      take(Step::kIndex, c10::IValue(), index++, element);
    }
  } else if (value.isTuple()) {
    size_t index = 0;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      take(Step::kIndex, c10::IValue(), index++, element);
    }
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) {
      take(Step::kKey, item.key(), 0, item.value());
    }
    for (const auto& item : attributes(value.toGenericDict())) {
      take(Step::kAttribute, item.key(), 0, item.value());
    }
  } else if (Opaque* opaque = as_opaque(value)) {
    for (size_t i = 0; i < opaque->args.size(); ++i) {
      take(Step::kArgument, c10::IValue(), i, opaque->args[i]);
    }
    for (size_t i = 0; i < opaque->kwargs.size(); ++i) {
      const auto& [key, element] = opaque->kwargs[i];
      take(Step::kKeyword, key, i, element);
    }
    for (size_t i = 0; i < opaque->items.size(); ++i) {
      const auto& [key, element] = opaque->items[i];
      take(Step::kItemKey, key, i, key);
      take(Step::kItem, key, i, element);
    }
    for (size_t i = 0; i < opaque->elements.size(); ++i) {
      take(Step::kIndex, c10::IValue(), i, opaque->elements[i]);
    }
    take(Step::kState, c10::IValue(), 0, opaque->state);
  }
}

}  // namespace

void set_attributes(c10::impl::GenericDict mapping,
                    const c10::impl::GenericDict& carried) {
  mapping.unsafeSetValueType(
      make_mapping(class_name(mapping), carried).valueType());
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

bool is_container(const c10::IValue& value) {
  return value.isList() || value.isTuple() || value.isGenericDict() ||
         value.isCapsule();
}

std::vector<Child> children(const c10::IValue& value) {
  std::vector<Child> result;
  visit_children(value, [&](auto step, const c10::IValue& key, size_t index,
                            const c10::IValue& element) {
    result.push_back({step, key, index, element});
  });
  return result;
}

std::vector<Child> container_children(const c10::IValue& value) {
  std::vector<Child> result;
  visit_children(value, [&](auto step, const c10::IValue& key, size_t index,
                            const c10::IValue& element) {
    if (is_container(element)) {
      result.push_back({step, key, index, element});
    }
  });
  return result;
}

void replace_child(const c10::IValue& container, const Child& child,
                   const c10::IValue& value) {
  using Step = Child::Step;
  if (container.isList()) {
    container.toList().set(child.index, value);
  } else if (container.isTuple()) {
    container.toTuple()->unsafeSetElement(child.index, value);
  } else if (container.isGenericDict()) {
    auto mapping = container.toGenericDict();
    if (child.step == Step::kKey) {
      mapping.insert_or_assign(child.key, value);
    } else {
      auto carried = attributes(mapping);
      carried.insert_or_assign(child.key, value);
      set_attributes(mapping, carried);
    }
  } else if (Opaque* opaque = as_opaque(container)) {
    switch (child.step) {
      case Step::kArgument:
        opaque->args[child.index] = value;
        break;
      case Step::kIndex:
        opaque->elements[child.index] = value;
        break;
      case Step::kState:
        opaque->state = value;
        break;
      case Step::kKeyword:
        opaque->kwargs[child.index].second = value;
        break;
      case Step::kItemKey:
        opaque->items[child.index].first = value;
        break;
      default:
        opaque->items[child.index].second = value;
    }
  }
}

std::string key_text(const c10::IValue& key) {
  if (key.isString()) {
    return "'" + detail::shortened(key.toStringRef()) + "'";
  }
  if (key.isBool()) {
    return key.toBool() ? "True" : "False";
  }
  if (key.isNone()) {
    return "None";
  }
  if (key.isTuple()) {
    std::string text = "(";
    for (const c10::IValue& element : key.toTupleRef().elements()) {
      if (text.size() > detail::kLongestPath) {
        text += ", ...";
        break;
      }
      text += (text.size() > 1 ? ", " : "") +
              (element.isTuple() ? "..." : key_text(element));
    }
    return text + ")";
  }
  if (key.isInt() || key.isDouble() || key.isComplexDouble() ||
      key.isDevice()) {
    std::ostringstream text;
    text << key;
    return text.str();
  }
  return "<" + python_type_name(key) + ">";
}

std::string step_text(const Child& child) {
  switch (child.step) {
    case Child::Step::kKey:
    case Child::Step::kItem:
      return "[" + key_text(child.key) + "]";
    case Child::Step::kItemKey:
      return ".keys[" + std::to_string(child.index) + "]";
    case Child::Step::kIndex:
      return "[" + std::to_string(child.index) + "]";
    case Child::Step::kArgument:
      return ".args[" + std::to_string(child.index) + "]";
    case Child::Step::kKeyword:
      return ".kwargs[" + key_text(child.key) + "]";
    case Child::Step::kAttribute:
      return "." + child.key.toStringRef();
    default:
      return ".state";
  }
}

}  // namespace dataparallel::checkpoint
