#pragma once

#include <dataparallel/one_call.h>
#include <dataparallel/parallel_apply.h>
#include <dataparallel/replicate.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/module_walk.h"

namespace dataparallel::python {

namespace py = pybind11;

/// The replicas of a Python module. See Note [Replicas of Python modules].
///
/// Every function needs the interpreter lock, and releases it while it copies
/// or waits. One thread at a time, which `enter` and `exit` see to.
class Replicas {
 public:
  explicit Replicas(std::string function) : function_(std::move(function)) {}
  ~Replicas();

  /// Waits until no other thread is between the two. Throws where the calling
  /// thread is itself inside.
  void enter(const std::string& function);
  void exit();

  /// The replicas `used` of `module` on `devices`, as it is now. With `itself`
  /// replica 0 is the module itself, else a module that holds its tensors.
  py::list replicate(const py::object& module,
                     const std::vector<at::Device>& devices,
                     const std::vector<int64_t>& used, bool itself,
                     bool detach = false);

  /// Until it ends, only the first `replicate` copies the parameters. Throws
  /// where one is under way.
  void begin_accumulation();
  void end_accumulation() { accumulating_ = false; }

  /// See `detail::ReplicaSet`.
  detail::ReplicaSet& set();
  WorkerTeam& team(const std::vector<at::Device>& devices);
  detail::OneCall& calls() { return *calls_; }

 private:
  /// A TorchScript module in the tree, and its replicas.
  struct Script {
    torch::jit::Module original;
    std::vector<py::object> copies;  // [replica], 0 itself
  };

  void follow(const ModuleWalk& walk, const std::vector<at::Device>& devices,
              bool detach);
  void rebuild(const ModuleWalk& walk, const std::vector<at::Device>& devices,
               bool detach);
  bool same(const ModuleWalk& walk,
            const std::vector<at::Device>& devices) const;
  py::object build(const ModuleWalk& walk, size_t replica);

  std::string function_;
  bool accumulating_ = false;
  bool parameters_fresh_ = false;  ///< copied since the accumulation began
  std::vector<at::Device> devices_;
  /// Of each slot of the walk that the set was made for: its tensor, and the
  /// number of that among the different ones.
  std::vector<at::Tensor> seen_;
  std::vector<bool> seen_parameter_;
  std::vector<size_t> unique_;
  std::vector<std::vector<py::object>> copies_;  // [replica][unique]
  std::vector<Script> scripts_;
  std::unique_ptr<detail::ReplicaSet> set_;
  std::unique_ptr<WorkerTeam> team_;
  std::unique_ptr<detail::OneCall> calls_ = std::make_unique<detail::OneCall>();
  std::unique_ptr<detail::OneCall::Scope> scope_;
};

/// Throws as torch does if a parameter or buffer of `module` is not on
/// `device`.
void check_module_device(const py::object& module, at::Device device);

}  // namespace dataparallel::python
