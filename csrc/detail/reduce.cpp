#include "detail/reduce.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "detail/flat_bucket.h"
#include "detail/links.h"

namespace dataparallel::detail {
namespace {

/// Whether nothing but `tensor` would notice if it were written to.
bool is_ours_alone(const at::Tensor& tensor) {
  return !at::GradMode::is_enabled() && tensor.use_count() == 1 &&
         tensor.layout() == at::kStrided && tensor.storage().use_count() == 1 &&
         tensor.is_non_overlapping_and_dense() && !tensor.is_inference();
}

// A gradient may have been allocated on another stream of its device than the
// one that is current here, and is freed as soon as it has been added.
void keep_for_current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return;
  }
  const auto* guard = c10::impl::getDeviceGuardImpl(tensor.device().type());
  const c10::Stream stream = guard->getStream(tensor.device());
  if (tensor.is_sparse()) {
    guard->recordDataPtrOnStream(tensor._indices().storage().data_ptr(),
                                 stream);
    guard->recordDataPtrOnStream(tensor._values().storage().data_ptr(), stream);
  } else {
    guard->recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

/// Brings the dense gradients among `gradients` from another device to
/// `device`, in one flat buffer.
void bring(std::vector<at::Tensor>& gradients, at::Device device) {
  std::vector<at::Tensor> there;
  std::vector<size_t> indices;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    if (gradient.defined() && gradient.device() != device &&
        gradient.layout() == at::kStrided &&
        (there.empty() || gradient.device() == there.front().device())) {
      there.push_back(gradient);
      indices.push_back(i);
    }
  }
  if (there.size() < 2) {
    return;
  }
  FlatBucket bucket(there, {device}, /*keep_storages=*/false);
  bucket.set_pack(at::empty(
      {bucket.bytes()},
      at::TensorOptions().dtype(at::kByte).device(there.front().device())));
  bucket.copy();
  for (size_t k = 0; k < there.size(); ++k) {
    gradients[indices[k]] = bucket.slice(/*t=*/0, k);
  }
}

/// The sums so far of some parameters.
class Sums {
 public:
  explicit Sums(size_t parameters) : sums_(parameters), ours_(parameters) {}

  /// `fresh`: made by `bring`, so that nobody else has them.
  void add(std::vector<at::Tensor> gradients, const std::vector<bool>& fresh) {
    std::vector<at::Tensor> into;
    std::vector<at::Tensor> terms;
    for (size_t i = 0; i < gradients.size(); ++i) {
      at::Tensor& gradient = gradients[i];
      if (!gradient.defined()) {
        continue;
      }
      if (!sums_[i].defined()) {
        ours_[i] = fresh[i] || is_ours_alone(gradient);
        sums_[i] = std::move(gradient);
      } else if (ours_[i] && gradient.layout() == at::kStrided &&
                 gradient.dtype() == sums_[i].dtype() &&
                 gradient.sizes() == sums_[i].sizes()) {
        into.push_back(sums_[i]);
        terms.push_back(std::move(gradient));
      } else {
        sums_[i] = plus(std::move(sums_[i]), gradient);
        ours_[i] = is_ours_alone(sums_[i]);
      }
    }
    if (!into.empty()) {
      at::_foreach_add_(into, terms);
    }
  }
  std::vector<at::Tensor> take() { return std::move(sums_); }

 private:
  std::vector<at::Tensor> sums_;
  std::vector<bool> ours_;
};

}  // namespace

at::Tensor plus(at::Tensor sum, const at::Tensor& gradient) {
  if (is_ours_alone(sum) && sum.dtype() == gradient.dtype()) {
    return sum.add_(gradient);
  }
  // torch adds a sparse tensor to a dense one, in this order only.
  return sum.is_sparse() && !gradient.is_sparse() ? gradient + sum
                                                  : sum + gradient;
}

std::vector<at::Tensor> reduce_add(
    std::vector<std::vector<at::Tensor>> gradients, at::Device device) {
  Sums sums(gradients.front().size());
  for (std::vector<at::Tensor>& of_replica : gradients) {
    for (const at::Tensor& gradient : of_replica) {
      if (gradient.defined()) {
        keep_for_current_stream(gradient);
      }
    }
    std::vector<bool> fresh(of_replica.size());
    for (size_t i = 0; i < of_replica.size(); ++i) {
      fresh[i] = of_replica[i].defined() && of_replica[i].device() != device &&
                 !at::GradMode::is_enabled();
    }
    if (!at::GradMode::is_enabled()) {
      bring(of_replica, device);
    }
    for (at::Tensor& gradient : of_replica) {
      if (gradient.defined()) {
        gradient = moved(gradient, device);
      }
    }
    sums.add(std::move(of_replica), fresh);
  }
  return sums.take();
}

}  // namespace dataparallel::detail
