#include "detail/tensor_fit.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <cstring>

namespace dataparallel::detail {
namespace {

std::string dtype_name(at::ScalarType dtype) {
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         tensor.has_storage();
}

}  // namespace

Place place_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || !tensor.has_storage() ||
      tensor.numel() == 0) {
    return {tensor.unsafeGetTensorImpl(), 0, {}, {}, tensor.scalar_type()};
  }
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(),
          tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

bool same_values(const at::Tensor& a, const at::Tensor& b,
                 at::ScalarType dtype) {
  if (a.is_quantized() || b.is_quantized()) {
    return at::equal(a.cpu(), b.cpu());
  }
  const auto plain = [dtype](const at::Tensor& tensor) {
    const at::Tensor dense =
        tensor.layout() == at::kStrided ? tensor : tensor.to_dense();
    return dense.to(at::kCPU, dtype).resolve_conj().resolve_neg().contiguous();
  };
  const at::Tensor x = plain(a), y = plain(b);
  if (x.sizes() != y.sizes()) {
    return false;
  }
  if (std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0) {
    return true;
  }
  try {
    return at::equal(x, y);
  } catch (const c10::NotImplementedError&) {
    return false;  // of that dtype the bits alone can be compared
  }
}

std::string CopyTrial::obstacle(const at::Tensor& target,
                                const at::Tensor& source, at::Tensor& staged) {
  if (source.is_complex() && !target.is_complex()) {
    return "the values are " + dtype_name(source.scalar_type()) +
           ", and the model's " + dtype_name(target.scalar_type()) +
           " would lose their imaginary parts.";
  }
  if (target.is_inference() && !c10::InferenceMode::is_enabled()) {
    return "the model's tensor was made in inference mode, outside of which "
           "it cannot be written.";
  }
  if (target.is_meta() != source.is_meta()) {
    return target.is_meta()
               ? "the model's tensor is on the meta device and has no values "
                 "to write; assign(true) gives it the checkpoint's."
               : "the checkpoint's tensor is on the meta device and has no "
                 "values.";
  }
  try {
    if (!is_plain(target) || !is_plain(source)) {
      staged = target.detach().clone().copy_(source);
      return "";
    }
    at::assert_no_internal_overlap(target);
    // One element shows whether there is a kernel for these two kinds.
    if (kinds_
            .emplace(target.device().str(), target.scalar_type(),
                     source.device().str(), source.scalar_type())
            .second) {
      at::zeros({1}, target.options()).copy_(at::zeros({1}, source.options()));
    }
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

std::string assign_obstacle(const at::Tensor& target, const at::Tensor& source,
                            bool replaceable) {
  if (target.requires_grad() && !source.is_floating_point() &&
      !source.is_complex()) {
    return "the parameter requires a gradient, and " +
           dtype_name(source.scalar_type()) + " has none.";
  }
  if (!replaceable && !at::_has_compatible_shallow_copy_type(target, source)) {
    return c10::str("a ", source.layout(), " tensor on ", source.device(),
                    " cannot take the place of a ", target.layout(), " one on ",
                    target.device(), ", which the module's own members hold.");
  }
  return "";
}

}  // namespace dataparallel::detail
