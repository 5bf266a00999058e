#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace dataparallel::detail {

/// Copies values into tensors of other dtypes and devices. All memory that this
/// takes is allocated before the first is written: a copy that fails for want
/// of it would leave some written and some not.
///
/// It is as much as the largest tensor takes that has to be converted or
/// rearranged on its way between two devices; on one device nothing.
class TensorWriter {
 public:
  /// Notes that `write` will be called with these dense tensors.
  void plan(const at::Tensor& target, const at::Tensor& source);
  /// Throws `c10::OutOfMemoryError`.
  void allocate();
  /// Changes nothing but the target. Between devices, ordered as torch's
  /// `copy_` is.
  void write(const at::Tensor& target, const at::Tensor& source);

 private:
  /// A contiguous tensor like `target`, in the memory set aside on `device`.
  at::Tensor buffer(const at::Tensor& target, at::Device device);

  std::map<std::string, int64_t> bytes_;  // by device
  std::map<std::string, at::Tensor> buffers_;
};

}  // namespace dataparallel::detail
