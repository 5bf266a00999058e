#include "progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace demo {
namespace {

constexpr int64_t kBarWidth = 16;  // title, bar and status fit in 80 columns
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);
constexpr auto* kRestartLine = "\r\x1b[K";  // column 0, then erase the line

std::string draw_bar(int64_t done_steps, int64_t total_steps) {
  const auto filled =
      total_steps > 0 ? kBarWidth * done_steps / total_steps : kBarWidth;
  const auto clamped = std::clamp<int64_t>(filled, 0, kBarWidth);
  return std::string(clamped, '#') + std::string(kBarWidth - clamped, '.');
}

}  // namespace

ProgressBar::ProgressBar(std::string title, int64_t total_steps)
    : title_(std::move(title)),
      total_steps_(total_steps),
      on_terminal_(isatty(fileno(stdout)) == 1),
      next_draw_(Clock::now()) {}

ProgressBar::~ProgressBar() {
  if (line_open_) {
    std::fputc('\n', stdout);
  }
}

void ProgressBar::update(int64_t done_steps, std::string_view status) {
  const auto now = Clock::now();
  if (!on_terminal_ || now < next_draw_) {
    return;
  }
  next_draw_ = now + kRedrawInterval;
  line_open_ = true;
  fmt::print("{}{} [{}] {}", kRestartLine, title_,
             draw_bar(done_steps, total_steps_), status);
  std::fflush(stdout);
}

void ProgressBar::finish(std::string_view status) {
  fmt::print("{}{}  {}\n", line_open_ ? kRestartLine : "", title_, status);
  line_open_ = false;
  std::fflush(stdout);
}

}  // namespace demo
