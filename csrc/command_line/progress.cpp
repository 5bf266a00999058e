#include "command_line/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace dataparallel::command_line {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(500);
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);
constexpr const char* kRestartLine = "\r\x1b[K";  // column 0, erase the line
constexpr uint64_t kBarWidth = 30;

}  // namespace

Progress::Progress(std::string title)
    : title_(std::move(title)),
      on_terminal_(isatty(STDERR_FILENO) == 1),
      next_draw_(Clock::now() + kPatience) {}

Progress::~Progress() {
  if (drawn_) {
    fmt::print(stderr, "{}", kRestartLine);
    std::fflush(stderr);
  }
}

void Progress::update(uint64_t done, uint64_t total) {
  const auto now = Clock::now();
  if (!on_terminal_ || total == 0 || now < next_draw_) {
    return;
  }
  next_draw_ = now + kRedrawInterval;
  drawn_ = true;
  const auto share = static_cast<double>(done) / static_cast<double>(total);
  const auto filled =
      static_cast<size_t>(share * static_cast<double>(kBarWidth));
  fmt::print(stderr, "{}{} [{}{}] {:3.0f} %", kRestartLine, title_,
             std::string(filled, '#'), std::string(kBarWidth - filled, '.'),
             100 * share);
  std::fflush(stderr);
}

}  // namespace dataparallel::command_line
