#include "detail/key_prefix.h"

#include <map>
#include <unordered_set>

namespace dataparallel::detail {
namespace {

using Names = std::unordered_set<std::string>;

/// How often each prefix that ends with a dot stands before one of `inner` in
/// `outer`.
std::map<std::string, size_t> count_prefixes(
    const std::vector<std::string>& outer, const Names& inner) {
  std::map<std::string, size_t> counts;
  for (const std::string& name : outer) {
    for (size_t dot = name.find('.'); dot != std::string::npos;
         dot = name.find('.', dot + 1)) {
      if (inner.count(name.substr(dot + 1)) != 0) {
        ++counts[name.substr(0, dot + 1)];
      }
    }
  }
  return counts;
}

}  // namespace

std::string CommonPrefix::call() const {
  return (strip ? "strip_prefix(state_dict, \"" : "add_prefix(state_dict, \"") +
         prefix + "\")";
}

std::optional<CommonPrefix> find_common_prefix(
    const std::vector<std::string>& keys, const std::vector<std::string>& names,
    size_t matches_now) {
  std::optional<CommonPrefix> best;
  const auto consider = [&](const std::string& prefix, bool strip,
                            size_t matches) {
    if (matches > (best.has_value() ? best->matches : matches_now)) {
      best = CommonPrefix{prefix, strip, matches};
    }
  };
  const Names all_keys(keys.begin(), keys.end());
  const Names all_names(names.begin(), names.end());
  for (const auto& [prefix, count] : count_prefixes(keys, all_names)) {
    // Keys without the prefix stay as they are, and may match. Where one has
    // the name of another without the prefix, stripping is refused.
    size_t others = 0;
    bool collides = false;
    for (const std::string& key : keys) {
      if (!key.starts_with(prefix)) {
        others += all_names.count(key);
        collides = collides || all_keys.count(prefix + key) != 0;
      }
    }
    if (collides) {
      continue;
    }
    consider(prefix, /*strip=*/true, count + others);
  }
  for (const auto& [prefix, count] : count_prefixes(names, all_keys)) {
    consider(prefix, /*strip=*/false, count);
  }
  return best;
}

}  // namespace dataparallel::detail
