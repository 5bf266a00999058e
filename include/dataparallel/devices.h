#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/export.h>

#include <string>
#include <vector>

namespace dataparallel {

/// The devices a wrapper uses when it is given none: every accelerator of the
/// machine; where there is none, CPU replicas, one for each four intra-op
/// threads (`at::get_num_threads()`), two at least.
///
/// Simulated devices count as accelerators once they have been started.
/// Thread safety: may be called from any thread.
DATAPARALLEL_EXPORT std::vector<at::Device> default_devices();

/// Returns `devices` with every accelerator's index filled in (a bare `cuda`
/// means the calling thread's current device, as in torch; `cpu:0` is `cpu`).
///
/// Throws `c10::ValueError` where the list is empty, and where a device does
/// not exist: `scatter: devices[1] is cuda:7, but there are 2 cuda devices`.
/// `function` is the name that the message starts with.
DATAPARALLEL_EXPORT std::vector<at::Device> check_devices(
    const std::string& function, const std::vector<at::Device>& devices);

/// The same for one device; `argument` is what the message calls it.
DATAPARALLEL_EXPORT at::Device check_device(const std::string& function,
                                            const std::string& argument,
                                            at::Device device);

}  // namespace dataparallel
