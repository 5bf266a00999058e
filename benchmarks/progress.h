#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace demo {

/// A progress bar on standard output: on a terminal one line, redrawn in
/// place; elsewhere (a file, a pipe, CI) a single plain line when it is done.
///
/// For one thread. Print nothing else between the first `update` and `finish`.
class ProgressBar {
 public:
  ProgressBar(std::string title, int64_t total_steps);

  /// Leaves an unfinished bar as it is and ends its line.
  ~ProgressBar();

  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Redraws, ten times a second at most: it may be called at every step.
  void update(int64_t done_steps, std::string_view status);

  /// Replaces the bar by title and status, for good.
  void finish(std::string_view status);

 private:
  using Clock = std::chrono::steady_clock;

  std::string title_;
  int64_t total_steps_;
  bool on_terminal_;
  bool line_open_ = false;
  Clock::time_point next_draw_;
};

}  // namespace demo
