#include "detail/tensor_writer.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <algorithm>

namespace dataparallel::detail {
namespace {

/// Whether the values are to lie as the target's before they leave their
/// device. Else torch would make that copy, or one on the target's device.
bool is_rearranged_at_source(const at::Tensor& target,
                             const at::Tensor& source) {
  return target.device() != source.device() &&
         (target.scalar_type() != source.scalar_type() ||
          !source.is_contiguous() || source.is_conj() || source.is_neg());
}

bool is_rearranged_at_target(const at::Tensor& target,
                             const at::Tensor& source) {
  return target.device() != source.device() && !target.is_contiguous();
}

}  // namespace

void TensorWriter::plan(const at::Tensor& target, const at::Tensor& source) {
  const auto need = [&](at::Device device) {
    int64_t& bytes = bytes_[device.str()];
    bytes = std::max(
        bytes, static_cast<int64_t>(target.numel() * target.element_size()));
  };
  if (is_rearranged_at_source(target, source)) {
    need(source.device());
  }
  if (is_rearranged_at_target(target, source)) {
    need(target.device());
  }
}

void TensorWriter::allocate() {
  for (const auto& [device, bytes] : bytes_) {
    buffers_[device] = at::empty(
        {bytes}, at::TensorOptions(at::kByte).device(at::Device(device)));
  }
}

void TensorWriter::write(const at::Tensor& target, const at::Tensor& source) {
  at::Tensor values = source;
  if (is_rearranged_at_source(target, source)) {
    values = buffer(target, source.device());
    values.copy_(source);
  }
  if (is_rearranged_at_target(target, source)) {
    const at::Tensor there = buffer(target, target.device());
    there.copy_(values);
    values = there;
  }
  target.copy_(values);
}

at::Tensor TensorWriter::buffer(const at::Tensor& target, at::Device device) {
  at::Tensor tensor =
      at::empty({0}, target.options().device(device).requires_grad(false));
  tensor.set_(buffers_.at(device.str()).storage(), 0, target.sizes(),
              c10::contiguous_strides(target.sizes()));
  return tensor;
}

}  // namespace dataparallel::detail
