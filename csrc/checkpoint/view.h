#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "checkpoint/storages.h"

namespace dataparallel::checkpoint {

struct ViewOptions {
  at::ScalarType dtype;
  int64_t offset = 0;  ///< in elements
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  bool requires_grad = false;
};

/// Fails unless the view's elements lie between 0 and `available` bytes, and
/// all its numbers can be computed with.
void check_view(const ViewOptions& view, uint64_t available);

/// Whether all elements of a dense tensor lie in its storage, whose memory may
/// have been given back.
bool lies_in_storage(const at::Tensor& tensor);

/// A dense tensor over a storage. A view that does not lie inside fails.
at::Tensor view_of(StorageRef& storage, const ViewOptions& options);

/// Fails where a tensor of its dtype can have no gradient.
void set_requires_grad(const at::Tensor& tensor, bool value);

/// "[2, 3]"
std::string text_of(const std::vector<int64_t>& values);

}  // namespace dataparallel::checkpoint
