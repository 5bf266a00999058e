#include <ATen/ATen.h>
#include <dataparallel/checkpoint.h>
#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <unordered_map>

#include "command_line/commands.h"
#include "command_line/progress.h"
#include "command_line/table.h"

namespace dataparallel::command_line {
namespace {

/// A checkpoint's values that hold no others, by their dotted paths, in order.
class Leaves {
 public:
  explicit Leaves(const c10::IValue& root) { add("", root); }

  const std::vector<std::string>& keys() const { return keys_; }
  const c10::IValue* find(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : &found->second;
  }

 private:
  static std::string text(const c10::IValue& key) {
    if (key.isString()) {
      return key.toStringRef();
    }
    if (key.isTensor() || is_opaque(key)) {
      return python_type_name(key);
    }
    std::ostringstream result;
    result << key;
    return result.str();
  }

  void add(const std::string& key, const c10::IValue& value) {
    const std::string prefix = key.empty() ? "" : key + ".";
    if (value.isGenericDict()) {
      if (value.toGenericDict().empty()) {
        put(key, c10::IValue("an empty " + python_type_name(value)));
      }
      for (const auto& item : value.toGenericDict()) {
        add(prefix + text(item.key()), item.value());
      }
    } else if (value.isList()) {
      add_all(key, value, value.toListRef());
    } else if (value.isTuple()) {
      add_all(key, value, value.toTupleRef().elements());
    } else if (is_opaque(value)) {
      add_opaque(key, *to_opaque(value));
    } else {
      put(key, value);
    }
  }

  void add_all(const std::string& key, const c10::IValue& value,
               c10::ArrayRef<c10::IValue> elements) {
    if (elements.empty()) {
      put(key, c10::IValue("an empty " + python_type_name(value)));
    }
    for (size_t i = 0; i < elements.size(); ++i) {
      add((key.empty() ? "" : key + ".") + std::to_string(i), elements[i]);
    }
  }

  void add_opaque(const std::string& key, const Opaque& opaque) {
    put(key, c10::IValue("a " + opaque.class_name));
    const std::string prefix = key.empty() ? "" : key + ".";
    const auto number = [&](const char* kind, const auto& values) {
      for (size_t i = 0; i < values.size(); ++i) {
        add(prefix + kind + std::to_string(i), values[i]);
      }
    };
    number("argument_", opaque.args);
    number("element_", opaque.elements);
    for (const auto& [name, value] : opaque.kwargs) {
      add(prefix + text(name), value);
    }
    for (const auto& [name, value] : opaque.items) {
      add(prefix + text(name), value);
    }
    if (!opaque.state.isNone()) {
      add(prefix + "state", opaque.state);
    }
  }

  void put(const std::string& key, const c10::IValue& value) {
    std::string name = key;
    // Keys 1 and "1" look alike.
    for (int again = 2; values_.count(name) != 0; ++again) {
      name = fmt::format("{} ({})", key, again);
    }
    keys_.push_back(name);
    values_.emplace(name, value);
  }

