#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace dataparallel::simulated {

inline constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr int64_t kMaxDevices = 64;

/// The allocator of the simulated devices: host memory, counted by device.
c10::Allocator* allocator();
/// Pinned host memory: host memory that knows that it is pinned.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

/// New memory of `device`. Throws `c10::OutOfMemoryError` above its size.
c10::DataPtr allocate(size_t bytes, c10::DeviceIndex device);
/// Memory that the CPU's kernels have allocated becomes `device`'s.
c10::DataPtr adopt(c10::Storage host, c10::DeviceIndex device);

/// In a dry run memory has addresses and is counted, and that is all.
bool is_dry();
/// Throws `c10::ValueError` while memory of the other kind is in use.
void set_dry(bool dry);

void set_memory_bytes(int64_t bytes);  // of each device; 0: no limit
int64_t allocated_bytes(int64_t device);
int64_t peak_bytes(int64_t device);
void reset_peaks();

}  // namespace dataparallel::simulated
