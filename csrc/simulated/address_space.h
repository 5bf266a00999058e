#pragma once

#include <cstddef>

namespace dataparallel::simulated {

/// Addresses without memory, for a dry run: distinct, aligned to 512 bytes, and
/// a crash for whoever touches them. Of 0 bytes: null. Throws `c10::Error` when
/// the process has no more. Thread safety: both lock.
void* reserve_addresses(size_t bytes);
void release_addresses(void* start, size_t bytes) noexcept;

}  // namespace dataparallel::simulated
