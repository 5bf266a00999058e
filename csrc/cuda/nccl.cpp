#include <ATen/ATen.h>
#include <torch/csrc/cuda/nccl.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "detail/communicator.h"
#include "detail/peer_copies.h"

// Note [NCCL]
//
// Through torch's own functions, so that the process has one NCCL, the one that
// libtorch_cuda is linked with, and one set of its communicators for each
// device list, whoever uses it; torch keeps them and destroys them at exit. A
// collective is one group, called from one thread, on the current streams of
// the devices, which here are the communication streams.
//
// All devices must see the collectives in the same order, and engine threads of
// several devices run bucket nodes at once: so one lock of the process is held
// from the first call of a group to its end. What a collective writes to is
// allocated before it, since memory that is allocated or freed inside a group
// may wait for a kernel that waits for the rest of the group.

namespace dataparallel::detail {
namespace {

namespace nccl = torch::cuda::nccl;

// Never destroyed: a backward may run while the process exits.
std::mutex& one_collective() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

/// `tensor` as real numbers that NCCL can add; undefined if it cannot.
at::Tensor summable(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return tensor;
    case at::kComplexFloat:
    case at::kComplexDouble:
      return at::view_as_real(tensor);
    default:
      return {};
  }
}

class Nccl : public Communicator {
 public:
  explicit Nccl(std::vector<at::Device> devices)
      : devices_(std::move(devices)), copies_(devices_) {}

  void broadcast(const std::vector<at::Tensor>& flat) override {
    std::lock_guard lock(one_collective());
    nccl::broadcast(flat);
  }

  at::Tensor reduce_add(std::vector<at::Tensor> flat) override {
    const auto some =
        std::find_if(flat.begin(), flat.end(),
                     [](const at::Tensor& one) { return one.defined(); });
    if (some == flat.end() || !summable(*some).defined()) {
      return copies_.reduce_add(std::move(flat));
    }
    const at::TensorOptions options = some->options();
    const auto sizes = some->sizes().vec();
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < flat.size(); ++i) {
      if (!flat[i].defined()) {
        flat[i] = at::zeros(sizes, options.device(devices_[i]));
      }
      parts.push_back(summable(flat[i]));
    }
    std::lock_guard lock(one_collective());
    nccl::reduce(parts, parts.front());
    return flat.front();
  }

 private:
  std::vector<at::Device> devices_;
  PeerCopies copies_;  // for the dtypes that NCCL does not have
};

}  // namespace

bool nccl_serves(const std::vector<at::Device>& devices) {
  std::set<c10::DeviceIndex> indices;
  return devices.size() > 1 &&
         std::all_of(devices.begin(), devices.end(), [&](at::Device device) {
           return device.is_cuda() && indices.insert(device.index()).second;
         });
}

std::shared_ptr<Communicator> make_nccl(std::vector<at::Device> devices) {
  return std::make_shared<Nccl>(std::move(devices));
}

}  // namespace dataparallel::detail
