#pragma once

#include <dataparallel/simulated_export.h>

#include <cstdint>
#include <optional>
#include <string>

/// What simulated devices take for their work, for the simulated clock (see
/// `simulated_clock.h`): plain numbers, which may be changed or made up.
///
/// The numbers of `h200()` and so on are the vendor's peaks, in one table
/// (csrc/simulated/hardware.cpp) with the source of each. Thread safety: values
/// without shared state.
namespace dataparallel::simulated {

struct DATAPARALLEL_SIMULATED_EXPORT DeviceModel {
  std::string name = "device";
  int64_t memory_bytes = 0;  // 0: no limit
  double memory_bytes_per_second = 0;
  /// Dense peaks, by the type of the operands; `tf32` where torch may use it
  /// for float32. What is in none of them counts as float32.
  double fp64_flops_per_second = 0;
  double fp32_flops_per_second = 0;
  double tf32_flops_per_second = 0;
  double fp16_flops_per_second = 0;
  double bf16_flops_per_second = 0;
  /// From the moment a stream could start a kernel to its start.
  double launch_latency_seconds = 0;
};

/// One direction of a device's link; both have it at the same time.
struct DATAPARALLEL_SIMULATED_EXPORT LinkModel {
  std::string name = "link";
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

/// The threads of the program, and memory that is not pinned.
struct DATAPARALLEL_SIMULATED_EXPORT HostModel {
  double kernel_launch_seconds = 0;
  double copy_launch_seconds = 0;
  /// A copy of pageable memory runs at the lower of this and the link.
  double pageable_bytes_per_second = 0;
};

DATAPARALLEL_SIMULATED_EXPORT DeviceModel h200();      // SXM, 141 GB
DATAPARALLEL_SIMULATED_EXPORT DeviceModel a100();      // SXM, 80 GB
DATAPARALLEL_SIMULATED_EXPORT DeviceModel rtx_4090();  // 24 GB
DATAPARALLEL_SIMULATED_EXPORT LinkModel nvlink_3();
DATAPARALLEL_SIMULATED_EXPORT LinkModel nvlink_4();
DATAPARALLEL_SIMULATED_EXPORT LinkModel pcie_4_x16();
DATAPARALLEL_SIMULATED_EXPORT LinkModel pcie_5_x16();
/// A server's processor that runs a C++ program in eager mode.
DATAPARALLEL_SIMULATED_EXPORT HostModel server_host();

/// A machine of equal devices.
///
///     simulated::start(simulated::Options().devices(8).hardware(
///         {.device = simulated::h200(), .peer_link = simulated::nvlink_4()}));
struct DATAPARALLEL_SIMULATED_EXPORT Hardware {
  DeviceModel device = h200();
  LinkModel host_link = pcie_5_x16();
  /// Between the devices, through a switch: each device has one such link, to
  /// all others. None: copies between devices take the host links of both.
  std::optional<LinkModel> peer_link;
  HostModel host = server_host();
};

}  // namespace dataparallel::simulated