  std::vector<std::string> keys_;
  std::unordered_map<std::string, c10::IValue> values_;
};

std::string describe(const c10::IValue* value) {
  if (value == nullptr) {
    return "-";
  }
  if (value->isTensor()) {
    const at::Tensor tensor = value->toTensor();
    std::string text(c10::getDtypeNames(tensor.scalar_type()).first);
    text += " " + shape_text(tensor.sizes().vec());
    if (tensor.layout() != at::kStrided) {
      text += c10::str(" ", tensor.layout());
    }
    return text;
  }
  std::ostringstream text;
  text << *value;
  return text.str();
}

struct Difference {
  std::string key;
  const c10::IValue* a;
  const c10::IValue* b;
  /// Where only the values differ: how many do, and the most of |a - b|.
  std::optional<int64_t> values;
  std::optional<double> most;
};

at::Tensor plain(const at::Tensor& tensor) {
  at::Tensor result = tensor.detach();
  result = result.is_quantized()             ? result.dequantize()
           : result.layout() != at::kStrided ? result.to_dense()
                                             : result;
  return result.resolve_conj().resolve_neg().contiguous();
}

/// Bit for bit, but that is no difference between two NaNs.
void compare_values(const at::Tensor& a, const at::Tensor& b,
                    std::optional<Difference>& found, Difference difference) {
  const at::Tensor x = plain(a), y = plain(b);
  if (x.is_meta() || x.numel() == 0 ||
      std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0) {
    return;
  }
  // Small and 8-bit dtypes lack comparisons; all fit into these.
  const at::ScalarType wide = x.is_complex()          ? at::kComplexDouble
                              : x.is_floating_point() ? at::kDouble
                                                      : at::kLong;
  const at::Tensor p = x.to(wide), q = y.to(wide);
  const at::Tensor differs =
      p.ne(q).logical_and(p.isnan().logical_and(q.isnan()).logical_not());
  difference.values = differs.sum().item<int64_t>();
  if (*difference.values == 0) {
    return;
  }
  const at::Tensor distance = (p - q).abs().to(at::kDouble);
  difference.most = distance.masked_select(differs)
                        .nan_to_num(INFINITY, INFINITY)
                        .max()
                        .item<double>();
  found = std::move(difference);
}

std::optional<Difference> compare(const std::string& key, const c10::IValue* a,
                                  const c10::IValue* b) {
  Difference difference{key, a, b, {}, {}};
  if (a == nullptr || b == nullptr || a->isTensor() != b->isTensor()) {
    return difference;
  }
  if (!a->isTensor()) {
    const bool nan = a->isDouble() && b->isDouble() &&
                     std::isnan(a->toDouble()) && std::isnan(b->toDouble());
    const bool same = nan || (a->tagKind() == b->tagKind() && *a == *b);
    return same ? std::nullopt : std::optional(difference);
  }
  const at::Tensor x = a->toTensor(), y = b->toTensor();
  if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes() ||
      x.layout() != y.layout() || x.is_meta() != y.is_meta()) {
    return difference;
  }
  std::optional<Difference> found;
  compare_values(x, y, found, std::move(difference));
  return found;
}

std::vector<Difference> compare_all(const Leaves& a, const Leaves& b) {
  std::vector<Difference> differences;
  Progress progress("comparing");
  const size_t total = a.keys().size();
  for (size_t i = 0; i < total; ++i) {
    const std::string& key = a.keys()[i];
    if (auto found = compare(key, a.find(key), b.find(key))) {
      differences.push_back(std::move(*found));
    }
    progress.update(i + 1, total);
  }
  for (const std::string& key : b.keys()) {
    if (a.find(key) == nullptr) {
      differences.push_back({key, nullptr, b.find(key), {}, {}});
    }
  }
  return differences;
}

void print_json(const std::vector<Difference>& differences) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Difference& difference : differences) {
    nlohmann::ordered_json item = {{"key", difference.key}};
    item["a"] = difference.a == nullptr
                    ? nlohmann::ordered_json()
                    : nlohmann::ordered_json(describe(difference.a));
    item["b"] = difference.b == nullptr
                    ? nlohmann::ordered_json()
                    : nlohmann::ordered_json(describe(difference.b));
    if (difference.values.has_value()) {
      item["different_values"] = *difference.values;
      item["max_difference"] = *difference.most;  // null: infinite
    }
    list.push_back(std::move(item));
  }
  const nlohmann::ordered_json all = {{"same", differences.empty()},
                                      {"differences", list}};
  fmt::print("{}\n", all.dump(2, ' ', /*ensure_ascii=*/false,
                              nlohmann::json::error_handler_t::replace));
}

void print_table(const std::vector<Difference>& differences, size_t compared) {
  if (differences.empty()) {
    fmt::print("the same, {} compared\n", count_text(compared, "value"));
    return;
  }
  using Align = Table::Align;
  Table table({Align::kLeft, Align::kLeft, Align::kLeft, Align::kLeft});
  table.add({"KEY", "A", "B", "DIFFERENCE"});
  for (const Difference& difference : differences) {
    std::string text;
    if (difference.values.has_value()) {
      text = fmt::format("{} differ, by {:.3g} at most",
                         count_text(*difference.values, "value"),
                         *difference.most);
    }
    table.add(
        {difference.key, describe(difference.a), describe(difference.b), text});
  }
  table.print();
  fmt::print("\n{}\n", count_text(differences.size(), "difference"));
}

}  // namespace

int diff_files(const DiffArguments& arguments) {
  const auto options = LoadOptions().map_location("cpu");
  const Leaves a(load(arguments.a, options));
  const Leaves b(load(arguments.b, options));
  const std::vector<Difference> differences = compare_all(a, b);
  if (arguments.json) {
    print_json(differences);
  } else {
    print_table(differences, a.keys().size());
  }
  return differences.empty() ? kSuccess : kDifferent;
}

}  // namespace dataparallel::command_line
