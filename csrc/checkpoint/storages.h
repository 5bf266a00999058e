#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <dataparallel/python_values.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>

#include "checkpoint/locations.h"
#include "checkpoint/source.h"

namespace dataparallel::checkpoint {

/// A storage of the file, which tensors are views of.
///
/// Where a value holds the storage itself, it is an `Opaque` of the storage's
/// class with a one-dimensional tensor in args.
class StorageRef : public Opaque {
 public:
  StorageRef(std::string name, c10::Storage memory);

  /// Fills in args.
  void complete();

  c10::Storage storage;
  /// Of the elements; none for bytes whose tensors say it.
  std::optional<at::ScalarType> dtype;
  /// The part of `storage` that this is: older files have views of storages.
  uint64_t base_bytes = 0;
  uint64_t nbytes = 0;
  /// The file's location tag.
  std::string tag;
  /// The bytes of every element are still to be reversed.
  bool reversed = false;
};

/// What a file says of a storage.
struct StorageClaim {
  std::string class_name;
  std::optional<at::ScalarType> dtype;
  std::string key;
  std::string tag;
  uint64_t nbytes = 0;
};

/// Where a storage's bytes lie in the file.
struct StoredBytes {
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

/// The storages of a file: each is read once, straight to its device, when
/// the value first refers to it.
class Storages {
 public:
  using Find = std::function<StoredBytes(const StorageClaim&)>;

  /// `find` knows where the bytes of a storage lie: inside the source, and as
  /// many at least as it claims. `big_endian`: numbers of the file are.
  Storages(Source& source, Locations& locations, Find find, bool big_endian)
      : source_(source),
        locations_(locations),
        find_(std::move(find)),
        big_endian_(big_endian) {}

  c10::intrusive_ptr<StorageRef> get(const StorageClaim& claim);

  /// Makes the storage's numbers those of this machine, now that the dtype is
  /// known for sure.
  void set_byte_order(StorageRef& storage, at::ScalarType dtype);

  /// The device for tensors that are rebuilt from other tensors.
  at::Device device(const std::string& tag) { return locations_.device(tag); }

  /// The file's tags, by the memory (`StorageImpl`) that was made for them.
  std::unordered_map<const void*, std::string> tags() const;

 private:
  c10::Storage read(const StorageClaim& claim, const StoredBytes& bytes);

  Source& source_;
  Locations& locations_;
  Find find_;
  bool big_endian_;
  std::unordered_map<std::string, c10::intrusive_ptr<StorageRef>> by_key_;
};

/// Reverses the bytes of each number of `item_bytes`.
void reverse_bytes(char* data, uint64_t nbytes, size_t item_bytes);

/// The size of what has an order of bytes: half a complex number.
size_t ordered_bytes(at::ScalarType dtype);

}  // namespace dataparallel::checkpoint
