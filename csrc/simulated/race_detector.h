#pragma once

#include <c10/core/Stream.h>
#include <dataparallel/simulated.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace dataparallel::simulated {

/// A device index and a stream of it.
using StreamKey = std::pair<int64_t, int64_t>;

inline StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

/// How far into each stream someone has seen.
using VectorClock = std::map<StreamKey, int64_t>;

// Note [Vector clocks]
//
// A stream's time is the number of events recorded on it. Its clock holds, for
// each stream, the time up to which that one's work is known to be over before
// this one's next operator starts. `record` gives the event a copy of the
// stream's clock, and then advances the stream's own time: so what is launched
// after the record is later than the event. `block` raises the waiting stream's
// clock to the event's. The host has a clock as well, raised when it
// synchronizes; a launch raises the stream's clock to the host's, since work is
// launched after what the host has waited for. One clock stands for all threads
// of the host: threads order themselves by means that cannot be seen from here,
// and a report must not be a guess.
//
// A storage remembers the bytes of its accesses. An access by stream s at an
// operator's launch is ordered after an access (s', t) if s is s', or if s's
// clock holds at least t for s'. One that covers an ordered one replaces it,
// since what comes after the later comes after both; only a read does not
// replace a write, which reads to come must still be compared with.
//
// Freed memory goes back to the stream that allocated it, and its next owner
// may write to it at once: every use by another stream must be ordered before
// that stream's present, or have been announced by `record_stream`.

/// Watches all accesses to simulated memory. Thread safety: all functions lock.
class RaceDetector {
 public:
  static RaceDetector& get();

  /// The bytes [begin, end) of the storage that starts at `storage`. Of a
  /// tensor with gaps these are all between its first and its last element.
  struct Access {
    const void* storage;
    int64_t begin;
    int64_t end;
    bool write;
  };

  void record(VectorClock& event, StreamKey stream);
  void block(const VectorClock& event, StreamKey stream);
  void synchronize(const VectorClock& event);
  void synchronize(StreamKey stream);
  void synchronize_device(int64_t device);

  /// An operator launched on `stream`. Throws if races shall fail.
  void access(const std::string& operator_name, StreamKey stream,
              std::vector<Access> accesses);

  void allocated(const void* storage, StreamKey stream);
  void used_on(const void* storage, StreamKey stream);  // record_stream
  void freed(const void* storage) noexcept;

  std::vector<Race> races();
  void clear();
  void fail_on_race(bool value);

 private:
  struct Use {
    StreamKey stream;
    int64_t time;
    int64_t begin;
    int64_t end;
    bool write;
    /// An ordered one has covered it, see Note [Vector clocks].
    bool replaced = false;
  };
  struct Shadow {
    StreamKey allocated_on;
    std::vector<Use> uses;  // by begin
    std::set<StreamKey> announced;
  };

  static constexpr size_t kKept = 1000;

  VectorClock& clock(StreamKey stream);
  /// `now`: the accesses of one operator to one storage. Its time grows with
  /// their number and with how many earlier ones they meet, so that a flat
  /// buffer with a thousand slices is no square.
  void use(Shadow& shadow, std::span<Use> now, const VectorClock& clock,
           const std::string& name);
  void report(const std::string& kind, const std::string& name,
              StreamKey stream, StreamKey other);

  std::mutex mutex_;
  std::map<StreamKey, VectorClock> clocks_;
  VectorClock host_;
  std::unordered_map<const void*, Shadow> shadows_;
  std::vector<Race> races_;
  bool fail_on_race_ = false;
};

}  // namespace dataparallel::simulated
