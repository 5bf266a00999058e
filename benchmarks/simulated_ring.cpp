#include "simulated_ring.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace bench {
namespace {

using torch::Tensor;

constexpr size_t kBucketBytes = size_t{25} << 20;
constexpr size_t kFirstBucketBytes = size_t{1} << 20;

const c10::impl::DeviceGuardImplInterface& guard(torch::Device device) {
  return *c10::impl::getDeviceGuardImpl(device.type());
}

void wait_for(c10::Stream waiting, c10::Stream before) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(waiting);
}

}  // namespace

Tensor flatten(const std::vector<Tensor>& tensors) {
  int64_t elements = 0;
  for (const Tensor& tensor : tensors) {
    elements += tensor.numel();
  }
  Tensor flat = torch::empty({elements}, tensors[0].options());
  at::_foreach_copy_(slices(flat, tensors), tensors);
  return flat;
}

std::vector<Tensor> slices(const Tensor& flat,
                           const std::vector<Tensor>& like) {
  std::vector<Tensor> parts;
  int64_t start = 0;
  for (const Tensor& tensor : like) {
    parts.push_back(flat.as_strided(tensor.sizes(), tensor.strides(), start));
    start += tensor.numel();
  }
  return parts;
}

Ring::Ring(const std::vector<torch::Device>& devices)
    : devices_(devices), all_ready_(static_cast<int64_t>(devices.size())) {}

void Ring::add(const std::vector<Tensor>& parameters) {
  const size_t rank = ranks_.size();
  const torch::Device device = devices_[rank];
  ranks_.push_back({{},
                    guard(device).getNewStream(device),
                    guard(device).getNewStream(device),
                    std::nullopt});
  auto& buckets = ranks_.back().buckets;
  size_t bytes = 0;
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend();
       ++parameter) {
    const size_t limit = buckets.size() <= 1 ? kFirstBucketBytes : kBucketBytes;
    if (buckets.empty() || bytes + parameter->nbytes() > limit) {
      buckets.emplace_back();
      bytes = 0;
    }
    bytes += parameter->nbytes();
    buckets.back().gradients.emplace_back();
    const size_t bucket = buckets.size() - 1;
    const size_t place = buckets.back().gradients.size() - 1;
    parameter->register_hook([=, this](const Tensor& gradient) {
      arrived(rank, bucket, place, gradient);
    });
  }
}

void Ring::arrived(size_t rank, size_t bucket, size_t place,
                   const Tensor& gradient) {
  Bucket& mine = ranks_[rank].buckets[bucket];
  mine.gradients[place] = gradient.detach();
  if (++mine.arrived == mine.gradients.size() && ranks_.size() > 1) {
    all_reduce(rank, bucket);
  }
}

void Ring::all_reduce(size_t rank, size_t bucket) {
  Rank& mine = ranks_[rank];
  Bucket& sent = mine.buckets[bucket];
  const torch::Device device = devices_[rank];
  const c10::Stream current = guard(device).getStream(device);
  sent.flat = flatten(sent.gradients);
  const auto count = static_cast<int64_t>(ranks_.size());
  const int64_t share = (sent.flat.numel() + count - 1) / count;
  sent.received = torch::empty({2 * (count - 1) * share}, sent.flat.options());
  mine.ready.emplace(device.type());
  mine.ready->record(current);
  all_ready_.arrive_and_wait();
  // As large as the ring's traffic; its values do not matter.
  const size_t next = (rank + 1) % ranks_.size();
  const Tensor& target = ranks_[next].buckets[bucket].received;
  for (Rank& other : ranks_) {
    other.ready->block(mine.sending);
  }
  all_ready_.arrive_and_wait();  // events may be recorded anew from here on
  const c10::Stream before = guard(device).exchangeStream(mine.sending);
  const c10::Stream there =
      guard(devices_[next]).exchangeStream(ranks_[next].receiving);
  const Tensor source =
      sent.flat.as_strided(target.sizes(), {0}, /*storage_offset=*/0);
  target.copy_(source, /*non_blocking=*/true);
  guard(devices_[next]).exchangeStream(there);
  guard(device).exchangeStream(before);
}

void Ring::finish(int64_t rank) {
  Rank& mine = ranks_[static_cast<size_t>(rank)];
  const torch::Device device = devices_[static_cast<size_t>(rank)];
  const c10::Stream current = guard(device).getStream(device);
  all_ready_.arrive_and_wait();  // the rank before has launched its copies too
  wait_for(current, mine.sending);
  wait_for(current, mine.receiving);
  for (Bucket& bucket : mine.buckets) {
    bucket = {std::vector<Tensor>(bucket.gradients.size()), 0, {}, {}};
  }
}

}  // namespace bench
