#include "simulated/clock.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simulated/device.h"
#include "simulated/replay.h"

namespace dataparallel::simulated {
namespace {

/// So many calls are kept before the next wait of the host replays them.
constexpr size_t kManyCalls = 1 << 18;

thread_local HostThread* self = nullptr;
/// Nodes of autograd whose function this thread has begun and not ended: more
/// than one where a node runs a backward of its own.
thread_local int64_t nodes_begun = 0;

/// Goes with torch's thread-local state, to threads that work for this one.
struct WorksFor final : c10::DebugInfoBase {
  explicit WorksFor(HostThread* of) : thread(of) {}
  HostThread* thread;
};

// A place of our own where torch lets us name one, else one that it has no use
// for.
template <class Kind = c10::DebugInfoKind>
Kind debug_info_kind() {
  if constexpr (std::is_enum_v<Kind>) {
    return Kind::PRODUCER_INFO;
  } else {
    static constexpr std::string_view kName = "dataparallel::simulated";
    return Kind(&kName);
  }
}

/// Whom the calling thread, `self`, works for.
HostThread* parent() {
  const auto* info = static_cast<const WorksFor*>(
      c10::ThreadLocalDebugInfo::get(debug_info_kind()));
  return info == nullptr || info->thread == self ? nullptr : info->thread;
}

// Only where nothing else is: others expect to find theirs on top.
void sign_thread_local_state() {
  if (c10::ThreadLocalDebugInfo::current() == nullptr) {
    c10::ThreadLocalDebugInfo::_push(debug_info_kind(),
                                     std::make_shared<WorksFor>(self));
  }
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& range) {
  if (range.scope() == at::RecordScope::USER_SCOPE) {
    Clock::get().begin_range(range.name());
  } else {
    if (nodes_begun == 0) {
      Clock::get().begin_node();
    }
    ++nodes_begun;
  }
  return nullptr;
}

void on_end(const at::RecordFunction& range, at::ObserverContext*) {
  if (range.scope() == at::RecordScope::USER_SCOPE) {
    Clock::get().end_range();
  } else {
    --nodes_begun;
  }
}

double ticks(double seconds) {
  return std::round(seconds * kTicksPerSecond);
}

const std::vector<RaceDetector::Access> kNone;

}  // namespace

std::atomic<bool> Clock::on_{false};

// Never destroyed: tensors in globals are freed after everything else.
Clock& Clock::get() {
  static auto* clock = new Clock;
  return *clock;
}

void Clock::start(const Hardware& hardware, int64_t devices) {
  {
    std::lock_guard lock(mutex_);
    hardware_ = hardware;
    schedule_.calls.clear();
    schedule_.streams.clear();
    schedule_.free_at.assign(devices * Resources::kPerDevice, 0);
    schedule_.compute_busy.assign(devices, 0);
    schedule_.link_busy.clear();
    schedule_.latest = schedule_.origin = 0;
    schedule_.spans.clear();
    for (HostThread& thread : schedule_.threads) {
      HostThread fresh;
      fresh.index = thread.index;
      fresh.name = thread.name;
      fresh.home = thread.home;
      fresh.of_autograd = thread.of_autograd;
      thread = std::move(fresh);
    }
    memory_.clear();
    this_thread();
    on_ = true;
  }
  if (!callback_.has_value()) {
    callback_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&on_begin, &on_end)
            .scopes({at::RecordScope::USER_SCOPE,
                     at::RecordScope::BACKWARD_FUNCTION}));
  }
}

void Clock::stop() {
  if (callback_.has_value()) {
    at::removeCallback(*callback_);
    callback_.reset();
  }
  std::lock_guard lock(mutex_);
  on_ = false;
}

const std::string* Clock::intern(const std::string& name) {
  return &*names_.insert(name).first;
}

