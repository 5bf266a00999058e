#pragma once

#include <c10/core/Event.h>
#include <torch/torch.h>

#include <barrier>
#include <deque>
#include <optional>
#include <vector>

namespace bench {

/// `tensors`, one after the other in one buffer: one launch.
torch::Tensor flatten(const std::vector<torch::Tensor>& tensors);
/// The parts of `flat` with the sizes of `like`.
std::vector<torch::Tensor> slices(const torch::Tensor& flat,
                                  const std::vector<torch::Tensor>& like);

/// DistributedDataParallel's reduction, as far as time goes: values are those
/// of a dry run. Every rank's backward must run on a thread of its own: the
/// last to have a bucket lets the others go on.
class Ring {
 public:
  explicit Ring(const std::vector<torch::Device>& devices);
  /// The next rank, whose gradients shall be reduced.
  void add(const std::vector<torch::Tensor>& parameters);
  /// After backward: the rank's current stream waits for the reduction.
  void finish(int64_t rank);

 private:
  struct Bucket {
    std::vector<torch::Tensor> gradients;
    size_t arrived = 0;
    torch::Tensor flat;
    torch::Tensor received;
  };
  struct Rank {
    std::vector<Bucket> buckets;
    c10::Stream sending;
    c10::Stream receiving;
    std::optional<c10::Event> ready;
  };
  void arrived(size_t rank, size_t bucket, size_t place,
               const torch::Tensor& gradient);
  void all_reduce(size_t rank, size_t bucket);

  std::vector<torch::Device> devices_;
  std::deque<Rank> ranks_;
  std::barrier<> all_ready_;
};

}  // namespace bench
