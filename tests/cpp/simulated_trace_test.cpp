#include <ATen/record_function.h>
#include <dataparallel/data_parallel.h>
#include <dataparallel/simulated_trace.h>
#include <torch/torch.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"
#include "support/temporary_folder.h"

namespace {

namespace sim = dataparallel::simulated;
using nlohmann::json;

/// 1 us a launch, 2 us to its start, a byte a us; a copy takes 3 us.
sim::Hardware slow_machine() {
  sim::Hardware machine;
  machine.device.memory_bytes = 0;
  machine.device.memory_bytes_per_second = 1e6;
  machine.device.launch_latency_seconds = 2e-6;
  machine.peer_link = {"peer", /*bytes_per_second=*/1e30,
                       /*latency_seconds=*/3e-6};
  machine.host.kernel_launch_seconds = 1e-6;
  machine.host.copy_launch_seconds = 1e-6;
  return machine;
}

class Running {
 public:
  Running() { sim::start(sim::Options().devices(4).hardware(slow_machine())); }
  ~Running() { sim::start(sim::Options().devices(4)); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

json saved(const sim::Trace& trace) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "trace.json";
  trace.save(path);
  return json::parse(std::ifstream(path));
}

/// "process/track" of each track number.
std::map<int64_t, std::string> tracks(const json& trace) {
  std::map<int64_t, std::string> processes;
  std::map<int64_t, std::string> names;
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "process_name") {
      processes[event["pid"]] = event["args"]["name"];
    }
  }
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name") {
      names[event["tid"]] = processes.at(event["pid"]) + "/" +
                            event["args"]["name"].get<std::string>();
    }
  }
  return names;
}

struct Bar {
  std::string name;
  double start;
  double end;
  json args;
};

std::map<std::string, std::vector<Bar>> bars(const json& trace) {
  const auto names = tracks(trace);
  std::map<std::string, std::vector<Bar>> result;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") {
      const double start = event["ts"];
      result[names.at(event["tid"])].push_back(
          {event["name"], start, start + event["dur"].get<double>(),
           event.value("args", json())});
    }
  }
  return result;
}

}  // namespace

TEST_CASE("a trace has a track for each stream, link and thread", "[trace]") {
  const auto devices = test::sim(2);
  const auto x = torch::ones({10}, devices[0]);
  const Running clock;
  const sim::Trace trace;
  torch::Tensor y;
  {
    RECORD_USER_SCOPE("my range");
    y = x.exp();
  }
  const auto z = y.to(devices[1], /*non_blocking=*/true);
  const auto found = bars(saved(trace));
  REQUIRE(found.size() == 3);

  const auto& kernels = found.at("sim:0/stream 0");
  REQUIRE(kernels.size() == 1);
  CHECK(kernels[0].name == "aten::exp");
  CHECK(kernels[0].start == 3);
  CHECK(kernels[0].end == 83);

  const auto& copies = found.at("links/sim:0 to sim:1");
  REQUIRE(copies.size() == 1);
  CHECK(copies[0].name == "aten::copy_");
  CHECK(copies[0].start == 83);
  CHECK(copies[0].end == 86);
  CHECK(copies[0].args["bytes"] == 40);

  const auto& host = found.at("host/thread 0");
  REQUIRE(host.size() == 3);
  CHECK(host[0].name == "aten::exp");
  CHECK(host[0].start == 0);
  CHECK(host[0].end == 1);
  CHECK(host[1].name == "my range");
  CHECK(host[1].start == 0);
  CHECK(host[1].end == 1);
  CHECK(host[2].name == "aten::copy_");
  CHECK(host[2].start == 1);
  CHECK(host[2].end == 2);
}

TEST_CASE("a trace shows the phases of a step, each around its launches",
          "[trace]") {
  const auto devices = test::sim(2);
  auto net = test::make<test::Mlp>(devices[0]);
  dataparallel::DataParallel<test::Mlp> model(net, test::on(devices));
  const auto x = test::batch_on(devices[0]);
  const Running clock;
  const sim::Trace trace;
  model(x).pow(2).mean().backward();
  const auto found = bars(saved(trace));
  std::map<std::string, int> ranges;
  std::string streams;
  for (const auto& [track, all] : found) {
    CAPTURE(track);
    for (const Bar& bar : all) {
      CHECK(bar.start <= bar.end);
      ranges[bar.name] += bar.name.starts_with("dataparallel::") ? 1 : 0;
      for (const Bar& other : all) {  // nested, or apart
        const bool apart = bar.end <= other.start || other.end <= bar.start;
        const bool around = bar.start <= other.start && other.end <= bar.end;
        const bool within = other.start <= bar.start && bar.end <= other.end;
        CHECK((apart || around || within));
        if (!track.starts_with("host")) {
          CHECK((apart || &bar == &other));
        }
      }
    }
  }
  for (const char* phase :
       {"dataparallel::scatter", "dataparallel::refresh",
        "dataparallel::replica 0", "dataparallel::replica 1",
        "dataparallel::gather", "dataparallel::reduce bucket 0"}) {
    CAPTURE(phase);
    CHECK(ranges[phase] == 1);
  }
  CHECK(found.count("sim:0/stream 0") == 1);
  CHECK(found.count("sim:1/stream 0") == 1);
  CHECK(found.count("links/sim:0 to sim:1") == 1);
  CHECK(found.count("links/sim:1 to sim:0") == 1);
}

TEST_CASE("a trace holds what happened while it lived", "[trace]") {
  const auto device = test::sim(1)[0];
  const auto x = torch::ones({10}, device);
  const Running clock;
  x.exp();
  {
    const sim::Trace trace;
    CHECK(saved(trace)["traceEvents"].empty());
    x.sin();
    CHECK(bars(saved(trace)).at("sim:0/stream 0").size() == 1);
    CHECK(bars(saved(trace)).at("sim:0/stream 0")[0].name == "aten::sin");
  }
  const sim::Trace next;
  CHECK(saved(next)["traceEvents"].empty());
}

TEST_CASE("a name that is no UTF-8 does not spoil a trace", "[trace]") {
  test::sim(1);
  const Running clock;
  const sim::Trace trace;
  { RECORD_USER_SCOPE("\xff"); }
  CHECK(saved(trace)["traceEvents"].size() == 3);
}

TEST_CASE("traces that cannot be are refused", "[trace]") {
  test::sim(1);
  CHECK_THROWS_WITH(sim::Trace(),
                    Catch::Contains("the simulated clock is off"));
  const Running clock;
  const sim::Trace trace;
  CHECK_THROWS_WITH(sim::Trace(), Catch::Contains("another trace"));
  CHECK_THROWS_WITH(
      trace.save("/nowhere/trace.json"),
      Catch::Contains("path is \"/nowhere/trace.json\", expected a file"));
}
