#pragma once

#include <queue>
#include <set>
#include <unordered_map>
#include <vector>

#include "simulated/schedule.h"

namespace dataparallel::simulated {

/// Gives every call of a schedule that has none yet its time, and what it
/// launched too: a simulation by events, in the order of time. See Note [The
/// simulated clock].
class Replay {
 public:
  explicit Replay(Schedule& schedule) : schedule_(schedule) {}
  void run();

 private:
  enum class What { kComplete, kResume, kCall, kRequest, kRetry };
  struct Wake {
    double time;
    What what;
    StreamKey key;  // what goes first among equal times
    int64_t index;
    HostThread* thread;
    StreamState* stream;
    bool operator<(const Wake& other) const;  // later
  };
  struct Waiting {
    double since;
    StreamState* stream;
  };

  void handle(const Wake& wake);
  void advance(HostThread& thread);
  Task* choose(HostThread& thread);
  bool is_over(HostThread& thread, int64_t call);
  bool is_ready(HostThread& thread, const Task& task, double& since);
  void perform(HostThread& thread);
  void enqueue(StreamKey key, StreamState::Item item);
  void pump(StreamState& stream);
  void tell(Moment& moment, double time);
  void resume(HostThread& thread, double time);
  bool try_start(StreamState& stream);
  void start_waiting();
  void end_of_range(HostThread& thread);
  void break_knot();

  Schedule& schedule_;
  double now_ = 0;
  std::priority_queue<Wake> wakes_;
  std::vector<Waiting> waiting_;  // for an engine or a link
  std::set<double> retries_;      // when these are tried again
  /// Threads that cannot go on before a call is over.
  std::unordered_map<int64_t, std::vector<HostThread*>> parked_;
};

}  // namespace dataparallel::simulated
