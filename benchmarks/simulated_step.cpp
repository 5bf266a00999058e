// How a training step scales, on simulated devices: no values, no memory, and
// the same times on every machine. See README.md for what is compared.

#include <dataparallel/simulated.h>
#include <dataparallel/simulated_clock.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "simulated_schemes.h"

namespace bench {
namespace {

namespace sim = dataparallel::simulated;

/// Before the times stand: replicas learn the order of gradients in the first,
/// and autograd's numbers of nodes settle after a few.
constexpr int kWarmUpSteps = 4;

struct Arguments {
  bool quick = false;
  std::vector<int64_t> devices{1, 2, 4, 8, 16, 32};
  std::vector<std::string> networks;
  std::vector<std::string> schemes;
  std::string device = "h200";
  std::string link = "nvlink";
};

sim::Options options(const Arguments& arguments) {
  const bool nvlink = arguments.link == "nvlink";
  const int64_t most = *std::ranges::max_element(arguments.devices);
  if (arguments.device == "h200") {
    return sim::Options().devices(most).dry_run(true).hardware(
        {.device = sim::h200(),
         .host_link = sim::pcie_5_x16(),
         .peer_link = nvlink ? std::optional(sim::nvlink_4()) : std::nullopt});
  }
  const bool a100 = arguments.device == "a100";
  return sim::Options().devices(most).dry_run(true).hardware(
      {.device = a100 ? sim::a100() : sim::rtx_4090(),
       .host_link = sim::pcie_4_x16(),
       .peer_link = nvlink ? std::optional(sim::nvlink_3()) : std::nullopt});
}

struct Measured {
  double step = 0;
  double compute = 0;  // of the last device
  double link = 0;     // the busiest direction between two devices' ends
  int64_t launches = 0;
  int64_t most_bytes = 0;  // over one device's end
  int64_t all_bytes = 0;
  int64_t first_peak = 0;
  int64_t other_peak = 0;
};

Measured measure(Scheme& scheme, const Devices& devices) {
  for (int i = 0; i < kWarmUpSteps; ++i) {
    scheme.step();
  }
  sim::reset_counters();
  scheme.step();
  Measured result;
  result.step = sim::elapsed_seconds();
  result.compute = sim::busy_seconds(devices.back());
  for (const auto& device : devices) {
    result.launches += sim::kernels_launched(device);
    double out = 0;
    double in = 0;
    int64_t out_bytes = 0;
    int64_t in_bytes = 0;
    for (const auto& other : devices) {
      if (other != device) {
        out += sim::busy_seconds(device, other);
        in += sim::busy_seconds(other, device);
        out_bytes += sim::bytes_copied(device, other);
        in_bytes += sim::bytes_copied(other, device);
      }
    }
    result.link = std::max({result.link, out, in});
    result.most_bytes = std::max({result.most_bytes, out_bytes, in_bytes});
    result.all_bytes += out_bytes;
    auto& peak = device == devices[0] ? result.first_peak : result.other_peak;
    peak = std::max(peak, sim::peak_memory(device));
  }
  return result;
}

constexpr double kMillion = 1e6;

void print(const std::string& scheme, size_t devices, const Measured& of,
           const Measured& alone) {
  const double exposed = std::clamp(of.step - alone.step, 0.0, of.link);
  const std::string hidden =
      of.link == 0 ? "-"
                   : fmt::format("{:.0f} %", 100 * (1 - exposed / of.link));
  fmt::print(
      "{:3}  {:17} {:9.3f} {:6.3f} {:>7} {:8} {:9.1f} {:9.1f} {:8.0f} "
      "{:8.0f}\n",
      devices, scheme, of.step * 1e3, alone.compute / of.step, hidden,
      of.launches, static_cast<double>(of.most_bytes) / kMillion,
      static_cast<double>(of.all_bytes) / kMillion,
      static_cast<double>(of.first_peak) / kMillion,
      static_cast<double>(of.other_peak) / kMillion);
  std::fflush(stdout);
}

bool chosen(const std::vector<std::string>& names, const std::string& name) {
  return names.empty() || std::ranges::count(names, name) > 0;
}

void run(const Workload& workload, const Arguments& arguments) {
  Devices all;
  for (int64_t i = 0; i < sim::device_count(); ++i) {
    all.emplace_back(c10::DeviceType::PrivateUse1,
                     static_cast<torch::DeviceIndex>(i));
  }
  const Measured alone = measure(*one_module(workload, {all[0]}), {all[0]});
  int64_t bytes = 0;
  for (const auto& parameter : Network(workload)->parameters()) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  fmt::print(
      "\n{}: {} samples a device, {:.1f} MB of parameters; alone {:.3f} ms, of "
      "which computing {:.3f} ms\n",
      workload.name, workload.samples, static_cast<double>(bytes) / kMillion,
      alone.step * 1e3, alone.compute * 1e3);
  fmt::print("{:3}  {:17} {:>9} {:>6} {:>7} {:>8} {:>9} {:>9} {:>8} {:>8}\n",
             "n", "scheme", "step ms", "eff.", "hidden", "launches", "MB/link",
             "MB all", "MB dev 0", "others");
  for (const int64_t count : arguments.devices) {
    const Devices devices(all.begin(), all.begin() + count);
    for (const auto& [name, make] : schemes()) {
      if (chosen(arguments.schemes, name)) {
        print(name, devices.size(), measure(*make(workload, devices), devices),
              alone);
      }
    }
  }
}

std::optional<int> parse(int argc, char** argv, Arguments& arguments) {
  CLI::App app("Times of a training step on simulated devices.",
               "simulated_step");
  app.add_flag("--quick", arguments.quick,
               "networks as small as they can be, on 1 and 2 devices");
  const auto* devices =
      app.add_option("--devices", arguments.devices, "how many")
          ->check(CLI::Range(int64_t{1}, int64_t{64}))
          ->delimiter(',')
          ->capture_default_str();
  app.add_option("--networks", arguments.networks,
                 "of resnet, bert, small [default: all]")
      ->check(CLI::IsMember({"resnet", "bert", "small"}))
      ->delimiter(',');
  std::vector<std::string> names;
  for (const auto& scheme : schemes()) {
    names.push_back(scheme.name);
  }
  app.add_option("--schemes", arguments.schemes,
                 fmt::format("of {} [default: all]", fmt::join(names, ", ")))
      ->check(CLI::IsMember(names))
      ->delimiter(',');
  app.add_option("--device", arguments.device, "the table's")
      ->check(CLI::IsMember({"h200", "a100", "rtx_4090"}))
      ->capture_default_str();
  app.add_option("--link", arguments.link, "between the devices")
      ->check(CLI::IsMember({"nvlink", "pcie"}))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "simulated_step: %s\n", error.what());
    return 2;
  }
  if (arguments.quick && devices->count() == 0) {
    arguments.devices = {1, 2};
  }
  return std::nullopt;
}

int main(int argc, char** argv) {
  Arguments arguments;
  if (const auto status = parse(argc, argv, arguments)) {
    return *status;
  }
  const sim::Options with = options(arguments);
  sim::start(with);
  fmt::print(
      "torch {}; {} and {}\n", TORCH_VERSION, with.hardware()->device.name,
      with.hardware()->peer_link.has_value() ? with.hardware()->peer_link->name
                                             : with.hardware()->host_link.name);
  for (const Workload& workload : workloads(arguments.quick)) {
    if (chosen(arguments.networks, workload.name)) {
      run(workload, arguments);
    }
  }
  const size_t races = sim::races().size();
  fmt::print("\nRaces found: {}\n", races);
  return races == 0 ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  return bench::main(argc, argv);
}
