#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace dataparallel::checkpoint {

/// Something wrong with a file, on its way to `CheckpointError`: who throws
/// says what, those above add where, unless that was said below.
struct Problem : std::runtime_error {
  using std::runtime_error::runtime_error;

  std::string key;
  std::optional<uint64_t> offset;
};

[[noreturn]] inline void fail(const std::string& what) {
  throw Problem(what);
}

[[noreturn]] inline void fail_at(uint64_t offset, const std::string& what) {
  Problem problem(what);
  problem.offset = offset;
  throw problem;
}

}  // namespace dataparallel::checkpoint
