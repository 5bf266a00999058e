#include "command_line/python_text.h"

#include <ATen/ATen.h>
#include <dataparallel/python_values.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "command_line/table.h"
#include "detail/wording.h"

namespace dataparallel::command_line {
namespace {

constexpr size_t kMostBytesOfACell = 60;
/// A value may hold another one as often as it likes, and that one too.
constexpr int kMostBytes = 4096;

std::string text_of(const c10::IValue& value, int& budget);

std::string number_text(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_not_of("-0123456789") == std::string::npos) {
    text += ".0";
  }
  return text;
}

std::string quoted(const std::string& text, bool is_bytes) {
  std::string result = is_bytes ? "b'" : "'";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '\'' || c == '\\') {
      result += '\\';
      result += c;
    } else if (code < 0x20 || code == 0x7F || (is_bytes && code > 0x7F)) {
      result += fmt::format("\\x{:02x}", code);
    } else {
      result += c;
    }
  }
  return result + "'";
}

std::string joined(c10::ArrayRef<c10::IValue> elements, int& budget,
                   bool sorted = false) {
  std::vector<std::string> texts;
  for (const c10::IValue& element : elements) {
    if (budget <= 0) {
      texts.emplace_back("...");
      break;
    }
    texts.push_back(detail::shortened(text_of(element, budget)));
    budget -= static_cast<int>(texts.back().size());
  }
  if (sorted) {
    std::sort(texts.begin(), texts.end());
  }
  return c10::Join(", ", texts);
}

std::string opaque_text(const Opaque& opaque, int& budget) {
  const std::string& type = opaque.class_name;
  const bool has_text = opaque.args.size() == 1 && opaque.args[0].isString();
  if (has_text && (type == "torch.dtype" || type == "torch.layout" ||
                   type == "torch.memory_format" || type == "torch.qscheme")) {
    return "torch." + opaque.args[0].toStringRef();
  }
  if (has_text && type == "builtins.int") {
    return opaque.args[0].toStringRef();
  }
  if (has_text && type == "builtins.type") {
    return "<class '" + opaque.args[0].toStringRef() + "'>";
  }
  if (has_text && type == "builtins.bytes") {
    return quoted(opaque.args[0].toStringRef(), /*is_bytes=*/true);
  }
  if (has_text && type == "builtins.bytearray") {
    return "bytearray(" + quoted(opaque.args[0].toStringRef(), true) + ")";
  }
  if (type == "builtins.slice") {
    return "slice(" + joined(opaque.args, budget) + ")";
  }
  if (type == "torch.Size") {
    return "torch.Size([" + joined(opaque.elements, budget) + "])";
  }
  if (type == "builtins.set" && !opaque.elements.empty()) {
    return "{" + joined(opaque.elements, budget, /*sorted=*/true) + "}";
  }
  if (type == "builtins.frozenset" && !opaque.elements.empty()) {
    return "frozenset({" + joined(opaque.elements, budget, /*sorted=*/true) +
           "})";
  }
  return "<" + type + ">";
}

std::string text_of(const c10::IValue& value, int& budget) {
  --budget;  // also of what holds nothing
  if (value.isTensor()) {
    return "tensor(" + tensor_text(value.toTensor()) + ")";
  }
  if (value.isNone()) {
    return "None";
  }
  if (value.isBool()) {
    return value.toBool() ? "True" : "False";
  }
  if (value.isInt()) {
    return std::to_string(value.toInt());
  }
  if (value.isDouble()) {
    return number_text(value.toDouble());
  }
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return fmt::format("({}{:+}j)", number.real(), number.imag());
  }
  if (value.isString()) {
    return quoted(detail::shortened(value.toStringRef(), kMostBytes),
                  /*is_bytes=*/false);
  }
  if (value.isDevice()) {
    return "device('" + value.toDevice().str() + "')";
  }
  if (value.isTuple()) {
    const auto elements = value.toTupleRef().elements().asArrayRef();
    return "(" + joined(elements, budget) + (elements.size() == 1 ? ",)" : ")");
  }
  if (is_opaque(value)) {
    return opaque_text(*to_opaque(value), budget);
  }
  return "<" + python_type_name(value) + ">";
}

std::string without_module(const std::string& class_name) {
  return class_name.substr(class_name.rfind('.') + 1);
}

}  // namespace

std::string python_text(const c10::IValue& value) {
  int budget = kMostBytes;
  return text_of(value, budget);
}

std::string tensor_text(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "undefined";
  }
  std::string text(c10::getDtypeNames(tensor.scalar_type()).first);
  if (tensor.is_nested()) {
    text += " nested, " +
            detail::count_text(
                static_cast<uint64_t>(tensor._nested_tensor_size().size(0)),
                "part");
  } else {
    text += " " + shape_text(tensor.sizes().vec());
  }
  if (tensor.layout() != at::kStrided) {
    text += c10::str(" ", tensor.layout());
  }
  if (tensor.is_quantized()) {
    text += tensor.qscheme() == at::kPerTensorAffine
                ? fmt::format(" scale {} zero point {}", tensor.q_scale(),
                              tensor.q_zero_point())
                : fmt::format(" scaled along {}", tensor.q_per_channel_axis());
  }
  return text + (tensor.is_meta() ? " without values" : "");
}

std::string short_text(const c10::IValue& value) {
  const auto container = [&](size_t size) {
    return without_module(python_type_name(value)) + " of " +
           std::to_string(size);
  };
  if (value.isTensor()) {
    return tensor_text(value.toTensor());
  }
  if (value.isGenericDict()) {
    return container(value.toGenericDict().size());
  }
  if (value.isList()) {
    return container(value.toListRef().size());
  }
  if (value.isTuple()) {
    return container(value.toTupleRef().size());
  }
  if (is_opaque(value) && !to_opaque(value)->items.empty()) {
    return container(to_opaque(value)->items.size());
  }
  std::string text = python_text(value);
  if (text.size() > kMostBytesOfACell) {
    size_t end = kMostBytesOfACell;
    while ((text[end] & 0xC0) == 0x80) {  // not within a character
      --end;
    }
    text = text.substr(0, end) + "…";
  }
  return text;
}

}  // namespace dataparallel::command_line
