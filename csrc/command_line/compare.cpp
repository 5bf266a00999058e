#include "command_line/compare.h"

#include <ATen/ATen.h>
#include <dataparallel/python_values.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "command_line/python_text.h"
#include "detail/wording.h"

namespace dataparallel::command_line {
namespace {

enum class Kind { kTensor, kMapping, kSequence, kSet, kObject, kPlain };

Kind kind_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return Kind::kTensor;
  }
  if (value.isGenericDict()) {
    return Kind::kMapping;
  }
  if (value.isList() || value.isTuple()) {
    return Kind::kSequence;
  }
  if (!is_opaque(value)) {
    return Kind::kPlain;
  }
  const std::string type = to_opaque(value)->class_name;
  if (type == "builtins.dict" || type == "collections.OrderedDict" ||
      type == "collections.defaultdict" || type == "collections.Counter") {
    return Kind::kMapping;
  }
  return type == "torch.Size" ? Kind::kSequence
         : type == "builtins.set" || type == "builtins.frozenset"
             ? Kind::kSet
             : Kind::kObject;
}

/// A mapping whose keys c10 cannot hash is an opaque object, but of one type.
std::string type_of(const c10::IValue& value) {
  const std::string type = python_type_name(value);
  return type == "builtins.dict" ? "dict" : type;
}

std::vector<std::pair<c10::IValue, c10::IValue>> items_of(
    const c10::impl::GenericDict& dict) {
  std::vector<std::pair<c10::IValue, c10::IValue>> items;
  for (const auto& item : dict) {
    items.emplace_back(item.key(), item.value());
  }
  return items;
}

std::vector<std::pair<c10::IValue, c10::IValue>> items_of(
    const c10::IValue& mapping) {
  return mapping.isGenericDict() ? items_of(mapping.toGenericDict())
                                 : to_opaque(mapping)->items;
}

/// What a mapping carries beside its items.
std::vector<std::pair<c10::IValue, c10::IValue>> extras_of(
    const c10::IValue& mapping) {
  if (mapping.isGenericDict()) {
    return items_of(attributes(mapping.toGenericDict()));
  }
  const auto opaque = to_opaque(mapping);
  std::vector<std::pair<c10::IValue, c10::IValue>> extras;
  if (opaque->state.isGenericDict()) {
    extras = items_of(opaque->state.toGenericDict());
  }
  if (!opaque->args.empty()) {
    extras.emplace_back("default_factory", opaque->args[0]);
  }
  return extras;
}

std::vector<c10::IValue> elements_of(const c10::IValue& sequence) {
  if (sequence.isList()) {
    return sequence.toListRef().vec();
  }
  if (sequence.isTuple()) {
    return sequence.toTupleRef().elements().asArrayRef().vec();
  }
  return to_opaque(sequence)->elements;
}

/// Sets have no order.
std::vector<c10::IValue> sorted_elements(const c10::IValue& set,
                                         KeyDigest& digest) {
  using Named = std::pair<std::pair<std::string, std::string>, c10::IValue>;
  std::vector<Named> named;
  for (const c10::IValue& element : to_opaque(set)->elements) {
    named.push_back({{python_text(KeyDigest::without_sign_of_zero(element)),
                      digest.of(element)},
                     element});
  }
  std::stable_sort(
      named.begin(), named.end(),
      [](const Named& a, const Named& b) { return a.first < b.first; });
  std::vector<c10::IValue> elements;
  for (Named& one : named) {
    elements.push_back(std::move(one.second));
  }
  return elements;
}

/// Keys that are compared as values are, those of one text in their order.
bool is_compared(const c10::IValue& key) {
  return key.isTensor() || kind_of(key) == Kind::kObject;
}

std::string child_key(const std::string& parent, const c10::IValue& key) {
  if (key.isString()) {
    return detail::shortened(parent + (parent.empty() ? "" : ".") +
                             key.toStringRef());
  }
  return detail::shortened(parent + "[" + python_text(key) + "]");
}

std::string child_key(const std::string& parent, size_t index) {
  return detail::shortened(parent + "[" + std::to_string(index) + "]");
}

