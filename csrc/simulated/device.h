#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace dataparallel::simulated {

/// The calling thread's.
c10::DeviceIndex current_device();
c10::Stream current_stream(c10::DeviceIndex device);

/// 0 before `make_devices`.
int64_t devices_made();
/// Registers guard, hooks, allocator and name; once a process.
void make_devices(int64_t count);

/// Throws `invalid device ordinal` where there is no such device.
void check_ordinal(int64_t device);

/// The index of an argument of `function`; `c10::ValueError` for what is no
/// simulated device.
int64_t checked_index(const char* function, c10::Device device);

/// The CPU generator that draws for `device`'s default generator.
at::Generator drawing_generator(c10::DeviceIndex device);
/// That of a generator that lies on a simulated device.
at::Generator drawing_generator(const at::Generator& generator);

}  // namespace dataparallel::simulated
