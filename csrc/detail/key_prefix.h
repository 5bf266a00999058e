#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace dataparallel::detail {

/// A prefix that a dictionary's keys have and a module's names lack, or the
/// other way round.
struct CommonPrefix {
  std::string prefix;
  /// Whether `strip_prefix` (else `add_prefix`) would help.
  bool strip = true;
  /// How many of the module's names would be there with that prefix gone.
  size_t matches = 0;

  /// `strip_prefix(state_dict, "module.")`.
  std::string call() const;
};

/// The prefix that makes most keys match; none if none makes more match than
/// the `matches_now`.
std::optional<CommonPrefix> find_common_prefix(
    const std::vector<std::string>& keys, const std::vector<std::string>& names,
    size_t matches_now);

}  // namespace dataparallel::detail
