#include "detail/sparse_parts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace dataparallel::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// `dense` with zeros before and after it along `dim`.
at::Tensor padded(const at::Tensor& dense, int64_t dim, int64_t before,
                  int64_t after) {
  std::vector<int64_t> pad(2 * (dense.dim() - dim), 0);  // the last dim first
  pad[pad.size() - 2] = before;
  pad[pad.size() - 1] = after;
  return at::constant_pad_nd(dense, pad);
}

/// `part` at `start` along `dim` of a tensor of `sizes`, zeros elsewhere.
at::Tensor widened(const at::Tensor& part, int64_t dim, int64_t start,
                   at::IntArrayRef sizes) {
  const int64_t after = sizes[dim] - start - part.size(dim);
  if (!part.is_sparse()) {
    return padded(part, dim, start, after);
  }
  const at::Tensor whole = part.coalesce();
  at::Tensor indices = whole.indices();
  at::Tensor values = whole.values();
  if (dim < whole.sparse_dim()) {
    indices = indices.clone();
    indices.select(/*dim=*/0, dim).add_(start);
  } else {
    values = padded(values, dim - whole.sparse_dim() + 1, start, after);
  }
  return at::sparse_coo_tensor(indices, values, sizes);
}

struct SparseNarrow : Function<SparseNarrow> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            int64_t dim, int64_t start, int64_t size) {
    context->saved_data["dim"] = dim;
    context->saved_data["start"] = start;
    context->saved_data["sizes"] = tensor.sizes();
    return tensor.index_select(
        dim, at::arange(
                 start, start + size,
                 at::TensorOptions().dtype(at::kLong).device(tensor.device())));
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    return {widened(gradients[0], context->saved_data["dim"].toInt(),
                    context->saved_data["start"].toInt(),
                    context->saved_data["sizes"].toIntVector()),
            {},
            {},
            {}};
  }
};

struct SparseCat : Function<SparseCat> {
  static at::Tensor forward(AutogradContext* context, at::TensorList parts,
                            int64_t dim) {
    std::vector<int64_t> sizes;
    for (const at::Tensor& part : parts) {
      sizes.push_back(part.size(dim));
    }
    context->saved_data["sizes"] = sizes;
    context->saved_data["dim"] = dim;
    return at::cat(parts, dim);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    const int64_t dim = context->saved_data["dim"].toInt();
    variable_list parts;
    int64_t start = 0;
    for (const int64_t size : context->saved_data["sizes"].toIntVector()) {
      parts.push_back(gradient.is_sparse()
                          ? sparse_narrow(gradient, dim, start, size)
                          : gradient.narrow(dim, start, size));
      start += size;
    }
    parts.emplace_back();  // for `dim`
    return parts;
  }
};

}  // namespace

at::Tensor sparse_narrow(const at::Tensor& tensor, int64_t dim, int64_t start,
                         int64_t size) {
  return SparseNarrow::apply(tensor, dim, start, size);
}

at::Tensor sparse_cat(const std::vector<at::Tensor>& parts, int64_t dim) {
  return SparseCat::apply(at::TensorList(parts), dim);
}

}  // namespace dataparallel::detail
