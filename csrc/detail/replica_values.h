#pragma once

#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "detail/counterparts.h"
#include "detail/flat_bucket.h"
#include "detail/snapshot.h"

namespace dataparallel::detail {

/// The values of the replicas: where they lie, and how they follow those of the
/// original. See Note [Where a replica's values live].
///
/// `counterparts` must outlive it. Not thread-safe; works on the current
/// streams of the calling thread.
class ReplicaValues {
 public:
  ReplicaValues(std::string function, std::vector<at::Device> devices,
                int64_t bucket_bytes, Transport transport,
                const std::vector<Counterpart>& counterparts);

  /// Throws if the original is no longer on the first of the devices.
  void check_devices() const;
  /// Gives all replicas' tensors their places; the copies must have no gradient
  /// edge. Values are not copied.
  void lay_out();
  /// Sees what has changed; false if something must be laid out anew.
  bool follow();
  /// Whether a parameter has changed since `follow`, by its version counter.
  bool parameters_changed() const;
  /// Copies the originals' values; buffers alone without `parameters`.
  void copy(bool parameters = true);
  /// Throws if a parameter that replicas share has changed since `follow`.
  void check_unwritten() const;

 private:
  /// Of one counterpart.
  struct State {
    std::optional<Snapshot> seen;
    int64_t version = 0;
    /// `[replica]`: what the copies point to; 0 and shared ones undefined.
    std::vector<at::Tensor> homes;
  };

  bool shares(size_t i, size_t replica) const;
  void lay_out_singly(size_t replica);
  void lay_out_buckets(bool parameters, const std::vector<size_t>& remote);
  void share_pack();
  void place(size_t i, size_t replica);
  void copy_singly(size_t i, size_t replica);

  std::string function_;
  std::vector<at::Device> devices_;
  int64_t bucket_bytes_;
  Transport transport_;
  const std::vector<Counterpart>& counterparts_;
  std::vector<State> states_;
  std::vector<FlatBucket> buckets_;  // of parameters, then of buffers
  size_t parameter_buckets_ = 0;
  /// Copied one by one: buffers on the original's own device, and what has no
  /// strides.
  std::vector<std::pair<size_t, size_t>> singly_;  // counterpart, replica
  /// The current streams when all was laid out, which autograd nodes keep.
  std::vector<c10::Stream> streams_;
};

}  // namespace dataparallel::detail
