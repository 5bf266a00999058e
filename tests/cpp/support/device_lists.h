#pragma once

#include <dataparallel/simulated.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "support/catch.h"

// The device lists that every piece is tested on: CPU replicas, and simulated
// devices with the race detector on; a test that leaves a race fails
// (main.cpp).

namespace test {

using Devices = std::vector<torch::Device>;

inline Devices cpu(size_t replicas) {
  return Devices(replicas, torch::Device(torch::kCPU));
}

/// sim:0, sim:1, …; starts the simulated devices, four of them.
inline Devices sim(size_t replicas) {
  dataparallel::simulated::start(dataparallel::simulated::Options().devices(4));
  Devices devices;
  for (size_t i = 0; i < replicas; ++i) {
    devices.emplace_back("sim:" + std::to_string(i));
  }
  return devices;
}

/// 1, 2, 3 and 4 replicas of each kind, and one device twice.
inline std::vector<Devices> device_lists() {
  std::vector<Devices> lists;
  for (size_t replicas = 1; replicas <= 4; ++replicas) {
    lists.push_back(cpu(replicas));
    lists.push_back(sim(replicas));
  }
  lists.push_back({sim(1)[0], sim(1)[0]});
  return lists;
}

/// Two lists, for tests that are slow: three CPU replicas, three devices.
inline std::vector<Devices> short_device_lists() {
  return {cpu(3), sim(3)};
}

inline std::string name(const Devices& devices) {
  std::string text;
  for (const torch::Device& device : devices) {
    text += device.str() + " ";
  }
  return text;
}

}  // namespace test
