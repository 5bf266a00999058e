#pragma once

#include <ATen/record_function.h>
#include <dataparallel/simulated_hardware.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "simulated/flops.h"
#include "simulated/memory_order.h"
#include "simulated/race_detector.h"
#include "simulated/schedule.h"

namespace dataparallel::simulated {

// Note [The simulated clock]
//
// Two things happen, one after the other. While the program runs, the clock
// writes down what its threads call: launches, copies, events, waits, and what
// each of these must come after. When somebody reads the clock, all that has
// been written down is replayed: a simulation by events, in the order of
// simulated time, of host threads, streams, engines and links.
//
// So simulated time shall not depend on real time. On a machine with two cores,
// the threads that drive eight devices run one after the other for milliseconds
// each; taken in that order, a device's stream would get the first bucket's
// reduction after the whole backward, or before it, as it happens. In the
// replay each host thread has a time of its own, which its calls move on by
// what a launch costs, and streams get their work in the order of these times.
//
// What a call comes after:
// - its thread's call before (but see below);
// - the last launches by other threads on the same bytes: what reads comes
//   after what wrote them, what writes comes after what read them as well;
// - for an event's block or synchronize: its record;
// - a thread that works for another, the library's workers and autograd's
//   device threads, comes after the other's last call, and the other's next
//   call comes after its. Who works for whom is seen by torch's thread-local
//   state, in which the clock has put the thread's name: both run with the
//   state of the thread that called.
//
// The threads of autograd choose what to do next, see Note [Tasks]. (Torch
// counts nodes by the thread that made them: the first steps of a program may
// take another order, and another time, than those after them.)
//
// On a stream, work starts when what is before it there is over and what it
// waits for has come; a kernel then takes its launch latency, and the device's
// one compute engine for the larger of bytes / memory bandwidth and flops /
// peak; a copy takes the sending end of the source's link and the receiving end
// of the target's. Those that wait for an engine or a link are served in the
// order in which they came. Events cost nothing.
//
// What this leaves out of causality: threads that order themselves by other
// means (mutexes, condition variables, queues) without touching the same
// simulated memory and without torch's thread-local state; the CPU's own work,
// which takes no time. What two threads do to the same bytes in an order that
// the program leaves open (under a mutex, whoever comes first) keeps the order
// in which it happened, which may differ from run to run; and so does the end
// of what is replayed, if the clock is read while other threads launch.

// Note [Tasks]
//
// A thread of autograd takes, of the nodes whose gradients are all there, that
// with the highest sequence number. Which ones are there depends on time, so
// the replay chooses anew, by the same rule and simulated time: the thread's
// calls are cut into tasks, one a node, and a task is ready when everything
// that its calls come after is over.
//
// A node's task is more than its function. Before it, the engine makes the
// node's stream wait for gradients that other streams have made, and calls its
// hooks; after it, it adds up and records events for the nodes that follow.
// Cut where the function begins, the waits would fall to the node that ran
// before on that thread, whichever that was, which then waited for a gradient
// that it has nothing to do with: steps differed by percents from run to run.
// So a call belongs to the node that the engine says it works on, and while
// that one's function runs to this one, also if it runs a backward of its own.

/// Thread safety: all functions lock. Nothing is written down while it is off.
class Clock {
 public:
  static Clock& get();
  static bool is_on() { return on_.load(std::memory_order_relaxed); }

  void start(const Hardware& hardware, int64_t devices);
  void stop();

  void kernel(const std::string& name, StreamKey stream, double bytes,
              const Flops& flops,
              const std::vector<RaceDetector::Access>& accesses);
  void copy(StreamKey stream, c10::Device source, c10::Device target,
            int64_t bytes, bool pinned, bool host_waits,
            const std::vector<RaceDetector::Access>& accesses);
  std::shared_ptr<Moment> record(StreamKey stream);
  void block(const std::shared_ptr<Moment>& moment, StreamKey stream);
  void wait(const std::shared_ptr<Moment>& moment);
  void wait(StreamKey stream);
  void wait_for_device(int64_t device);
  void begin_range(const std::string& name);
  void end_range();
  /// A node of autograd begins in this thread.
  void begin_node();
  void freed(const void* storage);

  double now();       // of the calling thread
  double elapsed();   // from the origin to the latest of everything
  void set_origin();  // counters are zeroed now
  double compute_seconds(int64_t device);
  double link_seconds(int64_t source, int64_t target);  // -1: the host
  double seconds_of(Moment& moment);
  void trace(bool on);
  /// Spans and the threads they point to, which live for ever.
  std::vector<Span> spans();

 private:
  Clock() = default;
  HostThread& this_thread();
  Task& this_task(HostThread& thread);
  /// Writes it down; returns its number.
  int64_t add(Call call, const std::vector<RaceDetector::Access>& accesses);
  void replay();
  const std::string* intern(const std::string& name);
  LinkModel link(c10::Device source, c10::Device target, int64_t resources[2]);

  static std::atomic<bool> on_;
  std::mutex mutex_;
  Hardware hardware_;
  Schedule schedule_;
  MemoryOrder memory_{schedule_};
  int64_t next_task_ = 0;
  std::unordered_set<std::string> names_;
  std::optional<at::CallbackHandle> callback_;
};

}  // namespace dataparallel::simulated
