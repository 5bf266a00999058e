#include <dataparallel/nested.h>

#include <cmath>
#include <sstream>

namespace dataparallel {
namespace {

std::string describe_type(const c10::IValue& value) {
  if (value.isGenericDict()) {
    return "a dictionary";
  }
  if (value.isList()) {
    return "a list of length " + std::to_string(value.toListRef().size());
  }
  if (value.isTuple()) {
    return "a tuple of length " +
           std::to_string(value.toTupleRef().elements().size());
  }
  return value.isTensor() ? "a tensor" : value.tagKind();
}

std::string dict_key_path(const std::string& path, const c10::IValue& key) {
  if (key.isString()) {
    return detail::key_path(path, key.toStringRef());
  }
  std::ostringstream text;
  text << path << "[" << key << "]";
  return text.str();
}

/// A tuple of `tuple`'s own type (named tuples keep their names).
c10::IValue like_tuple(const c10::IValue& tuple,
                       std::vector<c10::IValue> elements) {
  const auto type = tuple.type()->cast<c10::TupleType>();
  if (type != nullptr && type->schema() != nullptr) {
    return c10::ivalue::Tuple::createNamed(std::move(elements), type);
  }
  return c10::ivalue::Tuple::create(std::move(elements));
}

bool is_plain(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool() ||
         value.isString() || value.isComplexDouble() || value.isDevice() ||
         value.isEnum();
}

c10::IValue merge_lists(const std::vector<c10::IValue>& values,
                        const std::string& path, LeafMerger& merger) {
  auto result = c10::impl::GenericList(values.front().toList().elementType());
  const size_t length = values.front().toListRef().size();
  for (size_t i = 0; i < length; ++i) {
    std::vector<c10::IValue> parts;
    for (const c10::IValue& value : values) {
      parts.push_back(value.toListRef()[i]);
    }
    c10::IValue merged =
        merge_ivalues(parts, detail::index_path(path, i), merger);
    if (!merged.type()->isSubtypeOf(*result.elementType())) {
      // Plain values that differ became a list: the result's elements are no
      // longer of one static type.
      auto any = c10::impl::GenericList(c10::AnyType::get());
      for (const c10::IValue& before : result) {
        any.push_back(before);
      }
      result = any;
    }
    result.push_back(std::move(merged));
  }
  return result;
}

c10::IValue merge_dicts(const std::vector<c10::IValue>& values,
                        const std::string& path, LeafMerger& merger) {
  const auto first = values.front().toGenericDict();
  std::vector<std::string> descriptions;
  bool same = true;
  for (const c10::IValue& value : values) {
    const auto dict = value.toGenericDict();
    std::string keys = "a dictionary with keys";
    for (const auto& item : dict) {
      keys += " " + dict_key_path("", item.key());
      same = same && first.contains(item.key());
    }
    same = same && dict.size() == first.size();
    descriptions.push_back(std::move(keys));
  }
  if (!same) {
    merger.differ(path, descriptions);
  }
  auto result = c10::impl::GenericDict(first.keyType(), first.valueType());
  for (const auto& item : first) {
    std::vector<c10::IValue> parts;
    for (const c10::IValue& value : values) {
      parts.push_back(value.toGenericDict().at(item.key()));
    }
    c10::IValue merged =
        merge_ivalues(parts, dict_key_path(path, item.key()), merger);
    if (!merged.type()->isSubtypeOf(*result.valueType())) {
      auto any = c10::impl::GenericDict(first.keyType(), c10::AnyType::get());
      for (const auto& before : result) {
        any.insert(before.key(), before.value());
      }
      result = any;
    }
    result.insert(item.key(), std::move(merged));
  }
  return result;
}

}  // namespace

void LeafMerger::differ(const std::string& path,
                        const std::vector<std::string>& descriptions) const {
  std::string text = "gather: " + path + " is ";
  for (size_t i = 0; i < descriptions.size(); ++i) {
    const int64_t replica = i < replicas.size() ? replicas[i] : int64_t(i);
    text += (i == 0 ? "" : i + 1 == descriptions.size() ? " and " : ", ");
    text += descriptions[i] + " in replica " + std::to_string(replica);
  }
  TORCH_CHECK_VALUE(false, text, ", expected the same in every replica");
}

void visit_ivalue(c10::IValue& value, const std::string& path,
                  LeafVisitor& visitor) {
  if (value.isTensor()) {
    at::Tensor tensor = value.toTensor();
    visitor.tensor(tensor, path);
    value = std::move(tensor);
  } else if (value.isTuple()) {
    std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
    for (size_t i = 0; i < elements.size(); ++i) {
      visit_ivalue(elements[i], detail::index_path(path, i), visitor);
    }
    value = like_tuple(value, std::move(elements));
  } else if (value.isList()) {
    const auto list = value.toList();
    auto result = c10::impl::GenericList(list.elementType());
    result.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      c10::IValue element = list.get(i);
      visit_ivalue(element, detail::index_path(path, i), visitor);
      result.push_back(std::move(element));
    }
    value = std::move(result);
  } else if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    auto result = c10::impl::GenericDict(dict.keyType(), dict.valueType());
    for (const auto& item : dict) {
      c10::IValue element = item.value();
      visit_ivalue(element, dict_key_path(path, item.key()), visitor);
      result.insert(item.key(), std::move(element));
    }
    value = std::move(result);
  }
}

