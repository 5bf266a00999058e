#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <dataparallel/simulated.h>

#include <array>
#include <atomic>
#include <mutex>
#include <sstream>

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

int64_t index_of(const char* function, c10::Device device) {
  TORCH_CHECK_VALUE(device.type() == kDeviceType && device.has_index() &&
                        device.index() < devices_made(),
                    function, ": device is ", device,
                    ", expected a simulated device, of which there are ",
                    devices_made());
  return device.index();
}

size_t place_of(const char* function, c10::Device device) {
  return device.is_cpu() ? 0 : index_of(function, device) + 1;
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

void start(const Options& options) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  TORCH_CHECK_VALUE(options.devices() >= 1 && options.devices() <= kMaxDevices,
                    "start: devices is ", options.devices(), ", expected 1 to ",
                    kMaxDevices);
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
  set_memory_bytes(options.memory_bytes());
  RaceDetector::get().fail_on_race(options.fail_on_race());
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
  return allocated_bytes(index_of("memory_allocated", device));
}
int64_t peak_memory(c10::Device device) {
  return peak_bytes(index_of("peak_memory", device));
}
int64_t kernels_launched(c10::Device device) {
  return kernels[index_of("kernels_launched", device)];
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
