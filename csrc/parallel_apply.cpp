#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <dataparallel/parallel_apply.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <typeinfo>

#include "detail/thread_state.h"

// Note [Worker threads]
//
// A team has one thread a replica for as long as it lives: OpenMP, cuDNN and
// cuBLAS keep what they need by thread, and a new thread each step would make
// it anew. Replica 0 has a worker too, not the caller's thread: its share of
// the intra-op threads differs from the caller's, and libgomp rebuilds a
// thread's pool whenever that number changes.
//
// A run is handed over under `mutex`: the caller writes `job` and raises the
// worker's `has_job`, the worker runs it without the mutex, writes its own slot
// of `errors` and counts `running` down under the mutex. So everything the
// caller wrote before is seen by the worker, and everything the worker wrote is
// seen by the caller after. The job lives on the caller's stack; it outlives
// the run because the caller waits for `running == 0` whatever happens.

namespace dataparallel {
namespace {

/// While it lives, this thread runs one replica of one team; `outer` is where
/// the team was called from, which may be a replica in another thread. That one
/// waits for this one, so the list stays valid.
struct Inside {
  Inside(int64_t replica, const void* team, const Inside* outer);
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  int64_t replica;
  const void* team;
  const Inside* outer;
  const Inside* before;
};

thread_local const Inside* here = nullptr;

Inside::Inside(int64_t in_replica, const void* of_team, const Inside* from)
    : replica(in_replica), team(of_team), outer(from), before(here) {
  here = this;
}

Inside::~Inside() {
  here = before;
}

template <class E>
void rethrow_with(const std::exception& error, const std::string& where) {
  if (typeid(error) == typeid(E)) {
    throw E(error.what() + (" (" + where + ")"));
  }
}

[[noreturn]] void rethrow(const std::exception_ptr& error, int64_t replica,
                          at::Device device) {
  std::ostringstream text;
  text << "replica " << replica << " on " << device;
  const std::string where = text.str();
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& e) {
    e.add_context(where);
    throw;
  } catch (const torch::jit::JITException& e) {
    throw torch::jit::JITException(e.what() + (" (" + where + ")"),
                                   e.getPythonClassName(), e.getOriginalMsg());
  } catch (const std::exception& e) {
    rethrow_with<std::runtime_error>(e, where);
    rethrow_with<std::range_error>(e, where);
    rethrow_with<std::overflow_error>(e, where);
    rethrow_with<std::underflow_error>(e, where);
    rethrow_with<std::logic_error>(e, where);
    rethrow_with<std::invalid_argument>(e, where);
    rethrow_with<std::domain_error>(e, where);
    rethrow_with<std::length_error>(e, where);
    rethrow_with<std::out_of_range>(e, where);
    TORCH_WARN(where, " throws an exception whose message cannot be added to: ",
               e.what());
    throw;
  } catch (...) {
    TORCH_WARN(where, " throws an exception without a message");
    throw;
  }
}

}  // namespace

std::optional<int64_t> current_replica() {
  return here == nullptr ? std::nullopt : std::optional(here->replica);
}

struct WorkerTeam::Impl {
  struct Job {
    const std::function<void(int64_t)>* body;
    const detail::CallerState* state;
    const Inside* caller;
    int intraop_threads;
  };
  struct Worker {
    std::thread thread;
    std::condition_variable wake;
    bool has_job = false;
  };

  explicit Impl(std::vector<at::Device> team_devices)
      : devices(std::move(team_devices)),
        workers(devices.size()),
        errors(devices.size()) {}

  void work(int64_t replica) {
    Worker& self = workers[replica];
    std::unique_lock lock(mutex);
    while (true) {
      self.wake.wait(lock, [&] { return self.has_job || stopping; });
      if (!self.has_job) {
        return;
      }
      const Job current = job;
      lock.unlock();
      std::exception_ptr error;
      try {
        set_intraop_threads(replica, current.intraop_threads);
        detail::CallerStateGuard state(*current.state, devices[replica]);
        const Inside inside(replica, this, current.caller);
        RECORD_USER_SCOPE("dataparallel::replica " + std::to_string(replica));
        (*current.body)(replica);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      errors[replica] = std::move(error);
      self.has_job = false;
      if (--running == 0) {
        finished.notify_one();
      }
    }
  }

  void start(int64_t replica) {
    if (!workers[replica].thread.joinable()) {
      workers[replica].thread = std::thread([this, replica] { work(replica); });
    }
  }

  // OpenMP and MKL keep the number by thread, torch keeps the last one set as
  // the default of threads that it has not seen yet: `run` sets that back.
  void set_intraop_threads(int64_t replica, int threads) {
    if (devices[replica].is_cpu() && at::get_num_threads() != threads) {
      at::set_num_threads(threads);
      std::lock_guard lock(mutex);
      intraop_threads_set = true;
    }
  }

  const std::vector<at::Device> devices;
  std::mutex one_run;  // held for a whole run
  std::mutex mutex;    // guards all below
  std::condition_variable finished;
  std::vector<Worker> workers;
  std::vector<std::exception_ptr> errors;
  Job job{};
  int64_t running = 0;
  bool stopping = false;
  bool intraop_threads_set = false;
};

WorkerTeam::WorkerTeam(std::vector<at::Device> devices)
    : impl_(std::make_unique<Impl>(std::move(devices))) {}

WorkerTeam::~WorkerTeam() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    for (Impl::Worker& worker : impl_->workers) {
      worker.wake.notify_one();
    }
  }
  for (Impl::Worker& worker : impl_->workers) {
    if (worker.thread.joinable()) {
      worker.thread.join();
    }
  }
}

