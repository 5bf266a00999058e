#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "detail/communicator.h"
#include "detail/flat_layout.h"

namespace dataparallel::detail {

/// The gradients of one bucket's parameters, `gradients[replica][parameter]`,
/// each on its replica's device `devices[replica]` or undefined, added up on
/// `devices[0]`; all undefined gives undefined. Dense, sparse and mixed. The
/// order of addition is always the same.
///
/// With the grad mode on: plain, differentiable additions. Else dense gradients
/// of `layout`'s dtype travel together where replicas lie on several devices,
/// and the sums are slices of one buffer, made on the communication streams:
/// call `wait_for_comm(devices[0])` before they are used. On one device, sums
/// are made in the memory of gradients that nobody else holds.
std::vector<at::Tensor> reduce_add(
    std::vector<std::vector<at::Tensor>> gradients,
    const std::vector<at::Device>& devices, const FlatLayout& layout,
    Communicator& communicator);

/// `sum` + `gradient`; `sum` is given up.
at::Tensor plus(at::Tensor sum, const at::Tensor& gradient);

}  // namespace dataparallel::detail
