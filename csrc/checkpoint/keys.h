#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <unordered_map>

// When Python takes two keys for one: 1, True, 1.0 and 1+0j are the same, and
// so are tuples of such.
namespace dataparallel::checkpoint {

/// The key of `mapping` that is `key` in Python, though of another kind in C++;
/// else `key` itself.
c10::IValue key_in(const c10::impl::GenericDict& mapping,
                   const c10::IValue& key);

/// Finds keys among those in a list, by what Python compares them by.
///
/// Two keys are told apart (which they may not be in Python) if they have more
/// than 500 bytes of text, or hold frozensets or objects of other classes.
class KeyPositions {
 public:
  using KeyAt = c10::function_ref<const c10::IValue&(size_t index)>;

  /// Where `key` is among `count` keys; `count` where it is not. From one call
  /// to the next, there have at most come more.
  size_t find(size_t count, KeyAt key_at, const c10::IValue& key);

 private:
  std::unordered_multimap<size_t, size_t> by_hash_;
  size_t known_ = 0;
};

}  // namespace dataparallel::checkpoint
