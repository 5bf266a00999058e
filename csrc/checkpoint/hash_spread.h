#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>

namespace dataparallel::checkpoint {

/// Watches how the keys of one dictionary spread over its hash table.
///
/// c10's table doubles for every key that finds too many others near its place,
/// and its places are known beforehand: some dozen chosen keys would take all
/// memory. Those of honest files, numbers in steps and texts, spread evenly.
class HashSpread {
 public:
  /// `key` is to be added to `mapping`. Returns how many bytes the table may
  /// take because of it; 0 where nothing crowds.
  uint64_t add(const c10::impl::GenericDict& mapping, const c10::IValue& key);

 private:
  uint32_t count(const c10::IValue& key);

  size_t keys_ = 0;
  int bits_ = 0;  // of a place that tell its group
  std::map<uint64_t, uint32_t> groups_;
};

}  // namespace dataparallel::checkpoint
