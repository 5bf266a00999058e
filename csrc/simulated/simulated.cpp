#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <dataparallel/simulated.h>

#include <array>
#include <atomic>
#include <cmath>
#include <mutex>
#include <sstream>

#include "simulated/clock.h"
#include "simulated/counters.h"
#include "simulated/device.h"
#include "simulated/memory.h"
#include "simulated/race_detector.h"

namespace dataparallel::simulated {
namespace {

/// One for each pair; index 0 is the CPU.
template <class T>
using Pairs =
    std::array<std::array<std::atomic<T>, kMaxDevices + 1>, kMaxDevices + 1>;

std::array<std::atomic<int64_t>, kMaxDevices> kernels;
Pairs<int64_t> copy_counts;
Pairs<int64_t> copy_bytes;
Pairs<int64_t> corrupt;

size_t place(c10::Device device) {
  return device.type() == kDeviceType ? static_cast<size_t>(device.index()) + 1
                                      : 0;
}

size_t place_of(const char* function, c10::Device device) {
  return device.is_cpu() ? 0 : checked_index(function, device) + 1;
}

void check_hardware(const Hardware& hardware) {
  const auto check = [](const std::string& name, double value, bool zero) {
    TORCH_CHECK_VALUE(std::isfinite(value) && (zero ? value >= 0 : value > 0),
                      "start: hardware.", name, " is ", value, ", expected ",
                      zero ? "0 or more" : "a positive number");
  };
  const DeviceModel& device = hardware.device;
  check("device.memory_bytes", static_cast<double>(device.memory_bytes), true);
  check("device.memory_bytes_per_second", device.memory_bytes_per_second,
        false);
  check("device.fp64_flops_per_second", device.fp64_flops_per_second, false);
  check("device.fp32_flops_per_second", device.fp32_flops_per_second, false);
  check("device.tf32_flops_per_second", device.tf32_flops_per_second, false);
  check("device.fp16_flops_per_second", device.fp16_flops_per_second, false);
  check("device.bf16_flops_per_second", device.bf16_flops_per_second, false);
  check("device.launch_latency_seconds", device.launch_latency_seconds, true);
  const auto check_link = [&](const std::string& name, const LinkModel& link) {
    check(name + ".bytes_per_second", link.bytes_per_second, false);
    check(name + ".latency_seconds", link.latency_seconds, true);
  };
  check_link("host_link", hardware.host_link);
  if (hardware.peer_link.has_value()) {
    check_link("peer_link", *hardware.peer_link);
  }
  const HostModel& host = hardware.host;
  check("host.kernel_launch_seconds", host.kernel_launch_seconds, true);
  check("host.copy_launch_seconds", host.copy_launch_seconds, true);
  check("host.pageable_bytes_per_second", host.pageable_bytes_per_second,
        false);
}

// autograd makes one thread a device at the first backward of the process, and
// no more after.
void check_autograd_threads() {
  const at::AutoGradMode grad_mode(true);
  try {
    at::ones({1}, at::TensorOptions().device(c10::Device(kDeviceType, 0)))
        .requires_grad_()
        .sum()
        .backward();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false,
                "start: simulated devices must be started before the process's "
                "first backward, when autograd makes its threads (it says: ",
                error.what_without_backtrace(), ")");
  }
}

}  // namespace

Options& Options::devices(int64_t value) {
  devices_ = value;
  return *this;
}
Options& Options::memory_bytes(int64_t value) {
  memory_bytes_ = value;
  return *this;
}
Options& Options::fail_on_race(bool value) {
  fail_on_race_ = value;
  return *this;
}
Options& Options::hardware(Hardware value) {
  hardware_ = std::move(value);
  return *this;
}
Options& Options::dry_run(bool value) {
  dry_run_ = value;
  return *this;
}
int64_t Options::memory_bytes() const {
  return memory_bytes_.value_or(
      hardware_.has_value() ? hardware_->device.memory_bytes : 0);
}

void start(const Options& options) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  TORCH_CHECK_VALUE(options.devices() >= 1 && options.devices() <= kMaxDevices,
                    "start: devices is ", options.devices(), ", expected 1 to ",
                    kMaxDevices);
  if (options.hardware().has_value()) {
    check_hardware(*options.hardware());
  }
  TORCH_CHECK_VALUE(options.memory_bytes() >= 0, "start: memory_bytes is ",
                    options.memory_bytes(),
                    ", expected a positive number, or 0 for no limit");
  if (devices_made() == 0) {
    make_devices(options.devices());
  }
  static bool threads_checked = false;
  if (!threads_checked) {
    check_autograd_threads();
    threads_checked = true;
    reset_counters();
  }
  TORCH_CHECK_VALUE(devices_made() == options.devices(), "start: devices is ",
                    options.devices(), ", but ", devices_made(),
                    " simulated devices have been started already");
  set_dry(options.dry_run());
  set_memory_bytes(options.memory_bytes());
  RaceDetector::get().fail_on_race(options.fail_on_race());
  if (options.hardware().has_value()) {
    Clock::get().start(*options.hardware(), options.devices());
  } else if (Clock::is_on()) {
    Clock::get().stop();
  }
}

int64_t device_count() {
  return devices_made();
}

std::string Race::message() const {
  std::ostringstream text;
  text << kind << ": " << operator_name << " on " << device << " stream "
       << stream << " is not ordered after its use on " << other_device
       << " stream " << other_stream;
  return text.str();
}

std::vector<Race> races() {
  return RaceDetector::get().races();
}
void clear_races() {
  RaceDetector::get().clear();
}

int64_t memory_allocated(c10::Device device) {
  return allocated_bytes(checked_index("memory_allocated", device));
}
int64_t peak_memory(c10::Device device) {
  return peak_bytes(checked_index("peak_memory", device));
}
int64_t kernels_launched(c10::Device device) {
  return kernels[checked_index("kernels_launched", device)];
}
int64_t copies(c10::Device source, c10::Device target) {
  return copy_counts[place_of("copies", source)][place_of("copies", target)];
}
int64_t bytes_copied(c10::Device source, c10::Device target) {
  return copy_bytes[place_of("bytes_copied", source)]
                   [place_of("bytes_copied", target)];
}

void reset_counters() {
  for (auto& count : kernels) {
    count = 0;
  }
  for (auto* pairs : {&copy_counts, &copy_bytes}) {
    for (auto& row : *pairs) {
      for (auto& count : row) {
        count = 0;
      }
    }
  }
  reset_peaks();
  if (Clock::is_on()) {
    Clock::get().set_origin();
  }
}

CorruptCopies::CorruptCopies(c10::Device source, c10::Device target)
    : source_(source), target_(target) {
  ++corrupt[place_of("CorruptCopies", source)]
           [place_of("CorruptCopies", target)];
}
CorruptCopies::~CorruptCopies() {
  --corrupt[place(source_)][place(target_)];
}

void count_kernel(c10::DeviceIndex device) {
  ++kernels[device];
}

void count_copy(c10::Device source, c10::Device target, int64_t bytes) {
  ++copy_counts[place(source)][place(target)];
  copy_bytes[place(source)][place(target)] += bytes;
}

bool is_corrupt(c10::Device source, c10::Device target) {
  return corrupt[place(source)][place(target)] > 0;
}

}  // namespace dataparallel::simulated
