#include "checkpoint/view.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

/// Bytes that elements of that dtype take; some share one.
uint64_t bytes_of(uint64_t elements, at::ScalarType dtype) {
  const uint64_t per_byte = dtype == at::kQUInt4x2   ? 2
                            : dtype == at::kQUInt2x4 ? 4
                                                     : 1;
  return (elements * c10::elementSize(dtype) + per_byte - 1) / per_byte;
}

}  // namespace

std::string text_of(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
  }
  return text + "]";
}

bool lies_in_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return true;
  }
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return bytes_of(static_cast<uint64_t>(last) + 1, tensor.scalar_type()) <=
             tensor.storage().nbytes() &&
         (tensor.is_meta() || tensor.storage().data() != nullptr);
}

/// Fails unless the view's elements lie between 0 and `available` bytes, and
/// all its numbers can be computed with.
void check_view(const ViewOptions& view, uint64_t available) {
  const auto bad = [&](const std::string& why) {
    fail("a tensor of shape " + text_of(view.sizes) + ", strides " +
         text_of(view.strides) + " and offset " + std::to_string(view.offset) +
         " " + why);
  };
  if (view.sizes.size() != view.strides.size()) {
    bad("has not as many strides as dimensions");
  }
  if (view.offset < 0) {
    bad("starts before its storage");
  }
  bool is_empty = false;
  bool overflow = false;
  int64_t numel = 1;
  int64_t last = view.offset;
  for (size_t i = 0; i < view.sizes.size(); ++i) {
    if (view.sizes[i] < 0 || view.strides[i] < 0) {
      bad("has a negative size or stride");
    }
    is_empty = is_empty || view.sizes[i] == 0;
    int64_t span = 0;
    overflow |= __builtin_mul_overflow(std::max<int64_t>(view.sizes[i], 1),
                                       numel, &numel);
    overflow |= __builtin_mul_overflow(std::max<int64_t>(view.sizes[i] - 1, 0),
                                       view.strides[i], &span);
    overflow |= __builtin_add_overflow(last, span, &last);
  }
  constexpr int64_t kMost = int64_t{1} << 58;
  if (overflow || numel >= kMost || last >= kMost) {
    bad("is too large");
  }
  const uint64_t needed =
      is_empty ? 0 : bytes_of(static_cast<uint64_t>(last) + 1, view.dtype);
  if (needed > available) {
    bad("needs " + detail::count_text(needed, "byte") +
        " of its storage, which has " + std::to_string(available));
  }
}

void set_requires_grad(const at::Tensor& tensor, bool value) {
  if (value == tensor.requires_grad()) {
    return;
  }
  if (value && !tensor.is_floating_point() && !tensor.is_complex()) {
    fail("a tensor of dtype " + dtype_name(tensor.scalar_type()) +
         " is said to require gradients");
  }
  tensor.set_requires_grad(value);
}

at::Tensor view_of(StorageRef& storage, const ViewOptions& options) {
  check_view(options, storage.nbytes);
  const size_t item = c10::elementSize(options.dtype);
  if (storage.base_bytes % item != 0) {
    fail("a tensor starts within an element of its storage");
  }
  const c10::Device device = storage.storage.device();
  const int64_t offset =
      options.offset + static_cast<int64_t>(storage.base_bytes / item);
  at::Tensor tensor;
  if (device.is_cpu() || device.is_cuda() || device.is_meta()) {
    const auto key = device.is_cpu()    ? c10::DispatchKey::CPU
                     : device.is_cuda() ? c10::DispatchKey::CUDA
                                        : c10::DispatchKey::Meta;
    tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage.storage), c10::DispatchKeySet(key),
        c10::scalarTypeToTypeMeta(options.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        options.sizes, options.strides, offset);
  } else {
    tensor =
        at::empty({0}, at::TensorOptions().dtype(options.dtype).device(device));
    tensor.set_(storage.storage, offset, options.sizes, options.strides);
  }
  set_requires_grad(tensor, options.requires_grad);
  return tensor;
}

}  // namespace dataparallel::checkpoint
