#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/hash_spread.h"
#include "checkpoint/heap.h"
#include "checkpoint/keys.h"
#include "checkpoint/known.h"
#include "checkpoint/storages.h"

namespace dataparallel::checkpoint {

using Arguments = c10::ArrayRef<c10::IValue>;

/// Makes the objects that a pickle describes, out of what it says of them.
class Objects {
 public:
  /// `storages` may be null where a pickle may have none.
  Objects(Heap& heap, Storages* storages) : heap_(heap), storages_(storages) {}

  Heap& heap() { return heap_; }

  /// A byte string of Python 2, which is text most of the time.
  c10::IValue python2_string(std::string bytes);

  /// `callable(*args)`.
  c10::IValue call(const c10::IValue& callable, Arguments args);

  /// `class.__new__(class, *args, **kwargs)`.
  c10::IValue make(const c10::IValue& type, Arguments args,
                   const c10::IValue& kwargs);

  /// `object.__setstate__(state)`: the object that takes its place.
  c10::IValue build(const c10::IValue& object, const c10::IValue& state);

  void append(const c10::IValue& object, Arguments elements);

  /// `object[key] = value` for each pair: the object that takes its place.
  c10::IValue set_items(const c10::IValue& object, Arguments pairs);

  /// The storage that a persistent id describes.
  c10::IValue persistent(const c10::IValue& id);

 private:
  c10::IValue call_known(Reference& function, Arguments args);
  c10::IValue call_mapping(const Reference& type, Arguments args);
  c10::IValue opaque_call(const std::string& name, Arguments args);
  c10::IValue collection(const char* class_name, Arguments args);
  c10::IValue bytes_object(const Reference& type, Arguments args);
  std::string counted_bytes(const c10::IValue& content);
  c10::IValue encode(Arguments args);
  c10::IValue reconstruct(Arguments args);
  c10::IValue numpy_call(const Reference& function, Arguments args);
  /// The array that a state makes of an empty one; none: of another kind.
  std::optional<c10::IValue> numpy_state(const Opaque& array,
                                         const c10::IValue& state);
  c10::IValue storage(Arguments id);
  /// The bytes of a bytes object or of a Python 2 string; null: neither.
  const std::string* bytes_of(const c10::IValue& value);

  Heap& heap_;
  Storages* storages_;
  /// Of the dictionaries that are filled, by address.
  std::unordered_map<const void*, HashSpread> spreads_;
  /// Of the sets and opaque mappings that are filled, which the heap keeps.
  std::unordered_map<const Opaque*, KeyPositions> positions_;
  /// Python 2 strings that were no UTF-8: the text, and what they were.
  std::unordered_map<const void*, std::pair<c10::IValue, std::string>> latin1_;
};

}  // namespace dataparallel::checkpoint
