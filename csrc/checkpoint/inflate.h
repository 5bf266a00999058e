#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dataparallel::checkpoint {

/// Unpacks deflated bytes (RFC 1951) into exactly `size`, for which memory is
/// taken at once; anything else fails, at `offset`. For the few small texts
/// that TorchScript archives compress.
std::string inflate(std::string_view packed, uint64_t size, uint64_t offset);

}  // namespace dataparallel::checkpoint
