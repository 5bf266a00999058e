#include "python/module_walk.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/module_python.h>

namespace dataparallel::python {

py::dict attributes_of(const py::handle& object) {
  auto dict = py::reinterpret_steal<py::object>(
      PyObject_GenericGetDict(object.ptr(), nullptr));
  if (!dict) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::dict>(dict.release());
}

py::handle entry(const py::dict& dict, const char* name) {
  return PyDict_GetItemString(dict.ptr(), name);
}

ModuleWalk::ModuleWalk(std::string function, const py::object& root)
    : function_(std::move(function)) {
  add(root, 0, nullptr);
}

std::optional<size_t> ModuleWalk::find(PyObject* module) const {
  const auto found = places_.find(module);
  return found == places_.end() ? std::nullopt : std::optional(found->second);
}

std::string ModuleWalk::path(size_t node) const {
  const Node& at = nodes_[node];
  if (at.name == nullptr) {
    return "";
  }
  const std::string before = path(at.parent);
  const auto own = py::handle(at.name).cast<std::string>();
  return before.empty() ? own : before + "." + own;
}

std::string ModuleWalk::full_name(size_t node, const std::string& name) const {
  const std::string before = path(node);
  return before.empty() ? name : before + "." + name;
}

void ModuleWalk::add(const py::object& module, size_t parent, PyObject* name) {
  if (!places_.emplace(module.ptr(), nodes_.size()).second) {
    return;
  }
  const size_t here = nodes_.size();
  nodes_.push_back({module, attributes_of(module), parent, name, {}});
  const py::dict attributes = nodes_.back().attributes;
  const py::handle children = entry(attributes, "_modules");
  if (!children || !PyDict_Check(children.ptr())) {
    nodes_[here].script = torch::jit::as_module(module);
    TORCH_CHECK_TYPE(nodes_[here].script.has_value(), function_, ": module",
                     here == 0 ? "" : "." + path(here), " is ",
                     py::repr(module).cast<std::string>(),
                     ", expected a torch.nn.Module");
    return;
  }
  const py::handle compiled = entry(attributes, "_compiled_call_impl");
  const bool is_compiled = (compiled && !compiled.is_none()) ||
                           PyDict_GetItemString(children.ptr(), "_orig_mod");
  TORCH_CHECK_TYPE(
      !is_compiled, function_, ": module", here == 0 ? "" : "." + path(here),
      " is compiled by torch.compile, whose code belongs to that "
      "one module and cannot run with a replica's parameters; pass "
      "the module as it was before");
  add_slots(here, "_parameters", /*parameters=*/true);
  add_slots(here, "_buffers", /*parameters=*/false);
  PyObject* key = nullptr;
  PyObject* child = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(children.ptr(), &position, &key, &child) != 0) {
    if (child != Py_None) {
      add(py::reinterpret_borrow<py::object>(child), here, key);
    }
  }
}

void ModuleWalk::add_slots(size_t node, const char* kind, bool parameters) {
  const py::handle tensors = entry(nodes_[node].attributes, kind);
  if (!tensors || !PyDict_Check(tensors.ptr())) {
    return;
  }
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(tensors.ptr(), &position, &key, &value) != 0) {
    if (THPVariable_Check(value)) {
      slots_.push_back(
          {node, key, parameters, value, THPVariable_Unpack(value)});
    }
  }
}

}  // namespace dataparallel::python
