#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace demo {

/// The devices that a comma separated list names, in its order, repeats kept.
///
/// `cpu`; `cuda:N`, or `cuda` for every CUDA device; `sim:N`, a simulated
/// device. `sim:0` to the highest N named are started here, once the whole
/// list is known to be good: call it once.
///
/// Throws `c10::ValueError` for an empty list or entry, an unknown device, and
/// a CUDA device that this machine lacks.
std::vector<c10::Device> parse_devices(const std::string& list);

/// `cpu, cpu`
std::string device_names(const std::vector<c10::Device>& devices);

}  // namespace demo
