#pragma once

// All that differs between the versions of torch that the library compiles
// against; nothing else in the project asks for a version.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

namespace dataparallel::detail {

/// `std::shared_ptr<Node>` to torch 2.12, `c10::intrusive_ptr<Node>` from 2.13.
using NodePointer = decltype(torch::autograd::Edge::function);

/// torch's engine runs the ready node with the highest number first; its own
/// gradient accumulators have this one.
inline constexpr uint64_t kRunAsSoonAsReady = UINT64_MAX;

}  // namespace dataparallel::detail
