#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>

namespace dataparallel::checkpoint {

/// A storage's bytes in the host's memory: its own, or a copy that lives as
/// long as this.
class HostBytes {
 public:
  explicit HostBytes(const c10::Storage& storage);

  const void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  at::Tensor copy_;
  const void* data_;
  size_t size_;
};

}  // namespace dataparallel::checkpoint
