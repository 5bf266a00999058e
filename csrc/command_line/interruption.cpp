#include "command_line/interruption.h"

#include <array>
#include <cstdlib>

namespace dataparallel::command_line {
namespace {

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
volatile std::sig_atomic_t requested = 0;
std::array<struct sigaction, kSignals.size()> previous;

void note_request(int signal) {
  requested = signal;
}

}  // namespace

Interruption::Interruption() {
  struct sigaction action = {};
  action.sa_handler = note_request;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous[i]);
    if (previous[i].sa_handler != SIG_IGN) {  // as under nohup
      sigaction(kSignals[i], &action, nullptr);
    }
  }
}

Interruption::~Interruption() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &previous[i], nullptr);
  }
}

void Interruption::check() const {
  if (requested != 0) {
    throw Interrupted{requested};
  }
}

void end_by(const Interrupted& interrupted) {
  std::signal(interrupted.signal, SIG_DFL);
  std::raise(interrupted.signal);
  std::abort();
}

}  // namespace dataparallel::command_line
