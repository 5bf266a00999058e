#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace dataparallel::detail {

// Note [Communication streams]
//
// What travels between devices while these compute has a stream of its own on
// each device, the same for all wrappers of the process. Work on it starts when
// what is on the current stream at that time is done, and the current stream
// goes on; so a reduction runs beside the rest of backward. Who uses the result
// waits for it first (`wait_for_comm`). Memory that one of the two streams
// allocated and the other uses is announced to the allocator
// (`keep_for_current_stream` in reduce.cpp).

/// The calling thread's current stream of each of `devices`; the CPU has none.
std::vector<c10::Stream> current_streams(
    const std::vector<c10::Device>& devices);

/// While it lives, `streams` are the calling thread's current ones.
class OnStreams {
 public:
  explicit OnStreams(const std::vector<c10::Stream>& streams);
  ~OnStreams();
  OnStreams(const OnStreams&) = delete;
  OnStreams& operator=(const OnStreams&) = delete;

 private:
  std::vector<c10::Stream> before_;
};

/// The communication streams of `devices`, after they have been told to wait
/// for the current ones.
std::vector<c10::Stream> comm_streams(const std::vector<c10::Device>& devices);

/// The current stream of `device` waits for what its communication stream has
/// been given so far. Nothing to do on the CPU.
void wait_for_comm(c10::Device device);

}  // namespace dataparallel::detail
