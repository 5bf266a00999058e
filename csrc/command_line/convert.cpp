#include <dataparallel/checkpoint.h>
#include <dataparallel/save.h>
#include <dataparallel/state_dict.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "command_line/commands.h"
#include "command_line/convert_dtype.h"
#include "command_line/interruption.h"
#include "command_line/left_out.h"
#include "command_line/output.h"
#include "command_line/progress.h"
#include "command_line/table.h"

namespace dataparallel::command_line {
namespace {

using Metadata = std::map<std::string, std::string>;

bool names_safetensors(const std::string& path) {
  return std::filesystem::path(path).extension() == ".safetensors";
}

bool takes_all(const ConvertArguments& arguments) {
  return !names_safetensors(arguments.output) && arguments.key.empty() &&
         arguments.dtype.empty() && !arguments.strip_prefix.has_value() &&
         !arguments.add_prefix.has_value();
}

/// What a safetensors file says beside its tensors.
Metadata metadata_of(const std::string& path) {
  // What is no file, as a pipe, can be read once only.
  return std::filesystem::is_regular_file(path) ? inspect(path).metadata
                                                : Metadata();
}

StateDict change(StateDict dict, const ConvertArguments& arguments) {
  if (arguments.strip_prefix.has_value()) {
    if (std::none_of(dict.begin(), dict.end(), [&](const auto& item) {
          return item.first.starts_with(*arguments.strip_prefix);
        })) {
      fmt::print(stderr, "dataparallel: no name begins with '{}'\n",
                 printable(*arguments.strip_prefix));
    }
    dict = strip_prefix(dict, *arguments.strip_prefix);
  }
  if (arguments.add_prefix.has_value()) {
    dict = add_prefix(dict, *arguments.add_prefix);
  }
  return arguments.dtype.empty()
             ? dict
             : convert_dtype(dict, arguments.dtype, arguments.allow_overflow);
}

/// Errors of the library, with this program's names for its options.
std::string in_our_words(std::string text) {
  const std::pair<std::string, std::string> names[] = {
      {"copy_shared(true)", "--copy-shared"}, {"by key:", "by --key:"}};
  for (const auto& [theirs, ours] : names) {
    if (const size_t at = text.find(theirs); at != std::string::npos) {
      text.replace(at, theirs.size(), ours);
    }
  }
  return text;
}

void write(const c10::IValue& value, const StateDict& dict,
           const Metadata& metadata, const ConvertArguments& arguments) {
  const Interruption interruption;
  Progress progress("writing " + arguments.output);
  const auto update = [&](uint64_t done, uint64_t total) {
    interruption.check();
    progress.update(done, total);
  };
  if (takes_all(arguments)) {
    save(value, arguments.output, update);
  } else if (names_safetensors(arguments.output)) {
    save_safetensors(dict, arguments.output,
                     SaveSafetensorsOptions()
                         .metadata(metadata)
                         .copy_shared(arguments.copy_shared)
                         .progress(update));
  } else {
    save(dict, arguments.output, update);
  }
}

void warn_of_left_out(const ConvertArguments& arguments,
                      const std::vector<std::string>& others) {
  constexpr size_t kMost = 20;
  if (others.empty()) {
    return;
  }
  std::string text;
  for (size_t i = 0; i < std::min(others.size(), kMost); ++i) {
    text += (i == 0 ? "'" : ", '") + printable(others[i]) + "'";
  }
  if (others.size() > kMost) {
    text += fmt::format(" and {} more", others.size() - kMost);
  }
  fmt::print(stderr, "dataparallel: left out of {}: {}\n",
             printable(arguments.output), text);
}

/// On standard output; on standard error if OUT may be that, as a device or a
/// pipe.
void report(const ConvertArguments& arguments, std::optional<size_t> entries,
            const std::vector<std::string>& others) {
  const bool is_file = std::filesystem::is_regular_file(arguments.output);
  const auto bytes =
      is_file
          ? static_cast<int64_t>(std::filesystem::file_size(arguments.output))
          : 0;
  std::string text;
  if (arguments.json) {
    nlohmann::ordered_json all = {{"file", arguments.output}};
    all["nbytes"] =
        is_file ? nlohmann::ordered_json(bytes) : nlohmann::ordered_json();
    all["entries"] = entries.has_value() ? nlohmann::ordered_json(*entries)
                                         : nlohmann::ordered_json();
    all["left_out"] = others;
    text = json_text(all);
  } else {
    text =
        printable(arguments.output) + ": " +
        (entries.has_value() ? fmt::format("{} {}", *entries,
                                           *entries == 1 ? "entry" : "entries")
                             : "the whole checkpoint") +
        (is_file ? ", " + size_text(bytes) : "") + "\n";
  }
  if (is_file) {
    print(text);
  } else {
    fmt::print(stderr, "{}", text);
  }
}

}  // namespace

int convert_file(const ConvertArguments& arguments) {
  if (arguments.copy_shared && !names_safetensors(arguments.output)) {
    throw UsageError("--copy-shared is for safetensors, but " +
                     arguments.output + " does not end with .safetensors");
  }
  if (arguments.allow_overflow && arguments.dtype.empty()) {
    throw UsageError("--allow-overflow is for --dtype, which is not given");
  }
  const Metadata metadata = metadata_of(arguments.input);
  const c10::IValue value =
      load(arguments.input, LoadOptions().map_location("cpu"));
  std::optional<size_t> entries;
  std::vector<std::string> others;
  try {
    StateDict dict;
    if (!takes_all(arguments)) {
      dict = find_state_dict(value, arguments.key);
      others = left_out(value, dict);
      dict = change(std::move(dict), arguments);
      entries = dict.size();
    }
    write(value, dict, metadata, arguments);
  } catch (const c10::Error& error) {
    throw std::runtime_error(in_our_words(error.what_without_backtrace()));
  }
  if (!names_safetensors(arguments.output)) {
    for (const auto& [name, text] : metadata) {
      others.push_back("__metadata__." + name);
    }
  }
  for (const OpaqueEntry& entry : dropped_entries(value)) {
    others.push_back(entry.path + " (" + entry.class_name + ")");
  }
  warn_of_left_out(arguments, others);
  report(arguments, entries, others);
  return kSuccess;
}

}  // namespace dataparallel::command_line
