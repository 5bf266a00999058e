#pragma once

#include <torch/csrc/utils/pybind.h>

// The parts of the extension `dataparallel._C`, one file each. What users call
// lies in the Python files around it, with its documentation.

namespace dataparallel::python {

namespace py = pybind11;

void bind_checkpoint(py::module_& module);
void bind_data_parallel(py::module_& module);
void bind_errors(py::module_& module);
void bind_load_state_dict(py::module_& module);
void bind_loss(py::module_& module);
void bind_parallel_apply(py::module_& module);
void bind_scatter_gather(py::module_& module);
void bind_simulated(py::module_& module);
void bind_simulated_clock(py::module_& simulated_module);

}  // namespace dataparallel::python
