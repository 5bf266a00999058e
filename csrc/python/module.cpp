#include "python/bindings.h"

namespace dataparallel::python {

PYBIND11_MODULE(_C, module, py::mod_gil_not_used()) {
  module.doc() = "The C++ library, for the Python files of this package.";
  bind_errors(module);
  bind_checkpoint(module);
  bind_load_state_dict(module);
  bind_scatter_gather(module);
  bind_parallel_apply(module);
  bind_data_parallel(module);
  bind_loss(module);
  bind_simulated(module);
}

}  // namespace dataparallel::python
