#include <dataparallel/simulated_clock.h>

#include "simulated/clock.h"
#include "simulated/device.h"

namespace dataparallel::simulated {
namespace {

Clock& running(const char* function) {
  TORCH_CHECK(Clock::is_on(), function,
              ": the simulated clock is off, expected "
              "simulated::start with Options().hardware");
  return Clock::get();
}

int64_t link_end(const char* function, c10::Device device) {
  return device.is_cpu() ? -1 : checked_index(function, device);
}

}  // namespace

double now() {
  return running("now").now();
}

double elapsed_seconds() {
  return running("elapsed_seconds").elapsed();
}

double busy_seconds(c10::Device device) {
  Clock& clock = running("busy_seconds");
  return clock.compute_seconds(checked_index("busy_seconds", device));
}

double idle_seconds(c10::Device device) {
  return elapsed_seconds() - busy_seconds(device);
}

double busy_seconds(c10::Device source, c10::Device target) {
  Clock& clock = running("busy_seconds");
  return clock.link_seconds(link_end("busy_seconds", source),
                            link_end("busy_seconds", target));
}

double idle_seconds(c10::Device source, c10::Device target) {
  return elapsed_seconds() - busy_seconds(source, target);
}

}  // namespace dataparallel::simulated
