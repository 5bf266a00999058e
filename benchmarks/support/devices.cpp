#include "support/devices.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dataparallel/simulated.h>

namespace bench {

Devices cpu(size_t replicas) {
  return Devices(replicas, torch::kCPU);
}

Devices sim(size_t replicas) {
  dataparallel::simulated::start(dataparallel::simulated::Options().devices(4));
  Devices devices;
  for (size_t i = 0; i < replicas; ++i) {
    devices.emplace_back("sim:" + std::to_string(i));
  }
  return devices;
}

std::string text(const Devices& devices) {
  std::string text;
  for (const torch::Device& device : devices) {
    text += (text.empty() ? "" : ",") + device.str();
  }
  return text;
}

void synchronize(const Devices& devices) {
  for (const torch::Device& device : devices) {
    if (!device.is_cpu()) {
      c10::impl::VirtualGuardImpl(device.type())
          .synchronizeDevice(device.index());
    }
  }
}

}  // namespace bench
