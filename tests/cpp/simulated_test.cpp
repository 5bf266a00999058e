#include <dataparallel/simulated.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/device_lists.h"

namespace sim = dataparallel::simulated;

TEST_CASE("starting again with another number of devices is refused",
          "[simulated]") {
  test::sim(1);
  CHECK(sim::device_count() == 4);
  CHECK_NOTHROW(sim::start(sim::Options().devices(4)));
  CHECK_THROWS_WITH(sim::start(sim::Options().devices(2)),
                    Catch::Contains("devices is 2, but 4 simulated devices"));
  CHECK_THROWS_WITH(sim::start(sim::Options().devices(0)),
                    Catch::Contains("devices is 0, expected 1 to 64"));
  CHECK_THROWS_WITH(sim::start(sim::Options().memory_bytes(-1)),
                    Catch::Contains("memory_bytes is -1"));
}

TEST_CASE("a device that does not exist is refused", "[simulated]") {
  test::sim(1);
  CHECK_THROWS_WITH(torch::ones({2}, torch::Device("sim:4")),
                    Catch::Contains("invalid device ordinal 4"));
  CHECK_THROWS_WITH(sim::peak_memory(torch::Device("cpu")),
                    Catch::Contains("device is cpu, expected a simulated"));
}

TEST_CASE("tensors of two devices in one operator are CUDA's error",
          "[simulated]") {
  const auto devices = test::sim(3);
  const auto a = torch::ones({2, 2}, devices[1]);
  const auto b = torch::ones({2, 2}, devices[2]);
  const std::string text =
      "Expected all tensors to be on the same device, but found at least two "
      "devices, sim:1 and sim:2!";
  CHECK_THROWS_WITH(a + b, Catch::Contains(text));
  CHECK_THROWS_WITH(a.mm(b), Catch::Contains(text));
  CHECK_THROWS_WITH(torch::cat({a, b}), Catch::Contains(text));
  CHECK_THROWS_WITH(torch::linear(a, b), Catch::Contains(text));
  CHECK_THROWS_WITH(torch::conv2d(a.view({1, 1, 2, 2}), b.view({1, 1, 2, 2})),
                    Catch::Contains(text));
  CHECK_THROWS_WITH(a.mm(torch::ones({2, 2})),
                    Catch::Contains("devices, sim:1 and cpu!"));
}

TEST_CASE("zero-dimensional CPU tensors and CPU indices are taken, as on CUDA",
          "[simulated]") {
  const auto device = test::sim(1)[0];
  const auto a = torch::arange(4, torch::kFloat).to(device);
  CHECK((a + torch::tensor(2.0f)).sum().item<float>() == 14);
  CHECK(a.index({torch::tensor({1, 3})}).sum().item<float>() == 4);
}

TEST_CASE("memory is counted exactly, with its peak", "[simulated]") {
  const auto device = test::sim(1)[0];
  const auto before = sim::memory_allocated(device);
  sim::reset_counters();
  {
    const auto a = torch::empty({256}, device);
    CHECK(sim::memory_allocated(device) == before + 1024);
    const auto b = a + a;
    CHECK(sim::memory_allocated(device) == before + 2048);
    const auto view = b.view({16, 16}).t();
    CHECK(sim::memory_allocated(device) == before + 2048);
  }
  CHECK(sim::memory_allocated(device) == before);
  CHECK(sim::peak_memory(device) == before + 2048);
  sim::reset_counters();
  CHECK(sim::peak_memory(device) == before);
}

TEST_CASE("a full device throws torch's out-of-memory error and recovers",
          "[simulated]") {
  const auto device = test::sim(1)[0];
  const auto used = sim::memory_allocated(device);
  sim::start(sim::Options().devices(4).memory_bytes(used + 4096));
  const auto a = torch::zeros({512}, device);
  CHECK_THROWS_AS(torch::zeros({1024}, device), c10::OutOfMemoryError);
  CHECK_THROWS_WITH(a.repeat({4}), Catch::Contains("sim out of memory"));
  CHECK_THROWS_WITH(torch::zeros({1024}, device),
                    Catch::Contains("Tried to allocate 4096 bytes"));
  CHECK_NOTHROW(torch::zeros({256}, device));
  sim::start(sim::Options().devices(4));
  CHECK_NOTHROW(torch::zeros({1024}, device));
}

TEST_CASE("kernels, copies and their bytes are counted exactly",
          "[simulated]") {
  const auto devices = test::sim(2);
  const auto a = torch::ones({100}, devices[0]);
  sim::reset_counters();
  const auto view = a.view({10, 10}).t().narrow(0, 1, 2);
  CHECK(sim::kernels_launched(devices[0]) == 0);
  const auto b = a.exp().add_(1);
  CHECK(sim::kernels_launched(devices[0]) == 2);
  const auto c = b.to(devices[1]);
  const auto d = c.cpu();
  const auto e = d.to(devices[0]);
  CHECK(sim::copies(devices[0], devices[1]) == 1);
  CHECK(sim::bytes_copied(devices[0], devices[1]) == 400);
  CHECK(sim::copies(devices[1], devices[0]) == 0);
  CHECK(sim::bytes_copied(devices[1], torch::kCPU) == 400);
  CHECK(sim::bytes_copied(torch::kCPU, devices[0]) == 400);
  CHECK(sim::kernels_launched(devices[1]) == 0);
  CHECK(torch::equal(e.cpu(), b.cpu()));
}

