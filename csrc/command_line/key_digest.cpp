#include "command_line/key_digest.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>
#include <dataparallel/python_values.h>

#include <algorithm>
#include <vector>

#include "command_line/compare_tensors.h"
#include "command_line/python_text.h"

namespace dataparallel::command_line {
namespace {

bool holds_others(const c10::IValue& value) {
  return value.isTuple() || value.isList() || value.isGenericDict() ||
         is_opaque(value);
}

}  // namespace

c10::IValue KeyDigest::without_sign_of_zero(const c10::IValue& value) {
  if (value.isDouble()) {
    return value.toDouble() + 0.0;
  }
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return c10::complex<double>(number.real() + 0.0, number.imag() + 0.0);
  }
  return value;
}

std::string KeyDigest::of(const c10::IValue& value) {
  if (value.isTensor()) {
    return c10::sha1(python_text(value) + ":" + contents_of(value.toTensor()))
        .str();
  }
  if (!value.isString() && !holds_others(value)) {
    return python_text(without_sign_of_zero(value));
  }
  const void* address = value.internalToPointer();
  const auto [at, fresh] = known_.emplace(address, std::pair(value, ""));
  if (!fresh) {
    return at->second.second;
  }
  std::string digest = c10::sha1(value.isString() ? "str:" + value.toStringRef()
                                                  : contents(value))
                           .str();
  known_[address].second = digest;
  return digest;
}

std::string KeyDigest::contents(const c10::IValue& value) {
  std::string text = python_type_name(value);
  const auto add = [&](const std::string& digest) {
    text += "," + std::to_string(digest.size()) + ":" + digest;
  };
  const auto add_all = [&](c10::ArrayRef<c10::IValue> values, bool sorted) {
    text += ";";
    std::vector<std::string> digests;
    for (const c10::IValue& one : values) {
      digests.push_back(of(one));
    }
    if (sorted) {
      std::sort(digests.begin(), digests.end());
    }
    std::for_each(digests.begin(), digests.end(), add);
  };
  const auto add_pairs = [&](const auto& pairs) {
    text += ";";
    for (const auto& pair : pairs) {
      add(of(pair.first));
      add(of(pair.second));
    }
  };
  if (value.isTuple()) {
    add_all(value.toTupleRef().elements().asArrayRef(), false);
  } else if (value.isList()) {
    add_all(value.toListRef(), false);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) {
      add(of(item.key()));
      add(of(item.value()));
    }
  } else {
    const auto opaque = to_opaque(value);
    add_all(opaque->args, false);
    add_pairs(opaque->kwargs);
    add_pairs(opaque->items);
    add_all(opaque->elements, opaque->class_name == "builtins.set" ||
                                  opaque->class_name == "builtins.frozenset");
    add(of(opaque->state));
  }
  return text;
}

}  // namespace dataparallel::command_line
