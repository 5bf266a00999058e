#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

namespace torch::autograd {
struct Node;
}

namespace dataparallel::detail {

/// What a tensor looked like when replicas were last laid out by it.
struct Snapshot {
  const void* data;
  at::DimVector sizes;
  at::DimVector strides;
  at::ScalarType dtype;
  at::Device device;
  bool requires_grad;
  bool hooked;
  const torch::autograd::Node* grad_fn;
};

Snapshot snapshot(const at::Tensor& tensor);

/// Whether `tensor` still looks so.
bool same(const Snapshot& seen, const at::Tensor& tensor);

/// Has strides, and its elements as they lie in memory.
bool is_strided(const at::Tensor& tensor);

/// Null where the tensor is not strided.
const void* data_of(const at::Tensor& tensor);

/// Of a leaf: before or after its gradient is accumulated.
bool has_hooks(const at::Tensor& tensor);

/// torch's version counter; 0 of an inference tensor, which has none.
int64_t version_of(const at::Tensor& tensor);

}  // namespace dataparallel::detail
