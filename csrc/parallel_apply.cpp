#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <dataparallel/parallel_apply.h>
#include <torch/csrc/jit/runtime/jit_exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
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
#include "detail/while_waiting.h"

// Note [Worker threads]
//
// A team has one thread a replica for as long as it lives: OpenMP, cuDNN and
// cuBLAS keep what they need by thread, and a new thread each step would make
// it anew. Replica 0 has a worker too, not the caller's thread: its share of
// the intra-op threads differs from the caller's, and libgomp rebuilds a
// thread's pool whenever that number changes.
//
// A job is handed over under `mutex`: the caller writes `job` and raises the
// worker's `has_job`, the worker runs it without the mutex, writes its own slot
// of `errors` and counts `running` down under the mutex. So everything the
// caller wrote before is seen by the worker, and everything the worker wrote is
// seen by the caller after. The job lives on the caller's stack; it outlives
// the run because the caller waits for `running == 0` whatever happens.

// Note [Numbers of intra-op threads]
//
// OpenMP and MKL keep the number by thread. `at::set_num_threads` sets it for
// the calling thread, and for all threads that have not asked for theirs yet:
// a thread's first `at::get_num_threads` sets both to what it finds. Workers
// want their own number set only. So, whenever a worker's number has to change,
// a thread made for it reads the number that new threads get, has the workers
// set theirs, and sets the former back; under one lock of the process, under
// which a run also asks for its caller's number, as the caller may be such a
// new thread. (One that is not ours may still ask for the first time meanwhile,
// and get a replica's.)

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
  struct Worker {
    std::thread thread;
    std::condition_variable wake;
    bool has_job = false;
    int intraop_threads = 0;
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
      const std::function<void(int64_t)>& current = *job;
      lock.unlock();
      std::exception_ptr error;
      try {
        current(replica);
      } catch (...) {
        error = std::current_exception();
      }
      const int intraop_threads =
          devices[replica].is_cpu() ? at::get_num_threads() : 0;
      lock.lock();
      self.intraop_threads = intraop_threads;
      errors[replica] = std::move(error);
      self.has_job = false;
      if (--running == 0) {
        finished.notify_one();
      }
    }
  }

  /// Threads do not come along when a process is forked.
  bool is_of_this_process() const { return process == ::getpid(); }

  void start(const std::vector<int64_t>& replicas) {
    std::lock_guard lock(mutex);
    for (const int64_t replica : replicas) {
      if (!workers[replica].thread.joinable()) {
        workers[replica].thread =
            std::thread([this, replica] { work(replica); });
      }
    }
  }

  /// Runs `new_job` in the workers of `replicas`, and waits for all of them.
  void hand_over(const std::vector<int64_t>& replicas,
                 const std::function<void(int64_t)>& new_job) {
    std::unique_lock lock(mutex);
    job = &new_job;
    running = static_cast<int64_t>(replicas.size());
    for (const int64_t replica : replicas) {
      errors[replica] = nullptr;
      workers[replica].has_job = true;
      workers[replica].wake.notify_one();
    }
    wait(lock);
  }

  /// From within a job: for the other replicas' part of it, since what they use
  /// goes next. Not for ever: one of them may wait for this one.
  void wait_for_others() {
    using std::chrono::milliseconds;
    std::unique_lock lock(mutex);
    for (int waited_ms = 0; running > 1 && waited_ms < 1000; ++waited_ms) {
      lock.unlock();
      std::this_thread::sleep_for(milliseconds(1));
      lock.lock();
    }
  }

  /// Divides the caller's intra-op threads among the replicas on the CPU. See
  /// Note [Numbers of intra-op threads].
  void share_intraop_threads(const std::vector<int64_t>& replicas) {
    std::vector<int64_t> on_cpu;
    for (const int64_t replica : replicas) {
      if (devices[replica].is_cpu()) {
        on_cpu.push_back(replica);
      }
    }
    if (on_cpu.empty()) {
      return;
    }
    static std::mutex one_at_a_time;
    std::lock_guard setting(one_at_a_time);
    const int share =
        std::max(1, at::get_num_threads() / static_cast<int>(on_cpu.size()));
    std::erase_if(on_cpu, [&](int64_t replica) {
      return workers[replica].intraop_threads == share;
    });
    if (!on_cpu.empty()) {
      std::thread([&] {
        const int of_new_threads = at::get_num_threads();
        hand_over(on_cpu, [&](int64_t) {
          at::get_num_threads();  // its first
          at::set_num_threads(share);
        });
        at::set_num_threads(of_new_threads);
      }).join();
    }
  }

  /// Until none is running; `lock` holds `mutex`.
  void wait(std::unique_lock<std::mutex>& lock) {
    const auto done = [this] { return running == 0; };
    const std::function<void()>* act = detail::WhileWaiting::here();
    if (act == nullptr) {
      finished.wait(lock, done);
      return;
    }
    while (!finished.wait_for(lock, std::chrono::milliseconds(50), done)) {
      lock.unlock();
      (*act)();
      lock.lock();
    }
  }

  const std::vector<at::Device> devices;
  const pid_t process = ::getpid();
  std::mutex one_run;  // held for a whole run
  std::mutex mutex;    // guards all below
  std::condition_variable finished;
  std::vector<Worker> workers;
  std::vector<std::exception_ptr> errors;
  const std::function<void(int64_t)>* job = nullptr;
  int64_t running = 0;
  bool stopping = false;
};

WorkerTeam::WorkerTeam(std::vector<at::Device> devices)
    : impl_(std::make_unique<Impl>(std::move(devices))) {}

WorkerTeam::~WorkerTeam() {
  if (!impl_->is_of_this_process()) {
    static_cast<void>(impl_.release());  // there is nothing to wait for
    return;
  }
  for (const Inside* at = here; at != nullptr; at = at->outer) {
    if (at->team == impl_.get()) {
      // A body ends the program (`std::exit`), and this belongs to a global: it
      // cannot wait for itself. What the threads look at stays.
      impl_->wait_for_others();
      for (Impl::Worker& worker : impl_->workers) {
        if (worker.thread.joinable()) {
          worker.thread.detach();
        }
      }
      static_cast<void>(impl_.release());
      return;
    }
  }
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
  TORCH_CHECK(team.is_of_this_process(),
              "parallel_apply: the worker threads belong to the process that "
              "this one was forked from; make the wrapper anew in the child");
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
  team.start(replicas);
  team.share_intraop_threads(replicas);
  const detail::CallerState state(team.devices);
  const Inside* caller = here;
  team.hand_over(replicas, [&](int64_t replica) {
    detail::CallerStateGuard in_state(state, team.devices[replica]);
    const Inside inside(replica, &team, caller);
    RECORD_USER_SCOPE("dataparallel::replica " + std::to_string(replica));
    body(replica);
  });
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

thread_local const std::function<void()>* while_waiting = nullptr;

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

/// With the process, since a forked one has none of the threads.
std::string key_of(const std::vector<at::Device>& devices) {
  std::string key = std::to_string(::getpid()) + ":";
  for (const at::Device& device : devices) {
    key += device.str() + ",";
  }
  return key;
}

}  // namespace

WhileWaiting::WhileWaiting(std::function<void()> act)
    : act_(std::move(act)), before_(while_waiting) {
  while_waiting = &act_;
}

WhileWaiting::~WhileWaiting() {
  while_waiting = before_;
}

const std::function<void()>* WhileWaiting::here() {
  return while_waiting;
}

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
