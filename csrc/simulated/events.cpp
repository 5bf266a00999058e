#include "simulated/events.h"

#include "simulated/clock.h"

namespace dataparallel::simulated {

void record(Event& event, StreamKey stream) {
  RaceDetector::get().record(event.order, stream);
  event.moment = Clock::is_on() ? Clock::get().record(stream) : nullptr;
}

void block(const Event& event, StreamKey stream) {
  RaceDetector::get().block(event.order, stream);
  if (Clock::is_on() && event.moment) {
    Clock::get().block(event.moment, stream);
  }
}

void synchronize(const Event& event) {
  RaceDetector::get().synchronize(event.order);
  if (Clock::is_on() && event.moment) {
    Clock::get().wait(event.moment);
  }
}

void synchronize(StreamKey stream) {
  RaceDetector::get().synchronize(stream);
  if (Clock::is_on()) {
    Clock::get().wait(stream);
  }
}

void synchronize_device(int64_t device) {
  RaceDetector::get().synchronize_device(device);
  if (Clock::is_on()) {
    Clock::get().wait_for_device(device);
  }
}

void order(StreamKey before, StreamKey after) {
  Event event;
  record(event, before);
  block(event, after);
}

double milliseconds_between(const Event& first, const Event& second) {
  TORCH_CHECK(Clock::is_on() && first.moment && second.moment,
              "elapsed_time: both events must be recorded while the simulated "
              "clock is on (simulated::Options().hardware)");
  return 1e3 * (Clock::get().seconds_of(*second.moment) -
                Clock::get().seconds_of(*first.moment));
}

}  // namespace dataparallel::simulated
