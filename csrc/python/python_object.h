#pragma once

#include <dataparallel/python_values.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

namespace dataparallel::python {

/// An object of Python's that the library does not know, on its way through it.
/// May be destroyed without the interpreter lock.
class PythonObject : public Opaque {
 public:
  PythonObject(const std::string& class_name, pybind11::object object)
      : Opaque(class_name), object_(std::move(object)) {}
  ~PythonObject() override {
    pybind11::gil_scoped_acquire lock;
    object_ = pybind11::object();
  }
  PythonObject(const PythonObject&) = delete;
  PythonObject& operator=(const PythonObject&) = delete;

  const pybind11::object& object() const { return object_; }

 private:
  pybind11::object object_;
};

}  // namespace dataparallel::python
