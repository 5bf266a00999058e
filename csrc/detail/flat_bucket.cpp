#include "detail/flat_bucket.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>

#include "detail/flat_layout.h"

namespace dataparallel::detail {
namespace {

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
}

at::Tensor view_of(const at::Storage& storage, at::Device device,
                   at::ScalarType dtype, int64_t offset, at::IntArrayRef sizes,
                   at::IntArrayRef strides) {
  at::Tensor result =
      at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  result.set_(storage, offset, sizes, strides);
  return result;
}

struct Extent {
  int64_t begin;
  int64_t end;
  int64_t tensors;
};

Extent extent_of(const at::Tensor& tensor) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const int64_t begin = tensor.storage_offset() * size;
  return {begin, begin + (last + 1) * size, 1};
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> split_keeping_storages(
    const std::vector<at::Tensor>& tensors, int64_t bucket_bytes) {
  std::vector<std::pair<int64_t, int64_t>> runs;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto size = static_cast<int64_t>(tensors[i].nbytes());
    const bool stays =
        i > 0 && tensors[i].storage().is_alias_of(tensors[i - 1].storage());
    if (runs.empty() || (bytes + size > bucket_bytes && !stays)) {
      runs.emplace_back(static_cast<int64_t>(i), 0);
      bytes = 0;
    }
    ++runs.back().second;
    bytes += size;
  }
  return runs;
}

FlatBucket::FlatBucket(const std::vector<at::Tensor>& originals,
                       const std::vector<at::Device>& targets,
                       std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {
  std::unordered_map<const void*, Extent> extents;
  for (const at::Tensor& original : originals) {
    if (original.numel() == 0) {
      continue;
    }
    const Extent one = extent_of(original);
    const auto [found, fresh] =
        extents.emplace(original.storage().unsafeGetStorageImpl(), one);
    if (!fresh) {
      found->second = {std::min(found->second.begin, one.begin),
                       std::max(found->second.end, one.end),
                       found->second.tensors + 1};
    }
  }
  const at::Device device = originals.front().device();
  std::unordered_map<const void*, int64_t> block_offsets;
  for (const at::Tensor& original : originals) {
    Place place{bytes_, original.sizes().vec(), original.strides().vec(),
                original.scalar_type()};
    if (original.numel() == 0) {
      places_.push_back(std::move(place));
      continue;
    }
    const void* key = original.storage().unsafeGetStorageImpl();
    const Extent& extent = extents.at(key);
    if (extent.tensors > 1) {
      // Keep the whole block as it lies; its start keeps its alignment.
      const int64_t begin = extent.begin / kAlignmentBytes * kAlignmentBytes;
      const auto [offset, fresh] = block_offsets.emplace(key, bytes_);
      if (fresh) {
        const int64_t size = extent.end - begin;
        Place block{bytes_, {size}, {1}, at::kByte};
        sources_.push_back(view_of(original.storage(), device, at::kByte, begin,
                                   block.sizes, block.strides));
        source_places_.push_back(std::move(block));
        bytes_ += aligned(size);
      }
      place.byte_offset = offset->second + extent_of(original).begin - begin;
    } else {
      if (!original.is_non_overlapping_and_dense()) {
        place.strides = at::empty(original.sizes(), at::kMeta).strides().vec();
      }
      sources_.push_back(original.detach());
      source_places_.push_back(place);
      bytes_ += aligned(static_cast<int64_t>(original.nbytes()));
    }
    places_.push_back(std::move(place));
  }
  for (const at::Device& target : targets) {
    flat_.push_back(at::empty(
        {bytes_}, at::TensorOptions().dtype(at::kByte).device(target)));
  }
}

at::Tensor FlatBucket::view(const at::Tensor& flat, const Place& place) const {
  return view_of(
      flat.storage(), flat.device(), place.dtype,
      place.byte_offset / static_cast<int64_t>(c10::elementSize(place.dtype)),
      place.sizes, place.strides);
}

at::Tensor FlatBucket::slice(size_t t, size_t i) const {
  return view(flat_[t], places_[i]);
}

void FlatBucket::set_pack(const at::Tensor& pack) {
  pack_ = pack.narrow(/*dim=*/0, /*start=*/0, bytes_);
  packed_.clear();
  for (const Place& place : source_places_) {
    packed_.push_back(view(pack, place));
  }
}

void FlatBucket::copy() {
  if (sources_.empty()) {
    return;
  }
  at::_foreach_copy_(packed_, sources_);
  std::vector<at::Tensor> flat{pack_};
  flat.insert(flat.end(), flat_.begin(), flat_.end());
  communicator_->broadcast(flat);
}

}  // namespace dataparallel::detail
