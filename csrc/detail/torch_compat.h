#pragma once

// All that differs between the versions of torch that the library compiles
// against; nothing else in the project asks for a version.

#include <cstdint>

namespace dataparallel::detail {

/// torch's engine runs the ready node with the highest number first; its own
/// gradient accumulators have this one.
inline constexpr uint64_t kRunAsSoonAsReady = UINT64_MAX;
inline constexpr uint64_t kRunWhenNothingElseIs = 0;

}  // namespace dataparallel::detail
