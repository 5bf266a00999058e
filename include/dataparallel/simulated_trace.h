#pragma once

#include <dataparallel/simulated_clock.h>
#include <dataparallel/simulated_export.h>

#include <string>

namespace dataparallel::simulated {

/// Keeps what happens by the simulated clock while it lives, for a file that
/// https://ui.perfetto.dev and chrome://tracing open: a process for each device
/// with a track for each of its streams, one for the links with a track for
/// each pair of ends, one for the host with a track for each of its threads.
/// On the host's there are launches, and the ranges of torch's profiler
/// (`RECORD_USER_SCOPE`, such as `dataparallel::refresh`) around them.
///
///     simulated::Trace trace;
///     step();
///     trace.save("step.json");
///
/// One at a time; a second one, or one while the clock is off, is a
/// `c10::Error`. It keeps about 150 bytes for each kernel and each launch.
/// Thread safety: that of `simulated_clock.h`.
class DATAPARALLEL_SIMULATED_EXPORT Trace {
 public:
  Trace();
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// What has happened so far, in Chrome's trace event format (JSON); replaces
  /// the file. `c10::Error` if it cannot be written.
  void save(const std::string& path) const;
};

}  // namespace dataparallel::simulated
