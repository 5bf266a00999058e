#include "simulated/memory_order.h"

#include <algorithm>

namespace dataparallel::simulated {

void MemoryOrder::after(Call& call, const Use& use) const {
  if (use.call >= 0) {
    if (use.task != call.task) {
      call.after.push_back(use.call);
    }
  } else {
    call.not_before = std::max(call.not_before, use.over_at);
  }
}

/// Makes a segment that covers `at` two, so that one begins there.
void MemoryOrder::split(Segments& segments, int64_t at) {
  auto next = segments.upper_bound(at);
  if (next == segments.begin()) {
    return;
  }
  auto& [begin, segment] = *--next;
  if (begin < at && at < segment.end) {
    Segment rest = segment;
    segment.end = at;
    segments.emplace(at, std::move(rest));
  }
}

void MemoryOrder::access(Call& call, int64_t id,
                         std::span<const RaceDetector::Access> accesses) {
  const Use use{id, 0, call.task};
  for (const auto& [storage, begin, end, write] : accesses) {
    if (begin == end) {
      continue;
    }
    Segments& segments = storages_[storage];
    split(segments, begin);
    split(segments, end);
    int64_t at = begin;  // up to where segments have been seen
    auto next = segments.lower_bound(begin);
    while (next != segments.end() && next->first < end) {
      Segment& segment = next->second;
      after(call, segment.writer);
      if (write) {
        for (const Use& reader : segment.readers) {
          after(call, reader);
        }
        next = segments.erase(next);
        continue;
      }
      if (at < next->first) {
        segments.emplace(at, Segment{next->first, {}, {use}});
      }
      at = segment.end;
      const auto mine = std::find_if(
          segment.readers.begin(), segment.readers.end(),
          [&](const Use& reader) { return reader.task == use.task; });
      if (mine == segment.readers.end()) {
        segment.readers.push_back(use);
      } else {
        *mine = use;
      }
      ++next;
    }
    if (write) {
      segments.emplace(begin, Segment{end, use, {}});
    } else if (at < end) {
      segments.emplace(at, Segment{end, {}, {use}});
    }
  }
  std::sort(call.after.begin(), call.after.end());
  call.after.erase(std::unique(call.after.begin(), call.after.end()),
                   call.after.end());
}

void MemoryOrder::settle(Use& use) const {
  if (use.call >= 0) {
    use.over_at = schedule_.calls[use.call].over_at;
    use.call = -1;
  }
}

void MemoryOrder::settle() {
  for (auto& [storage, segments] : storages_) {
    for (auto& [begin, segment] : segments) {
      settle(segment.writer);
      Use last;  // of the readers, whose tasks are all done
      for (Use& reader : segment.readers) {
        settle(reader);
        last.over_at = std::max(last.over_at, reader.over_at);
      }
      if (!segment.readers.empty()) {
        segment.readers.assign(1, last);
      }
    }
  }
}

}  // namespace dataparallel::simulated
