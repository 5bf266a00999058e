#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace dataparallel::simulated {

void count_kernel(c10::DeviceIndex device);
void count_copy(c10::Device source, c10::Device target, int64_t bytes);
/// Whether copies between the two shall arrive as zeros.
bool is_corrupt(c10::Device source, c10::Device target);

}  // namespace dataparallel::simulated
