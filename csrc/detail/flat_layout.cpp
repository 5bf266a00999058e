#include "detail/flat_layout.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace dataparallel::detail {
std::vector<std::pair<int64_t, int64_t>> split_by_bytes(
    const std::vector<at::Tensor>& tensors, int64_t bucket_bytes,
    int64_t first_bytes) {
  std::vector<std::pair<int64_t, int64_t>> runs;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto size = static_cast<int64_t>(tensors[i].nbytes());
    const int64_t limit =
        runs.size() == 1 ? std::min(first_bytes, bucket_bytes) : bucket_bytes;
    if (runs.empty() || bytes + size > limit ||
        tensors[i].scalar_type() != tensors[i - 1].scalar_type()) {
      runs.emplace_back(static_cast<int64_t>(i), 0);
      bytes = 0;
    }
    ++runs.back().second;
    bytes += size;
  }
  return runs;
}

FlatLayout::FlatLayout(const std::vector<at::Tensor>& like)
    : dtype_(like.front().scalar_type()) {
  const auto alignment =
      kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype_));
  for (const at::Tensor& tensor : like) {
    TORCH_INTERNAL_ASSERT(tensor.scalar_type() == dtype_);
    const bool dense = tensor.layout() == at::kStrided &&
                       tensor.is_non_overlapping_and_dense();
    places_.push_back(
        {elements_, at::DimVector(tensor.sizes()),
         at::DimVector(dense
                           ? tensor.strides()
                           : at::empty(tensor.sizes(), at::kMeta).strides())});
    elements_ += (tensor.numel() + alignment - 1) / alignment * alignment;
  }
}

at::Tensor FlatLayout::empty(at::Device device) const {
  return at::empty({elements_}, at::dtype(dtype_).device(device));
}

at::Tensor FlatLayout::slice(const at::Tensor& flat, size_t i) const {
  const Place& place = places_[i];
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(flat.storage()), flat.key_set(),
      flat.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      place.sizes, place.strides, flat.storage_offset() + place.offset);
  return view;
}

void FlatLayout::pack(const std::vector<at::Tensor>& tensors,
                      const at::Tensor& flat) const {
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> unused;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined()) {
      sources.push_back(tensors[i]);
      targets.push_back(slice(flat, i));
    } else {
      unused.push_back(slice(flat, i));
    }
  }
  if (!sources.empty()) {
    at::_foreach_copy_(targets, sources);
  }
  if (!unused.empty()) {
    at::_foreach_zero_(unused);
  }
}

}  // namespace dataparallel::detail
