#include "simulated/race_detector.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace dataparallel::simulated {
namespace {

void raise(VectorClock& clock, const VectorClock& to) {
  for (const auto& [stream, time] : to) {
    int64_t& mine = clock[stream];
    mine = std::max(mine, time);
  }
}

/// Whether what `before` did at `time` is over before `stream`, whose clock
/// this is, does anything more.
bool ordered(const VectorClock& clock, StreamKey stream, StreamKey before,
             int64_t time) {
  if (before == stream) {
    return true;
  }
  const auto found = clock.find(before);
  return found != clock.end() && found->second >= time;
}

c10::Device device_of(const StreamKey& stream) {
  return {c10::DeviceType::PrivateUse1,
          static_cast<c10::DeviceIndex>(stream.first)};
}

}  // namespace

// Never destroyed: tensors in globals are freed after everything else.
RaceDetector& RaceDetector::get() {
  static auto* detector = new RaceDetector;
  return *detector;
}

VectorClock& RaceDetector::clock(StreamKey stream) {
  VectorClock& clock = clocks_[stream];
  clock.try_emplace(stream, 1);
  return clock;
}

void RaceDetector::record(VectorClock& event, StreamKey stream) {
  std::lock_guard lock(mutex_);
  VectorClock& now = clock(stream);
  raise(now, host_);
  event = now;
  ++now[stream];
}

void RaceDetector::block(const VectorClock& event, StreamKey stream) {
  std::lock_guard lock(mutex_);
  raise(clock(stream), event);
}

void RaceDetector::synchronize(const VectorClock& event) {
  std::lock_guard lock(mutex_);
  raise(host_, event);
}

void RaceDetector::synchronize(StreamKey stream) {
  VectorClock event;
  record(event, stream);
  synchronize(event);
}

void RaceDetector::synchronize_device(int64_t device) {
  std::lock_guard lock(mutex_);
  for (auto& [stream, now] : clocks_) {
    if (stream.first == device) {
      raise(host_, now);
      ++now[stream];
    }
  }
}

void RaceDetector::use(Shadow& shadow, std::span<Use> now,
                       const VectorClock& clock, const std::string& name) {
  const auto by_begin = [](const Use& a, const Use& b) {
    return a.begin < b.begin;
  };
  std::sort(now.begin(), now.end(), by_begin);
  std::set<StreamKey> reported;
  c10::SmallVector<Use*, 8> ahead;  // may meet the accesses still to come
  auto next = shadow.uses.begin();
  for (const Use& use : now) {
    for (; next != shadow.uses.end() && next->begin < use.end; ++next) {
      ahead.push_back(&*next);
    }
    ahead.erase(std::remove_if(ahead.begin(), ahead.end(),
                               [&](const Use* before) {
                                 return before->replaced ||
                                        before->end <= use.begin;
                               }),
                ahead.end());
    for (Use* before : ahead) {
      if (before->begin >= use.end) {
        continue;
      }
      const bool over =
          ordered(clock, use.stream, before->stream, before->time);
      if (!over && (before->write || use.write) &&
          reported.insert(before->stream).second) {
        report(!use.write      ? "read after write"
               : before->write ? "write after write"
                               : "write after read",
               name, use.stream, before->stream);
      }
      before->replaced = over && (use.write || !before->write) &&
                         use.begin <= before->begin && before->end <= use.end;
    }
  }
  std::erase_if(shadow.uses, [](const Use& use) { return use.replaced; });
  const auto kept = static_cast<std::ptrdiff_t>(shadow.uses.size());
  shadow.uses.insert(shadow.uses.end(), now.begin(), now.end());
  std::inplace_merge(shadow.uses.begin(), shadow.uses.begin() + kept,
                     shadow.uses.end(), by_begin);
}

void RaceDetector::access(const std::string& operator_name, StreamKey stream,
                          std::vector<Access> accesses) {
  std::erase_if(accesses, [](const Access& access) {
    return access.begin == access.end;
  });
  std::lock_guard lock(mutex_);
  VectorClock& now = clock(stream);
  raise(now, host_);
  const int64_t time = now[stream];
  const size_t before = races_.size();
  std::vector<Use> uses;
  uses.reserve(accesses.size());
  for (const Access& access : accesses) {
    uses.push_back({stream, time, access.begin, access.end, access.write});
  }
  for (size_t i = 0; i < accesses.size();) {
    const size_t first = i;
    while (i < accesses.size() &&
           accesses[i].storage == accesses[first].storage) {
      ++i;
    }
    const auto found = shadows_.find(accesses[first].storage);
    if (found != shadows_.end()) {
      use(found->second, std::span(uses).subspan(first, i - first), now,
          operator_name);
    }
  }
  TORCH_CHECK(!fail_on_race_ || races_.size() == before,
              races_.size() == before ? "" : races_[before].message());
}

void RaceDetector::allocated(const void* storage, StreamKey stream) {
  if (storage != nullptr) {
    std::lock_guard lock(mutex_);
    clock(stream);
    shadows_[storage] = Shadow{stream, {}, {}};
  }
}

void RaceDetector::used_on(const void* storage, StreamKey stream) {
  std::lock_guard lock(mutex_);
  const auto found = shadows_.find(storage);
  if (found != shadows_.end()) {
    found->second.announced.insert(stream);
  }
}

void RaceDetector::freed(const void* storage) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = shadows_.find(storage);
  if (found == shadows_.end()) {
    return;
  }
  const Shadow shadow = std::move(found->second);
  shadows_.erase(found);
  const StreamKey owner = shadow.allocated_on;
  VectorClock now = clock(owner);
  raise(now, host_);
  std::set<StreamKey> reported;
  for (const Use& use : shadow.uses) {
    if (shadow.announced.count(use.stream) == 0 &&
        !ordered(now, owner, use.stream, use.time) &&
        reported.insert(use.stream).second) {
      report("use after free", "free", owner, use.stream);
    }
  }
}

void RaceDetector::report(const std::string& kind, const std::string& name,
                          StreamKey stream, StreamKey other) {
  if (races_.size() < kKept) {
    races_.push_back({kind, name, device_of(stream), stream.second,
                      device_of(other), other.second});
  }
}

std::vector<Race> RaceDetector::races() {
  std::lock_guard lock(mutex_);
  return races_;
}

void RaceDetector::clear() {
  std::lock_guard lock(mutex_);
  races_.clear();
}

void RaceDetector::fail_on_race(bool value) {
  std::lock_guard lock(mutex_);
  fail_on_race_ = value;
}

}  // namespace dataparallel::simulated
