#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace dataparallel::python {

namespace py = pybind11;

/// The tree of a Python module as it is now. Needs the interpreter lock.
class ModuleWalk {
 public:
  struct Node {
    py::object module;
    py::dict attributes;  ///< its `__dict__`
    size_t parent;
    PyObject* name;  ///< in the parent; null: the root
    std::optional<torch::jit::Module> script;
  };
  /// A parameter or buffer under one of its names.
  struct Slot {
    size_t node;
    PyObject* name;
    bool parameter;
    PyObject* object;
    at::Tensor tensor;
  };

  /// Throws `c10::TypeError` for what is no module, and for modules that
  /// torch.compile made. `function` is what the messages start with.
  ModuleWalk(std::string function, const py::object& root);

  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<Slot>& slots() const { return slots_; }
  /// The node of a module; none where it is not in the tree.
  std::optional<size_t> find(PyObject* module) const;
  /// "layer.0.weight"
  std::string full_name(size_t node, const std::string& name) const;
  /// "layer.0"; "" for the root.
  std::string path(size_t node) const;

 private:
  void add(const py::object& module, size_t parent, PyObject* name);
  void add_slots(size_t node, const char* kind, bool parameters);

  std::string function_;
  std::vector<Node> nodes_;
  std::vector<Slot> slots_;
  std::unordered_map<PyObject*, size_t> places_;
};

/// The `__dict__` of an object.
py::dict attributes_of(const py::handle& object);

/// The entry of a dictionary, or null.
py::handle entry(const py::dict& dict, const char* name);

}  // namespace dataparallel::python
