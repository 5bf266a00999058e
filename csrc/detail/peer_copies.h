#pragma once

#include <utility>
#include <vector>

#include "detail/communicator.h"

namespace dataparallel::detail {

/// torch's own copies, for any devices, also one that comes twice. Along a
/// tree, so that with many devices no link carries more than log2 of their
/// number, and copies between different pairs run at the same time. Sums are
/// always made in the same order.
class PeerCopies : public Communicator {
 public:
  explicit PeerCopies(std::vector<at::Device> devices)
      : devices_(std::move(devices)) {}
  void broadcast(const std::vector<at::Tensor>& flat) override;
  at::Tensor reduce_add(std::vector<at::Tensor> flat) override;

 private:
  std::vector<at::Device> devices_;
};

}  // namespace dataparallel::detail
