#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dataparallel::detail {

// Along a tree, so that with many devices no link carries more than log2 of
// their number, and copies between different pairs run at the same time. On the
// current streams of the calling thread; the host does not wait.

/// Copies `flat[0]` into all others; each lies on a device of its own, or on
/// one of those before.
void broadcast(const std::vector<at::Tensor>& flat);

/// The sum of `flat`, on `flat[0]`'s device `devices[0]`; `flat[i]` lies on
/// `devices[i]`, or is undefined and counts for nothing. The order of addition
/// is always the same. All of `flat` is given up: sums are made in place.
at::Tensor reduce_add(std::vector<at::Tensor> flat,
                      const std::vector<at::Device>& devices);

}  // namespace dataparallel::detail
