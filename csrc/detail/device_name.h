#pragma once

#include <c10/core/Device.h>
#include <dataparallel/export.h>

#include <limits>
#include <optional>
#include <string>

namespace dataparallel::detail {

inline constexpr int kMostDeviceIndex =
    std::numeric_limits<c10::DeviceIndex>::max();

/// "cpu", "cuda:1"; none where the text names no device. Unlike `at::Device`,
/// which keeps the last 8 bits of an index, takes no index that it cannot hold.
DATAPARALLEL_EXPORT std::optional<c10::Device> parse_device(
    const std::string& text);

}  // namespace dataparallel::detail
