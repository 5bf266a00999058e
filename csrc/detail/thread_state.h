#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include <array>
#include <optional>
#include <vector>

namespace dataparallel::detail {

/// Autocast as one thread has it. `at::ThreadLocalState` carries the flags of
/// some device types only, and never the cache flag.
class AutocastState {
 public:
  /// The calling thread's.
  AutocastState();
  /// Makes the calling thread's state this one.
  void set() const;

 private:
  struct Entry {
    bool enabled;
    at::ScalarType dtype;
  };
  std::array<Entry, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()> entries_;
  bool cache_enabled_;
};

/// What a worker takes over from the thread that called it.
///
/// Not carried because torch keeps them for the whole process: the default
/// dtype, anomaly mode, deterministic algorithms.
class CallerState {
 public:
  /// Of the calling thread; `devices` are those whose current streams count.
  explicit CallerState(const std::vector<at::Device>& devices);

 private:
  friend class CallerStateGuard;
  at::ThreadLocalState local_;
  AutocastState autocast_;
  std::vector<c10::Stream> streams_;
};

/// Makes the calling thread's state the caller's, with `device` current, and
/// puts it back.
class CallerStateGuard {
 public:
  CallerStateGuard(const CallerState& state, at::Device device);
  ~CallerStateGuard();
  CallerStateGuard(const CallerStateGuard&) = delete;
  CallerStateGuard& operator=(const CallerStateGuard&) = delete;

 private:
  AutocastState autocast_before_;
  std::vector<c10::Stream> streams_before_;
  at::ThreadLocalStateGuard local_;
  c10::OptionalDeviceGuard device_;
};

}  // namespace dataparallel::detail
