#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dataparallel/devices.h>

#include <algorithm>

namespace dataparallel {
namespace {

int64_t device_count(at::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) {
    return 0;
  }
  return c10::impl::getDeviceGuardImpl(type)->deviceCount();
}

}  // namespace

std::vector<at::Device> default_devices() {
  const auto accelerator = at::getAccelerator();
  const int64_t accelerators =
      accelerator.has_value() ? device_count(*accelerator) : 0;
  if (accelerators > 0) {
    std::vector<at::Device> devices;
    for (int64_t i = 0; i < accelerators; ++i) {
      devices.emplace_back(*accelerator, static_cast<c10::DeviceIndex>(i));
    }
    return devices;
  }
  const int64_t replicas = std::max(2, at::get_num_threads() / 4);
  return std::vector<at::Device>(replicas, at::Device(at::kCPU));
}

at::Device check_device(const std::string& function,
                        const std::string& argument, at::Device device) {
  if (device.is_cpu()) {
    return at::Device(at::kCPU);
  }
  TORCH_CHECK_VALUE(!device.is_meta(), function, ": ", argument,
                    " is meta, expected a device whose tensors hold values");
  const int64_t count = device_count(device.type());
  TORCH_CHECK_VALUE(device.has_index()
                        ? device.index() >= 0 && device.index() < count
                        : count > 0,
                    function, ": ", argument, " is ", device, ", but there ",
                    count == 1 ? "is " : "are ", count == 0 ? "no" : "",
                    count == 0 ? "" : std::to_string(count), " ",
                    at::DeviceTypeName(device.type(), /*lower_case=*/true),
                    count == 1 ? " device" : " devices");
  if (device.has_index()) {
    return device;
  }
  return c10::impl::getDeviceGuardImpl(device.type())->getDevice();
}

std::vector<at::Device> check_devices(const std::string& function,
                                      const std::vector<at::Device>& devices) {
  TORCH_CHECK_VALUE(!devices.empty(), function,
                    ": devices is empty, expected one device at least");
  std::vector<at::Device> checked;
  for (size_t i = 0; i < devices.size(); ++i) {
    checked.push_back(check_device(
        function, "devices[" + std::to_string(i) + "]", devices[i]));
  }
  return checked;
}

}  // namespace dataparallel
