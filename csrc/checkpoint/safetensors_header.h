#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dataparallel::checkpoint {

/// One tensor of a safetensors header.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  ///< counted from the end of the header
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in the header's order
  std::map<std::string, std::string> metadata;
};

/// Reads the header's JSON as the reference reader does: fails where it does.
SafetensorsHeader parse_safetensors_header(std::string_view json);

}  // namespace dataparallel::checkpoint
