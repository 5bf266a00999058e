#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <utility>
#include <vector>

namespace dataparallel::detail {

/// Where the tensors in a flat buffer begin: what vectorized kernels and cuDNN
/// like. The element sizes divide it.
inline constexpr int64_t kAlignmentBytes = 256;

/// Consecutive runs `{first, count}` of `tensors`, each of one dtype and of at
/// most `bucket_bytes` (or of one tensor that is larger), the first of at most
/// `first_bytes`, where that is less.
std::vector<std::pair<int64_t, int64_t>> split_by_bytes(
    const std::vector<at::Tensor>& tensors, int64_t bucket_bytes,
    int64_t first_bytes = std::numeric_limits<int64_t>::max());

/// The places of some tensors of one dtype in a flat buffer of that dtype, with
/// the tensors' own strides where these are dense, else contiguous ones.
class FlatLayout {
 public:
  explicit FlatLayout(const std::vector<at::Tensor>& like);

  size_t size() const { return places_.size(); }
  at::ScalarType dtype() const { return dtype_; }
  /// Uninitialized.
  at::Tensor empty(at::Device device) const;
  /// The place of tensor `i` in `flat`, a view.
  at::Tensor slice(const at::Tensor& flat, size_t i) const;
  /// Copies `tensors` to their places in `flat`, with one kernel; those that
  /// are undefined become zeros, with another.
  void pack(const std::vector<at::Tensor>& tensors,
            const at::Tensor& flat) const;

 private:
  struct Place {
    int64_t offset;
    at::DimVector sizes;
    at::DimVector strides;
  };
  at::ScalarType dtype_;
  std::vector<Place> places_;
  int64_t elements_ = 0;
};

}  // namespace dataparallel::detail
