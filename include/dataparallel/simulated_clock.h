#pragma once

#include <c10/core/Device.h>
#include <dataparallel/simulated.h>
#include <dataparallel/simulated_export.h>

/// What a program would take on real devices, by a clock of its own: the same
/// on every run, whatever machine it runs on.
///
/// `Options().hardware(...)` switches the clock on. From then on
/// - a kernel takes its device's launch latency, and then the larger of bytes /
///   memory bandwidth and flops / peak of its type. The bytes are those that
///   the operator reads and writes; the flops are counted for matrix products,
///   convolutions and attention;
/// - a copy takes the link's latency and bytes / its bandwidth. Each device has
///   a link to the host and one to the other devices, with two directions each;
///   each direction carries one copy at a time;
/// - a host thread takes a fixed time for each launch and each copy call, and
///   waits where it would with CUDA: in `item()`, `synchronize`, and copies
///   from and to the CPU, unless `non_blocking` from or to pinned memory;
/// - events carry time from stream to stream. `elapsed_time` between two events
///   works.
///
///     simulated::start(simulated::Options().devices(2).hardware(
///         {.device = simulated::h200(), .peer_link = simulated::nvlink_4()}));
///     step();  // what happens once
///     simulated::reset_counters();
///     step();
///     double seconds = simulated::elapsed_seconds();
///     double share = simulated::busy_seconds(torch::Device("sim:0")) /
///     seconds;
///
/// What the model leaves out: kernels below their peak (small, odd-shaped or
/// badly written ones), caches, several kernels at once on one device (they
/// share its compute engine one by one, in the order in which their streams
/// were ready), contention for memory between kernels and copies, the topology
/// of PCIe and NUMA, waits of the memory allocator, frequency and power, the
/// host's own computing and its memory, the cost of events, and other threads
/// of the host that would need the same core. Operators are those that torch
/// runs on these devices, which are not always those that CUDA would run:
/// attention is two products and a softmax, not one fused kernel. So compare
/// programs by it; do not expect a stopwatch's seconds.
///
/// How host threads are put in order, and where that order is not determined:
/// Note [The simulated clock] in csrc/simulated/clock.h.
///
/// Thread safety: every function may be called from any thread. Each throws
/// `c10::Error` while the clock is off, and should be called while no other
/// thread launches work, or the result depends on how far that one has come.
namespace dataparallel::simulated {

/// The calling thread's time, in seconds since `start`. It does not include
/// work that this thread has launched and not waited for.
DATAPARALLEL_SIMULATED_EXPORT double now();

/// From the last `reset_counters` (or `start`), when all that was launched
/// before had ended, to the end of all that has been launched since.
DATAPARALLEL_SIMULATED_EXPORT double elapsed_seconds();

/// How long the device's compute engine was busy, and idle, in
/// `elapsed_seconds()`. `c10::ValueError` for what is no simulated device.
DATAPARALLEL_SIMULATED_EXPORT double busy_seconds(c10::Device device);
DATAPARALLEL_SIMULATED_EXPORT double idle_seconds(c10::Device device);
/// How long copies from `source` to `target` were under way; one may be the
/// CPU. Bytes: `bytes_copied`.
DATAPARALLEL_SIMULATED_EXPORT double busy_seconds(c10::Device source,
                                                  c10::Device target);
DATAPARALLEL_SIMULATED_EXPORT double idle_seconds(c10::Device source,
                                                  c10::Device target);

}  // namespace dataparallel::simulated