const std::vector<at::Device>& WorkerTeam::devices() const {
  return impl_->devices;
}

void WorkerTeam::refuse_inside(const std::string& function) const {
  for (const Inside* at = here; at != nullptr; at = at->outer) {
    TORCH_CHECK(at->team != impl_.get(), function,
                ": called from inside replica ", at->replica,
                " of the same workers, which cannot wait for themselves");
  }
}

void WorkerTeam::run(const std::vector<int64_t>& replicas,
                     const std::function<void(int64_t)>& body) {
  if (replicas.empty()) {
    return;
  }
  Impl& team = *impl_;
  const auto count = static_cast<int64_t>(team.devices.size());
  for (size_t i = 0; i < replicas.size(); ++i) {
    TORCH_CHECK_VALUE(
        replicas[i] < count && replicas[i] > (i == 0 ? -1 : replicas[i - 1]),
        "parallel_apply: replicas[", i, "] is ", replicas[i],
        ", expected one of ", count, " replicas, each once and in order");
  }
  refuse_inside("parallel_apply");
  if (replicas.size() == 1) {
    const int64_t replica = replicas.front();
    const at::Device device = team.devices[replica];
    std::exception_ptr error;
    try {
      const c10::OptionalDeviceGuard on_device(
          device.is_cpu() ? std::nullopt : std::make_optional(device));
      const Inside inside(replica, &team, here);
      RECORD_USER_SCOPE("dataparallel::replica " + std::to_string(replica));
      body(replica);
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      rethrow(error, replica, device);
    }
    return;
  }
  std::lock_guard one_run(team.one_run);
  const detail::CallerState state(team.devices);
  const auto on_cpu = static_cast<int>(std::count_if(
      replicas.begin(), replicas.end(),
      [&](int64_t replica) { return team.devices[replica].is_cpu(); }));
  const int threads = at::get_num_threads();
  bool intraop_threads_set = false;
  {
    std::unique_lock lock(team.mutex);
    for (const int64_t replica : replicas) {
      team.start(replica);
    }
    team.job = {&body, &state, here,
                std::max(1, threads / std::max(1, on_cpu))};
    team.running = static_cast<int64_t>(replicas.size());
    for (const int64_t replica : replicas) {
      team.errors[replica] = nullptr;
      team.workers[replica].has_job = true;
      team.workers[replica].wake.notify_one();
    }
    team.finished.wait(lock, [&] { return team.running == 0; });
    std::swap(intraop_threads_set, team.intraop_threads_set);
  }
  if (intraop_threads_set) {
    at::set_num_threads(threads);
  }
  for (const int64_t replica : replicas) {
    if (team.errors[replica]) {
      const std::exception_ptr error = std::move(team.errors[replica]);
      for (std::exception_ptr& other : team.errors) {
        other = nullptr;
      }
      rethrow(error, replica, team.devices[replica]);
    }
  }
}

namespace detail {
namespace {

struct KeptTeams {
  std::mutex mutex;
  std::multimap<std::string, std::unique_ptr<WorkerTeam>> idle;
};

// Never destroyed: at exit, threads of a team may be inside torch's own
// libraries, which are being torn down.
KeptTeams& kept_teams() {
  static KeptTeams* teams = new KeptTeams;
  return *teams;
}

std::string key_of(const std::vector<at::Device>& devices) {
  std::string key;
  for (const at::Device& device : devices) {
    key += device.str() + ",";
  }
  return key;
}

}  // namespace

BorrowedTeam::BorrowedTeam(const std::vector<at::Device>& devices) {
  KeptTeams& kept = kept_teams();
  {
    std::lock_guard lock(kept.mutex);
    const auto found = kept.idle.find(key_of(devices));
    if (found != kept.idle.end()) {
      team_ = std::move(found->second);
      kept.idle.erase(found);
      return;
    }
  }
  team_ = std::make_unique<WorkerTeam>(devices);
}

BorrowedTeam::~BorrowedTeam() {
  KeptTeams& kept = kept_teams();
  std::lock_guard lock(kept.mutex);
  kept.idle.emplace(key_of(team_->devices()), std::move(team_));
}

}  // namespace detail
}  // namespace dataparallel
