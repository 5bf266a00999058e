#pragma once

#include <dataparallel/scatter_gather.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

namespace dataparallel::python {

namespace py = pybind11;

/// The arguments of one call, cut for the replicas.
struct Parts {
  py::list args;    ///< a tuple a replica
  py::list kwargs;  ///< a dict a replica
  std::vector<detail::Chunk> chunks;
  /// None: nothing was to be split. 0: an empty batch.
  std::optional<int64_t> samples;
};

/// How arguments are cut.
struct Rules {
  int64_t dim = 0;
  /// By position or keyword: `InputRule`s.
  py::dict inputs;
  std::vector<double> chunk_shares;
};

/// Cuts a call's arguments. `each_device`: where nothing is to be split, each
/// device gets all of it; else only the first. `for_replicas`: parts on one
/// device are apart where gradients are on; see Note [Parts of a batch].
Parts scatter_call(const std::string& function, const py::tuple& args,
                   const py::dict& kwargs,
                   const std::vector<at::Device>& devices, const Rules& rules,
                   bool each_device, bool for_replicas);

/// Joins the replicas' results. `whole`: there is one, which stays as it is.
py::object join(const std::vector<py::object>& outputs,
                const std::vector<int64_t>& replicas, at::Device target,
                std::vector<int64_t> dims, bool whole);

}  // namespace dataparallel::python
