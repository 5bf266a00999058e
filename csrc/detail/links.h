#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dataparallel::detail {

// Note [Links that lie]
//
// On some machines copies between two accelerators arrive wrong, without an
// error: zeros, or what lay there before (an IOMMU between the PCIe slots is
// the usual cause). So before two accelerators first exchange anything, each
// sends the other a known pattern. If one does not come back as it was, the two
// are named in one warning, and all that the library copies between them from
// then on goes through the host's memory, both ways, since backward copies the
// other way. A pair is tested once a process. Copies between the host and an
// accelerator are trusted: there is nothing to compare them with.

/// Tests the links between all pairs of `devices` that have not been tested,
/// waiting for the copies; whether all are sound. Thread safety: any thread.
bool check_links(const std::vector<at::Device>& devices);

/// `tensor` on `device`, differentiable; the tensor itself if it is there. On
/// the current streams, and not waited for unless `device` is the CPU.
at::Tensor moved(const at::Tensor& tensor, at::Device device);

/// Copies the values of `source` into `target`, likewise.
void copy_into(const at::Tensor& target, const at::Tensor& source);

}  // namespace dataparallel::detail
