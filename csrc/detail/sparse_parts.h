#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dataparallel::detail {

// Parts of sparse COO tensors, differentiable: torch's own derivatives of
// `index_select` and `cat` have no kernels for sparse gradients. Gradients may
// be sparse or dense.

/// `tensor.narrow(dim, start, size)`, a copy.
at::Tensor sparse_narrow(const at::Tensor& tensor, int64_t dim, int64_t start,
                         int64_t size);

/// `at::cat(parts, dim)`.
at::Tensor sparse_cat(const std::vector<at::Tensor>& parts, int64_t dim);

}  // namespace dataparallel::detail
