// Deliberate bugs, and the same programs without the bug.

#include <c10/core/Event.h>
#include <dataparallel/simulated.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/streams.h"

namespace {

using dataparallel::simulated::clear_races;
using dataparallel::simulated::races;
using test::guard;
using test::OnNewStream;

void wait_for(c10::Stream waiting, c10::Stream before) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(waiting);
}

std::vector<std::string> kinds() {
  std::vector<std::string> found;
  for (const auto& race : races()) {
    found.push_back(race.kind);
  }
  clear_races();
  return found;
}

using Kinds = std::vector<std::string>;

}  // namespace

TEST_CASE("a read without an event after a write on another stream is reported",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto x = torch::ones({4}, device);
  const auto written_on = guard().getStream(device);
  clear_races();
  const bool with_event = GENERATE(false, true);
  {
    OnNewStream side(device);
    if (with_event) {
      wait_for(side.stream, written_on);
    }
    const auto y = x.exp();
    if (!with_event) {
      REQUIRE(races().size() == 1);
      const auto race = races().front();
      CHECK(race.kind == "read after write");
      CHECK(race.operator_name == "aten::exp");
      CHECK(race.device == device);
      CHECK(race.stream == side.stream.id());
      CHECK(race.other_stream == written_on.id());
      CHECK_THAT(
          race.message(),
          Catch::Contains("read after write: aten::exp on sim:0 stream"));
    }
    wait_for(written_on, side.stream);
  }
  CHECK(kinds() == (with_event ? Kinds{} : Kinds{"read after write"}));
}

TEST_CASE("an event recorded before the write does not order it",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto main = guard().getStream(device);
  const auto x = torch::ones({4}, device);
  c10::Event early(device.type());
  early.record(main);
  x.add_(1);
  clear_races();
  {
    OnNewStream side(device);
    early.block(side.stream);
    x.exp();
    wait_for(main, side.stream);
  }
  CHECK(kinds() == Kinds{"read after write"});
}

TEST_CASE("a write without an event after a read or a write is reported",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto main = guard().getStream(device);
  const auto x = torch::ones({4}, device);
  const bool read = GENERATE(false, true);
  clear_races();
  OnNewStream side(device);
  wait_for(side.stream, main);
  if (read) {
    x.exp();
  } else {
    x.fill_(1);
  }
  guard().exchangeStream(main);
  x.fill_(2);
  guard().exchangeStream(side.stream);
  CHECK(kinds() == Kinds{read ? "write after read" : "write after write"});
  wait_for(main, side.stream);
}

TEST_CASE("waiting on the host orders what is launched after",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto x = torch::ones({4}, device);
  const auto main = guard().getStream(device);
  const int how = GENERATE(0, 1, 2, 3);
  clear_races();
  if (how == 0) {
    guard().synchronizeStream(main);
  } else if (how == 1) {
    guard().synchronizeDevice(device.index());
  } else if (how == 2) {
    x.sum().item<float>();
  } else {
    x.cpu();
  }
  OnNewStream side(device);
  const auto y = x.exp();
  CHECK(kinds() == Kinds{});
  guard().synchronizeStream(side.stream);
}

TEST_CASE("memory freed while another stream may use it is reported",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto main = guard().getStream(device);
  const int how = GENERATE(0, 1, 2);  // a bug, record_stream, an event back
  auto x = torch::ones({4}, device);
  clear_races();
  {
    OnNewStream side(device);
    wait_for(side.stream, main);
    const auto y = x.exp();
    if (how == 1) {
      x.record_stream(side.stream);
    }
    if (how == 2) {
      wait_for(main, side.stream);
    }
    guard().exchangeStream(main);
    x.reset();
    guard().exchangeStream(side.stream);
  }
  CHECK(kinds() == (how == 0 ? Kinds{"use after free"} : Kinds{}));
}

TEST_CASE("a copy between devices waits for both current streams, not others",
          "[simulated][races]") {
  const auto devices = test::sim(2);
  const auto x = torch::ones({4}, devices[0]);
  clear_races();
  const auto y = x.to(devices[1]);
  y.add_(1);
  x.add_(1);
  CHECK(kinds() == Kinds{});
  const auto main = guard().getStream(devices[0]);
  OnNewStream side(devices[0]);
  const auto z = x.to(devices[1]);  // the new stream has not waited for add_
  CHECK(kinds() == Kinds{"read after write"});
  wait_for(main, side.stream);
}

TEST_CASE("a racing operator throws where that is asked for",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto x = torch::ones({4}, device);
  dataparallel::simulated::start(
      dataparallel::simulated::Options().devices(4).fail_on_race(true));
  {
    OnNewStream side(device);
    CHECK_THROWS_WITH(x.exp(),
                      Catch::Contains("read after write: aten::exp on sim:0"));
    guard().synchronizeDevice(device.index());
    CHECK_NOTHROW(x.exp());
    guard().synchronizeStream(side.stream);
  }
  dataparallel::simulated::start(dataparallel::simulated::Options().devices(4));
  clear_races();
}

TEST_CASE("slices of one buffer race where they overlap, and only there",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto main = guard().getStream(device);
  const auto buffer = torch::zeros({10}, device);
  const auto first = buffer.narrow(0, 0, 5);
  const int64_t start = GENERATE(5, 4);
  const auto second = buffer.narrow(0, start, 5);
  OnNewStream side(device);
  wait_for(side.stream, main);
  clear_races();
  second.fill_(2);
  guard().exchangeStream(main);
  first.fill_(1);
  CHECK(kinds() == (start == 5 ? Kinds{} : Kinds{"write after write"}));
  buffer.sum();
  CHECK(kinds() == Kinds{"read after write"});
  guard().exchangeStream(side.stream);
  wait_for(main, side.stream);
}

TEST_CASE("a part written again does not hide the write of the whole",
          "[simulated][races]") {
  const auto device = test::sim(1)[0];
  const auto main = guard().getStream(device);
  const auto buffer = torch::zeros({10}, device);
  OnNewStream side(device);
  c10::Event whole_written(device.type());
  whole_written.record(main);
  guard().exchangeStream(main);
  buffer.narrow(0, 0, 5).fill_(1);
  guard().exchangeStream(side.stream);
  whole_written.block(side.stream);
  clear_races();
  buffer.narrow(0, 5, 5).exp();
  CHECK(kinds() == Kinds{});
  buffer.narrow(0, 4, 5).exp();
  CHECK(kinds() == Kinds{"read after write"});
  wait_for(main, side.stream);
}
