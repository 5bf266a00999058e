#pragma once

#include <memory>

#include "simulated/race_detector.h"
#include "simulated/schedule.h"

namespace dataparallel::simulated {

/// How far a stream had come, for the race detector and for the clock.
struct Event {
  VectorClock order;
  std::shared_ptr<Moment> moment;  // none while the clock is off
};

void record(Event& event, StreamKey stream);
void block(const Event& event, StreamKey stream);
void synchronize(const Event& event);
void synchronize(StreamKey stream);
void synchronize_device(int64_t device);

/// What `after` does next comes after all that `before` has been given.
void order(StreamKey before, StreamKey after);

/// Throws unless both were recorded while the clock was on.
double milliseconds_between(const Event& first, const Event& second);

}  // namespace dataparallel::simulated
