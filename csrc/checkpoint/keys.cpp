#include "checkpoint/keys.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>

#include "checkpoint/known.h"

namespace dataparallel::checkpoint {
namespace {

constexpr double kInt64End = 9223372036854775808.0;

/// The number, if it is a real one that a double can be.
std::optional<double> real_of(const c10::IValue& key) {
  if (key.isBool()) {
    return key.toBool() ? 1 : 0;
  }
  if (key.isInt()) {
    const auto value = static_cast<double>(key.toInt());
    const bool exact =
        value < kInt64End && static_cast<int64_t>(value) == key.toInt();
    return exact ? std::optional(value) : std::nullopt;
  }
  if (key.isDouble()) {
    return key.toDouble();
  }
  if (key.isComplexDouble() && key.toComplexDouble().imag() == 0) {
    return key.toComplexDouble().real();
  }
  return std::nullopt;
}

void append_bits(std::string& text, double value) {
  value += 0.0;  // -0.0 is 0.0
  char bytes[sizeof(value)];
  std::memcpy(bytes, &value, sizeof(value));
  text.append(bytes, sizeof(bytes));
}

/// Whole numbers by their digits, whatever their kind.
void append_real(std::string& text, double value) {
  if (!std::isfinite(value) || value != std::floor(value)) {
    text += 'f';
    append_bits(text, value);
    return;
  }
  char digits[400];
  std::snprintf(digits, sizeof(digits), "%.0f", value + 0.0);
  text.append("i").append(digits);
}

void append_text(std::string& text, char kind, const std::string& value) {
  text += kind;
  text += std::to_string(value.size()) + ":" + value;
}

/// Appends a text that is the same for keys that are the same in Python, and
/// another one for others. False: there is none.
bool append_key(std::string& text, const c10::IValue& key) {
  constexpr size_t kLongest = 500;
  if (text.size() > kLongest) {  // however deep a tuple is
    return false;
  }
  if (const auto real = real_of(key)) {
    append_real(text, *real);
    return !std::isnan(*real);
  }
  if (key.isNone()) {
    text += 'n';
  } else if (key.isInt()) {
    text += "i" + std::to_string(key.toInt());
  } else if (key.isComplexDouble()) {
    text += 'c';
    append_bits(text, key.toComplexDouble().real());
    append_bits(text, key.toComplexDouble().imag());
  } else if (key.isString()) {
    if (key.toStringRef().size() > kLongest) {
      return false;
    }
    append_text(text, 's', key.toStringRef());
  } else if (key.isDevice()) {
    append_text(text, 'd', key.toDevice().str());
  } else if (key.isTuple() || python_type_name(key) == "torch.Size") {
    const auto elements =
        key.isTuple() ? key.toTupleRef().elements().asArrayRef()
                      : c10::ArrayRef<c10::IValue>(as_opaque(key)->elements);
    text += '(';
    for (const c10::IValue& element : elements) {
      if (!append_key(text, element)) {
        return false;
      }
    }
    text += ')';
  } else if (const Opaque* opaque = as_opaque(key);
             opaque != nullptr && is_known_class(opaque->class_name) &&
             opaque->args.size() == 1 && opaque->args[0].isString() &&
             opaque->args[0].toStringRef().size() <= kLongest) {
    const std::string& content = opaque->args[0].toStringRef();
    if (opaque->class_name == "builtins.int") {
      text += "i" + content;
    } else {
      append_text(text, 'o', opaque->class_name);
      append_text(text, '=', content);
    }
  } else {
    return false;
  }
  return text.size() <= kLongest;
}

std::string text_of_key(const c10::IValue& key) {
  std::string text;
  return append_key(text, key) ? text : "";
}

}  // namespace

c10::IValue key_in(const c10::impl::GenericDict& mapping,
                   const c10::IValue& key) {
  const auto real = real_of(key);
  if (!real || mapping.contains(key)) {
    return key;
  }
  std::vector<c10::IValue> same = {*real, c10::complex<double>(*real, 0)};
  if (*real == std::floor(*real) && *real >= -kInt64End && *real < kInt64End) {
    same.emplace_back(static_cast<int64_t>(*real));
  }
  if (*real == 0 || *real == 1) {
    same.emplace_back(*real == 1);
  }
  for (const c10::IValue& other : same) {
    if (mapping.contains(other)) {
      return other;
    }
  }
  return key;
}

size_t KeyPositions::find(size_t count, KeyAt key_at, const c10::IValue& key) {
  const std::hash<std::string> hash;
  for (; known_ < count; ++known_) {
    const std::string text = text_of_key(key_at(known_));
    if (!text.empty()) {
      by_hash_.emplace(hash(text), known_);
    }
  }
  const std::string text = text_of_key(key);
  if (text.empty()) {
    return count;
  }
  const auto [begin, end] = by_hash_.equal_range(hash(text));
  for (auto place = begin; place != end; ++place) {
    if (text_of_key(key_at(place->second)) == text) {
      return place->second;
    }
  }
  return count;
}

}  // namespace dataparallel::checkpoint
