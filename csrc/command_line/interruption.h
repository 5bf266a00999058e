#pragma once

#include <csignal>

namespace dataparallel::command_line {

/// Thrown where a signal asks the program to end.
struct Interrupted {
  int signal;
};

/// While it lives, Ctrl-C and other requests to end wait for `check`, so that
/// what was begun is cleaned up. One at a time.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  /// Throws `Interrupted` if there was such a request.
  void check() const;
};

/// Ends the program by that signal, as its caller expects.
[[noreturn]] void end_by(const Interrupted& interrupted);

}  // namespace dataparallel::command_line
