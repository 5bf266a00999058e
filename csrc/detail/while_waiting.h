#pragma once

#include <dataparallel/export.h>

#include <functional>

namespace dataparallel::detail {

/// While it lives, the calling thread calls `act` twenty times a second where
/// it waits for workers in `WorkerTeam::run`; Python looks for signals there.
/// `act` must not throw.
class DATAPARALLEL_EXPORT WhileWaiting {
 public:
  explicit WhileWaiting(std::function<void()> act);
  ~WhileWaiting();
  WhileWaiting(const WhileWaiting&) = delete;
  WhileWaiting& operator=(const WhileWaiting&) = delete;

  /// The calling thread's, or null.
  static const std::function<void()>* here();

 private:
  std::function<void()> act_;
  const std::function<void()>* before_;
};

}  // namespace dataparallel::detail
