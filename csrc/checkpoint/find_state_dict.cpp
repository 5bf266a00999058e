#include <dataparallel/checkpoint.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_set>

#include "checkpoint/walk.h"
#include "detail/wording.h"

namespace dataparallel {
namespace {

using Mapping = c10::impl::GenericDict;

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() &&
         text.substr(text.size() - end.size()) == end;
}

bool has_names_only(const Mapping& mapping) {
  return std::all_of(mapping.begin(), mapping.end(),
                     [](const auto& item) { return item.key().isString(); });
}

bool is_state_dict(const Mapping& mapping) {
  if (!has_names_only(mapping)) {
    return false;
  }
  if (attributes(mapping).contains("_metadata")) {
    return true;  // one of a module without tensors too
  }
  bool has_tensor = false;
  for (const auto& item : mapping) {
    if (item.value().isTensor()) {
      has_tensor = true;
    } else if (!ends_with(item.key().toStringRef(), "_extra_state")) {
      return false;
    }
  }
  return has_tensor;
}

/// What `optimizer.state_dict()` gives: its tensors are no model's.
bool is_optimizer(const Mapping& mapping) {
  return mapping.contains("state") && mapping.contains("param_groups");
}

/// What `key` and paths call a key.
std::string name_of(const c10::IValue& key) {
  return key.isString() ? key.toStringRef() : checkpoint::key_text(key);
}

struct Candidate {
  std::string path;  ///< keys joined by dots
  std::string name;  ///< the last of them
  Mapping mapping;
};

void collect(const Mapping& mapping, const Candidate& here,
             std::unordered_set<const void*>& seen,
             std::vector<Candidate>& found) {
  if (!seen.insert(c10::IValue(mapping).internalToPointer()).second) {
    return;
  }
  if (is_state_dict(mapping)) {
    found.push_back(here);
    return;
  }
  if (is_optimizer(mapping)) {
    return;
  }
  for (const auto& item : mapping) {
    if (!item.value().isGenericDict()) {
      continue;
    }
    const std::string name = name_of(item.key());
    const Mapping inside = item.value().toGenericDict();
    collect(
        inside,
        {detail::shortened(here.path + (here.path.empty() ? "" : ".") + name),
         name, inside},
        seen, found);
  }
}

bool is_usual_name(const std::string& name) {
  if (name == "state_dict") {
    return true;
  }
  size_t start = 0;
  while (start <= name.size()) {
    const size_t end = std::min(name.find_first_of("_-. ", start), name.size());
    const std::string_view word =
        std::string_view(name).substr(start, end - start);
    if (std::find(kUsualNames.begin(), kUsualNames.end(), word) !=
        kUsualNames.end()) {
      return true;
    }
    start = end + 1;
  }
  return false;
}

std::string list_of(const std::vector<Candidate>& candidates) {
  constexpr size_t kMost = 20;
  std::string text;
  for (size_t i = 0; i < std::min(candidates.size(), kMost); ++i) {
    text +=
        (i == 0 ? "\"" : ", \"") + detail::shortened(candidates[i].path) + "\"";
  }
  return text + (candidates.size() > kMost ? ", ..." : "");
}

std::string keys_of(const Mapping& mapping) {
  constexpr size_t kMost = 20;
  std::string text;
  size_t count = 0;
  for (const auto& item : mapping) {
    if (count++ == kMost) {
      return text + ", ...";
    }
    text += (text.empty() ? "" : ", ") +
            detail::shortened(checkpoint::key_text(item.key()));
  }
  return text.empty() ? "none" : text;
}

/// Why there may be none: a module that stayed opaque, for one.
std::string opaque_in(const c10::IValue& value) {
  constexpr size_t kMost = 5;
  const auto entries = opaque_entries(value);
  std::string text;
  for (size_t i = 0; i < std::min(entries.size(), kMost); ++i) {
    text +=
        (i == 0 ? "; opaque objects: " : ", ") + entries[i].class_name +
        (entries[i].path.empty() ? ""
                                 : " at " + detail::shortened(entries[i].path));
  }
  return text + (entries.size() > kMost ? ", ..." : "");
}

/// What lies at the key of that name, text before others.
std::optional<c10::IValue> named(const Mapping& mapping,
                                 const std::string& name) {
  if (mapping.contains(name)) {
    return mapping.at(name);
  }
  for (const auto& item : mapping) {
    if (!item.key().isString() && name_of(item.key()) == name) {
      return item.value();
    }
  }
  return std::nullopt;
}

/// The mapping at `key`: as it is, or its parts between dots one by one.
Mapping at_key(const c10::IValue& value, const std::string& key) {
  c10::IValue current = value;
  std::optional<std::string> rest = key;
  while (rest.has_value()) {
    if (!current.isGenericDict()) {
      throw CheckpointError("find_state_dict: key \"" + key + "\" leads into " +
                            detail::with_article(python_type_name(current)) +
                            ", expected a mapping");
    }
    const Mapping mapping = current.toGenericDict();
    size_t end = rest->size();
    auto found = named(mapping, *rest);
    while (!found.has_value() && end != std::string::npos) {
      end = end == 0 ? std::string::npos : rest->rfind('.', end - 1);
      found = named(mapping, rest->substr(0, end));
    }
    if (!found.has_value()) {
      throw CheckpointError("find_state_dict: there is no key \"" + key +
                            "\" in the checkpoint (at \"" + *rest +
                            "\" the keys are: " + keys_of(mapping) + ")");
    }
    current = *found;
    rest = end == rest->size() ? std::nullopt
                               : std::optional(rest->substr(end + 1));
  }
  if (!current.isGenericDict() || !has_names_only(current.toGenericDict())) {
    throw CheckpointError("find_state_dict: key \"" + key + "\" leads to " +
                          detail::with_article(python_type_name(current)) +
                          ", expected a mapping from names to tensors");
  }
  return current.toGenericDict();
}

}  // namespace

StateDict find_state_dict(const c10::IValue& value, const std::string& key) {
  if (!key.empty()) {
    return StateDict::from_ivalue(at_key(value, key));
  }
  std::vector<Candidate> found;
  if (value.isGenericDict()) {
    std::unordered_set<const void*> seen;
    const Mapping mapping = value.toGenericDict();
    if (mapping.empty()) {
      return StateDict::from_ivalue(mapping);
    }
    collect(mapping, {"", "", mapping}, seen, found);
  }
  if (found.empty()) {
    throw CheckpointError(
        "find_state_dict: the checkpoint, " +
        detail::with_article(python_type_name(value)) +
        ", has no mapping from names to tensors" +
        (value.isGenericDict()
             ? " (its keys: " + keys_of(value.toGenericDict()) + ")"
             : "") +
        opaque_in(value));
  }
  std::vector<Candidate> usual;
  std::copy_if(found.begin(), found.end(), std::back_inserter(usual),
               [](const Candidate& c) { return is_usual_name(c.name); });
  if (found.size() > 1 && usual.size() != 1) {
    throw CheckpointError("find_state_dict: the checkpoint has " +
                          std::to_string(found.size()) +
                          " state_dicts; say which by key: " + list_of(found));
  }
  return StateDict::from_ivalue(
      (found.size() == 1 ? found : usual).front().mapping);
}

}  // namespace dataparallel
