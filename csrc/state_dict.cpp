#include <ATen/ATen.h>
#include <dataparallel/python_values.h>
#include <dataparallel/state_dict.h>

#include <algorithm>

#include "detail/module_tree.h"
#include "detail/wording.h"

namespace dataparallel {
namespace {

constexpr const char* kMetadata = "_metadata";
constexpr const char* kOrderedDict = "collections.OrderedDict";

c10::impl::GenericDict plain_dict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

c10::impl::GenericDict ordered_dict(
    const c10::impl::GenericDict& attributes = plain_dict()) {
  return make_mapping(kOrderedDict, attributes);
}

/// Adds what Python's modules write; the strings are made once, as there.
class Collector {
 public:
  void add(const detail::ModuleNode& node, const std::string& prefix) {
    auto local = plain_dict();
    local.insert(version_, node.version);
    metadata_.insert(prefix.substr(0, prefix.size() - !prefix.empty()),
                     std::move(local));
    for (const detail::NamedTensor& item : node.tensors) {
      result_.insert(prefix + item.name, item.tensor.detach());
    }
    for (const auto& [name, child] : node.children) {
      add(child, prefix + name + ".");
    }
  }

  StateDict take() {
    result_.set_metadata(std::move(metadata_));
    return std::move(result_);
  }

 private:
  StateDict result_;
  c10::impl::GenericDict metadata_ = ordered_dict();
  const c10::IValue version_{"version"};
};

/// Calls `act(key, value)` for the entries of the metadata whose keys are
/// strings; others say nothing of a module.
template <class Act>
void for_each_module(const c10::impl::GenericDict& metadata, Act&& act) {
  for (const auto& item : metadata) {
    if (item.key().isString()) {
      act(item.key().toStringRef(), item.value());
    }
  }
}

/// `"a.b."` → `"a.b"`, `"a"`, `""`: the modules around the one that `prefix`
/// leads to, itself first.
std::vector<std::string> modules_along(const std::string& prefix) {
  std::vector<std::string> result;
  for (size_t dot = prefix.rfind('.'); dot != std::string::npos && dot > 0;
       dot = prefix.rfind('.', dot - 1)) {
    result.push_back(prefix.substr(0, dot));
  }
  result.emplace_back();
  return result;
}

c10::impl::GenericDict strip_metadata(const c10::impl::GenericDict& metadata,
                                      const std::string& prefix,
                                      const StateDict& stripped) {
  const std::vector<std::string> wrappers = modules_along(prefix);
  bool has_inner = false;
  for_each_module(metadata, [&](const std::string& key, const c10::IValue&) {
    has_inner = has_inner || key + "." == prefix;
  });
  // A module around the inner ones is gone, unless something of it is left.
  const auto gone = [&](const std::string& key) {
    if (std::find(wrappers.begin(), wrappers.end(), key) == wrappers.end()) {
      return false;
    }
    if (key.empty()) {
      return has_inner;
    }
    return std::none_of(
        stripped.begin(), stripped.end(),
        [&](const auto& item) { return item.first.starts_with(key + "."); });
  };
  auto result = make_mapping(class_name(metadata), attributes(metadata));
  for_each_module(metadata,
                  [&](const std::string& key, const c10::IValue& value) {
                    if (key + "." == prefix) {
                      result.insert_or_assign("", value);
                    } else if (key.starts_with(prefix)) {
                      result.insert_or_assign(key.substr(prefix.size()), value);
                    } else if (!gone(key)) {
                      result.insert(key, value);
                    }
                  });
  return result;
}

c10::impl::GenericDict prefix_metadata(const c10::impl::GenericDict& metadata,
                                       const std::string& prefix) {
  auto result = make_mapping(class_name(metadata), attributes(metadata));
  if (prefix.ends_with('.')) {
    std::vector<std::string> wrappers = modules_along(prefix);
    for (auto it = wrappers.rbegin(); it != wrappers.rend() - 1; ++it) {
      auto local = plain_dict();
      local.insert("version", int64_t{1});
      result.insert(*it, std::move(local));
    }
  }
  for_each_module(
      metadata, [&](const std::string& key, const c10::IValue& value) {
        const std::string root =
            prefix.ends_with('.') ? prefix.substr(0, prefix.size() - 1) : "";
        result.insert_or_assign(key.empty() ? root : prefix + key, value);
      });
  return result;
}

}  // namespace

StateDict::StateDict(std::initializer_list<Entry> entries) {
  for (const Entry& entry : entries) {
    insert(entry.first, entry.second);
  }
}

bool StateDict::contains(const std::string& name) const {
  return positions_.count(name) != 0;
}

at::Tensor StateDict::at(const std::string& name) const {
  const c10::IValue* value = find(name);
  TORCH_CHECK_INDEX(value != nullptr, "StateDict: there is no '", name,
                    "' among the ", detail::count_text(size(), "name"));
  TORCH_CHECK_TYPE(value->isTensor(), "StateDict: '", name, "' is no tensor (",
                   value->tagKind(), ")");
  return value->toTensor();
}

const c10::IValue* StateDict::find(const std::string& name) const {
  const auto found = positions_.find(name);
  return found == positions_.end() ? nullptr : &entries_[found->second].second;
}

std::vector<std::string> StateDict::keys() const {
  std::vector<std::string> result;
  result.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    result.push_back(entry.first);
  }
  return result;
}

