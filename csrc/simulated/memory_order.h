#pragma once

#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "simulated/race_detector.h"
#include "simulated/schedule.h"

namespace dataparallel::simulated {

/// Which calls last used which bytes: what reads or writes them comes after
/// what wrote them, what writes them after what read them too. Not thread-safe.
class MemoryOrder {
 public:
  explicit MemoryOrder(const Schedule& schedule) : schedule_(schedule) {}

  void freed(const void* storage) { storages_.erase(storage); }
  /// Adds to what `call`, which will have the number `id`, comes after.
  /// `accesses`: to simulated memory only.
  void access(Call& call, int64_t id,
              std::span<const RaceDetector::Access> accesses);
  /// The calls have been replayed and are about to be forgotten.
  void settle();
  void clear() { storages_.clear(); }

 private:
  /// A call, or, where it is settled, when it was over.
  struct Use {
    int64_t call = -1;
    double over_at = 0;
    int64_t task = -1;
  };
  struct Segment {
    int64_t end = 0;
    Use writer;
    std::vector<Use> readers;  // since the write, one a task
  };
  using Segments = std::map<int64_t, Segment>;  // by begin, without overlaps

  static void split(Segments& segments, int64_t at);
  void after(Call& call, const Use& use) const;
  void settle(Use& use) const;

  const Schedule& schedule_;
  std::unordered_map<const void*, Segments> storages_;
};

}  // namespace dataparallel::simulated
