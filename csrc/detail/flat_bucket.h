#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "detail/communicator.h"

namespace dataparallel::detail {

/// Consecutive runs `{first, count}` of `tensors`, each of at most
/// `bucket_bytes` (or of one tensor that is larger); neighbours in one storage
/// stay together whatever their size.
std::vector<std::pair<int64_t, int64_t>> split_keeping_storages(
    const std::vector<at::Tensor>& tensors, int64_t bucket_bytes);

/// A run of tensors on one device, and their copies in one flat buffer on each
/// of some other devices.
///
/// Slices have the strides of the originals where these are dense, else
/// contiguous ones. Originals that lie in one storage (as
/// the flattened weights of a recurrent layer do) lie in the same places
/// relative to each other in the copies, with the bytes between them.
///
/// Not thread-safe. `copy` works on the current streams of the calling thread.
class FlatBucket {
 public:
  /// `communicator` is for the originals' device and the targets.
  FlatBucket(const std::vector<at::Tensor>& originals,
             const std::vector<at::Device>& targets,
             std::shared_ptr<Communicator> communicator);

  /// The place of original `i` on target `t`.
  at::Tensor slice(size_t t, size_t i) const;
  int64_t bytes() const { return bytes_; }

  /// `pack` holds `bytes()` on the originals' device; buckets that are copied
  /// one after another may share one.
  void set_pack(const at::Tensor& pack);
  /// Copies the originals' values to all targets: one packing, then one copy a
  /// target.
  void copy();

 private:
  /// Where an original lies in the flat buffer.
  struct Place {
    int64_t byte_offset;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    at::ScalarType dtype;
  };
  at::Tensor view(const at::Tensor& flat, const Place& place) const;

  std::shared_ptr<Communicator> communicator_;
  std::vector<Place> places_;
  std::vector<at::Tensor> sources_;  // what is packed
  std::vector<Place> source_places_;
  int64_t bytes_ = 0;
  at::Tensor pack_;
  std::vector<at::Tensor> packed_;  // the sources' places in `pack_`
  std::vector<at::Tensor> flat_;    // [target], bytes
};

}  // namespace dataparallel::detail