void StateDict::insert(std::string name, c10::IValue value) {
  const bool is_new = positions_.emplace(name, entries_.size()).second;
  TORCH_CHECK_VALUE(is_new, "StateDict: there is a '", name, "' already");
  entries_.emplace_back(std::move(name), std::move(value));
}

c10::IValue StateDict::to_ivalue() const {
  auto attributes = plain_dict();
  if (metadata_.has_value()) {
    attributes.insert(kMetadata, *metadata_);
  }
  auto result = ordered_dict(attributes);
  result.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    result.insert(entry.first, entry.second);
  }
  return result;
}

StateDict StateDict::from_ivalue(const c10::IValue& value) {
  TORCH_CHECK_TYPE(value.isGenericDict(),
                   "StateDict: expected a mapping of names to tensors, got ",
                   value.tagKind());
  const auto dict = value.toGenericDict();
  StateDict result;
  result.entries_.reserve(dict.size());
  result.positions_.reserve(dict.size());
  for (const auto& item : dict) {
    TORCH_CHECK_TYPE(item.key().isString(),
                     "StateDict: expected names as keys, got ", item.key());
    result.insert(item.key().toStringRef(), item.value());
  }
  const auto all = attributes(dict);
  if (const auto found = all.find(kMetadata);
      found != all.end() && found->value().isGenericDict()) {
    result.set_metadata(found->value().toGenericDict());
  }
  return result;
}

StateDict state_dict(const torch::nn::Module& module) {
  Collector collector;
  collector.add(detail::module_tree(module), "");
  return collector.take();
}

StateDict state_dict(const torch::jit::Module& module) {
  Collector collector;
  collector.add(detail::module_tree(module), "");
  return collector.take();
}

StateDict strip_prefix(const StateDict& state_dict, const std::string& prefix) {
  StateDict result;
  for (const auto& [name, value] : state_dict) {
    const std::string stripped =
        name.starts_with(prefix) ? name.substr(prefix.size()) : name;
    TORCH_CHECK_VALUE(!stripped.empty() || name.empty(), "strip_prefix: '",
                      name, "' is the prefix and nothing else");
    TORCH_CHECK_VALUE(!result.contains(stripped), "strip_prefix: both '",
                      stripped, "' and '", prefix, stripped,
                      "' are there, and without the prefix they would have "
                      "one name");
    result.insert(stripped, value);
  }
  if (state_dict.metadata().has_value()) {
    result.set_metadata(prefix.empty() ? state_dict.metadata()
                                       : strip_metadata(*state_dict.metadata(),
                                                        prefix, result));
  }
  return result;
}

StateDict add_prefix(const StateDict& state_dict, const std::string& prefix) {
  StateDict result;
  for (const auto& [name, value] : state_dict) {
    result.insert(prefix + name, value);
  }
  if (state_dict.metadata().has_value()) {
    result.set_metadata(prefix_metadata(*state_dict.metadata(), prefix));
  }
  return result;
}

}  // namespace dataparallel
