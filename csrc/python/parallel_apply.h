#pragma once

#include <dataparallel/parallel_apply.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <vector>

namespace dataparallel::python {

namespace py = pybind11;

/// Calls `body(i)` in the worker of `replicas[i]`, all at once, with the
/// interpreter lock, and returns what they return, in order.
///
/// The exception of the lowest replica is rethrown as the object it is, with
/// the note `replica 1 on cuda:1`, after all have ended. Signals are handled
/// meanwhile, where the calling thread is Python's main one; what a handler
/// raises is raised in all replicas as KeyboardInterrupt, and then here.
py::list apply_in(WorkerTeam& team, const std::vector<int64_t>& replicas,
                  const std::function<py::object(size_t)>& body);

}  // namespace dataparallel::python
