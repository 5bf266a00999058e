#include "checkpoint/host_bytes.h"

#include <ATen/ATen.h>

namespace dataparallel::checkpoint {

HostBytes::HostBytes(const c10::Storage& storage)
    : data_(storage.data()), size_(storage.nbytes()) {
  if (!storage.device().is_cpu() && size_ > 0) {
    at::Tensor bytes =
        at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
    bytes.set_(storage, /*storage_offset=*/0, {static_cast<int64_t>(size_)},
               {1});
    copy_ = bytes.cpu();
    data_ = copy_.const_data_ptr();
  }
}

}  // namespace dataparallel::checkpoint
