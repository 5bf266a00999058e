#include "detail/replica_values.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>

#include "detail/links.h"
#include "detail/streams.h"

// Note [Where a replica's values live]
//
// Replica tensors are never replaced, since members of the user's struct and
// the registry hold them: they are pointed elsewhere (`set_data`).
//
// - A parameter on the original's own device points to the original's memory
//   and shares its version counter: it is the original, under another
//   TensorImpl. Nothing is copied, and an update between a forward and its
//   backward is the error it is on one device.
// - All else on another device points into a flat buffer, written by `refresh`
//   with one copy a bucket. That does not count as a change (two forwards
//   before one backward write the same values twice), unless the original's
//   version has moved since the last refresh: then the replicas' moves too.
// - A buffer on the original's own device has its own memory, since replicas
//   write to their buffers at the same time.
//
// What a tensor looked like when it was last laid out is kept as a Snapshot;
// `refresh` compares, and lays everything out anew when something differs.

namespace dataparallel::detail {

ReplicaValues::ReplicaValues(std::string function,
                             std::vector<at::Device> devices,
                             int64_t bucket_bytes, Transport transport,
                             const std::vector<Counterpart>& counterparts)
    : function_(std::move(function)),
      devices_(std::move(devices)),
      bucket_bytes_(bucket_bytes),
      transport_(transport),
      counterparts_(counterparts),
      states_(counterparts.size()) {
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].version = version_of(counterparts_[i].original);
  }
}

bool ReplicaValues::shares(size_t i, size_t replica) const {
  const Counterpart& one = counterparts_[i];
  return devices_[replica] == devices_[0] &&
         (one.parameter || states_[i].seen->requires_grad) &&
         is_strided(one.original);
}

void ReplicaValues::check_devices() const {
  for (const Counterpart& one : counterparts_) {
    TORCH_CHECK_VALUE(one.original.device() == devices_[0], function_, ": ",
                      one.parameter ? "parameter " : "buffer ", one.name,
                      " is on ", one.original.device(), ", expected ",
                      devices_[0], " (the first of devices)");
  }
}

void ReplicaValues::lay_out() {
  check_devices();
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].seen = snapshot(counterparts_[i].original);
    states_[i].homes.assign(devices_.size(), at::Tensor());
  }
  streams_ = current_streams(devices_);
  buckets_.clear();
  singly_.clear();
  std::vector<size_t> remote;
  for (size_t replica = 1; replica < devices_.size(); ++replica) {
    lay_out_singly(replica);
    if (devices_[replica] != devices_[0]) {
      remote.push_back(replica);
    }
  }
  lay_out_buckets(/*parameters=*/true, remote);
  parameter_buckets_ = buckets_.size();
  lay_out_buckets(/*parameters=*/false, remote);
  share_pack();
  for (size_t i = 0; i < states_.size(); ++i) {
    for (size_t replica = 1; replica < devices_.size(); ++replica) {
      place(i, replica);
    }
  }
}

void ReplicaValues::lay_out_singly(size_t replica) {
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor& original = counterparts_[i].original;
    const bool own_copy =
        devices_[replica] == devices_[0] && !shares(i, replica);
    if (own_copy && is_strided(original)) {
      states_[i].homes[replica] = at::empty_like(original);
    }
    if (own_copy || !is_strided(original)) {
      singly_.emplace_back(i, replica);
    }
  }
}

void ReplicaValues::lay_out_buckets(bool parameters,
                                    const std::vector<size_t>& remote) {
  if (remote.empty()) {
    return;
  }
  std::vector<at::Device> targets;
  std::vector<at::Device> all{devices_[0]};
  for (const size_t replica : remote) {
    targets.push_back(devices_[replica]);
    all.push_back(devices_[replica]);
  }
  const auto communicator = make_communicator(function_, all, transport_);
  std::vector<at::Tensor> originals;
  std::vector<size_t> indices;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (counterparts_[i].parameter == parameters &&
        is_strided(counterparts_[i].original)) {
      originals.push_back(counterparts_[i].original);
      indices.push_back(i);
    }
  }
  for (auto& [first, count] :
       split_keeping_storages(originals, bucket_bytes_)) {
    const std::vector<at::Tensor> part(originals.begin() + first,
                                       originals.begin() + first + count);
    FlatBucket bucket(part, targets, communicator);
    for (int64_t k = 0; k < count; ++k) {
      for (size_t t = 0; t < targets.size(); ++t) {
        states_[indices[first + k]].homes[remote[t]] = bucket.slice(t, k);
      }
    }
    buckets_.push_back(std::move(bucket));
  }
}

