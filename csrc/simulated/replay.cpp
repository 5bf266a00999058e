#include "simulated/replay.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>

namespace dataparallel::simulated {
namespace {

/// An order of tasks by what they do, for those that nothing else puts in
/// order: theirs in the log is by chance.
bool looks_before(const Schedule& schedule, const Task& a, const Task& b) {
  return std::lexicographical_compare(
      a.calls.begin(), a.calls.end(), b.calls.begin(), b.calls.end(),
      [&](int64_t left, int64_t right) {
        const auto look = [&](int64_t id) {
          const Call& call = schedule.calls[id];
          return std::tuple(call.kind,
                            call.name == nullptr ? std::string() : *call.name,
                            call.stream, call.busy);
        };
        return look(left) < look(right);
      });
}

}  // namespace

bool Replay::Wake::operator<(const Wake& other) const {
  return std::tie(time, what, key, index) >
         std::tie(other.time, other.what, other.key, other.index);
}

void Replay::run() {
  for (HostThread& thread : schedule_.threads) {
    advance(thread);
  }
  while (true) {
    while (!wakes_.empty()) {
      const Wake wake = wakes_.top();
      wakes_.pop();
      now_ = wake.time;
      schedule_.latest = std::max(schedule_.latest, now_);
      handle(wake);
    }
    if (std::all_of(
            schedule_.threads.begin(), schedule_.threads.end(),
            [](const HostThread& thread) { return thread.tasks.empty(); })) {
      return;
    }
    break_knot();
  }
}

void Replay::handle(const Wake& wake) {
  switch (wake.what) {
    case What::kComplete: {
      StreamState& stream = *wake.stream;
      const Call& call = *stream.queue.front().call;
      stream.queue.pop_front();
      stream.running = false;
      stream.tail = now_;
      if (call.host_waits) {
        resume(*call.thread, now_);
      }
      pump(stream);
      start_waiting();
      return;
    }
    case What::kResume:
      wake.thread->scheduled = false;
      return advance(*wake.thread);
    case What::kCall:
      wake.thread->scheduled = false;
      return perform(*wake.thread);
    case What::kRequest:
      if (!try_start(*wake.stream)) {
        waiting_.push_back({now_, wake.stream});
      }
      return;
    case What::kRetry:
      retries_.erase(now_);
      return start_waiting();
  }
}

/// Schedules the thread's next call, if there is one that can be made.
void Replay::advance(HostThread& thread) {
  if (thread.scheduled || thread.waiting > 0) {
    return;
  }
  while (true) {
    if (thread.current == nullptr) {
      thread.current = choose(thread);
      if (thread.current == nullptr) {
        return;
      }
    }
    Task& task = *thread.current;
    if (task.next < task.calls.size()) {
      break;
    }
    const auto done =
        std::find_if(thread.tasks.begin(), thread.tasks.end(),
                     [&](const Task& one) { return &one == &task; });
    if (done == thread.tasks.begin()) {
      thread.tasks.pop_front();
    } else {
      // Keep the addresses of the others: they go when they are at the front.
      done->calls.clear();
      done->next = 0;
    }
    thread.current = nullptr;
  }
  const Call& call =
      schedule_.calls[thread.current->calls[thread.current->next]];
  double begin = std::max({thread.time, call.not_before, now_});
  for (const int64_t before : call.after) {
    if (!is_over(thread, before)) {
      return;
    }
    begin = std::max(begin, schedule_.calls[before].over_at);
  }
  thread.scheduled = true;
  wakes_.push({begin + call.on_host,
               What::kCall,
               {call.stream.first, call.stream.second},
               thread.home * 1000 + thread.index,
               &thread,
               nullptr});
}

bool Replay::is_over(HostThread& thread, int64_t call) {
  if (schedule_.calls[call].over_at >= 0) {
    return true;
  }
  auto& parked = parked_[call];
  if (std::find(parked.begin(), parked.end(), &thread) == parked.end()) {
    parked.push_back(&thread);
  }
  return false;
}

/// Whether all that the task needs from others is there, and since when.
bool Replay::is_ready(HostThread& thread, const Task& task, double& since) {
  for (const int64_t id : task.calls) {
    for (const int64_t before : schedule_.calls[id].after) {
      if (schedule_.calls[before].task == schedule_.calls[id].task) {
        continue;
      }
      if (!is_over(thread, before)) {
        return false;
      }
      since = std::max(since, schedule_.calls[before].over_at);
    }
  }
  return true;
}

/// The next task: that which follows, or of those in the engine's queue what
/// the engine would take.
Task* Replay::choose(HostThread& thread) {
  while (!thread.tasks.empty() && thread.tasks.front().calls.empty()) {
    thread.tasks.pop_front();
  }
  if (thread.tasks.empty()) {
    return nullptr;
  }
  Task& front = thread.tasks.front();
  if (front.node == nullptr) {
    return &front;
  }
  Task* best = nullptr;
  double best_since = 0;
  for (Task& task : thread.tasks) {
    if (task.node == nullptr || task.group != front.group) {
      break;
    }
    double since = 0;
    if (task.calls.empty() || !is_ready(thread, task, since)) {
      continue;
    }
    if (best == nullptr || task.priority > best->priority ||
        (task.priority == best->priority &&
         (since < best_since ||
          (since == best_since && looks_before(schedule_, task, *best))))) {
      best = &task;
      best_since = since;
    }
  }
  return best;
}

void Replay::perform(HostThread& thread) {
  Task& task = *thread.current;
  const int64_t id = task.calls[task.next++];
  Call& call = schedule_.calls[id];
  if (schedule_.tracing && call.on_host > 0) {
    schedule_.spans.push_back({Span::Kind::kLaunch, call.name,
                               now_ - call.on_host, now_, call.stream,
                               call.source, call.target, call.bytes, &thread});
  }
  thread.time = now_;
  call.over_at = now_;
  switch (call.kind) {
    case Call::Kind::kKernel:
    case Call::Kind::kCopy:
      thread.waiting += call.host_waits ? 1 : 0;
      [[fallthrough]];
    case Call::Kind::kRecord:
    case Call::Kind::kBlock:
      enqueue(call.stream, {&call, now_, nullptr});
      break;
    case Call::Kind::kWaitForEvent:
      ++thread.waiting;
      if (call.moment->known) {
        resume(thread, std::max(now_, call.moment->time));
      } else {
        call.moment->threads.push_back(&thread);
      }
      break;
    case Call::Kind::kWaitForStream:
      ++thread.waiting;
      enqueue(call.stream, {nullptr, now_, &thread});
      break;
    case Call::Kind::kWaitForDevice:
      ++thread.waiting;  // once more, so that it goes on once
      for (auto& [key, stream] : schedule_.streams) {
        if (key.first == call.stream.first) {
          ++thread.waiting;
          enqueue(key, {nullptr, now_, &thread});
        }
      }
      resume(thread, now_);
      break;
    case Call::Kind::kRangeBegin:
      thread.ranges.emplace_back(call.name, now_);
      break;
    case Call::Kind::kRangeEnd:
      end_of_range(thread);
      break;
  }
  const auto parked = parked_.find(id);
  if (parked != parked_.end()) {
    const std::vector<HostThread*> woken = std::move(parked->second);
    parked_.erase(parked);
    for (HostThread* one : woken) {
      advance(*one);
    }
  }
  advance(thread);
}

void Replay::end_of_range(HostThread& thread) {
  if (thread.ranges.empty()) {
    return;  // it began before the clock was started
  }
  const auto [name, start] = thread.ranges.back();
  thread.ranges.pop_back();
  if (schedule_.tracing) {
    schedule_.spans.push_back({Span::Kind::kRange,
                               name,
                               start,
                               now_,
                               {},
                               c10::Device(c10::kCPU),
                               c10::Device(c10::kCPU),
                               0,
                               &thread});
  }
}

void Replay::enqueue(StreamKey key, StreamState::Item item) {
  StreamState& stream = schedule_.streams[key];
  stream.key = key;
  stream.queue.push_back(item);
  pump(stream);
}

/// Lets the stream go as far as it can.
void Replay::pump(StreamState& stream) {
  while (!stream.queue.empty() && !stream.running && !stream.blocked) {
    const StreamState::Item item = stream.queue.front();
    const double ready = std::max(item.enqueued, stream.tail);
    if (item.waiter != nullptr) {
      stream.queue.pop_front();
      resume(*item.waiter, ready);
    } else if (item.call->kind == Call::Kind::kRecord) {
      stream.queue.pop_front();
      tell(*item.call->moment, ready);
    } else if (item.call->kind == Call::Kind::kBlock) {
      Moment& moment = *item.call->moment;
      if (!moment.known) {
        stream.blocked = true;
        moment.streams.push_back(&stream);
        return;
      }
      stream.queue.pop_front();
      stream.tail = std::max(ready, moment.time);
    } else {
      stream.running = true;
      wakes_.push({std::max(ready, now_) + item.call->latency, What::kRequest,
                   stream.key, 0, nullptr, &stream});
    }
  }
}

void Replay::tell(Moment& moment, double time) {
  moment.known = true;
  moment.time = time;
  for (HostThread* thread : std::exchange(moment.threads, {})) {
    resume(*thread, std::max(time, now_));
  }
  for (StreamState* stream : std::exchange(moment.streams, {})) {
    stream->blocked = false;
    pump(*stream);
  }
}

/// One of the things that the thread waits for has come.
void Replay::resume(HostThread& thread, double time) {
  thread.time = std::max(thread.time, time);
  if (--thread.waiting == 0) {
    thread.scheduled = true;
    wakes_.push({std::max(thread.time, now_),
                 What::kResume,
                 {thread.home, 0},
                 thread.index,
                 &thread,
                 nullptr});
  }
}

/// Gives the stream's first item what it needs, if that is free.
bool Replay::try_start(StreamState& stream) {
  const Call& call = *stream.queue.front().call;
  double free_at = 0;
  for (const int64_t resource : call.resources) {
    if (resource >= 0) {
      free_at = std::max(free_at, schedule_.free_at[resource]);
    }
  }
  if (free_at > now_) {
    // One for all that wait until then: each retries all of them.
    if (retries_.insert(free_at).second) {
      wakes_.push({free_at, What::kRetry, {}, 0, nullptr, nullptr});
    }
    return false;
  }
  const double end = now_ + call.busy;
  for (const int64_t resource : call.resources) {
    if (resource >= 0) {
      schedule_.free_at[resource] = end;
    }
  }
  const bool kernel = call.kind == Call::Kind::kKernel;
  if (kernel) {
    schedule_.compute_busy[call.stream.first] += call.busy;
  } else {
    schedule_.link_busy[{link_end(call.source), link_end(call.target)}] +=
        call.busy;
  }
  if (schedule_.tracing) {
    schedule_.spans.push_back({kernel ? Span::Kind::kKernel : Span::Kind::kCopy,
                               call.name, now_, end, call.stream, call.source,
                               call.target, call.bytes, call.thread});
  }
  wakes_.push({end, What::kComplete, stream.key, 0, nullptr, &stream});
  return true;
}

/// What waits is served in the order in which it came.
void Replay::start_waiting() {
  std::sort(waiting_.begin(), waiting_.end(),
            [](const Waiting& a, const Waiting& b) {
              return std::tie(a.since, a.stream->key) <
                     std::tie(b.since, b.stream->key);
            });
  std::vector<Waiting> still;
  for (const Waiting& one : waiting_) {
    if (!try_start(*one.stream)) {
      still.push_back(one);
    }
  }
  waiting_ = std::move(still);
}

// Tasks that wait for each other's middle: not what a node of autograd does,
// unless it runs a backward of its own. They ran, so the order in which they
// were written down is one that works.
void Replay::break_knot() {
  HostThread* first = nullptr;
  Task* task_of_first = nullptr;
  int64_t lowest = 0;
  for (HostThread& thread : schedule_.threads) {
    for (Task& task : thread.tasks) {
      if (task.next < task.calls.size() &&
          (first == nullptr || task.calls[task.next] < lowest)) {
        first = &thread;
        task_of_first = &task;
        lowest = task.calls[task.next];
      }
    }
  }
  TORCH_INTERNAL_ASSERT(first != nullptr && first->waiting == 0 &&
                        first->current != task_of_first);
  first->current = task_of_first;
  advance(*first);
}

}  // namespace dataparallel::simulated
