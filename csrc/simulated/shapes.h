#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <string>

namespace dataparallel::simulated {

/// In a dry run: what the operator would return, for operators whose meta
/// kernel torch has in Python only. The arguments on the stack are meta tensors
/// and become the results. False: the operator is not one of these.
bool run_shapes(const std::string& name, torch::jit::Stack& stack,
                size_t arguments);

/// The results of a convolution and of its backward, on meta tensors.
at::Tensor convolution_shape(const at::Tensor& input, const at::Tensor& weight,
                             at::IntArrayRef stride, at::IntArrayRef padding,
                             at::IntArrayRef dilation, bool transposed,
                             at::IntArrayRef output_padding, int64_t groups);

}  // namespace dataparallel::simulated
