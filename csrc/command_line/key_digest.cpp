#include "command_line/key_digest.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>
#include <dataparallel/python_values.h>

#include <algorithm>
#include <vector>

#include "command_line/python_text.h"

namespace dataparallel::command_line {
namespace {

bool holds_others(const c10::IValue& value) {
  return value.isTuple() || value.isList() || value.isGenericDict() ||
         is_opaque(value);
}

std::string bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      tensor.is_nested() || tensor.is_quantized() || tensor.is_meta()) {
    return "";  // its text is all that is looked at
  }
  const at::Tensor plain =
      tensor.detach().resolve_conj().resolve_neg().contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

}  // namespace

std::string KeyDigest::of(const c10::IValue& value) {
  if (!holds_others(value)) {
    return value.isTensor() ? c10::sha1(python_text(value) + ":" +
                                        bytes_of(value.toTensor()))
                                  .str()
                            : python_text(value);
  }
  std::string& known = known_[value.internalToPointer()];
  if (known.empty()) {
    known = "circle";  // which no loaded value is
    std::string digest = c10::sha1(contents(value)).str();
    known_[value.internalToPointer()] = digest;
    return digest;
  }
  return known;
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
