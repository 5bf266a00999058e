#pragma once

#include <c10/core/Device.h>
#include <dataparallel/simulated_export.h>
#include <dataparallel/simulated_hardware.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Simulated devices `sim:0`, `sim:1`, …: accelerators whose memory is the
/// host's and whose kernels are the CPU's, for testing code for many devices on
/// a machine that has none.
///
/// They are as strict as CUDA (tensors of two devices in one operator are an
/// error with CUDA's text; a device has a memory size), have streams and
/// events, and see what a real device hides: an access that no event orders
/// after the one before is reported every time. They count kernels, copies and
/// bytes exactly. What they do not have is speed: what a step would take on
/// real hardware, a simulated clock tells (`simulated_clock.h`).
///
/// Of a tensor with gaps the race detector takes all bytes between the first
/// and the last element for used, so it reports two streams that write to
/// columns of one matrix. The host's own reads and writes (after a
/// `non_blocking` copy, without synchronizing) it does not watch.
///
/// Thread safety: every function may be called from any thread; counters and
/// races are the process's.
namespace dataparallel::simulated {

struct DATAPARALLEL_SIMULATED_EXPORT Options {
  /// How many, 1 to 64. Default 4.
  Options& devices(int64_t value);
  /// The memory of each device, in bytes; 0: no limit. Default: that of
  /// `hardware`, or no limit.
  Options& memory_bytes(int64_t value);
  /// Whether an operator that races throws. Default: it is only recorded.
  Options& fail_on_race(bool value);
  /// Switches the clock on (`simulated_clock.h`), at 0, with devices and links
  /// of this kind. Default: no clock.
  Options& hardware(Hardware value);
  /// Shapes only: operators compute nothing, memory is counted against
  /// `memory_bytes` and not allocated. So a step of any size is over in
  /// seconds, to see whether it fits and, with the clock, how it scales.
  /// Default: false.
  ///
  /// Reading a value (`item()`, a copy to the CPU) is a `c10::Error` then; an
  /// operator whose result's shape depends on values (`nonzero`), or that has
  /// no meta kernel, a `c10::NotImplementedError`. What touches the memory
  /// itself (`data_ptr`) crashes. `start` changes it only while no simulated
  /// memory is in use (`c10::ValueError`).
  Options& dry_run(bool value);

  int64_t devices() const { return devices_; }
  int64_t memory_bytes() const;
  bool fail_on_race() const { return fail_on_race_; }
  const std::optional<Hardware>& hardware() const { return hardware_; }
  bool dry_run() const { return dry_run_; }

 private:
  int64_t devices_ = 4;
  std::optional<int64_t> memory_bytes_;
  bool fail_on_race_ = false;
  std::optional<Hardware> hardware_;
  bool dry_run_ = false;
};

/// Makes the devices; `torch::Device("sim:1")` can be written from then on, and
/// they are the process's accelerator (`at::getAccelerator()`).
///
/// Call it before the process's first backward: autograd makes one thread a
/// device then, and no more after; too late is a `c10::Error` that says so.
/// Before it, nothing in the process is changed. Calling it again with the same
/// number of devices changes the other options only; with another number:
/// `c10::ValueError`, as for a number that is not 1 to 64.
DATAPARALLEL_SIMULATED_EXPORT void start(const Options& options = {});

/// 0 before `start`.
DATAPARALLEL_SIMULATED_EXPORT int64_t device_count();

/// Two accesses to one storage that no stream order and no event separates.
struct DATAPARALLEL_SIMULATED_EXPORT Race {
  /// "read after write", "write after write", "write after read", or "use after
  /// free": freed while another stream may still use it, without
  /// `record_stream`.
  std::string kind;
  std::string operator_name;
  /// Of the access that is not ordered, and of the one that it may meet.
  c10::Device device{c10::kCPU};
  int64_t stream = 0;
  c10::Device other_device{c10::kCPU};
  int64_t other_stream = 0;

  std::string message() const;
};

/// The races seen since the start or the last `clear_races`, oldest first; the
/// first thousand are kept.
DATAPARALLEL_SIMULATED_EXPORT std::vector<Race> races();
DATAPARALLEL_SIMULATED_EXPORT void clear_races();

/// Bytes now, and at most since `reset_counters`. `c10::ValueError` for what is
/// no simulated device, as in all that follow.
DATAPARALLEL_SIMULATED_EXPORT int64_t memory_allocated(c10::Device device);
DATAPARALLEL_SIMULATED_EXPORT int64_t peak_memory(c10::Device device);
/// Operators run on the device; views and copies between devices do not count.
DATAPARALLEL_SIMULATED_EXPORT int64_t kernels_launched(c10::Device device);
/// Copies from `source` to `target`, and their bytes; one may be the CPU.
DATAPARALLEL_SIMULATED_EXPORT int64_t copies(c10::Device source,
                                             c10::Device target);
DATAPARALLEL_SIMULATED_EXPORT int64_t bytes_copied(c10::Device source,
                                                   c10::Device target);
/// Zeros all counters, busy times of the clock too; peaks become what is
/// allocated.
DATAPARALLEL_SIMULATED_EXPORT void reset_counters();

/// While it lives, copies from `source` to `target` arrive as zeros: a link
/// that lies.
class DATAPARALLEL_SIMULATED_EXPORT CorruptCopies {
 public:
  CorruptCopies(c10::Device source, c10::Device target);
  ~CorruptCopies();
  CorruptCopies(const CorruptCopies&) = delete;
  CorruptCopies& operator=(const CorruptCopies&) = delete;

 private:
  c10::Device source_;
  c10::Device target_;
};

}  // namespace dataparallel::simulated
