#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace bench {

using Devices = std::vector<torch::Device>;

/// `cpu, cpu, …`.
Devices cpu(size_t replicas);
/// `sim:0, sim:1, …`; starts the simulated devices.
Devices sim(size_t replicas);

/// `cpu,cpu`.
std::string text(const Devices& devices);

/// Waits until all work on `devices` is done.
void synchronize(const Devices& devices);

}  // namespace bench