/// The place of each key; those of one text are told apart by their order.
std::vector<std::string> names_of(
    const std::vector<std::pair<c10::IValue, c10::IValue>>& items,
    KeyDigest& digest) {
  std::vector<std::string> names;
  std::unordered_map<std::string, size_t> times;
  for (const auto& [key, value] : items) {
    const std::string text =
        is_compared(key) ? python_text(key) : digest.of(key);
    const size_t time = times[text]++;
    names.push_back(time == 0 ? text : text + " " + std::to_string(time + 1));
  }
  return names;
}

uint64_t count(const c10::IValue& value, std::set<const void*>& seen) {
  const Kind kind = kind_of(value);
  if (kind == Kind::kTensor || kind == Kind::kPlain) {
    return 1;
  }
  if (!seen.insert(value.internalToPointer()).second) {
    return 0;
  }
  uint64_t sum = kind == Kind::kObject ? 1 : 0;
  const auto add = [&](const c10::IValue& part) { sum += count(part, seen); };
  if (kind == Kind::kMapping) {
    for (const auto& [key, element] : items_of(value)) {
      add(element);
    }
  } else if (kind == Kind::kSequence || kind == Kind::kSet) {
    for (const c10::IValue& element : elements_of(value)) {
      add(element);
    }
  } else {
    add(to_opaque(value)->state);
  }
  return sum;
}

bool same_number(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

}  // namespace

bool Comparison::same_text(const c10::IValue& a, const c10::IValue& b) {
  const std::pair pair(a.internalToPointer(), b.internalToPointer());
  if (same_texts_.count(pair) > 0) {
    return true;
  }
  const bool same = a.toStringRef() == b.toStringRef();
  if (same) {
    same_texts_.insert(pair);
  }
  return same;
}

bool Comparison::same_plain(const c10::IValue& a, const c10::IValue& b) {
  if (a.isString() && b.isString()) {
    return same_text(a, b);
  }
  if (a.isDouble() && b.isDouble()) {
    return same_number(a.toDouble(), b.toDouble());
  }
  if (a.isComplexDouble() && b.isComplexDouble()) {
    const auto x = a.toComplexDouble(), y = b.toComplexDouble();
    return same_number(x.real(), y.real()) && same_number(x.imag(), y.imag());
  }
  return a.tagKind() == b.tagKind() && python_text(a) == python_text(b);
}

uint64_t count_values(const c10::IValue& value) {
  std::set<const void*> seen;
  return count(value, seen);
}

void Comparison::compare(const std::string& key, const c10::IValue& a,
                         const c10::IValue& b) {
  const Kind kind = kind_of(a);
  if (kind != kind_of(b)) {
    note(key, &a, &b, "type");
    return;
  }
  if (kind != Kind::kTensor && kind != Kind::kPlain &&
      !seen_.emplace(a.internalToPointer(), b.internalToPointer()).second) {
    return;
  }
  switch (kind) {
    case Kind::kTensor:
      compare_tensor_values(key, a, b);
      return;
    case Kind::kMapping:
      compare_mappings(key, a, b);
      return;
    case Kind::kSequence:
      compare_sequences(key, a, b);
      return;
    case Kind::kSet:
      if (type_of(a) != type_of(b)) {
        note(key, &a, &b, "type");
      }
      compare_elements(key, sorted_elements(a, digest_),
                       sorted_elements(b, digest_));
      return;
    case Kind::kObject:
      compare_objects(key, a, b);
      return;
    default:
      count();
      if (type_of(a) != type_of(b)) {
        note(key, &a, &b, "type");
      } else if (!same_plain(a, b)) {
        note(key, &a, &b, "value");
      }
  }
}

void Comparison::compare_tensor_values(const std::string& key,
                                       const c10::IValue& a,
                                       const c10::IValue& b) {
  TensorDifference found;
  try {
    found = compare_tensors(a.toTensor(), b.toTensor(), !values_only_);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "diff: '", key, "' (", short_text(a),
                ") cannot be compared: ", error.what_without_backtrace());
  }
  if (!found.empty()) {
    note(key, &a, &b, "", std::move(found));
  }
  count();
}

