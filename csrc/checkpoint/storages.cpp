#include "checkpoint/storages.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/view.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

/// Alignment that any dtype is content with.
constexpr size_t kLargestItem = 8;

at::Tensor bytes_tensor(uint64_t nbytes, at::Device device) {
  return at::empty({static_cast<int64_t>(nbytes)},
                   at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

StorageRef::StorageRef(std::string name, c10::Storage memory)
    : Opaque(std::move(name)), storage(std::move(memory)) {}

void StorageRef::complete() {
  if (!args.empty()) {
    return;
  }
  // A dense tensor cannot have a quantized dtype.
  const at::ScalarType type =
      dtype && !c10::isQIntType(*dtype) ? *dtype : at::kByte;
  const auto numel = static_cast<int64_t>(nbytes / c10::elementSize(type));
  args.emplace_back(view_of(*this, {type, /*offset=*/0, {numel}, {1}, false}));
}

size_t ordered_bytes(at::ScalarType dtype) {
  const size_t size = c10::elementSize(dtype);
  return c10::isComplexType(dtype) ? size / 2 : size;
}

void reverse_bytes(char* data, uint64_t nbytes, size_t item_bytes) {
  for (uint64_t i = 0; i + item_bytes <= nbytes; i += item_bytes) {
    std::reverse(data + i, data + i + item_bytes);
  }
}

c10::intrusive_ptr<StorageRef> Storages::get(const StorageClaim& claim) {
  auto& known = by_key_[claim.key];
  if (known && known->dtype == claim.dtype && known->nbytes == claim.nbytes) {
    return known;
  }
  c10::intrusive_ptr<StorageRef> result;
  if (!known) {
    const StoredBytes bytes = find_(claim);
    result =
        c10::make_intrusive<StorageRef>(claim.class_name, read(claim, bytes));
    result->reversed = big_endian_ && !claim.dtype;
    result->tag = claim.tag;
    known = result;
  } else {
    // Another part of the file says otherwise what the elements are.
    result = c10::make_intrusive<StorageRef>(claim.class_name, known->storage);
    result->tag = known->tag;
  }
  result->dtype = claim.dtype;
  result->nbytes = claim.nbytes;
  if (claim.nbytes > result->storage.nbytes()) {
    fail("storage \"" + claim.key + "\" is said to have " +
         detail::count_text(claim.nbytes, "byte") + ", but has " +
         std::to_string(result->storage.nbytes()));
  }
  return result;
}

c10::Storage Storages::read(const StorageClaim& claim,
                            const StoredBytes& bytes) {
  const at::Device device = locations_.device(claim.tag);
  if (device.is_meta()) {
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes.nbytes,
                        c10::DataPtr(nullptr, device));
  }
  const size_t item = claim.dtype ? ordered_bytes(*claim.dtype) : kLargestItem;
  const bool reverse = big_endian_ && claim.dtype && item > 1;
  if (device.is_cpu() && !big_endian_ && bytes.nbytes > 0) {
    if (c10::DataPtr shared = source_.share(bytes.offset)) {
      if (reinterpret_cast<uintptr_t>(shared.get()) % item == 0) {
        return c10::Storage(c10::Storage::use_byte_size_t(), bytes.nbytes,
                            std::move(shared));
      }
    }
  }
  at::Tensor host;
  if (!device.is_cpu() && source_.data() != nullptr && !reverse) {
    host = at::from_blob(const_cast<char*>(source_.data()) + bytes.offset,
                         {static_cast<int64_t>(bytes.nbytes)}, at::kByte);
  } else {
    host = bytes_tensor(bytes.nbytes, at::kCPU);
    source_.read(bytes.offset, bytes.nbytes, host.data_ptr());
    if (reverse) {
      reverse_bytes(static_cast<char*>(host.data_ptr()), bytes.nbytes, item);
    }
  }
  if (device.is_cpu()) {
    return host.storage();
  }
  at::Tensor there = bytes_tensor(bytes.nbytes, device);
  there.copy_(host);
  source_.forget(bytes.offset, bytes.nbytes);
  return there.storage();
}

void Storages::set_byte_order(StorageRef& storage, at::ScalarType dtype) {
  if (!storage.reversed) {
    return;
  }
  storage.reversed = false;
  const c10::Device device = storage.storage.device();
  if (device.is_meta() || ordered_bytes(dtype) == 1) {
    return;
  }
  const at::Tensor bytes =
      view_of(storage, {at::kByte,
                        0,
                        {static_cast<int64_t>(storage.storage.nbytes())},
                        {1},
                        false});
  const at::Tensor host = bytes.to(at::kCPU);
  reverse_bytes(static_cast<char*>(host.data_ptr()), storage.storage.nbytes(),
                ordered_bytes(dtype));
  if (!device.is_cpu()) {
    bytes.copy_(host);
  }
}

std::unordered_map<const void*, std::string> Storages::tags() const {
  std::unordered_map<const void*, std::string> tags;
  for (const auto& [key, storage] : by_key_) {
    tags.emplace(storage->storage.unsafeGetStorageImpl(), storage->tag);
  }
  return tags;
}

}  // namespace dataparallel::checkpoint
