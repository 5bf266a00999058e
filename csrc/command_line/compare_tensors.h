#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dataparallel::command_line {

/// What differs between two tensors.
struct TensorDifference {
  /// "dtype", "shape", "layout", "requires_grad", "quantization", "indices".
  std::vector<std::string> properties;
  /// Of elements that were compared, and that differ.
  int64_t elements = 0;
  int64_t different = 0;
  /// Those of them that are not a number in one tensor alone.
  int64_t nan_in_one = 0;
  /// The most of |a - b| among the others; none where there is no such number.
  std::optional<double> most;

  bool empty() const { return properties.empty() && different == 0; }
};

/// The bytes of all elements, in order; of one that is there many times, once.
std::string contents_of(const at::Tensor& tensor);

/// Two elements are the same if they are equal as numbers or both not a number;
/// of dtypes without arithmetic, if they have the same bits. Quantized tensors
/// are compared by the integers they store, sparse ones by their indices and
/// stored values. Strides and devices are not compared.
TensorDifference compare_tensors(const at::Tensor& a, const at::Tensor& b,
                                 bool with_requires_grad);

}  // namespace dataparallel::command_line
