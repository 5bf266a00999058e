#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace bench {

/// Which network, and what one device gets of a batch.
struct Workload {
  std::string name;
  int64_t samples = 0;  ///< a device
  /// Layers and width; a network of the same kind that takes no time to
  /// simulate has few.
  int64_t layers = 0;
  int64_t width = 0;
};

/// ResNet-50-like, BERT-base-like and many small layers; `quick`: the same, as
/// small as they can be.
std::vector<Workload> workloads(bool quick);

/// The network of a workload. Its weights are not initialized: a dry run has no
/// values, and so a replica costs the host neither time nor memory.
struct NetworkImpl : torch::nn::Cloneable<NetworkImpl> {
  explicit NetworkImpl(Workload workload);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& batch);

  Workload workload;
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Network);

/// A batch for so many devices in pinned memory of the host, where a data
/// loader leaves it.
torch::Tensor inputs(const Workload& workload, int64_t devices);
torch::Tensor labels(const Workload& workload, int64_t devices);

}  // namespace bench