TEST_CASE("copies over a corrupt link arrive as zeros, and only these",
          "[simulated]") {
  const auto devices = test::sim(2);
  const auto a = torch::ones({4}, devices[0]);
  {
    sim::CorruptCopies corrupt(devices[0], devices[1]);
    CHECK(a.to(devices[1]).cpu().sum().item<float>() == 0);
    CHECK(a.cpu().to(devices[1]).cpu().sum().item<float>() == 4);
  }
  CHECK(a.to(devices[1]).cpu().sum().item<float>() == 4);
}

TEST_CASE("each device has its own generator, and a seed repeats it",
          "[simulated]") {
  const auto devices = test::sim(2);
  torch::manual_seed(7);
  const auto a = torch::randn({8}, devices[0]).cpu();
  const auto cpu = torch::randn({8});
  torch::manual_seed(7);
  CHECK(torch::equal(torch::randn({8}), cpu));
  const auto other = torch::randn({8}, devices[1]).cpu();
  CHECK(torch::equal(torch::randn({8}, devices[0]).cpu(), a));
  CHECK(torch::equal(other, a));  // the same seed, the same place in it
  CHECK_FALSE(torch::equal(torch::randn({8}, devices[0]).cpu(), a));
}

TEST_CASE("dropout draws from its device's generator, and a seed repeats it",
          "[simulated]") {
  const auto devices = test::sim(2);
  torch::nn::Dropout dropout(0.5);
  const auto draw = [&] {
    torch::manual_seed(7);
    std::vector<torch::Tensor> results;
    for (const int i : {0, 1, 0}) {
      results.push_back(dropout(torch::ones({64}, devices[i])).cpu());
    }
    return results;
  };
  torch::manual_seed(7);
  const auto cpu = at::globalContext().defaultGenerator(torch::kCPU);
  const auto before = cpu.get_state();
  const auto first = draw();
  CHECK(torch::equal(cpu.get_state(), before));
  const auto second = draw();
  for (size_t i = 0; i < first.size(); ++i) {
    CHECK(torch::equal(first[i], second[i]));
  }
  CHECK(torch::equal(first[0], first[1]));  // the same place in the same seed
  CHECK_FALSE(torch::equal(first[0], first[2]));
}

TEST_CASE("dropout scales, and keeps all, none and nothing, as on the CPU",
          "[simulated]") {
  const auto device = test::sim(1)[0];
  const auto x = torch::rand({8, 3}) + 1;
  for (const std::optional<bool> train :
       {std::optional(true), std::optional(false), std::optional<bool>()}) {
    for (const double p : {0.0, 1.0}) {
      CAPTURE(train.value_or(true), p);
      const auto [expected, expected_mask] = at::native_dropout(x, p, train);
      const auto [got, mask] = at::native_dropout(x.to(device), p, train);
      CHECK(got.device() == device);
      CHECK(mask.dtype() == expected_mask.dtype());
      CHECK(torch::equal(got.cpu(), expected));
      CHECK(torch::equal(mask.cpu(), expected_mask));
    }
  }
  const auto [nothing, no_mask] =
      at::native_dropout(torch::empty({0, 3}, device), 0.5, true);
  CHECK(nothing.sizes() == torch::IntArrayRef{0, 3});
  CHECK(no_mask.sizes() == torch::IntArrayRef{0, 3});

  auto leaf = x.to(device).requires_grad_();
  const auto dropped = torch::dropout(leaf, 0.25, /*train=*/true);
  dropped.sum().backward();
  CHECK(torch::allclose(dropped.detach(), leaf.detach() * leaf.grad()));
  CHECK(torch::equal(leaf.grad() != 0, dropped.detach() != 0));
  CHECK(leaf.grad().max().item<double>() == Approx(1 / 0.75));
  CHECK_THROWS_AS(torch::dropout(leaf, 1.5, true), c10::Error);
}

TEST_CASE("pinned memory knows that it is pinned", "[simulated]") {
  const auto device = test::sim(1)[0];
  const auto a = torch::arange(5).pin_memory();
  CHECK(a.is_pinned());
  CHECK_FALSE(torch::arange(5).is_pinned());
  CHECK(torch::equal(a.to(device, /*non_blocking=*/true).cpu(), a));
}

TEST_CASE("simulated devices are the accelerator of the process",
          "[simulated]") {
  const auto device = test::sim(1)[0];
  CHECK(at::getAccelerator() == device.type());
  CHECK(device.str() == "sim:0");
}
