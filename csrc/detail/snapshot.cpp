#include "detail/snapshot.h"

#include <torch/csrc/autograd/variable.h>

namespace dataparallel::detail {
namespace {

using torch::autograd::impl::get_autograd_meta;

const torch::autograd::Node* grad_fn_of(const at::Tensor& tensor) {
  const auto* meta = get_autograd_meta(tensor);
  return meta == nullptr ? nullptr : meta->grad_fn_.get();
}

}  // namespace

bool is_strided(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg();
}

const void* data_of(const at::Tensor& tensor) {
  return is_strided(tensor) ? tensor.const_data_ptr() : nullptr;
}

bool has_hooks(const at::Tensor& tensor) {
  const auto* meta = get_autograd_meta(tensor);
  if (meta == nullptr) {
    return false;
  }
  const auto accumulator =
      torch::autograd::impl::try_get_grad_accumulator(tensor);
  return !meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr ||
         (accumulator != nullptr && !accumulator->post_hooks().empty());
}

Snapshot snapshot(const at::Tensor& tensor) {
  const bool strided = is_strided(tensor);
  return {data_of(tensor),
          at::DimVector(tensor.sizes()),
          strided ? at::DimVector(tensor.strides()) : at::DimVector(),
          tensor.scalar_type(),
          tensor.device(),
          tensor.requires_grad(),
          has_hooks(tensor),
          grad_fn_of(tensor)};
}

bool same(const Snapshot& seen, const at::Tensor& tensor) {
  return seen.data == data_of(tensor) &&
         seen.requires_grad == tensor.requires_grad() &&
         seen.dtype == tensor.scalar_type() && seen.device == tensor.device() &&
         seen.hooked == has_hooks(tensor) &&
         seen.grad_fn == grad_fn_of(tensor) &&
         tensor.sizes() == at::IntArrayRef(seen.sizes) &&
         (!is_strided(tensor) ||
          tensor.strides() == at::IntArrayRef(seen.strides));
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference()
             ? 0
             : static_cast<int64_t>(tensor.unsafeGetTensorImpl()
                                        ->version_counter()
                                        .current_version());
}

}  // namespace dataparallel::detail