// One for all: a second copy of the whole model on the first device would be
// for nothing.
void ReplicaValues::share_pack() {
  int64_t pack_bytes = 0;
  for (const FlatBucket& bucket : buckets_) {
    pack_bytes = std::max(pack_bytes, bucket.bytes());
  }
  const at::Tensor pack = at::empty(
      {pack_bytes}, at::TensorOptions().dtype(at::kByte).device(devices_[0]));
  for (FlatBucket& bucket : buckets_) {
    bucket.set_pack(pack);
  }
}

void ReplicaValues::place(size_t i, size_t replica) {
  const at::Tensor& original = counterparts_[i].original;
  if (!is_strided(original)) {
    return;
  }
  const bool shared = shares(i, replica);
  const at::Tensor home =
      shared ? original.detach() : states_[i].homes[replica];
  for (const at::Tensor& copy : counterparts_[i].copies[replica]) {
    const bool was_inference = copy.is_inference();
    copy.set_data(home);
    if (was_inference && !copy.is_inference()) {
      // `set_data` makes it a normal tensor, but for the version counter.
      copy.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(0));
    }
    if (shared && !original.is_inference()) {
      copy.unsafeGetTensorImpl()->set_version_counter(
          original.unsafeGetTensorImpl()->version_counter());
    }
  }
}

bool ReplicaValues::follow() {
  if (streams_ != current_streams(devices_)) {
    return false;
  }
  for (size_t i = 0; i < states_.size(); ++i) {
    const Counterpart& one = counterparts_[i];
    State& state = states_[i];
    if (!same(*state.seen, one.original)) {
      return false;
    }
    const int64_t version = version_of(one.original);
    const bool changed = version != state.version;
    state.version = version;
    for (size_t replica = 1; replica < devices_.size(); ++replica) {
      const bool shared = shares(i, replica);
      const void* expected =
          shared ? state.seen->data
                 : data_of(state.homes[replica].defined() ? state.homes[replica]
                                                          : one.original);
      for (const at::Tensor& copy : one.copies[replica]) {
        if (is_strided(one.original) &&
            (data_of(copy) != expected ||
             copy.sizes() != one.original.sizes() ||
             copy.scalar_type() != state.seen->dtype)) {
          return false;
        }
        if (changed && !shared && !copy.is_inference()) {
          copy.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
  }
  return true;
}

bool ReplicaValues::parameters_changed() const {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (counterparts_[i].parameter &&
        version_of(counterparts_[i].original) != states_[i].version) {
      return true;
    }
  }
  return false;
}

void ReplicaValues::copy(bool parameters) {
  at::NoGradGuard no_grad;
  for (size_t k = parameters ? 0 : parameter_buckets_; k < buckets_.size();
       ++k) {
    buckets_[k].copy();
  }
  for (const auto& [i, replica] : singly_) {
    if (parameters || !counterparts_[i].parameter) {
      copy_singly(i, replica);
    }
  }
}

void ReplicaValues::copy_singly(size_t i, size_t replica) {
  const at::Tensor& original = counterparts_[i].original;
  const at::Tensor& home = states_[i].homes[replica];
  if (!is_strided(original)) {
    c10::InferenceMode normal_mode(false);
    at::NoGradGuard no_grad;
    for (const at::Tensor& copy : counterparts_[i].copies[replica]) {
      copy.set_data(devices_[replica] == devices_[0]
                        ? original.detach().clone()
                        : moved(original.detach(), devices_[replica]));
    }
  } else if (original.is_cpu() && original.is_non_overlapping_and_dense() &&
             home.strides() == original.strides()) {
    if (original.numel() > 0) {
      std::memcpy(home.mutable_data_ptr(), original.const_data_ptr(),
                  original.nbytes());
    }
  } else {
    home.copy_(original);
  }
}

void ReplicaValues::check_unwritten() const {
  for (size_t i = 0; i < states_.size(); ++i) {
    const Counterpart& one = counterparts_[i];
    if (version_of(one.original) == states_[i].version) {
      continue;
    }
    for (size_t replica = 1; replica < devices_.size(); ++replica) {
      TORCH_CHECK(!shares(i, replica), function_, ": ", one.name,
                  " was written while forward ran, by forward or by another "
                  "thread; it is a parameter, which replicas on ",
                  devices_[replica],
                  " share, so that they could meet half-written values; what "
                  "forward writes to must be a buffer");
    }
  }
}

}  // namespace dataparallel::detail
