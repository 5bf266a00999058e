#include "detail/links.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "detail/torch_compat.h"

namespace dataparallel::detail {
namespace {

constexpr int64_t kPatternElements = 512;

using Pair = std::pair<at::Device, at::Device>;

struct PairHash {
  size_t operator()(const Pair& pair) const {
    return c10::hash_combine(std::hash<at::Device>()(pair.first),
                             std::hash<at::Device>()(pair.second));
  }
};

Pair pair_of(at::Device a, at::Device b) {
  const auto rank = [](at::Device device) {
    return std::pair(device.type(), device.index());
  };
  return rank(a) < rank(b) ? Pair(a, b) : Pair(b, a);
}

bool arrives(at::Device source, at::Device target) {
  const at::Tensor pattern =
      at::arange(1, kPatternElements + 1, at::dtype(at::kLong));
  return pattern.to(source).to(target).cpu().equal(pattern);
}

/// Whether a direct copy between the two arrives as it was sent.
bool is_sound(at::Device a, at::Device b) {
  if (a == b || a.is_cpu() || b.is_cpu()) {
    return true;
  }
  static std::mutex mutex;
  static auto* known = new std::unordered_map<Pair, bool, PairHash>;
  const Pair pair = pair_of(a, b);
  std::lock_guard lock(mutex);
  const auto found = known->find(pair);
  if (found != known->end()) {
    return found->second;
  }
  const c10::InferenceMode inference_mode;
  bool sound = true;
  try {
    sound = arrives(a, b) && arrives(b, a);
  } catch (const c10::NotImplementedError&) {
    // Devices that hold no values, as a dry run's.
  }
  known->emplace(pair, sound);
  if (!sound) {
    TORCH_WARN("dataparallel: what is copied between ", pair.first, " and ",
               pair.second,
               " arrives wrong (a known pattern did not come back); copies "
               "between them go through the host's memory from now on, which "
               "is slower. On PCIe the usual cause is an IOMMU between the "
               "slots");
  }
  return sound;
}

/// The copy that made `tensor` is undone in backward as soon as it can be: else
/// the engine's thread of this device would launch all of its own replica's
/// backward before another one got its part of the gradient.
at::Tensor first_in_backward(const at::Tensor& tensor) {
  if (const auto& copy = tensor.grad_fn()) {
    copy->set_sequence_nr(kRunAsSoonAsReady);
  }
  return tensor;
}

}  // namespace

bool check_links(const std::vector<at::Device>& devices) {
  bool sound = true;
  for (size_t i = 0; i < devices.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      sound = is_sound(devices[i], devices[j]) && sound;
    }
  }
  return sound;
}

at::Tensor moved(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) {
    return tensor;
  }
  const bool sound = is_sound(tensor.device(), device);
  const at::Tensor source = sound ? tensor : first_in_backward(tensor.cpu());
  return first_in_backward(
      source.to(device, /*non_blocking=*/!device.is_cpu()));
}

void copy_into(const at::Tensor& target, const at::Tensor& source) {
  const bool sound = is_sound(source.device(), target.device());
  target.copy_(sound ? source : source.cpu(),
               /*non_blocking=*/!target.is_cpu());
}

}  // namespace dataparallel::detail
