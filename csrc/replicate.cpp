#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <dataparallel/replicate.h>

#include "detail/counterparts.h"
#include "detail/links.h"
#include "detail/replica_edges.h"
#include "detail/replica_values.h"

namespace dataparallel::detail {

struct ReplicaSet::Impl {
  Impl(const std::string& function, std::vector<at::Device> on,
       int64_t bucket_bytes, std::vector<std::unique_ptr<ModuleAccess>> all,
       bool made_by_user)
      : devices(std::move(on)),
        modules(std::move(all)),
        counterparts(match_replicas(function, modules, made_by_user)),
        values(function, devices, bucket_bytes, counterparts),
        edges(devices.size(), bucket_bytes, counterparts) {}

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
  ReplicaValues values;
  ReplicaEdges edges;
};

ReplicaSet::ReplicaSet(const std::string& function,
                       std::vector<at::Device> devices, int64_t bucket_bytes,
                       std::vector<std::unique_ptr<ModuleAccess>> modules,
                       bool made_by_user) {
  check_links(devices);
  impl_ = std::make_unique<Impl>(function, std::move(devices), bucket_bytes,
                                 std::move(modules), made_by_user);
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
