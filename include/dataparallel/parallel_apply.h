#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/devices.h>
#include <dataparallel/export.h>
#include <dataparallel/nested.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

namespace dataparallel {

/// Inside a replica's forward (or loss): that replica's number. Anywhere else:
/// none.
DATAPARALLEL_EXPORT std::optional<int64_t> current_replica();

/// Long-lived worker threads, one a replica.
///
/// `run` calls `body(replica)` for each of `replicas`, each on its own thread,
/// all at once, whatever the number of intra-op threads; and returns when all
/// are done. One replica alone runs in the calling thread.
///
/// Inside `body` the thread state is the caller's: grad mode, inference mode,
/// autocast (flag, dtype and cache flag of every device type), saved-tensor
/// hooks, profiler; the current device is the replica's, and the current stream
/// of each device of the team is the caller's own. Workers are put back as they
/// were. Replicas on the CPU share the caller's intra-op threads evenly.
///
/// If bodies throw, the exception of the lowest replica is rethrown with its
/// own type after all have finished; its message gains `replica 1 on cuda:1`
/// where the type is one of torch's or of <stdexcept>; for other types a
/// warning says so.
///
/// Throws `c10::ValueError` if `replicas` are not numbers of the team's devices
/// in ascending order, each once.
///
/// Thread safety: one `run` at a time, further callers wait. A `run` from
/// inside a body of the same team, in whatever thread and through however many
/// other teams, is an error.
class DATAPARALLEL_EXPORT WorkerTeam {
 public:
  explicit WorkerTeam(std::vector<at::Device> devices);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  const std::vector<at::Device>& devices() const;
  void run(const std::vector<int64_t>& replicas,
           const std::function<void(int64_t)>& body);
  /// Throws if the calling thread works for one of this team's own bodies.
  void refuse_inside(const std::string& function) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {

/// Lends a team over `devices` from those the process keeps, or makes one.
class DATAPARALLEL_EXPORT BorrowedTeam {
 public:
  explicit BorrowedTeam(const std::vector<at::Device>& devices);
  ~BorrowedTeam();
  BorrowedTeam(const BorrowedTeam&) = delete;
  BorrowedTeam& operator=(const BorrowedTeam&) = delete;
  WorkerTeam* operator->() const { return team_.get(); }

 private:
  std::unique_ptr<WorkerTeam> team_;
};

}  // namespace detail

/// Runs `modules[i](inputs[i]...)` on `devices[i]`, all at once, and returns
/// the outputs in order.
///
/// A module is anything callable (a torch module holder, a lambda);
/// `inputs[i]` is a `std::tuple` of its arguments, or its one argument. The
/// threads, the thread state and the errors are those of `WorkerTeam`; teams
/// are kept by the process and used again.
///
///     std::vector<torch::nn::Linear> layers{on_first, on_second};
///     auto outputs = dataparallel::parallel_apply(
///         layers, dataparallel::scatter(images, devices), devices);
///
/// Throws `c10::ValueError` if the three lists are not equally long,
/// `c10::TypeError` for an empty holder. Thread safety: any thread, also inside
/// a worker.
template <class Module, class Input>
auto parallel_apply(std::vector<Module>& modules,
                    const std::vector<Input>& inputs,
                    const std::vector<at::Device>& devices) {
  const auto call = [](Module& module, const Input& input) {
    if constexpr (detail::is_specialization<Input, std::tuple>) {
      return std::apply(module, input);
    } else {
      return module(input);
    }
  };
  using Output =
      std::decay_t<std::invoke_result_t<decltype(call), Module&, const Input&>>;
  TORCH_CHECK_VALUE(
      modules.size() == inputs.size() && inputs.size() == devices.size(),
      "parallel_apply: there are ", modules.size(), " modules, ", inputs.size(),
      " inputs and ", devices.size(), " devices, expected as many of each");
  if constexpr (requires(const Module& module) { module.is_empty(); }) {
    for (size_t i = 0; i < modules.size(); ++i) {
      TORCH_CHECK_TYPE(!modules[i].is_empty(), "parallel_apply: modules[", i,
                       "] is empty, expected a holder with a module in it");
    }
  }
  const auto checked = check_devices("parallel_apply", devices);
  std::vector<int64_t> replicas(modules.size());
  for (size_t i = 0; i < replicas.size(); ++i) {
    replicas[i] = static_cast<int64_t>(i);
  }
  std::vector<std::optional<Output>> outputs(modules.size());
  detail::BorrowedTeam team(checked);
  team->run(replicas, [&](int64_t replica) {
    outputs[replica].emplace(call(modules[replica], inputs[replica]));
  });
  std::vector<Output> result;
  for (auto& output : outputs) {
    result.push_back(std::move(*output));
  }
  return result;
}

}  // namespace dataparallel