c10::IValue merge_ivalues(const std::vector<c10::IValue>& values,
                          const std::string& path, LeafMerger& merger) {
  const c10::IValue& first = values.front();
  bool all_plain = true;
  bool same_type = true;
  std::vector<std::string> descriptions;
  for (const c10::IValue& value : values) {
    descriptions.push_back(describe_type(value));
    all_plain = all_plain && is_plain(value);
    same_type = same_type && descriptions.back() == descriptions.front();
  }
  if (all_plain) {
    bool equal = same_type;
    for (size_t i = 1; equal && i < values.size(); ++i) {
      equal = values[i] == first ||
              (first.isDouble() && std::isnan(first.toDouble()) &&
               std::isnan(values[i].toDouble()));
    }
    if (equal) {
      return first;
    }
    auto list =
        c10::impl::GenericList(same_type ? first.type() : c10::AnyType::get());
    for (const c10::IValue& value : values) {
      list.push_back(value);
    }
    return list;
  }
  if (!same_type) {
    merger.differ(path, descriptions);
  }
  if (first.isTensor()) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& value : values) {
      tensors.push_back(value.toTensor());
    }
    return merger.tensors(tensors, path);
  }
  if (first.isList()) {
    return merge_lists(values, path, merger);
  }
  if (first.isGenericDict()) {
    return merge_dicts(values, path, merger);
  }
  if (first.isTuple()) {
    std::vector<c10::IValue> elements;
    bool widened = false;
    const auto type = first.type()->expect<c10::TupleType>();
    for (size_t i = 0; i < first.toTupleRef().elements().size(); ++i) {
      std::vector<c10::IValue> parts;
      for (const c10::IValue& value : values) {
        parts.push_back(value.toTupleRef().elements()[i]);
      }
      elements.push_back(
          merge_ivalues(parts, detail::index_path(path, i), merger));
      widened =
          widened || !elements.back().type()->isSubtypeOf(*type->elements()[i]);
    }
    return widened ? c10::IValue(c10::ivalue::Tuple::create(elements))
                   : like_tuple(first, std::move(elements));
  }
  for (size_t i = 1; i < values.size(); ++i) {
    if (!values[i].is(first)) {
      descriptions.assign(values.size(), "an object of its own (" +
                                             first.type()->repr_str() + ")");
      merger.differ(path, descriptions);
    }
  }
  return first;  // None, or one object that all share
}

}  // namespace dataparallel
