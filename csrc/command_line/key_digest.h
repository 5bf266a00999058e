#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <utility>

namespace dataparallel::command_line {

/// Short texts that are the same for values that hold the same, and others for
/// others (but for accidents of a 160-bit hash): of keys that hold values
/// themselves. Each value is looked at once, however often it is held.
class KeyDigest {
 public:
  std::string of(const c10::IValue& value);

  /// The number that equals it, without the sign of a zero; else `value`.
  static c10::IValue without_sign_of_zero(const c10::IValue& value);

 private:
  std::string contents(const c10::IValue& value);

  /// By address; with the value, so that no address is used twice.
  std::unordered_map<const void*, std::pair<c10::IValue, std::string>> known_;
};

}  // namespace dataparallel::command_line
