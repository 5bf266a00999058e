#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

namespace dataparallel::python {

namespace py = pybind11;

/// A device as torch takes it: a `torch.device`, a text, or a number, which is
/// that of the machine's accelerator.
///
/// Throws `c10::TypeError` for anything else, and `c10::ValueError` for a
/// number where there is no accelerator; `argument` is what the message calls
/// it.
c10::Device to_device(const std::string& function, const std::string& argument,
                      py::handle value);

/// The same, with its index; throws where it does not exist.
c10::Device to_existing_device(const std::string& function,
                               const std::string& argument, py::handle value);

/// A sequence of them, one at least.
std::vector<c10::Device> to_existing_devices(const std::string& function,
                                             const std::string& argument,
                                             py::handle values);

}  // namespace dataparallel::python
