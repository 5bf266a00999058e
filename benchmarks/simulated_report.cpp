#include "simulated_report.h"

#include <dataparallel/simulated.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace demo {
namespace {

namespace simulated = dataparallel::simulated;

/// Each simulated device once, in the list's order.
std::vector<c10::Device> simulated_only(const std::vector<c10::Device>& all) {
  std::vector<c10::Device> devices;
  for (const auto& device : all) {
    if (device.is_privateuseone() && std::ranges::count(devices, device) == 0) {
      devices.push_back(device);
    }
  }
  return devices;
}

}  // namespace

bool report_simulated(const std::vector<c10::Device>& devices) {
  const auto used = simulated_only(devices);
  if (used.empty()) {
    return true;
  }
  auto ends = used;
  ends.emplace_back(c10::kCPU);
  for (const auto& device : used) {
    int64_t copied_bytes = 0;
    for (const auto& source : ends) {
      copied_bytes += simulated::bytes_copied(source, device);
    }
    fmt::print("{}: {} kernels launched, {} bytes copied to it\n", device.str(),
               simulated::kernels_launched(device), copied_bytes);
  }
  const auto races = simulated::races();
  fmt::print("Races found: {}\n", races.size());
  return races.empty();
}

}  // namespace demo
