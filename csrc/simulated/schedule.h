#pragma once

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "simulated/race_detector.h"

// What the clock has written down, and where time stands: see Note [The
// simulated clock] in clock.h. Times are whole numbers of picoseconds: their
// sums are exact for the first hours, so that a step takes the same time
// whenever it is run.

namespace dataparallel::simulated {

inline constexpr double kTicksPerSecond = 1e12;

struct HostThread;
struct StreamState;

/// What an event stands for: how far a stream had come when it was recorded.
struct Moment {
  bool known = false;
  double time = 0;
  int64_t call = -1;  // that recorded it; -1 once settled
  double recorded_at = 0;
  std::vector<HostThread*> threads;  // that wait for it
  std::vector<StreamState*> streams;
};

/// A call of the host: it launches work, or waits.
struct Call {
  enum class Kind {
    kKernel,
    kCopy,
    kRecord,
    kBlock,
    kWaitForEvent,
    kWaitForStream,
    kWaitForDevice,
    kRangeBegin,
    kRangeEnd,
  };
  Kind kind{};
  const std::string* name = nullptr;
  HostThread* thread = nullptr;
  int64_t task = 0;
  StreamKey stream{};
  double on_host = 0;  // how long the thread takes
  double latency = 0;  // on the stream alone
  double busy = 0;     // of its resources
  int64_t resources[2] = {-1, -1};
  c10::Device source{c10::kCPU};
  c10::Device target{c10::kCPU};
  int64_t bytes = 0;
  bool host_waits = false;
  std::shared_ptr<Moment> moment;
  /// It starts when these calls are over, and no earlier than this.
  c10::SmallVector<int64_t, 2> after;
  double not_before = 0;
  /// When it was over for the host; below 0 before it has been replayed.
  double over_at = -1;
};

/// One end of a link: a device by its index, the host as -1.
inline int64_t link_end(c10::Device device) {
  return device.is_cpu() ? -1 : device.index();
}

/// A part of a thread's calls that keeps its order.
struct Task {
  int64_t id = 0;
  std::vector<int64_t> calls;
  size_t next = 0;
  /// The node of autograd that the engine took from its queue, to tell it from
  /// others; null for what simply follows the task before.
  const void* node = nullptr;
  /// Of nodes that are ready the highest goes first.
  uint64_t priority = 0;
  /// The backward call that it belongs to: queued tasks of one change places.
  int64_t group = 0;
};

struct HostThread {
  int64_t index = 0;
  std::string name;
  int64_t home = 0;  // the device that was current at its first call
  double time = 0;
  std::deque<Task> tasks;
  int64_t last_call = -1;
  bool of_autograd = false;  // one of its device threads
  /// The last calls, by task, of threads that work for this one, since its own
  /// last call; and when those were over that are settled.
  std::map<int64_t, int64_t> joining;
  double joining_time = 0;
  std::vector<std::pair<const std::string*, double>> ranges;  // open ones

  // While replaying.
  Task* current = nullptr;
  bool scheduled = false;
  int64_t waiting = 0;  // for so many streams and events
};

struct StreamState {
  struct Item {
    const Call* call;
    double enqueued;
    HostThread* waiter;  // instead of a call: told when all before is over
  };
  StreamKey key;
  std::deque<Item> queue;
  double tail = 0;  // when what has left the queue was over
  bool running = false;
  bool blocked = false;
};

/// One bar of a trace.
struct Span {
  enum class Kind { kKernel, kCopy, kRange, kLaunch };
  Kind kind;
  const std::string* name;
  double start;
  double end;
  StreamKey stream;
  c10::Device source;
  c10::Device target;
  int64_t bytes;
  const HostThread* thread;
};

/// Engines and link ends of a device, which serve one after the other.
struct Resources {
  static constexpr int64_t kPerDevice = 5;
  static int64_t compute(int64_t device) { return device * kPerDevice; }
  static int64_t host_out(int64_t device) { return device * kPerDevice + 1; }
  static int64_t host_in(int64_t device) { return device * kPerDevice + 2; }
  static int64_t peer_out(int64_t device) { return device * kPerDevice + 3; }
  static int64_t peer_in(int64_t device) { return device * kPerDevice + 4; }
};

struct Schedule {
  std::deque<Call> calls;
  std::deque<HostThread> threads;
  std::map<StreamKey, StreamState> streams;
  std::vector<double> free_at;  // by resource
  double latest = 0;            // of everything that has been replayed

  // Since the counters were zeroed.
  double origin = 0;
  std::vector<double> compute_busy;                         // by device
  std::map<std::pair<int64_t, int64_t>, double> link_busy;  // by its ends

  bool tracing = false;
  std::vector<Span> spans;
};

}  // namespace dataparallel::simulated
