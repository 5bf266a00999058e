#pragma once

#include <c10/core/Device.h>

#include <vector>

namespace demo {

/// Prints what the simulated devices among `devices` did since their start:
/// kernels launched, bytes copied to each, races found. Prints nothing, and is
/// true, if there are none. Returns whether no race was found.
bool report_simulated(const std::vector<c10::Device>& devices);

}  // namespace demo
