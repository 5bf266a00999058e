#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "simulated_networks.h"

namespace bench {

/// A way to train one network on several devices.
class Scheme {
 public:
  virtual ~Scheme() = default;
  /// A whole training step: gradients to zero, the batch from the host to the
  /// devices, forward, loss, backward, SGD.
  virtual void step() = 0;
};

using Devices = std::vector<torch::Device>;
using MakeScheme =
    std::function<std::unique_ptr<Scheme>(const Workload&, const Devices&)>;

struct NamedScheme {
  std::string name;
  MakeScheme make;
};

/// The module alone, on the first device.
std::unique_ptr<Scheme> one_module(const Workload& workload,
                                   const Devices& devices);

/// Ours, with the loss in the replicas and with outputs gathered; then those of
/// others:
/// - `libtorch`: `torch::nn::parallel::replicate` and `parallel_apply`, and the
///   reduction that hangs on these; scattering and gathering, which LibTorch
///   has for CUDA only, by `chunk`, `to` and `cat`;
/// - `nn.DataParallel`: kept replicas (Python's are as cheap to make as the
///   simulated host's time is concerned), all parameters broadcast in flat
///   buffers before forward, outputs gathered on the first device, all
///   gradients added up there in flat buffers after backward. Its copies go
///   along the same tree as ours. What Python's interpreter lock takes is left
///   out;
/// - `DDP`: DistributedDataParallel's. A thread a replica with an optimizer of
///   its own, gradients in buckets of 25 MiB (the first of 1 MiB), all-reduced
///   beside the rest of backward. A ring's traffic, 2 (n - 1) / n of the bytes
///   over each device's link to the next, goes as one copy and one launch, as
///   NCCL's kernel does; the latency of its steps is counted once.
std::vector<NamedScheme> schemes();

}  // namespace bench
