#include "detail/reduce.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "detail/links.h"
#include "detail/streams.h"

namespace dataparallel::detail {
namespace {

using Gradients = std::vector<std::vector<at::Tensor>>;

/// Whether nothing but `tensor` would notice if it were written to.
bool is_ours_alone(const at::Tensor& tensor) {
  return !at::GradMode::is_enabled() && tensor.use_count() == 1 &&
         tensor.layout() == at::kStrided && tensor.storage().use_count() == 1 &&
         tensor.is_non_overlapping_and_dense() && !tensor.is_inference();
}

// A gradient may have been allocated on another stream of its device than the
// one that is current here, and is freed as soon as it has been added.
void keep_for_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) {
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

/// The gradients of parameter `i` one by one.
at::Tensor add_singly(Gradients& gradients, size_t i, at::Device device) {
  at::Tensor sum;
  for (std::vector<at::Tensor>& of_replica : gradients) {
    at::Tensor gradient = std::move(of_replica[i]);
    if (gradient.defined()) {
      at::Tensor here = moved(gradient, device);
      gradient = at::Tensor();
      sum = sum.defined() ? plus(std::move(sum), here) : std::move(here);
    }
  }
  return sum;
}

/// Takes out of `gradients` those that can travel in a flat buffer: of
/// parameters whose gradients are dense and of one dtype in all replicas.
Gradients take_flat(Gradients& gradients, at::ScalarType dtype) {
  Gradients flat(gradients.size());
  for (auto& of_replica : flat) {
    of_replica.resize(gradients.front().size());
  }
  for (size_t i = 0; i < gradients.front().size(); ++i) {
    const bool fits = std::all_of(
        gradients.begin(), gradients.end(), [&](const auto& of_replica) {
          return !of_replica[i].defined() ||
                 (of_replica[i].layout() == at::kStrided &&
                  of_replica[i].scalar_type() == dtype);
        });
    for (size_t replica = 0; fits && replica < gradients.size(); ++replica) {
      flat[replica][i] = std::move(gradients[replica][i]);
    }
  }
  return flat;
}

bool any_defined(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.defined(); });
}

/// The sum of all in one buffer; undefined where there is nothing to add up.
at::Tensor add_together(const Gradients& gradients,
                        const std::vector<at::Device>& devices,
                        const FlatLayout& layout, Communicator& communicator) {
  at::Tensor sum;
  {
    const OnStreams on_comm_streams(comm_streams(devices));
    std::vector<at::Tensor> flat(gradients.size());
    for (size_t replica = 0; replica < gradients.size(); ++replica) {
      if (any_defined(gradients[replica])) {
        std::for_each(gradients[replica].begin(), gradients[replica].end(),
                      keep_for_current_stream);
        flat[replica] = layout.empty(devices[replica]);
        layout.pack(gradients[replica], flat[replica]);
      }
    }
    sum = communicator.reduce_add(std::move(flat));
  }
  keep_for_current_stream(sum);
  return sum;
}

}  // namespace

at::Tensor plus(at::Tensor sum, const at::Tensor& gradient) {
  if (is_ours_alone(sum) && sum.dtype() == gradient.dtype()) {
    return sum.add_(gradient);
  }
  // torch adds a sparse tensor to a dense one, in this order only.
  return sum.is_sparse() && !gradient.is_sparse() ? gradient + sum
                                                  : sum + gradient;
}

std::vector<at::Tensor> reduce_add(Gradients gradients,
                                   const std::vector<at::Device>& devices,
                                   const FlatLayout& layout,
                                   Communicator& communicator) {
  const size_t parameters = gradients.front().size();
  std::vector<at::Tensor> sums(parameters);
  for (const auto& of_replica : gradients) {
    std::for_each(of_replica.begin(), of_replica.end(),
                  keep_for_current_stream);
  }
  bool far = false;
  for (size_t replica = 1; replica < gradients.size(); ++replica) {
    far = far ||
          (devices[replica] != devices[0] && any_defined(gradients[replica]));
  }
  if (far && !at::GradMode::is_enabled()) {
    const Gradients together = take_flat(gradients, layout.dtype());
    const at::Tensor sum =
        add_together(together, devices, layout, communicator);
    for (size_t i = 0; i < parameters; ++i) {
      const bool used = std::any_of(
          together.begin(), together.end(),
          [&](const auto& of_replica) { return of_replica[i].defined(); });
      if (used) {
        sums[i] = layout.slice(sum, i);
      }
    }
  }
  for (size_t i = 0; i < parameters; ++i) {
    if (!sums[i].defined()) {
      sums[i] = add_singly(gradients, i, devices[0]);
    }
  }
  return sums;
}

}  // namespace dataparallel::detail
