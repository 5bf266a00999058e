#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace test {

/// Waits until as many threads as expected are here; false after 20 s.
class Meeting {
 public:
  explicit Meeting(size_t expected = 2) : expected_(expected) {}
  bool arrive() {
    std::unique_lock lock(mutex_);
    ++here_;
    all_here_.notify_all();
    return all_here_.wait_for(lock, std::chrono::seconds(20),
                              [&] { return here_ >= expected_; });
  }

 private:
  const size_t expected_;
  size_t here_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

}  // namespace test
