#include <dataparallel/simulated_hardware.h>

// The table of devices and links. All are the vendor's peaks, dense (data
// sheets print the tensor cores' numbers for sparse matrices, twice as high).
// What a kernel reaches of its peak is not modelled.

namespace dataparallel::simulated {
namespace {

constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;
constexpr double kMicro = 1e-6;

// Not in data sheets. NVIDIA, "Getting Started with CUDA Graphs" (developer
// blog, 2019): kernels of 2.9 us took 3.8 us each in a stream that never ran
// empty, so 0.9 us lie between two. Taken for all devices.
constexpr double kLaunchLatency = 0.9 * kMicro;

// Not in data sheets. p2pBandwidthLatencyTest of the CUDA samples reports 2 to
// 3 us between two devices on NVLink; p2pmark (github.com/lukealonso/p2pmark)
// 4.1 us at least on PCIe 5.
constexpr double kNvlinkLatency = 2.5 * kMicro;
constexpr double kPcieLatency = 4.1 * kMicro;

}  // namespace

// NVIDIA H200 data sheet (2024): 141 GB, 4.8 TB/s; FP64 tensor core 67, FP32
// 67, TF32 989 and FP16 and BF16 1,979 TFLOPS, the last three with sparsity.
DeviceModel h200() {
  return {.name = "H200 SXM",
          .memory_bytes = 141'000'000'000,
          .memory_bytes_per_second = 4800 * kGiga,
          .fp64_flops_per_second = 67 * kTera,
          .fp32_flops_per_second = 67 * kTera,
          .tf32_flops_per_second = 494.7 * kTera,
          .fp16_flops_per_second = 989.4 * kTera,
          .bf16_flops_per_second = 989.4 * kTera,
          .launch_latency_seconds = kLaunchLatency};
}

// NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4): 80 GB
// SXM 2,039 GB/s; FP64 tensor core and FP32 19.5, TF32 156, FP16 and BF16 312
// TFLOPS.
DeviceModel a100() {
  return {.name = "A100 SXM 80 GB",
          .memory_bytes = 80'000'000'000,
          .memory_bytes_per_second = 2039 * kGiga,
          .fp64_flops_per_second = 19.5 * kTera,
          .fp32_flops_per_second = 19.5 * kTera,
          .tf32_flops_per_second = 156 * kTera,
          .fp16_flops_per_second = 312 * kTera,
          .bf16_flops_per_second = 312 * kTera,
          .launch_latency_seconds = kLaunchLatency};
}

// NVIDIA Ada GPU architecture white paper (v2.1), appendix A: 24 GB, 1008 GB/s;
// FP32 82.6, TF32 82.6, FP16 and BF16 with FP32 accumulate 165.2 TFLOPS; FP64
// 1/64 of FP32.
DeviceModel rtx_4090() {
  return {.name = "GeForce RTX 4090",
          .memory_bytes = 24'000'000'000,
          .memory_bytes_per_second = 1008 * kGiga,
          .fp64_flops_per_second = 1.29 * kTera,
          .fp32_flops_per_second = 82.6 * kTera,
          .tf32_flops_per_second = 82.6 * kTera,
          .fp16_flops_per_second = 165.2 * kTera,
          .bf16_flops_per_second = 165.2 * kTera,
          .launch_latency_seconds = kLaunchLatency};
}

// A100 data sheet: 600 GB/s, both directions together.
LinkModel nvlink_3() {
  return {.name = "NVLink 3",
          .bytes_per_second = 300 * kGiga,
          .latency_seconds = kNvlinkLatency};
}

// H200 data sheet: 900 GB/s, both directions together.
LinkModel nvlink_4() {
  return {.name = "NVLink 4",
          .bytes_per_second = 450 * kGiga,
          .latency_seconds = kNvlinkLatency};
}

// PCI Express 4.0: 16 GT/s, 16 lanes, 128 of 130 bits are data.
LinkModel pcie_4_x16() {
  return {.name = "PCIe 4 x16",
          .bytes_per_second = 31.5 * kGiga,
          .latency_seconds = kPcieLatency};
}

// PCI Express 5.0: 32 GT/s, 16 lanes, 128 of 130 bits are data.
LinkModel pcie_5_x16() {
  return {.name = "PCIe 5 x16",
          .bytes_per_second = 63.0 * kGiga,
          .latency_seconds = kPcieLatency};
}

// Chosen, not measured: an operator of LibTorch in eager mode takes a thread
// about 5 us (dispatch, allocation, autograd's bookkeeping and the 2 us of
// cudaLaunchKernel), a copy as much. Pageable memory goes through a pinned
// buffer that one core fills: 8 GB/s, what the CUDA samples' bandwidthTest
// reports on common servers, give or take a half.
HostModel server_host() {
  return {.kernel_launch_seconds = 5 * kMicro,
          .copy_launch_seconds = 5 * kMicro,
          .pageable_bytes_per_second = 8 * kGiga};
}

}  // namespace dataparallel::simulated
