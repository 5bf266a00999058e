#pragma once

#include <dataparallel/nested.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

// Python's arguments and results, walked as nested.h walks those of C++. All of
// it needs the interpreter lock, which is released at each leaf.
//
// Walked: tensors, `PackedSequence`, tuples, named tuples, lists, mappings and
// dataclasses, of any depth. All else is plain.

namespace dataparallel::python {

namespace py = pybind11;

/// `value` with its leaves as `visitor` leaves them, in containers of the same
/// types.
py::object visit(const py::object& value, const std::string& path,
                 LeafVisitor& visitor);

/// Calls `visitor` at each leaf, in the same order; what it makes of it is
/// lost.
void look(const py::object& value, const std::string& path,
          LeafVisitor& visitor);

/// One value of the replicas' `values` (one at least). None in all stays None,
/// equal plain values stay, different ones become a list.
///
/// Throws `c10::ValueError` with the path where types, lengths or keys differ,
/// and `c10::TypeError` for an object that is neither walked nor plain.
py::object merge(const std::vector<py::object>& values, const std::string& path,
                 LeafMerger& merger);

/// Collects the tensors inside a value.
class TensorsInside : public LeafVisitor {
 public:
  void tensor(at::Tensor& tensor, const std::string& path) override;
  void packed(torch::nn::utils::rnn::PackedSequence& sequence,
              const std::string& path) override;
  std::vector<at::Tensor> tensors;
};

}  // namespace dataparallel::python