HostThread& Clock::this_thread() {
  if (self == nullptr) {
    HostThread& thread = schedule_.threads.emplace_back();
    thread.index = static_cast<int64_t>(schedule_.threads.size()) - 1;
    thread.name = c10::getThreadName();
    thread.home = current_device();
    thread.of_autograd = thread.name.rfind("pt_autograd", 0) == 0;
    self = &thread;
  }
  sign_thread_local_state();
  return *self;
}

// See Note [Tasks].
Task& Clock::this_task(HostThread& thread) {
  const bool has_task = !thread.tasks.empty();
  if (nodes_begun > 0 && has_task) {
    return thread.tasks.back();
  }
  const auto node = torch::autograd::get_current_node();
  const bool queued =
      thread.of_autograd && parent() != nullptr && node != nullptr;
  const void* key = queued ? node.get() : nullptr;
  const int64_t group = torch::autograd::get_current_graph_task_id();
  if (has_task && thread.tasks.back().node == key &&
      (!queued || thread.tasks.back().group == group)) {
    return thread.tasks.back();
  }
  Task& task = thread.tasks.emplace_back();
  task.id = next_task_++;
  task.node = key;
  if (queued) {
    task.priority = node->sequence_nr();
    task.group = group;
  }
  return task;
}

int64_t Clock::add(Call call,
                   const std::vector<RaceDetector::Access>& accesses) {
  const auto id = static_cast<int64_t>(schedule_.calls.size());
  HostThread& thread = this_thread();
  Task& task = this_task(thread);
  task.calls.push_back(id);
  call.thread = &thread;
  call.task = task.id;
  for (const auto& [of_task, last] : thread.joining) {
    call.after.push_back(last);
  }
  thread.joining.clear();
  call.not_before = std::max(call.not_before, thread.joining_time);
  if (HostThread* caller = parent()) {
    if (caller->last_call >= 0) {
      call.after.push_back(caller->last_call);
    } else {
      call.not_before = std::max(call.not_before, caller->time);
    }
    caller->joining[task.id] = id;
  }
  memory_.access(call, id, accesses);
  thread.last_call = id;
  schedule_.calls.push_back(std::move(call));
  return id;
}

void Clock::replay() {
  Replay(schedule_).run();
  memory_.settle();
  for (const Call& call : schedule_.calls) {
    if (call.kind == Call::Kind::kRecord) {
      call.moment->call = -1;
      call.moment->recorded_at = call.over_at;
    }
  }
  for (HostThread& thread : schedule_.threads) {
    for (const auto& [task, last] : thread.joining) {
      thread.joining_time =
          std::max(thread.joining_time, schedule_.calls[last].over_at);
    }
    thread.joining.clear();
    thread.last_call = -1;
  }
  schedule_.calls.clear();
}

void Clock::kernel(const std::string& name, StreamKey stream, double bytes,
                   const Flops& flops,
                   const std::vector<RaceDetector::Access>& accesses) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kKernel;
  call.name = intern(name);
  call.stream = stream;
  call.on_host = ticks(hardware_.host.kernel_launch_seconds);
  call.latency = ticks(hardware_.device.launch_latency_seconds);
  call.busy =
      ticks(std::max(bytes / hardware_.device.memory_bytes_per_second,
                     flops.count / flops_per_second(hardware_.device, flops)));
  call.resources[0] = Resources::compute(stream.first);
  add(std::move(call), accesses);
}

LinkModel Clock::link(c10::Device source, c10::Device target,
                      int64_t resources[2]) {
  if (!source.is_cpu() && !target.is_cpu() && hardware_.peer_link) {
    resources[0] = Resources::peer_out(source.index());
    resources[1] = Resources::peer_in(target.index());
    return *hardware_.peer_link;
  }
  resources[0] = source.is_cpu() ? -1 : Resources::host_out(source.index());
  resources[1] = target.is_cpu() ? -1 : Resources::host_in(target.index());
  return hardware_.host_link;
}

