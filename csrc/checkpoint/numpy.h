#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace dataparallel::checkpoint {

/// The part of a `numpy.dtype` that has a torch dtype.
struct NumpyType {
  at::ScalarType dtype;
  bool reversed;  ///< its bytes are in the other order
};

/// None: not a `numpy.dtype`, or one that torch lacks (text, objects, dates).
std::optional<NumpyType> numpy_type(const c10::IValue& value);

/// The tensor of a NumPy array. Fails where the bytes are not as many as the
/// shape needs.
at::Tensor numpy_array(const NumpyType& type, const std::vector<int64_t>& shape,
                       bool fortran, const std::string& bytes);

/// The array with its dimensions in another order. Fails where `axes` is none.
at::Tensor numpy_transpose(const at::Tensor& array,
                           const std::vector<int64_t>& axes);

/// The number of a NumPy scalar. None: not of that many bytes.
std::optional<c10::IValue> numpy_scalar(const NumpyType& type,
                                        const std::string& bytes);

}  // namespace dataparallel::checkpoint
