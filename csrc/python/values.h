#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

// Between Python's objects and the `c10::IValue`s that stand for them
// (python_values.h). All of it needs the interpreter lock.

namespace dataparallel::python {

namespace py = pybind11;

/// Lists, tuples and mappings that are one object stay one.
py::object to_python(const c10::IValue& value);

/// The other way. Objects that have no form there become opaque values, which
/// `to_python` turns back into the objects themselves.
///
/// Throws `c10::ValueError` where an object contains itself: `name` is what the
/// message calls `value`, `function` what it starts with.
c10::IValue to_ivalue(py::handle value, const std::string& function,
                      const std::string& name);

}  // namespace dataparallel::python
