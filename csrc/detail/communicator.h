#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/replicate.h>

#include <memory>
#include <vector>

namespace dataparallel::detail {

/// Moves flat buffers between the devices of one list. All work goes to the
/// calling thread's current streams; the host does not wait. Thread safety: any
/// thread.
class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Copies `flat[0]` into all others, one on each of the devices.
  virtual void broadcast(const std::vector<at::Tensor>& flat) = 0;

  /// The sum of `flat`, one on each of the devices or undefined, which counts
  /// for nothing; on the first device, undefined if all are. Two calls give the
  /// same, bit for bit. All of `flat` is given up: sums are made in place.
  virtual at::Tensor reduce_add(std::vector<at::Tensor> flat) = 0;
};

/// The one for `devices` that `transport` asks for. Throws `c10::ValueError`
/// for `kNccl` where NCCL does not serve them.
std::shared_ptr<Communicator> make_communicator(
    const std::string& function, const std::vector<at::Device>& devices,
    Transport transport);

/// Whether this library was built with CUDA, and `devices` are several CUDA
/// devices, each once.
bool nccl_serves(const std::vector<at::Device>& devices);

std::shared_ptr<Communicator> make_nccl(std::vector<at::Device> devices);

}  // namespace dataparallel::detail
