#include <ATen/ATen.h>
#include <dataparallel/checkpoint.h>
#include <dataparallel/save.h>
#include <dataparallel/state_dict.h>
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "command_line/commands.h"
#include "command_line/progress.h"
#include "command_line/table.h"

namespace dataparallel::command_line {
namespace {

const std::map<std::string, at::ScalarType>& dtypes() {
  static const std::map<std::string, at::ScalarType> result = {
      {"bfloat16", at::kBFloat16},
      {"float16", at::kHalf},
      {"float32", at::kFloat},
      {"float64", at::kDouble},
      {"float8_e4m3fn", at::kFloat8_e4m3fn},
      {"float8_e5m2", at::kFloat8_e5m2},
  };
  return result;
}

/// Converts tensors so that what was one stays one.
class Converter {
 public:
  explicit Converter(at::ScalarType dtype) : dtype_(dtype) {}

  c10::IValue operator()(const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().is_floating_point()) {
      return value;
    }
    const at::Tensor tensor = value.toTensor();
    if (!tensor.has_storage()) {
      return tensor.to(dtype_);
    }
    const Place place{tensor.storage().unsafeGetStorageImpl(),
                      tensor.storage_offset(), tensor.sizes().vec(),
                      tensor.strides().vec()};
    at::Tensor& converted = converted_[place];
    if (!converted.defined()) {
      converted = tensor.detach().to(dtype_);
    }
    return converted;
  }

 private:
  using Place = std::tuple<const void*, int64_t, std::vector<int64_t>,
                           std::vector<int64_t>>;
  at::ScalarType dtype_;
  std::map<Place, at::Tensor> converted_;
};

bool names_safetensors(const std::string& path) {
  return std::filesystem::path(path).extension() == ".safetensors";
}

StateDict change(StateDict dict, const ConvertArguments& arguments) {
  if (arguments.strip_prefix.has_value()) {
    dict = strip_prefix(dict, *arguments.strip_prefix);
  }
  if (arguments.add_prefix.has_value()) {
    dict = add_prefix(dict, *arguments.add_prefix);
  }
  if (arguments.dtype.empty()) {
    return dict;
  }
  Converter convert(dtypes().at(arguments.dtype));
  StateDict converted;
  for (const auto& [name, value] : dict) {
    converted.insert(name, convert(value));
  }
  converted.set_metadata(dict.metadata());
  return converted;
}

void report(const ConvertArguments& arguments, std::optional<size_t> entries) {
  const auto bytes =
      static_cast<int64_t>(std::filesystem::file_size(arguments.output));
  if (arguments.json) {
    nlohmann::ordered_json all = {{"file", arguments.output},
                                  {"nbytes", bytes}};
    all["entries"] = entries.has_value() ? nlohmann::ordered_json(*entries)
                                         : nlohmann::ordered_json();
    fmt::print("{}\n", all.dump(2));
  } else {
    fmt::print("{}: {}, {}\n", arguments.output,
               entries.has_value()
                   ? fmt::format("{} {}", *entries,
                                 *entries == 1 ? "entry" : "entries")
                   : "the whole checkpoint",
               size_text(bytes));
  }
}

}  // namespace

const std::vector<std::string>& convertible_dtypes() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, dtype] : dtypes()) {
      result.push_back(name);
    }
    return result;
  }();
  return names;
}

int convert_file(const ConvertArguments& arguments) {
  const c10::IValue value =
      load(arguments.input, LoadOptions().map_location("cpu"));
  const bool whole = !names_safetensors(arguments.output) &&
                     arguments.key.empty() && arguments.dtype.empty() &&
                     !arguments.strip_prefix.has_value() &&
                     !arguments.add_prefix.has_value();
  Progress progress("writing " + arguments.output);
  const auto update = [&](uint64_t done, uint64_t total) {
    progress.update(done, total);
  };
  if (whole) {
    save(value, arguments.output, update);
    report(arguments, std::nullopt);
    return kSuccess;
  }
  const StateDict dict =
      change(find_state_dict(value, arguments.key), arguments);
  if (names_safetensors(arguments.output)) {
    save_safetensors(dict, arguments.output,
                     SaveSafetensorsOptions()
                         .copy_shared(arguments.copy_shared)
                         .progress(update));
  } else {
    save(dict, arguments.output, update);
  }
  report(arguments, dict.size());
  return kSuccess;
}

}  // namespace dataparallel::command_line