void Comparison::compare_mappings(const std::string& key, const c10::IValue& a,
                                  const c10::IValue& b) {
  if (!values_only_ && type_of(a) != type_of(b)) {
    note(key, &a, &b, "type");
  }
  const bool in_order = compare_items(key, items_of(a), items_of(b));
  if (values_only_) {
    return;
  }
  const std::string ordered = "collections.OrderedDict";
  if (!in_order && type_of(a) == ordered && type_of(b) == ordered) {
    note(key, &a, &b, "order");
  }
  const uint64_t values = compared_;
  compare_items(key, extras_of(a), extras_of(b));
  compared_ = values;
}

bool Comparison::compare_items(const std::string& key, const Items& a,
                               const Items& b) {
  const auto a_names = names_of(a, digest_), b_names = names_of(b, digest_);
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < b.size(); ++i) {
    places.emplace(b_names[i], i);
  }
  std::vector<bool> found(b.size());
  bool in_order = true;
  size_t last = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const std::string child = child_key(key, a[i].first);
    const auto place = places.find(a_names[i]);
    if (place == places.end()) {
      note(child, &a[i].second, nullptr, "key");
      continue;
    }
    const size_t j = place->second;
    in_order = in_order && j >= last;
    last = j;
    found[j] = true;
    if (is_compared(a[i].first)) {
      compare(child + ".key", a[i].first, b[j].first);
    }
    compare(child, a[i].second, b[j].second);
  }
  for (size_t j = 0; j < b.size(); ++j) {
    if (!found[j]) {
      note(child_key(key, b[j].first), nullptr, &b[j].second, "key");
    }
  }
  return in_order;
}

void Comparison::compare_sequences(const std::string& key, const c10::IValue& a,
                                   const c10::IValue& b) {
  if (!values_only_ && type_of(a) != type_of(b)) {
    note(key, &a, &b, "type");
  }
  compare_elements(key, elements_of(a), elements_of(b));
}

void Comparison::compare_elements(const std::string& key,
                                  c10::ArrayRef<c10::IValue> a,
                                  c10::ArrayRef<c10::IValue> b) {
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i >= a.size() || i >= b.size()) {
      note(child_key(key, i), i < a.size() ? &a[i] : nullptr,
           i < b.size() ? &b[i] : nullptr, "key");
    } else {
      compare(child_key(key, i), a[i], b[i]);
    }
  }
}

void Comparison::compare_objects(const std::string& key, const c10::IValue& a,
                                 const c10::IValue& b) {
  const auto x = to_opaque(a), y = to_opaque(b);
  count();
  if (x->class_name != y->class_name) {
    note(key, &a, &b, "type");
    return;
  }
  const size_t before = differences_.size();
  const uint64_t values = compared_;
  compare_elements(key + ".args", x->args, y->args);
  compare_items(key + ".kwargs", x->kwargs, y->kwargs);
  compare_elements(key, x->elements, y->elements);
  compare_items(key, x->items, y->items);
  if (!x->state.isNone() || !y->state.isNone()) {
    compare(key + ".state", x->state, y->state);
  }
  if (x->args.size() == 1 && x->args[0].isString()) {  // as torch.float32
    compared_ = values;
    if (differences_.size() > before) {
      differences_.resize(before);
      note(key, &a, &b, "value");
    }
  }
}

void Comparison::count() {
  progress_(++compared_);
}

void Comparison::note(const std::string& key, const c10::IValue* a,
                      const c10::IValue* b, const std::string& property,
                      TensorDifference tensor) {
  const auto text = [](const c10::IValue* value) {
    return value == nullptr ? "" : short_text(*value);
  };
  Difference difference{key, text(a), text(b), {}, std::move(tensor)};
  difference.properties = difference.tensor.properties;
  if (!property.empty()) {
    difference.properties.push_back(property);
  }
  differences_.push_back(std::move(difference));
}

}  // namespace dataparallel::command_line
