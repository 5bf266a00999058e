#include "checkpoint/hash_spread.h"

#include <algorithm>
#include <bit>

namespace dataparallel::checkpoint {
namespace {

/// Below so many keys, doubling costs nothing.
constexpr size_t kFewKeys = 8;
/// In one group. There are two groups a key and more, so that one holds half a
/// key on average.
constexpr uint32_t kCrowd = 5;
constexpr uint32_t kMostDoublings = 40;
constexpr uint64_t kPlaceBytes = 64;

/// c10 takes the first bits of this for a key's place (Fibonacci hashing).
uint64_t place_of(const c10::IValue& key) {
  return c10::detail::DictKeyHash()(key) * 11400714819323198485ULL;
}

}  // namespace

uint64_t HashSpread::add(const c10::impl::GenericDict& mapping,
                         const c10::IValue& key) {
  if (mapping.size() < kFewKeys) {
    return 0;
  }
  // The sizes differ where another dictionary was at this address before.
  if (keys_ != mapping.size() || keys_ >= size_t{1} << (bits_ - 1)) {
    groups_.clear();
    keys_ = 0;
    bits_ = std::bit_width(mapping.size()) + 1;
    for (const auto& item : mapping) {
      count(item.key());
    }
  }
  const uint32_t crowd = count(key);
  // All at one place, they need a table of so many places.
  return crowd < kCrowd ? 0 : kPlaceBytes << std::min(crowd, kMostDoublings);
}

uint32_t HashSpread::count(const c10::IValue& key) {
  ++keys_;
  return ++groups_[place_of(key) >> (64 - bits_)];
}

}  // namespace dataparallel::checkpoint
