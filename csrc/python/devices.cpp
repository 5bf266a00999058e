#include "python/devices.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>
#include <dataparallel/devices.h>
#include <torch/csrc/Device.h>

#include "detail/device_name.h"

namespace dataparallel::python {

c10::Device to_device(const std::string& function, const std::string& argument,
                      py::handle value) {
  PyObject* object = value.ptr();
  if (THPDevice_Check(object)) {
    return reinterpret_cast<THPDevice*>(object)->device;
  }
  if (PyUnicode_Check(object)) {
    const auto text = value.cast<std::string>();
    const auto device = detail::parse_device(text);
    TORCH_CHECK_VALUE(device.has_value(), function, ": ", argument, " is '",
                      text, "', expected a device, such as 'cpu' or 'cuda:0'");
    return *device;
  }
  TORCH_CHECK_TYPE(PyLong_Check(object) && !PyBool_Check(object), function,
                   ": ", argument, " is ", py::repr(value).cast<std::string>(),
                   ", expected a torch.device, a str or an int");
  const auto index = value.cast<int64_t>();
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  TORCH_CHECK_VALUE(
      accelerator.has_value() && at::accelerator::deviceCount() > 0, function,
      ": ", argument, " is ", index,
      ", the number of an accelerator, but there is none; name a "
      "device, as \"cpu\"");
  TORCH_CHECK_VALUE(index >= 0 && index < 128, function, ": ", argument, " is ",
                    index, ", expected 0 or more");
  return {*accelerator, static_cast<c10::DeviceIndex>(index)};
}

c10::Device to_existing_device(const std::string& function,
                               const std::string& argument, py::handle value) {
  return check_device(function, argument, to_device(function, argument, value));
}

std::vector<c10::Device> to_existing_devices(const std::string& function,
                                             const std::string& argument,
                                             py::handle values) {
  TORCH_CHECK_TYPE(
      PySequence_Check(values.ptr()) && !PyUnicode_Check(values.ptr()),
      function, ": ", argument, " is ", py::repr(values).cast<std::string>(),
      ", expected a list of devices");
  std::vector<c10::Device> devices;
  for (const py::handle& value : values) {
    devices.push_back(to_existing_device(
        function, argument + "[" + std::to_string(devices.size()) + "]",
        value));
  }
  TORCH_CHECK_VALUE(!devices.empty(), function, ": ", argument,
                    " is empty, expected one device at least");
  return devices;
}

}  // namespace dataparallel::python
