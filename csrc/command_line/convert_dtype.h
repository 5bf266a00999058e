#pragma once

#include <dataparallel/state_dict.h>

#include <string>
#include <vector>

namespace dataparallel::command_line {

/// What `--dtype` may name.
const std::vector<std::string>& convertible_dtypes();

/// A new dictionary, its floating-point tensors in that dtype. Tensors of one
/// dtype that shared a storage share one afterwards; strides and requires_grad
/// are as they were. Integer, complex and quantized tensors, and what is no
/// tensor, stay.
///
/// Throws `c10::ValueError` with the name of a tensor that torch cannot
/// convert, and unless `allow_overflow` with the names of those that have
/// finite values beyond the largest of that dtype: they would become inf, or be
/// cut off.
StateDict convert_dtype(const StateDict& dict, const std::string& dtype,
                        bool allow_overflow);

}  // namespace dataparallel::command_line
