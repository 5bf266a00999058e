#include <dataparallel/simulated_trace.h>

#include <atomic>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "simulated/clock.h"

namespace dataparallel::simulated {
namespace {

using nlohmann::json;

std::atomic<bool> kept{false};

// Chrome's trace event format: "X" is an event with a duration, "M" names the
// process or thread (here: track) of the others; microseconds. Process 0 and
// thread 0 have a meaning of their own for Perfetto.
constexpr int64_t kHost = 1;
constexpr int64_t kLinks = 2;
constexpr int64_t kFirstDevice = 10;

constexpr double kTicksPerMicrosecond = kTicksPerSecond / 1e6;

/// A process, and what in it.
using Track = std::tuple<int64_t, int64_t, int64_t>;

Track track_of(const Span& span) {
  switch (span.kind) {
    case Span::Kind::kKernel:
      return {kFirstDevice + span.stream.first, span.stream.second, 0};
    case Span::Kind::kCopy:
      return {kLinks, link_end(span.source), link_end(span.target)};
    default:
      return {kHost, span.thread->index, 0};
  }
}

std::string name_of(const Span& span) {
  switch (span.kind) {
    case Span::Kind::kKernel:
      return c10::str("stream ", span.stream.second);
    case Span::Kind::kCopy:
      return c10::str(span.source, " to ", span.target);
    default:
      return span.thread->of_autograd ? span.thread->name
                                      : c10::str("thread ", span.thread->index);
  }
}

std::string process_name(int64_t process) {
  return process == kHost    ? "host"
         : process == kLinks ? "links"
                             : c10::str("sim:", process - kFirstDevice);
}

json named(const char* what, int64_t process, int64_t track,
           const std::string& name) {
  return {{"ph", "M"},
          {"name", what},
          {"pid", process},
          {"tid", track},
          {"args", {{"name", name}}}};
}

const char* category(Span::Kind kind) {
  switch (kind) {
    case Span::Kind::kKernel:
      return "kernel";
    case Span::Kind::kCopy:
      return "copy";
    case Span::Kind::kLaunch:
      return "launch";
    default:
      return "range";
  }
}

json events_of(const std::vector<Span>& spans) {
  json events = json::array();
  std::map<Track, int64_t> tracks;
  for (const Span& span : spans) {
    tracks.emplace(track_of(span), 0);
  }
  int64_t count = 0;
  for (auto& [track, number] : tracks) {
    number = ++count;
  }
  std::set<int64_t> seen;
  for (const Span& span : spans) {
    const Track track = track_of(span);
    const int64_t process = std::get<0>(track);
    const int64_t number = tracks.at(track);
    if (seen.insert(-process).second) {
      events.push_back(
          named("process_name", process, number, process_name(process)));
    }
    if (seen.insert(number).second) {
      events.push_back(named("thread_name", process, number, name_of(span)));
    }
    json event{{"ph", "X"},
               {"name", *span.name},
               {"cat", category(span.kind)},
               {"pid", process},
               {"tid", number},
               {"ts", span.start / kTicksPerMicrosecond},
               {"dur", (span.end - span.start) / kTicksPerMicrosecond}};
    if (span.kind == Span::Kind::kCopy) {
      event["args"] = {{"bytes", span.bytes}};
    }
    events.push_back(std::move(event));
  }
  return events;
}

}  // namespace

Trace::Trace() {
  TORCH_CHECK(Clock::is_on(),
              "Trace: the simulated clock is off, expected simulated::start "
              "with Options().hardware");
  TORCH_CHECK(!kept.exchange(true),
              "Trace: another trace is being kept, expected one at a time");
  Clock::get().trace(true);
}

Trace::~Trace() {
  Clock::get().trace(false);
  kept = false;
}

void Trace::save(const std::string& path) const {
  const json trace{{"displayTimeUnit", "ns"},
                   {"traceEvents", events_of(Clock::get().spans())}};
  std::ofstream file(path);
  // Names are the user's: what is no UTF-8 is replaced.
  file << trace.dump(-1, ' ', false, json::error_handler_t::replace) << '\n';
  file.close();
  TORCH_CHECK(file, "Trace::save: path is \"", path,
              "\", expected a file that can be written");
}

}  // namespace dataparallel::simulated
