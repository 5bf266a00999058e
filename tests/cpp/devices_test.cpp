#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dataparallel/devices.h>
#include <torch/torch.h>

#include <string>
#include <thread>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/values.h"

using dataparallel::check_device;
using dataparallel::check_devices;
using dataparallel::default_devices;
using test::Devices;
using test::message_of;

// First: the simulated devices are not there before something starts them.
TEST_CASE(
    "without an accelerator the default is one CPU replica for four "
    "threads, two at least",
    "[devices]") {
  if (torch::cuda::device_count() > 0 || torch::mps::is_available()) {
    return;  // the next test's
  }
  const int before = at::get_num_threads();
  for (const auto& [threads, replicas] : std::vector<std::pair<int, size_t>>{
           {1, 2}, {4, 2}, {8, 2}, {11, 2}, {12, 3}, {16, 4}}) {
    at::set_num_threads(threads);
    CAPTURE(threads);
    CHECK(default_devices() == test::cpu(replicas));
  }
  at::set_num_threads(before);
}

TEST_CASE("simulated devices are the default once they are started",
          "[devices][sim]") {
  const Devices all = test::sim(4);
  CHECK(default_devices() == all);
}

TEST_CASE("a device list of CPUs is taken as it is", "[devices]") {
  CHECK(check_devices("scatter", test::cpu(3)) == test::cpu(3));
  CHECK(check_device("gather", "target", torch::kCPU) == torch::kCPU);
}

TEST_CASE("a CPU with an index is the CPU", "[devices]") {
  CHECK(check_devices("scatter", {torch::Device("cpu:0"), torch::kCPU}) ==
        test::cpu(2));
  CHECK_FALSE(
      check_device("gather", "target", torch::Device("cpu:0")).has_index());
}

TEST_CASE("a bare accelerator is the calling thread's current device",
          "[devices][sim]") {
  const Devices sim = test::sim(3);
  const torch::Device bare(sim[0].type());
  for (const torch::Device& current : sim) {
    const c10::DeviceGuard guard(current);
    CHECK(check_device("gather", "target", bare) == current);
    CHECK(check_devices("scatter", {sim[1], bare}) == Devices{sim[1], current});
    // Another thread has a current device of its own.
    torch::Device elsewhere = current;
    std::thread([&] {
      elsewhere = check_device("gather", "target", bare);
    }).join();
    CHECK(elsewhere == sim[0]);
  }
}

TEST_CASE("the order and repetitions of a device list stay", "[devices][sim]") {
  const Devices sim = test::sim(3);
  const Devices list{sim[2], sim[0], sim[2], torch::kCPU};
  CHECK(check_devices("scatter", list) == list);
}

TEST_CASE("an empty device list is refused", "[devices]") {
  CHECK(message_of<c10::ValueError>([] { check_devices("scatter", {}); }) ==
        "scatter: devices is empty, expected one device at least");
}

TEST_CASE("a device of a kind that this machine lacks is refused by its place",
          "[devices]") {
  const torch::Device absent("fpga:1");
  CHECK(message_of<c10::ValueError>([&] {
          check_devices("scatter", {torch::kCPU, absent});
        }) == "scatter: devices[1] is fpga:1, but there are no fpga devices");
  CHECK(message_of<c10::ValueError>([] {
          check_device("gather", "target", torch::Device("fpga"));
        }) == "gather: target is fpga, but there are no fpga devices");
}

TEST_CASE("a CUDA device that does not exist is refused with the count",
          "[devices]") {
  const auto count = torch::cuda::device_count();
  const std::string are =
      count == 0   ? "are no cuda devices"
      : count == 1 ? "is 1 cuda device"
                   : "are " + std::to_string(count) + " cuda devices";
  CHECK(message_of<c10::ValueError>([] {
          check_devices("scatter", {torch::kCPU, torch::Device("cuda:99")});
        }) == "scatter: devices[1] is cuda:99, but there " + are);
}

TEST_CASE("an accelerator index beyond the last one is refused with the count",
          "[devices][sim]") {
  const Devices sim = test::sim(4);
  CHECK(check_devices("scatter", {sim[3]}) == Devices{sim[3]});
  const torch::Device beyond(sim[0].type(), 4);
  CHECK(message_of<c10::ValueError>([&] {
          check_devices("parallel_apply", {sim[0], beyond});
        }) ==
        "parallel_apply: devices[1] is sim:4, but there are 4 sim devices");
}
