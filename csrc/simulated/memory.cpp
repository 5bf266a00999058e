#include "simulated/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>
#include <mutex>
#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

#include "simulated/address_space.h"
#include "simulated/clock.h"
#include "simulated/device.h"
#include "simulated/race_detector.h"

namespace dataparallel::simulated {
namespace {

struct Usage {
  std::atomic<int64_t> now{0};
  std::atomic<int64_t> peak{0};
};

std::array<Usage, kMaxDevices> usages;
std::atomic<int64_t> memory_bytes{0};
std::atomic<bool> dry{false};

// Modules are made on the CPU and then moved here, 32 times for 32 replicas. Of
// what they free, glibc gives nothing back that lies below something small
// still in use, such as what the clock writes down, and finds no place there
// for an aligned block of the same size: each replica of a ResNet-50 would take
// 100 MB of the host that no one uses. Blocks of their own go back to the
// system when they are freed.
void give_back_what_the_host_frees() {
#ifdef M_MMAP_THRESHOLD
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
#endif
}

void count(int64_t bytes, c10::DeviceIndex device) {
  Usage& usage = usages[device];
  const int64_t limit = memory_bytes;
  const int64_t now = usage.now.fetch_add(bytes) + bytes;
  if (limit > 0 && now > limit) {
    usage.now -= bytes;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes,
        " bytes. Device ", static_cast<int>(device),
        " has a total capacity of ", limit, " bytes of which ",
        std::max<int64_t>(0, limit - (now - bytes)), " bytes are free; ",
        now - bytes, " bytes are allocated by tensors.");
  }
  int64_t peak = usage.peak;
  while (now > peak && !usage.peak.compare_exchange_weak(peak, now)) {
  }
}

/// What a DataPtr of ours owns: one of the two, or addresses.
struct Block {
  c10::DataPtr own;
  c10::Storage adopted;
  bool addresses;
  void* data;
  int64_t bytes;
  c10::DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  RaceDetector::get().freed(block->data);
  if (Clock::is_on()) {
    Clock::get().freed(block->data);
  }
  usages[block->device].now -= block->bytes;
  if (block->addresses) {
    release_addresses(block->data, static_cast<size_t>(block->bytes));
  }
  delete block;
}

c10::DataPtr wrap(Block* block) {
  RaceDetector::get().allocated(block->data,
                                key_of(current_stream(block->device)));
  return {block->data, block, &free_block, {kDeviceType, block->device}};
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return simulated::allocate(bytes, current_device());
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source,
                 std::size_t bytes) const override {
    if (!is_dry()) {
      default_copy_data(target, source, bytes);
    }
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = c10::GetCPUAllocator()->allocate(bytes);
    void* start = data.get();
    auto* owner = new Pinned{this, std::move(data)};
    if (start != nullptr) {
      std::lock_guard lock(mutex_);
      ranges_[start] = bytes;
    }
    return {start, owner, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source,
                 std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool holds(const void* data) {
    std::lock_guard lock(mutex_);
    auto after = ranges_.upper_bound(data);
    if (after == ranges_.begin()) {
      return false;
    }
    --after;
    return static_cast<const char*>(data) <
           static_cast<const char*>(after->first) + after->second;
  }

 private:
  struct Pinned {
    PinnedAllocator* allocator;
    c10::DataPtr data;
  };
  static void free_pinned(void* context) {
    auto* owner = static_cast<Pinned*>(context);
    {
      std::lock_guard lock(owner->allocator->mutex_);
      owner->allocator->ranges_.erase(owner->data.get());
    }
    delete owner;
  }
  std::mutex mutex_;
  std::map<const void*, size_t> ranges_;
};

// Never destroyed, as what they allocated may be freed at exit.
PinnedAllocator& pinned() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

}  // namespace

c10::Allocator* allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  return &pinned();
}

bool is_pinned(const void* data) {
  return pinned().holds(data);
}

c10::DataPtr allocate(size_t bytes, c10::DeviceIndex device) {
  const auto size = static_cast<int64_t>(bytes);
  count(size, device);
  if (is_dry()) {
    return wrap(new Block{
        {}, {}, /*addresses=*/true, reserve_addresses(bytes), size, device});
  }
  c10::DataPtr own = c10::GetCPUAllocator()->allocate(bytes);
  void* data = own.get();
  return wrap(
      new Block{std::move(own), {}, /*addresses=*/false, data, size, device});
}

c10::DataPtr adopt(c10::Storage host, c10::DeviceIndex device) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  count(bytes, device);
  void* data = host.mutable_data();
  return wrap(
      new Block{{}, std::move(host), /*addresses=*/false, data, bytes, device});
}

bool is_dry() {
  return dry.load(std::memory_order_relaxed);
}

void set_dry(bool value) {
  if (value == dry) {
    return;
  }
  for (size_t i = 0; i < usages.size(); ++i) {
    TORCH_CHECK_VALUE(usages[i].now == 0, "start: dry_run is ",
                      value ? "true" : "false", ", but ", usages[i].now.load(),
                      " bytes of sim:", i, " are in use that were allocated ",
                      value ? "outside a dry run" : "in a dry run",
                      ", expected none");
  }
  if (value) {
    give_back_what_the_host_frees();
  }
  dry = value;
}

void set_memory_bytes(int64_t bytes) {
  memory_bytes = bytes;
}
int64_t allocated_bytes(int64_t device) {
  return usages[device].now;
}
int64_t peak_bytes(int64_t device) {
  return usages[device].peak;
}

void reset_peaks() {
  for (Usage& usage : usages) {
    usage.peak = usage.now.load();
  }
}

}  // namespace dataparallel::simulated
