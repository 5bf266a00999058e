// Expectations are worked out by hand, on a machine with round numbers.

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dataparallel/data_parallel.h>
#include <dataparallel/simulated_clock.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

namespace {

namespace sim = dataparallel::simulated;
using torch::Tensor;

/// A launch takes its thread 1 s and starts 2 s later; a byte takes 1 s; a copy
/// takes 3 s and 0.1 s a byte between devices, 5 s and 0.25 s a byte to or from
/// pinned memory, 5 s and 0.5 s a byte to or from other memory.
sim::Hardware slow_machine() {
  sim::Hardware machine;
  machine.device = {.name = "slow",
                    .memory_bytes = 0,
                    .memory_bytes_per_second = 1,
                    .fp64_flops_per_second = 1e9,
                    .fp32_flops_per_second = 2e9,
                    .tf32_flops_per_second = 16e9,
                    .fp16_flops_per_second = 4e9,
                    .bf16_flops_per_second = 8e9,
                    .launch_latency_seconds = 2};
  machine.host_link = {"host", /*bytes_per_second=*/4, /*latency_seconds=*/5};
  machine.peer_link = {"peer", /*bytes_per_second=*/10, /*latency_seconds=*/3};
  machine.host = {.kernel_launch_seconds = 1,
                  .copy_launch_seconds = 1,
                  .pageable_bytes_per_second = 2};
  return machine;
}

/// Starts the clock, at 0, and stops it again.
class Running {
 public:
  explicit Running(sim::Hardware machine = slow_machine()) {
    sim::start(sim::Options().devices(4).hardware(std::move(machine)));
  }
  ~Running() { sim::start(sim::Options().devices(4)); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

const c10::impl::DeviceGuardImplInterface& guard() {
  return *c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
}

/// Makes a new stream of `device`, which waits for the current one, current.
class OnNewStream {
 public:
  explicit OnNewStream(torch::Device device)
      : stream(guard().getNewStream(device)),
        before(guard().getStream(device)) {
    c10::Event event(device.type());
    event.record(before);
    event.block(stream);
    guard().exchangeStream(stream);
  }
  ~OnNewStream() {
    c10::Event event(before.device_type());
    event.record(stream);
    event.block(before);
    guard().exchangeStream(before);
  }
  c10::Stream stream;
  c10::Stream before;
};

/// Ten numbers, 40 bytes.
Tensor ten(torch::Device device) {
  return torch::ones({10}, device);
}

}  // namespace

TEST_CASE("a kernel takes its launch, its latency and its bytes", "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  const auto y = x.exp();  // reads 40 bytes and writes as many
  CHECK(sim::now() == 1);
  CHECK(sim::elapsed_seconds() == 1 + 2 + 80);
  CHECK(sim::busy_seconds(device) == 80);
  CHECK(sim::idle_seconds(device) == 3);
}

TEST_CASE("an operator in place reads and writes, a fill writes", "[clock]") {
  const auto device = test::sim(1)[0];
  auto x = ten(device);
  const Running clock;
  x.add_(1);
  CHECK(sim::busy_seconds(device) == 80);
  x.zero_();
  CHECK(sim::busy_seconds(device) == 80 + 40);
  x.expand({3, 10}).exp();  // 40 bytes, three times written
  CHECK(sim::busy_seconds(device) == 80 + 40 + 160);
  x.slice(0, 0, 10, 2).exp();  // every other number
  CHECK(sim::busy_seconds(device) == 80 + 40 + 160 + 40);
}

TEST_CASE("kernels of one stream come one after the other", "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  const auto y = x.exp().exp();
  CHECK(sim::now() == 2);
  CHECK(sim::elapsed_seconds() == (1 + 2 + 80) + (2 + 80));
}

TEST_CASE("two streams share a device's engine, but not their latencies",
          "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  const OnNewStream side(device);
  const auto y = x.exp();
  guard().exchangeStream(side.before);
  const auto z = x.exp();
  CHECK(sim::elapsed_seconds() == (1 + 2 + 80) + 80);
  CHECK(sim::idle_seconds(device) == 3);
}

TEST_CASE("kernels of two devices run at the same time", "[clock]") {
  const auto devices = test::sim(2);
  const auto x = ten(devices[0]);
  const auto y = ten(devices[1]);
  const Running clock;
  x.exp();
  y.exp();
  CHECK(sim::elapsed_seconds() == 2 + 2 + 80);
}

TEST_CASE("a copy on another stream runs beside a kernel", "[clock]") {
  const auto devices = test::sim(2);
  const auto x = ten(devices[0]);
  const Running clock;
  x.exp();
  Tensor y;
  {
    const bool beside = GENERATE(true, false);
    if (beside) {
      const auto before = guard().getStream(devices[0]);
      guard().exchangeStream(guard().getNewStream(devices[0]));
      y = x.to(devices[1], /*non_blocking=*/true);
      guard().exchangeStream(before);
    } else {
      y = x.to(devices[1], /*non_blocking=*/true);
    }
    CHECK(sim::now() == 2);
    CHECK(sim::busy_seconds(devices[0], devices[1]) == 3 + 4);
    CHECK(sim::busy_seconds(devices[1], devices[0]) == 0);
    CHECK(sim::elapsed_seconds() == (beside ? 83 : 83 + 7));
  }
  guard().synchronizeDevice(0);
  guard().synchronizeDevice(1);
  sim::clear_races();  // of the new stream, which waited for nothing
}

TEST_CASE("each direction of a link carries one copy at a time", "[clock]") {
  const auto devices = test::sim(3);
  const auto a = ten(devices[0]);
  const auto b = ten(devices[1]);
  const Running clock;
  // The second and third copy on streams of their own.
  std::vector<std::unique_ptr<OnNewStream>> sides;
  const auto x = a.to(devices[1], true);  // 1 to 8
  for (const auto& device : devices) {
    guard().exchangeStream(guard().getNewStream(device));
  }
  const int what = GENERATE(0, 1, 2, 3);
  if (what == 0) {
    b.to(devices[0], true);  // 2 to 9: the other direction
    CHECK(sim::elapsed_seconds() == 9);
  } else if (what == 1) {
    b.to(devices[2], true);  // 2 to 9: no end is shared
    CHECK(sim::elapsed_seconds() == 9);
  } else if (what == 2) {
    a.to(devices[2], true);  // from 8: the first device sends
    CHECK(sim::elapsed_seconds() == 15);
  } else {
    ten(devices[2]);  // a kernel beside it: 40 bytes, from 2 + 2 to 44
    CHECK(sim::elapsed_seconds() == 44);
  }
  for (const auto& device : devices) {
    guard().synchronizeDevice(device.index());
    guard().exchangeStream(guard().getDefaultStream(device));
  }
  sim::clear_races();
}

TEST_CASE("without a link of their own, devices copy over the host's links",
          "[clock]") {
  const auto devices = test::sim(2);
  const auto x = ten(devices[0]);
  auto machine = slow_machine();
  machine.peer_link.reset();
  const Running clock(machine);
  const auto y = x.to(devices[1], true);
  CHECK(sim::busy_seconds(devices[0], devices[1]) == 5 + 10);
}

TEST_CASE("an event carries the time to another stream, not to the host",
          "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  const auto y = x.exp();
  const OnNewStream side(device);
  const auto z = y.exp();
  CHECK(sim::now() == 2);
  CHECK(sim::elapsed_seconds() == 83 + 2 + 80);
}

TEST_CASE("the time between two events is the streams'", "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const auto timed = c10::EventFlag::BACKEND_DEFAULT;
  c10::Event unrecorded(device.type(), timed);
  unrecorded.record(guard().getStream(device));
  const Running clock;
  c10::Event first(device.type(), timed);
  c10::Event second(device.type(), timed);
  first.record(guard().getStream(device));
  x.exp();
  second.record(guard().getStream(device));
  CHECK(first.elapsedTime(second) == 83e3);
  CHECK_THROWS_WITH(unrecorded.elapsedTime(second),
                    Catch::Contains("while the simulated clock is on"));
}

TEST_CASE("who synchronizes waits, with what is asked for", "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  const auto y = x.exp();
  c10::Event event(device.type());
  event.record(guard().getStream(device));
  const auto z = x.exp();
  const int how = GENERATE(0, 1, 2);
  if (how == 0) {
    event.synchronize();
    CHECK(sim::now() == 83);
  } else if (how == 1) {
    guard().synchronizeStream(guard().getStream(device));
    CHECK(sim::now() == 165);
  } else {
    guard().synchronizeDevice(device.index());
    CHECK(sim::now() == 165);
  }
}

TEST_CASE("reading a number waits for it and for its copy", "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  CHECK(x.sum().item<float>() == 10);  // reads 40 bytes, writes 4
  CHECK(sim::now() == (1 + 2 + 44) + (5 + 1));
}

TEST_CASE("copies to and from the host wait, but for pinned memory",
          "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const auto pageable = torch::ones({10});
  const auto pinned = torch::ones({10}).pin_memory();
  const Running clock;
  const bool from = GENERATE(true, false);
  const auto copy = [&](const Tensor& host, bool non_blocking) {
    from ? x.copy_(host, non_blocking) : host.copy_(x, non_blocking);
  };
  const bool non_blocking = GENERATE(true, false);
  SECTION("pageable") {
    copy(pageable, non_blocking);
    CHECK(sim::now() == 1 + 5 + 20);
  }
  SECTION("pinned") {
    copy(pinned, non_blocking);
    CHECK(sim::now() == (non_blocking ? 1 : 1 + 5 + 10));
    CHECK(sim::elapsed_seconds() == 1 + 5 + 10);
  }
  const torch::Device host(torch::kCPU);
  CHECK(sim::busy_seconds(from ? host : device, from ? device : host) >= 15);
  CHECK(sim::busy_seconds(from ? device : host, from ? host : device) == 0);
  guard().synchronizeDevice(device.index());
}

TEST_CASE("each thread of the host has its own time", "[clock]") {
  const auto devices = test::sim(2);
  const auto x = ten(devices[0]);
  const auto y = ten(devices[1]);
  const Running clock;
  double theirs = 0;
  std::thread([&] {
    y.exp();
    theirs = sim::now();
  }).join();
  CHECK(theirs == 1);
  CHECK(sim::now() == 0);
  x.exp();
  CHECK(sim::now() == 1);
  CHECK(sim::elapsed_seconds() == 83);
}

TEST_CASE("a thread uses what another wrote only after that one launched it",
          "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  const int what = GENERATE(0, 1, 2, 3);
  const auto on_thread = [](auto&& body) { std::thread(body).join(); };
  if (what == 0) {  // read after write
    Tensor y;
    on_thread([&] { y = x.exp(); });
    y.exp();
    CHECK(sim::now() == 2);
  } else if (what == 1) {  // write after read
    on_thread([&] { x.exp().exp(); });
    x.zero_();  // after the first, which read it
    CHECK(sim::now() == 2);
  } else if (what == 2) {  // read after read
    on_thread([&] { x.exp(); });
    x.exp();
    CHECK(sim::now() == 1);
  } else {  // other bytes of the same storage
    on_thread([&] { x.narrow(0, 0, 5).zero_(); });
    x.narrow(0, 5, 5).zero_();
    CHECK(sim::now() == 1);
    x.narrow(0, 4, 2).zero_();
    CHECK(sim::now() == 2);
  }
}

TEST_CASE("a thread remembers what was read before the clock was looked at",
          "[clock]") {
  const auto device = test::sim(1)[0];
  const auto x = ten(device);
  const Running clock;
  Tensor y;
  std::thread([&] {
    x.exp().exp();
    y = x.exp();
  }).join();
  CHECK(sim::now() == 0);
  y.exp();
  CHECK(sim::now() == 4);
}

TEST_CASE("streams get their work in the order of simulated time", "[clock]") {
  const auto devices = test::sim(2);
  const auto x = ten(devices[0]);
  const auto y = ten(devices[1]);
  const Running clock;
  // Written down first, launched last: the other thread is at 3 by then.
  std::thread([&] {
    y.exp();
    y.exp();
    x.exp();
  }).join();
  c10::Event event(devices[0].type());
  x.zero_();  // at 4, since the other one has read x at 3
  const auto z = ten(devices[0]);
  CHECK(sim::now() == 5);
  const auto other = torch::ones({1}, devices[0]);
  CHECK(sim::busy_seconds(devices[0]) == 80 + 40 + 40 + 4);
}

TEST_CASE("flops count for products, convolutions and attention, by type",
          "[clock]") {
  const auto device = test::sim(1)[0];
  auto machine = slow_machine();
  machine.device.memory_bytes_per_second = 1e30;
  const bool had_tf32 = at::globalContext().allowTF32CuDNN();
  at::globalContext().setAllowTF32CuDNN(false);
  const Running clock(machine);
  const auto flops = [&](auto&& run) {
    sim::reset_counters();
    run();
    return std::round(2e9 * sim::busy_seconds(device));
  };
  const auto a = torch::ones({4, 8}, device);
  const auto b = torch::ones({8, 2}, device);
  const auto c = torch::ones({4, 2}, device);
  CHECK(flops([&] { a.mm(b); }) == 2 * 4 * 8 * 2);
  CHECK(flops([&] { torch::addmm(c, a, b); }) == 2 * 4 * 8 * 2);
  CHECK(flops([&] { torch::linear(a, b.t()); }) == 2 * 4 * 8 * 2);
  CHECK(flops([&] { a.mv(torch::ones({8}, device)); }) == 2 * 4 * 8);
  const auto many = torch::ones({3, 4, 8}, device);
  CHECK(flops([&] {
          many.bmm(torch::ones({3, 8, 2}, device));
        }) == 2 * 3 * 4 * 8 * 2);
  CHECK(flops([&] { many.matmul(b); }) == 2 * 3 * 4 * 8 * 2);
  CHECK(flops([&] {
          torch::baddbmm(torch::ones({3, 4, 2}, device), many,
                         torch::ones({3, 8, 2}, device));
        }) == 2 * 3 * 4 * 8 * 2);
  CHECK(flops([&] { a.exp(); }) == 0);

  auto image = torch::ones({2, 4, 5, 5}, device);
  auto filters = torch::ones({6, 2, 3, 3}, device).requires_grad_();
  const double forward = 2.0 * (2 * 6 * 3 * 3) * (2 * 3 * 3);
  const auto convolve = [&] {
    return torch::convolution(image, filters, {}, {1, 1}, {0, 0}, {1, 1},
                              /*transposed=*/false, {0, 0}, /*groups=*/2);
  };
  CHECK(flops(convolve) == forward);
  const auto y = convolve();
  CHECK(flops([&] { y.sum().backward(); }) == forward);  // for the filters
  image.requires_grad_();
  const auto z = convolve();
  CHECK(flops([&] { z.sum().backward(); }) == 2 * forward);
  CHECK(flops([&] {
          torch::convolution(torch::ones({2, 6, 3, 3}, device),
                             torch::ones({6, 2, 3, 3}, device), {}, {1, 1},
                             {0, 0}, {1, 1}, /*transposed=*/true, {0, 0},
                             /*groups=*/2);
        }) == forward);

  const auto query = torch::ones({1, 2, 3, 4}, device);
  const auto keys = torch::ones({1, 2, 5, 4}, device);
  CHECK(flops([&] { at::scaled_dot_product_attention(query, keys, keys); }) ==
        2 * 2 * (2 * 3 * 5 * 4));

  const double product = 2 * 4 * 8 * 2;
  const auto as = [&](at::ScalarType type) {
    return flops([&] { a.to(type).mm(b.to(type)); });
  };
  CHECK(as(at::kDouble) == 2 * product);
  CHECK(as(at::kHalf) == product / 2);
  CHECK(as(at::kBFloat16) == product / 4);
  at::globalContext().setAllowTF32CuDNN(true);
  CHECK(flops(convolve) == forward / 8);
  at::globalContext().setAllowTF32CuDNN(had_tf32);
}

TEST_CASE("counters zeroed, times count from the end of what was launched",
          "[clock]") {
  const auto devices = test::sim(2);
  const auto x = ten(devices[0]);
  const Running clock;
  x.exp();
  x.to(devices[1]);
  sim::reset_counters();
  CHECK(sim::elapsed_seconds() == 0);
  CHECK(sim::busy_seconds(devices[0]) == 0);
  CHECK(sim::busy_seconds(devices[0], devices[1]) == 0);
  guard().synchronizeDevice(0);
  CHECK(sim::now() == 83 + 7);
  x.exp();
  CHECK(sim::elapsed_seconds() == 83);
}

TEST_CASE("with the clock off, reading it is an error", "[clock]") {
  const auto device = test::sim(1)[0];
  CHECK_THROWS_WITH(sim::now(), Catch::Contains("now: the simulated clock is "
                                                "off"));
  CHECK_THROWS_WITH(sim::elapsed_seconds(), Catch::Contains("clock is off"));
  CHECK_THROWS_WITH(sim::busy_seconds(device), Catch::Contains("clock is off"));
  const Running clock;
  CHECK_THROWS_AS(sim::busy_seconds(torch::Device("cpu")), c10::ValueError);
  CHECK_THROWS_AS(sim::idle_seconds(device, torch::Device("meta")),
                  c10::ValueError);
}

TEST_CASE("hardware that cannot be is refused by name", "[clock]") {
  test::sim(1);
  const auto refused = [](auto&& spoil, const std::string& text) {
    auto machine = slow_machine();
    spoil(machine);
    CHECK_THROWS_WITH(sim::start(sim::Options().devices(4).hardware(machine)),
                      Catch::Contains("start: hardware." + text));
  };
  refused([](auto& m) { m.device.memory_bytes_per_second = 0; },
          "device.memory_bytes_per_second is 0, expected a positive number");
  refused([](auto& m) { m.device.launch_latency_seconds = -1; },
          "device.launch_latency_seconds is -1, expected 0 or more");
  refused([](auto& m) { m.device.memory_bytes = -1; },
          "device.memory_bytes is -1, expected 0 or more");
  refused([](auto& m) { m.device.bf16_flops_per_second = NAN; },
          "device.bf16_flops_per_second is nan");
  refused([](auto& m) { m.host_link.bytes_per_second = 0; },
          "host_link.bytes_per_second");
  refused([](auto& m) { m.peer_link->latency_seconds = INFINITY; },
          "peer_link.latency_seconds is inf");
  refused([](auto& m) { m.host.pageable_bytes_per_second = 0; },
          "host.pageable_bytes_per_second");
  CHECK_THROWS_WITH(sim::now(), Catch::Contains("clock is off"));
}

TEST_CASE("the memory of the hardware is the devices', unless another is given",
          "[clock]") {
  const auto device = test::sim(1)[0];
  auto machine = slow_machine();
  machine.device.memory_bytes = sim::memory_allocated(device) + 4096;
  const Running clock(machine);
  CHECK_THROWS_AS(torch::ones({2048}, device), c10::OutOfMemoryError);
  sim::start(sim::Options().devices(4).hardware(machine).memory_bytes(0));
  CHECK_NOTHROW(torch::ones({2048}, device));
}

TEST_CASE("the table holds what it says", "[clock]") {
  for (const auto& device : {sim::h200(), sim::a100(), sim::rtx_4090()}) {
    CAPTURE(device.name);
    CHECK(device.memory_bytes > 0);
    CHECK(device.bf16_flops_per_second >= device.tf32_flops_per_second);
    CHECK(device.tf32_flops_per_second >= device.fp32_flops_per_second);
    CHECK(device.fp32_flops_per_second >= device.fp64_flops_per_second);
  }
  for (const auto& link : {sim::nvlink_3(), sim::nvlink_4(), sim::pcie_4_x16(),
                           sim::pcie_5_x16()}) {
    CAPTURE(link.name);
    test::sim(1);
    CHECK_NOTHROW(Running(sim::Hardware{.host_link = link, .peer_link = link}));
  }
}

namespace {

/// Real time passes at random in forward and backward, simulated time does not.
struct HesitantImpl : torch::nn::Cloneable<HesitantImpl> {
  HesitantImpl() { reset(); }
  void reset() override {
    layers = torch::nn::ModuleList();
    for (int i = 0; i < 4; ++i) {
      layers->push_back(torch::nn::Linear(16, 16));
    }
    register_module("layers", layers);
  }
  Tensor forward(Tensor x) {
    for (auto& layer : *layers) {
      x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
      hesitate();
      x.register_hook([](const Tensor&) { hesitate(); });
    }
    return x;
  }
  static void hesitate() {
    thread_local std::mt19937 random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Hesitant);

}  // namespace

TEST_CASE("a step takes the same time on every run", "[clock]") {
  const auto devices = test::sim(3);
  auto net = Hesitant();
  net->to(devices[0]);
  dataparallel::DataParallel<Hesitant> model(
      net, test::on(devices).bucket_bytes(1000));
  const auto x = torch::rand({12, 16}, devices[0]);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  const bool in_replicas = GENERATE(false, true);
  const auto step = [&] {
    optimizer.zero_grad();
    if (in_replicas) {
      model->forward_backward(
          [](const Tensor& y, const Tensor& t) {
            return (y - t).pow(2).mean();
          },
          x, x);
    } else {
      (model(x) - x).pow(2).mean().backward();
    }
    optimizer.step();
  };
  const Running clock(
      sim::Hardware{.device = sim::h200(), .peer_link = sim::nvlink_4()});
  // Autograd numbers the nodes of each thread of the host, and compares the
  // numbers: after a few steps the workers, who make more of them, are ahead.
  for (int i = 0; i < 40; ++i) {
    step();
  }
  std::vector<std::vector<double>> runs;
  for (int i = 0; i < 20; ++i) {
    sim::reset_counters();
    step();
    runs.push_back({sim::elapsed_seconds()});
    for (const auto& device : devices) {
      runs.back().push_back(sim::busy_seconds(device));
      runs.back().push_back(sim::busy_seconds(devices[0], device));
      runs.back().push_back(sim::busy_seconds(device, devices[0]));
    }
  }
  CHECK(runs[0][0] > 0);
  for (const auto& run : runs) {
    for (size_t i = 0; i < run.size(); ++i) {
      CAPTURE(i, run[i] - runs[0][i]);
      CHECK(run[i] == runs[0][i]);
    }
  }
}