void Clock::copy(StreamKey stream, c10::Device source, c10::Device target,
                 int64_t bytes, bool pinned, bool host_waits,
                 const std::vector<RaceDetector::Access>& accesses) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kCopy;
  call.name = intern("aten::copy_");
  call.stream = stream;
  call.on_host = ticks(hardware_.host.copy_launch_seconds);
  const LinkModel model = link(source, target, call.resources);
  const double bytes_per_second =
      pinned ? model.bytes_per_second
             : std::min(model.bytes_per_second,
                        hardware_.host.pageable_bytes_per_second);
  call.busy = ticks(model.latency_seconds +
                    static_cast<double>(bytes) / bytes_per_second);
  call.source = source;
  call.target = target;
  call.bytes = bytes;
  call.host_waits = host_waits;
  add(std::move(call), accesses);
  if (host_waits && schedule_.calls.size() > kManyCalls && !parent()) {
    replay();
  }
}

std::shared_ptr<Moment> Clock::record(StreamKey stream) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kRecord;
  call.stream = stream;
  call.moment = std::make_shared<Moment>();
  auto moment = call.moment;
  moment->call = add(std::move(call), kNone);
  return moment;
}

namespace {

void after(Call& call, const std::shared_ptr<Moment>& moment) {
  if (moment->call >= 0) {
    call.after.push_back(moment->call);
  } else {
    call.not_before = moment->recorded_at;
  }
  call.moment = moment;
}

}  // namespace

void Clock::block(const std::shared_ptr<Moment>& moment, StreamKey stream) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kBlock;
  call.stream = stream;
  after(call, moment);
  add(std::move(call), kNone);
}

void Clock::wait(const std::shared_ptr<Moment>& moment) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kWaitForEvent;
  after(call, moment);
  add(std::move(call), kNone);
}

void Clock::wait(StreamKey stream) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kWaitForStream;
  call.stream = stream;
  add(std::move(call), kNone);
  if (schedule_.calls.size() > kManyCalls && !parent()) {
    replay();
  }
}

void Clock::wait_for_device(int64_t device) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kWaitForDevice;
  call.stream = {device, 0};
  add(std::move(call), kNone);
}

void Clock::begin_range(const std::string& name) {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kRangeBegin;
  call.name = intern(name);
  add(std::move(call), kNone);
}

void Clock::end_range() {
  std::lock_guard lock(mutex_);
  Call call;
  call.kind = Call::Kind::kRangeEnd;
  add(std::move(call), kNone);
}

void Clock::begin_node() {
  std::lock_guard lock(mutex_);
  this_task(this_thread());
}

void Clock::freed(const void* storage) {
  std::lock_guard lock(mutex_);
  memory_.freed(storage);
}

double Clock::now() {
  std::lock_guard lock(mutex_);
  HostThread& thread = this_thread();
  replay();
  return std::max(thread.time, thread.joining_time) / kTicksPerSecond;
}

double Clock::elapsed() {
  std::lock_guard lock(mutex_);
  replay();
  return (schedule_.latest - schedule_.origin) / kTicksPerSecond;
}

void Clock::set_origin() {
  std::lock_guard lock(mutex_);
  replay();
  schedule_.origin = schedule_.latest;
  std::fill(schedule_.compute_busy.begin(), schedule_.compute_busy.end(), 0.0);
  schedule_.link_busy.clear();
}

double Clock::compute_seconds(int64_t device) {
  std::lock_guard lock(mutex_);
  replay();
  return schedule_.compute_busy[device] / kTicksPerSecond;
}

double Clock::link_seconds(int64_t source, int64_t target) {
  std::lock_guard lock(mutex_);
  replay();
  return schedule_.link_busy[{source, target}] / kTicksPerSecond;
}

double Clock::seconds_of(Moment& moment) {
  std::lock_guard lock(mutex_);
  replay();
  return moment.time / kTicksPerSecond;
}

void Clock::trace(bool on) {
  std::lock_guard lock(mutex_);
  replay();
  schedule_.tracing = on;
  schedule_.spans.clear();
}

std::vector<Span> Clock::spans() {
  std::lock_guard lock(mutex_);
  replay();
  return schedule_.spans;
}

}  // namespace dataparallel::simulated
