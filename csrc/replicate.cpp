#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <dataparallel/replicate.h>

#include "detail/counterparts.h"
#include "detail/links.h"
#include "detail/reduce.h"
#include "detail/replica_edges.h"
#include "detail/replica_values.h"
#include "detail/streams.h"

namespace dataparallel::detail {

struct ReplicaSet::Impl {
  Impl(const std::string& function, std::vector<at::Device> on,
       int64_t bucket_bytes, std::vector<std::unique_ptr<ModuleAccess>> all,
       bool made_by_user, Transport transport)
      : devices(std::move(on)),
        modules(std::move(all)),
        counterparts(match_replicas(function, modules, made_by_user)),
        bucket_bytes(bucket_bytes),
        communicator(make_communicator(function, devices, transport)),
        values(function, devices, bucket_bytes, transport, counterparts),
        edges(devices.size(), bucket_bytes, communicator, counterparts) {}

  void lay_out() {
    values.check_devices();
    c10::InferenceMode normal_mode(false);
    at::NoGradGuard no_grad;
    edges.clear();
    values.lay_out();
    edges.lay_out();
  }

  void lay_out_edges() {
    c10::InferenceMode normal_mode(false);
    at::NoGradGuard no_grad;
    edges.clear();
    edges.lay_out();
  }

  std::vector<at::Device> devices;
  std::vector<std::unique_ptr<ModuleAccess>> modules;
  std::vector<Counterpart> counterparts;
  int64_t bucket_bytes;
  std::shared_ptr<Communicator> communicator;
  ReplicaValues values;
  ReplicaEdges edges;
};

ReplicaSet::ReplicaSet(const std::string& function,
                       std::vector<at::Device> devices, int64_t bucket_bytes,
                       std::vector<std::unique_ptr<ModuleAccess>> modules,
                       bool made_by_user, Transport transport) {
  check_links(devices);
  impl_ = std::make_unique<Impl>(function, std::move(devices), bucket_bytes,
                                 std::move(modules), made_by_user, transport);
  impl_->lay_out();
  refresh();
}

ReplicaSet::~ReplicaSet() = default;

bool ReplicaSet::same_structure() const {
  return !impl_->modules[0]->replaced();
}

void ReplicaSet::refresh_edges() {
  for (size_t replica = 1; replica < impl_->devices.size(); ++replica) {
    impl_->modules[replica]->follow(*impl_->modules[0],
                                    impl_->devices[replica]);
  }
  if (!impl_->values.follow()) {
    impl_->lay_out();
    impl_->values.copy();
    impl_->values.follow();  // the versions
  } else if (impl_->edges.order_changed()) {
    impl_->lay_out_edges();
  }
}

void ReplicaSet::refresh() {
  refresh_edges();
  impl_->values.copy();
}

void ReplicaSet::refresh_buffers() {
  const bool changed = impl_->values.parameters_changed();
  refresh_edges();
  impl_->values.copy(/*parameters=*/changed);
}

void ReplicaSet::set_gradients(Gradients where) {
  impl_->edges.set_gradients(where);
}

void ReplicaSet::redirect(const std::vector<at::Tensor>& outputs,
                          const std::vector<at::Tensor>& inputs) {
  impl_->edges.redirect(outputs, inputs);
}

void ReplicaSet::check_devices() const {
  impl_->values.check_devices();
}

void ReplicaSet::check_unwritten() const {
  impl_->values.check_unwritten();
}

void ReplicaSet::clear_stashes(bool open) {
  impl_->edges.clear_stashes(open);
}

std::vector<ReplicaGradients> ReplicaSet::take_gradients() {
  return impl_->edges.take_gradients();
}

void ReplicaSet::add_up(std::vector<ReplicaGradients>& gradients, size_t first,
                        size_t step) const {
  const std::vector<at::Device>& devices = impl_->devices;
  at::NoGradGuard no_grad;
  std::vector<ReplicaGradients*> mine;
  std::vector<at::Tensor> originals;
  for (size_t i = first; i < gradients.size(); i += step) {
    mine.push_back(&gradients[i]);
    originals.push_back(gradients[i].original);
  }
  int64_t number = 0;
  for (const auto& [begin, count] :
       split_by_bytes(originals, impl_->bucket_bytes)) {
    RECORD_USER_SCOPE(c10::str("dataparallel::reduce bucket ", number++));
    std::vector<std::vector<at::Tensor>> by_replica(devices.size());
    for (int64_t k = begin; k < begin + count; ++k) {
      for (size_t replica = 0; replica < devices.size(); ++replica) {
        by_replica[replica].push_back(std::move(mine[k]->parts[replica]));
      }
    }
    auto sums = reduce_add(std::move(by_replica), devices,
                           FlatLayout({originals.begin() + begin,
                                       originals.begin() + begin + count}),
                           *impl_->communicator);
    for (int64_t k = 0; k < count; ++k) {
      mine[begin + k]->parts = {std::move(sums[k])};
    }
  }
  wait_for_comm(devices.front());
}

StashScope::StashScope(ReplicaSet& set) : set_(set) {
  at::autocast::clear_cache();
  set_.clear_stashes(/*open=*/true);
  set_.set_gradients(ReplicaSet::Gradients::kToStashes);
}

StashScope::~StashScope() {
  at::autocast::clear_cache();
  set_.clear_stashes(/*open=*/false);
  set_.set_gradients(ReplicaSet::Gradients::kToOriginals);
}

}  // namespace dataparallel::detail
