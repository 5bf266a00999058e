#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace dataparallel::command_line {

/// How far a long task is, on standard error and only if that is a terminal:
/// one line, redrawn, that is gone with the object. Nothing for what takes less
/// than half a second.
class Progress {
 public:
  explicit Progress(std::string title);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(uint64_t done, uint64_t total);

 private:
  using Clock = std::chrono::steady_clock;

  std::string title_;
  bool on_terminal_;
  bool drawn_ = false;
  Clock::time_point next_draw_;
};

}  // namespace dataparallel::command_line
