#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simulated/flops.h"
#include "simulated/race_detector.h"

namespace dataparallel::simulated {

bool is_simulated(const at::Tensor& tensor);

/// A tensor over `storage`, laid out as `like`.
at::Tensor make_tensor(c10::Storage storage, const at::Tensor& like);
c10::Storage make_storage(c10::DataPtr data, size_t bytes);

/// The bytes of a strided tensor, for the race detector.
RaceDetector::Access access_to(const at::Tensor& tensor, bool write);
/// Those that a kernel moves: without gaps, and repeated ones once.
double bytes_of(const at::Tensor& tensor);

/// One launch: the simulated tensors of one operator seen as CPU tensors over
/// the same memory, and CPU results seen as simulated ones. In a dry run, read
/// "meta" for "CPU": there is no memory, only shapes.
///
///     Launch launch("aten::add");
///     const at::Tensor a = launch.read(x), b = launch.read(y);
///     launch.start();
///     return launch.result(at::add(a, b));
///
/// `read` and `write` check that all tensors are on one device; `start` tells
/// the race detector and the counters, the destructor the clock, which wants to
/// know the results too. Not thread-safe, one operator's own.
class Launch {
 public:
  explicit Launch(std::string name, bool kernel = true);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  at::Tensor read(const at::Tensor& tensor) { return view(tensor, false); }
  at::Tensor write(const at::Tensor& tensor) { return view(tensor, true); }
  /// The device of results; that of the arguments, unless this is called.
  void on(c10::Device device);
  /// The next tensors may be on the CPU whatever their shape.
  void allow_cpu() { allow_cpu_ = true; }

  void start();
  /// For the clock; may be left out.
  void set_flops(const Flops& flops) { flops_ = flops; }
  c10::Device device() const;
  /// `tensor` is what the CPU returned: an argument again, a view of one, or
  /// new memory.
  at::Tensor result(const at::Tensor& tensor);
  /// Shapes and memory of written arguments, where the CPU changed them.
  void finish();

 private:
  struct Seen {
    at::Tensor cpu;
    at::Tensor simulated;
    bool written;
  };
  at::Tensor view(const at::Tensor& tensor, bool write);
  at::Tensor dense_view(const at::Tensor& tensor, bool write);
  void check_device(const at::Tensor& tensor);
  void finish_dense(const at::Tensor& cpu, const at::Tensor& simulated);

  std::string name_;
  bool kernel_;
  bool allow_cpu_ = false;
  std::optional<c10::Device> device_;
  std::optional<c10::Device> on_;
  std::optional<c10::Device> cpu_seen_;
  std::vector<Seen> seen_;
  std::unordered_map<const at::TensorImpl*, size_t> seen_at_;  // simulated
  std::unordered_map<const void*, size_t> storage_at_;         // of the CPU's
  std::vector<RaceDetector::Access> accesses_;

  // For the clock.
  std::optional<StreamKey> started_on_;
  int exceptions_;
  bool in_place_;
  double bytes_ = 0;
  Flops flops_;
};

}  // namespace dataparallel::simulated
