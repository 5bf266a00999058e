#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dataparallel/replicate.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "detail/flat_bucket.h"
#include "detail/gradient_bridge.h"
#include "detail/links.h"
#include "detail/torch_compat.h"

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
namespace {

/// Of the gradients that are ready first: the sooner the links have work.
constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;

using torch::autograd::Edge;
using torch::autograd::impl::get_autograd_meta;
using torch::autograd::impl::materialize_autograd_meta;

struct Snapshot {
  const at::TensorImpl* impl;
  const void* data;
  at::DimVector sizes;
  at::DimVector strides;
  at::ScalarType dtype;
  at::Device device;
  bool requires_grad;
  bool hooked;
  const torch::autograd::Node* grad_fn;
};

bool is_strided(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized();
}

const void* data_of(const at::Tensor& tensor) {
  return is_strided(tensor) ? tensor.const_data_ptr() : nullptr;
}

const torch::autograd::Node* grad_fn_of(const at::Tensor& tensor) {
  const auto* meta = get_autograd_meta(tensor);
  return meta == nullptr ? nullptr : meta->grad_fn_.get();
}

bool has_hooks(const at::Tensor& tensor) {
  const auto* meta = get_autograd_meta(tensor);
  return meta != nullptr && !meta->hooks_.empty();
}

Snapshot snapshot(const at::Tensor& tensor) {
  const bool strided = is_strided(tensor);
  return {tensor.unsafeGetTensorImpl(),
          data_of(tensor),
          at::DimVector(tensor.sizes()),
          strided ? at::DimVector(tensor.strides()) : at::DimVector(),
          tensor.scalar_type(),
          tensor.device(),
          tensor.requires_grad(),
          has_hooks(tensor),
          grad_fn_of(tensor)};
}

bool same(const Snapshot& seen, const at::Tensor& tensor) {
  return seen.data == data_of(tensor) &&
         seen.requires_grad == tensor.requires_grad() &&
         seen.dtype == tensor.scalar_type() && seen.device == tensor.device() &&
         seen.hooked == has_hooks(tensor) &&
         seen.grad_fn == grad_fn_of(tensor) &&
         tensor.sizes() == at::IntArrayRef(seen.sizes) &&
         (!is_strided(tensor) ||
          tensor.strides() == at::IntArrayRef(seen.strides));
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference()
             ? 0
             : static_cast<int64_t>(tensor.unsafeGetTensorImpl()
                                        ->version_counter()
                                        .current_version());
}

/// One tensor of the original, and what stands for it in the replicas.
struct Entry {
  std::string name;
  bool parameter;
  at::Tensor original;
  /// `[replica]`, 0 empty. Names that share a tensor: one each.
  std::vector<std::vector<at::Tensor>> copies;
  Snapshot seen;
  int64_t version = 0;
  /// `[replica]`: what the copies point to; 0 and shared ones undefined.
  std::vector<at::Tensor> homes;
  /// `[replica]`, both empty without `requires_grad`.
  std::vector<Edge> to_original;
  std::vector<Edge> to_stash;
};

void set_edge(const at::Tensor& tensor, const Edge& edge) {
  auto* meta = materialize_autograd_meta(tensor);
  meta->requires_grad_ = false;
  meta->grad_fn_ = edge.function;
  meta->output_nr_ = edge.input_nr;
}

void clear_edge(const at::Tensor& tensor) {
  if (auto* meta = get_autograd_meta(tensor)) {
    meta->requires_grad_ = false;
    meta->grad_fn_ = nullptr;
    meta->output_nr_ = 0;
  }
}

std::unordered_map<const at::TensorImpl*, int64_t> names_by_tensor(
    const std::vector<NamedTensor>& tensors) {
  std::unordered_map<const at::TensorImpl*, int64_t> names;
  for (const NamedTensor& item : tensors) {
    ++names[item.tensor.unsafeGetTensorImpl()];
  }
  return names;
}

std::string shape_of(const at::Tensor& tensor) {
  return c10::str(tensor.sizes(), " ", tensor.scalar_type());
}

}  // namespace

struct ReplicaSet::Impl {
  Impl(std::string name, std::vector<at::Device> on, int64_t bytes,
       std::vector<std::unique_ptr<ModuleAccess>> replicas)
      : function(std::move(name)),
        devices(std::move(on)),
        bucket_bytes(bytes),
        modules(std::move(replicas)) {}

  void collect(bool made_by_user);
  void collect_kind(bool parameters, bool made_by_user,
                    std::unordered_set<const at::TensorImpl*>& taken);
  [[noreturn]] void refuse_assigned(const char* kind,
                                    const std::string& name) const;
  void check_devices() const;
  void lay_out();
  void lay_out_values();
  void lay_out_edges();
  void place(Entry& entry, size_t replica, const at::Tensor& home);
  void place_all();
  bool follow_originals();
  bool parameters_changed() const;
  void copy_values(bool parameters = true);
  void put_edges();
  void learn_order(const std::vector<Redirected>& found);
  std::vector<c10::Stream> current_streams() const;
  bool shares(const Entry& entry, size_t replica) const;

  std::string function;
  std::vector<at::Device> devices;
  int64_t bucket_bytes;
  std::vector<std::unique_ptr<ModuleAccess>> modules;
  std::vector<Entry> entries;
  std::vector<FlatBucket> buckets;  // of parameters, then of buffers
  size_t parameter_buckets = 0;
  /// Copied one by one: buffers on the original's own device, and what has no
  /// strides.
  std::vector<std::pair<size_t, size_t>> singly;  // entry, replica
  std::vector<c10::intrusive_ptr<GradientStash>> stashes;
  std::vector<size_t> trained;  // entries in the order of their stash slots
  Gradients gradients = Gradients::kToOriginals;
  /// The current streams when the autograd nodes were made, which they keep.
  std::vector<c10::Stream> streams;
  /// By where gradients go: an original's own edge, and replica 0's instead.
  std::map<Gradients, Redirections> redirections;
  std::mutex redirecting;
  /// All entries, in the order in which backward has their gradients ready.
  /// Until the first forward has shown it: the last first.
  std::vector<size_t> ready_order;
  bool order_learned = false;
  bool order_changed = false;  // the edges are still laid out in the old one
  std::unordered_map<Edge, size_t> entry_of;  // by the originals' own edges
};

void ReplicaSet::Impl::collect(bool made_by_user) {
  if (const auto name = modules[0]->unregistered(); name && !made_by_user) {
    refuse_assigned("parameter", *name);
  }
  entries.clear();
  std::unordered_set<const at::TensorImpl*> taken;
  collect_kind(/*parameters=*/true, made_by_user, taken);
  collect_kind(/*parameters=*/false, made_by_user, taken);
  for (size_t i = entries.size(); i-- > 0;) {
    ready_order.push_back(i);
  }
}

// A member that was assigned after registration: forward uses a tensor that the
// registry does not know, which a clone cannot follow. Of torch's own layers
// `unregistered` tells; of others a registered tensor has fewer holders then
// than its fresh clone. Not seen where somebody else holds it too.
void ReplicaSet::Impl::refuse_assigned(const char* kind,
                                       const std::string& name) const {
  TORCH_CHECK_TYPE(
      false, function, ": ", kind, " ", name, " of ", modules[0]->type_name(),
      " is registered, but its member holds another tensor (a tie made by "
      "assignment?), which a clone loses; tie it in reset(), or pass a factory "
      "that makes a replica for a device");
}

// Compares each replica with the original; see "checked" in `Replicas`.
// `taken`: the tensors of the original and of the replicas before.
void ReplicaSet::Impl::collect_kind(
    bool parameters, bool made_by_user,
    std::unordered_set<const at::TensorImpl*>& taken) {
  const char* kind = parameters ? "parameter" : "buffer";
  const auto tensors_of = [&](size_t replica) {
    return parameters ? modules[replica]->parameters()
                      : modules[replica]->buffers();
  };
  const auto originals = tensors_of(0);
  std::unordered_map<const at::TensorImpl*, size_t> known;
  for (size_t i = 0; i < entries.size(); ++i) {
    known.emplace(entries[i].original.unsafeGetTensorImpl(), i);
  }
  std::vector<size_t> entry_of;
  for (const NamedTensor& item : originals) {
    const auto [found, fresh] =
        known.emplace(item.tensor.unsafeGetTensorImpl(), entries.size());
    if (fresh) {
      entries.push_back({item.name,
                         parameters,
                         item.tensor,
                         std::vector<std::vector<at::Tensor>>(devices.size()),
                         snapshot(item.tensor),
                         version_of(item.tensor),
                         {},
                         {},
                         {}});
    }
    entry_of.push_back(found->second);
    taken.insert(item.tensor.unsafeGetTensorImpl());
  }
  const auto names_of = names_by_tensor(originals);
  const char* ways_out = made_by_user
                             ? "; the factory must build the same module"
                             : "; register everything in reset(), or pass a "
                               "factory that makes a replica for a device";
  for (size_t replica = 1; replica < devices.size(); ++replica) {
    const auto copies = tensors_of(replica);
    const auto names_of_copy = names_by_tensor(copies);
    std::unordered_map<std::string, at::Tensor> by_name;
    for (const NamedTensor& item : copies) {
      by_name.emplace(item.name, item.tensor);
    }
    std::unordered_map<const at::TensorImpl*, size_t> stands_for;
    for (size_t i = 0; i < originals.size(); ++i) {
      const NamedTensor& item = originals[i];
      const auto found = by_name.find(item.name);
      TORCH_CHECK_TYPE(found != by_name.end(), function, ": ", kind, " ",
                       item.name, " of ", modules[0]->type_name(),
                       " is missing in its replica ", replica, ways_out);
      const at::Tensor& copy = found->second;
      TORCH_CHECK_TYPE(copy.sizes() == item.tensor.sizes(), function, ": ",
                       kind, " ", item.name, " of ", modules[0]->type_name(),
                       " is ", shape_of(item.tensor), ", but ", shape_of(copy),
                       " in its replica ", replica, ways_out);
      TORCH_CHECK_TYPE(taken.count(copy.unsafeGetTensorImpl()) == 0, function,
                       ": ", kind, " ", item.name, " of ",
                       modules[0]->type_name(),
                       " is the same tensor in its replica ", replica,
                       " and in one before, expected one each", ways_out);
      const auto [tie, fresh] =
          stands_for.emplace(copy.unsafeGetTensorImpl(), entry_of[i]);
      TORCH_CHECK_TYPE(tie->second == entry_of[i], function, ": ", kind, " ",
                       item.name, " of ", modules[0]->type_name(),
                       " shares a tensor with ", entries[tie->second].name,
                       " in its replica ", replica, ", but not in the original",
                       ways_out);
      auto& handles = entries[entry_of[i]].copies[replica];
      // Not holders in this sense: the lists here, one a name in `originals`,
      // two in `copies` and `by_name`; the entry; and the original's gradient
      // accumulator.
      if (!made_by_user && fresh) {
        const auto names = names_of.at(item.tensor.unsafeGetTensorImpl());
        const bool accumulator =
            torch::autograd::impl::try_get_grad_accumulator(item.tensor) !=
            nullptr;
        const auto holders = static_cast<int64_t>(item.tensor.use_count()) -
                             names - 1 - (accumulator ? 1 : 0);
        const auto of_copy = static_cast<int64_t>(copy.use_count()) -
                             2 * names_of_copy.at(copy.unsafeGetTensorImpl());
        if (holders < of_copy) {
          refuse_assigned(kind, item.name);
        }
      }
      handles.push_back(copy);
      by_name.erase(found);
    }
    TORCH_CHECK_TYPE(by_name.empty(), function, ": ", kind, " ",
                     by_name.begin()->first, " is in replica ", replica, " of ",
                     modules[0]->type_name(), ", but not in the original",
                     ways_out);
    for (const NamedTensor& item : copies) {
      taken.insert(item.tensor.unsafeGetTensorImpl());
    }
  }
}

bool ReplicaSet::Impl::shares(const Entry& entry, size_t replica) const {
  return devices[replica] == devices[0] &&
         (entry.parameter || entry.seen.requires_grad) &&
         is_strided(entry.original);
}

void ReplicaSet::Impl::check_devices() const {
  for (const Entry& entry : entries) {
    TORCH_CHECK_VALUE(entry.original.device() == devices[0], function, ": ",
                      entry.parameter ? "parameter " : "buffer ", entry.name,
                      " is on ", entry.original.device(), ", expected ",
                      devices[0], " (the first of devices)");
  }
}

void ReplicaSet::Impl::lay_out() {
  check_devices();
  c10::InferenceMode normal_mode(false);
  at::NoGradGuard no_grad;
  for (Entry& entry : entries) {
    entry.seen = snapshot(entry.original);
    entry.homes.assign(devices.size(), at::Tensor());
  }
  streams = current_streams();
  lay_out_values();
  place_all();
  lay_out_edges();
  put_edges();
}

void ReplicaSet::Impl::lay_out_values() {
  buckets.clear();
  parameter_buckets = 0;
  singly.clear();
  std::vector<size_t> remote;
  for (size_t replica = 1; replica < devices.size(); ++replica) {
    if (devices[replica] != devices[0]) {
      remote.push_back(replica);
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      Entry& entry = entries[i];
      if (devices[replica] == devices[0] && !shares(entry, replica) &&
          is_strided(entry.original)) {
        entry.homes[replica] = at::empty_like(entry.original);
      }
      if (!is_strided(entry.original) ||
          (devices[replica] == devices[0] && !shares(entry, replica))) {
        singly.emplace_back(i, replica);
      }
    }
  }
  if (remote.empty()) {
    return;
  }
  std::vector<at::Device> targets;
  for (const size_t replica : remote) {
    targets.push_back(devices[replica]);
  }
  // Backwards, since the last parameters have their gradients first.
  for (const bool parameters : {true, false}) {
    std::vector<at::Tensor> originals;
    std::vector<size_t> indices;
    for (size_t i = entries.size(); i-- > 0;) {
      if (entries[i].parameter == parameters &&
          is_strided(entries[i].original)) {
        originals.push_back(entries[i].original);
        indices.push_back(i);
      }
    }
    for (auto& [first, count] :
         split_keeping_storages(originals, bucket_bytes)) {
      const std::vector<at::Tensor> part(originals.begin() + first,
                                         originals.begin() + first + count);
      FlatBucket bucket(part, targets, /*keep_storages=*/true);
      for (int64_t i = 0; i < count; ++i) {
        for (size_t t = 0; t < targets.size(); ++t) {
          entries[indices[first + i]].homes[remote[t]] = bucket.slice(t, i);
        }
      }
      buckets.push_back(std::move(bucket));
    }
    if (parameters) {
      parameter_buckets = buckets.size();
    }
  }
  // One for all: a second copy of the whole model on the first device would be
  // for nothing.
  int64_t pack_bytes = 0;
  for (const FlatBucket& bucket : buckets) {
    pack_bytes = std::max(pack_bytes, bucket.bytes());
  }
  const at::Tensor pack = at::empty(
      {pack_bytes}, at::TensorOptions().dtype(at::kByte).device(devices[0]));
  for (FlatBucket& bucket : buckets) {
    bucket.set_pack(pack);
  }
}

void ReplicaSet::Impl::place(Entry& entry, size_t replica,
                             const at::Tensor& home) {
  for (const at::Tensor& copy : entry.copies[replica]) {
    clear_edge(copy);
    const bool was_inference = copy.is_inference();
    copy.set_data(home);
    if (was_inference && !copy.is_inference()) {
      // `set_data` makes it a normal tensor, but for the version counter.
      copy.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(0));
    }
    if (shares(entry, replica) && !entry.original.is_inference()) {
      copy.unsafeGetTensorImpl()->set_version_counter(
          entry.original.unsafeGetTensorImpl()->version_counter());
    }
  }
}

void ReplicaSet::Impl::place_all() {
  for (Entry& entry : entries) {
    for (size_t replica = 1; replica < devices.size(); ++replica) {
      if (is_strided(entry.original)) {
        place(entry, replica,
              shares(entry, replica) ? entry.original.detach()
                                     : entry.homes[replica]);
      }
    }
  }
}

void ReplicaSet::Impl::lay_out_edges() {
  std::vector<size_t> wanting;
  for (const size_t i : ready_order) {
    entries[i].to_original.clear();
    entries[i].to_stash.clear();
    if (entries[i].seen.requires_grad) {
      wanting.push_back(i);
    }
  }
  order_changed = false;
  entry_of.clear();
  redirections.clear();
  stashes.clear();
  trained.clear();
  if (wanting.empty() || devices.size() == 1) {
    return;
  }
  trained = wanting;
  const auto placeholder = [&](const Entry& entry, size_t replica) {
    return replica == 0 ? entry.original.detach()
                        : entry.copies[replica].front().detach();
  };
  // The accumulators behind a bucket's node all run, those of unused
  // parameters with an undefined gradient, and so do hooks on these; one device
  // calls none. So a parameter with hooks has a node of its own.
  std::vector<std::vector<size_t>> runs;
  std::vector<size_t> plain;
  std::vector<at::Tensor> originals;
  for (const size_t i : wanting) {
    if (entries[i].seen.hooked) {
      runs.push_back({i});
    } else {
      plain.push_back(i);
      originals.push_back(entries[i].original);
    }
  }
  for (const auto& [first, count] :
       split_by_bytes(originals, bucket_bytes, kFirstBucketBytes)) {
    runs.emplace_back(plain.begin() + first, plain.begin() + first + count);
  }
  for (size_t bucket = 0; bucket < runs.size(); ++bucket) {
    const std::vector<size_t>& run = runs[bucket];
    std::vector<std::vector<at::Tensor>> placeholders(devices.size());
    std::vector<at::Tensor> of_bucket;
    for (const size_t i : run) {
      of_bucket.push_back(entries[i].original);
      for (size_t replica = 0; replica < devices.size(); ++replica) {
        placeholders[replica].push_back(placeholder(entries[i], replica));
      }
    }
    const auto edges =
        make_bridge(of_bucket, placeholders, static_cast<int64_t>(bucket));
    for (size_t k = 0; k < run.size(); ++k) {
      for (const auto& of_replica : edges) {
        entries[run[k]].to_original.push_back(of_replica[k]);
      }
    }
  }
  for (size_t replica = 0; replica < devices.size(); ++replica) {
    std::vector<at::Tensor> placeholders;
    for (const size_t i : wanting) {
      placeholders.push_back(placeholder(entries[i], replica));
    }
    stashes.push_back(c10::make_intrusive<GradientStash>(wanting.size()));
    const auto edges = make_stash_edges(stashes.back(), placeholders);
    for (size_t i = 0; i < wanting.size(); ++i) {
      entries[wanting[i]].to_stash.push_back(edges[i]);
    }
  }
  for (const size_t i : wanting) {
    const Edge own = torch::autograd::impl::gradient_edge(entries[i].original);
    entry_of[own] = i;
    redirections[Gradients::kToOriginals][own] = entries[i].to_original[0];
    redirections[Gradients::kToStashes][own] = entries[i].to_stash[0];
  }
}

// A parameter's gradient is whole when backward has done the first of the nodes
// that use it, the one with the lowest number.
void ReplicaSet::Impl::learn_order(const std::vector<Redirected>& found) {
  if (order_learned || found.empty()) {
    return;
  }
  std::unordered_map<size_t, uint64_t> last_use;
  for (const auto& [edge, sequence_nr] : found) {
    const auto [use, fresh] = last_use.emplace(entry_of.at(edge), sequence_nr);
    use->second = std::min(use->second, sequence_nr);
  }
  const auto number = [&](size_t i) {
    const auto use = last_use.find(i);
    return use == last_use.end() ? 0 : use->second + 1;
  };
  std::vector<size_t> order = ready_order;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return number(a) > number(b); });
  order_learned = true;
  order_changed = order != ready_order;
  ready_order = std::move(order);
}

void ReplicaSet::Impl::put_edges() {
  for (const size_t i : trained) {
    Entry& entry = entries[i];
    const auto& edges = gradients == Gradients::kToOriginals ? entry.to_original
                                                             : entry.to_stash;
    for (size_t replica = 1; replica < devices.size(); ++replica) {
      for (const at::Tensor& copy : entry.copies[replica]) {
        set_edge(copy, edges[replica]);
      }
    }
  }
}

std::vector<c10::Stream> ReplicaSet::Impl::current_streams() const {
  std::vector<c10::Stream> current;
  for (const at::Device& device : devices) {
    if (!device.is_cpu()) {
      current.push_back(
          c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
    }
  }
  return current;
}

// False if something must be laid out anew.
bool ReplicaSet::Impl::follow_originals() {
  if (streams != current_streams()) {
    return false;
  }
  for (Entry& entry : entries) {
    if (!same(entry.seen, entry.original)) {
      return false;
    }
    const int64_t version = version_of(entry.original);
    const bool changed = version != entry.version;
    entry.version = version;
    for (size_t replica = 1; replica < devices.size(); ++replica) {
      const bool shared = shares(entry, replica);
      const void* expected =
          shared ? entry.seen.data
                 : data_of(entry.homes[replica].defined() ? entry.homes[replica]
                                                          : entry.original);
      for (const at::Tensor& copy : entry.copies[replica]) {
        if (is_strided(entry.original) &&
            (data_of(copy) != expected ||
             copy.sizes() != entry.original.sizes() ||
             copy.scalar_type() != entry.seen.dtype)) {
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

bool ReplicaSet::Impl::parameters_changed() const {
  return std::any_of(entries.begin(), entries.end(), [](const Entry& entry) {
    return entry.parameter && version_of(entry.original) != entry.version;
  });
}

void ReplicaSet::Impl::copy_values(bool parameters) {
  at::NoGradGuard no_grad;
  for (size_t i = parameters ? 0 : parameter_buckets; i < buckets.size(); ++i) {
    buckets[i].copy();
  }
  for (const auto& [i, replica] : singly) {
    Entry& entry = entries[i];
    if (entry.parameter && !parameters) {
      continue;
    }
    if (!is_strided(entry.original)) {
      c10::InferenceMode normal_mode(false);
      at::NoGradGuard still_no_grad;
      for (const at::Tensor& copy : entry.copies[replica]) {
        const at::Tensor original = entry.original.detach();
        copy.set_data(devices[replica] == devices[0]
                          ? original.clone()
                          : moved(original, devices[replica]));
      }
    } else if (entry.original.is_cpu() &&
               entry.original.is_non_overlapping_and_dense() &&
               entry.homes[replica].strides() == entry.original.strides()) {
      if (entry.original.numel() > 0) {
        std::memcpy(entry.homes[replica].mutable_data_ptr(),
                    entry.original.const_data_ptr(), entry.original.nbytes());
      }
    } else {
      entry.homes[replica].copy_(entry.original);
    }
  }
}

ReplicaSet::ReplicaSet(std::string function, std::vector<at::Device> devices,
                       int64_t bucket_bytes,
                       std::vector<std::unique_ptr<ModuleAccess>> modules,
                       bool made_by_user)
    : impl_(std::make_unique<Impl>(std::move(function), std::move(devices),
                                   bucket_bytes, std::move(modules))) {
  check_links(impl_->devices);
  impl_->collect(made_by_user);
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
  if (!impl_->follow_originals()) {
    impl_->lay_out();
    impl_->copy_values();
    impl_->follow_originals();  // the versions
  } else if (impl_->order_changed) {
    c10::InferenceMode normal_mode(false);
    at::NoGradGuard no_grad;
    impl_->lay_out_edges();
    impl_->put_edges();
  }
}

void ReplicaSet::refresh() {
  refresh_edges();
  impl_->copy_values();
}

void ReplicaSet::refresh_buffers() {
  const bool changed = impl_->parameters_changed();
  refresh_edges();
  impl_->copy_values(/*parameters=*/changed);
}

void ReplicaSet::set_gradients(Gradients where) {
  if (impl_->gradients != where) {
    impl_->gradients = where;
    impl_->put_edges();
  }
}

void ReplicaSet::redirect(const std::vector<at::Tensor>& outputs,
                          const std::vector<at::Tensor>& inputs) {
  std::lock_guard lock(impl_->redirecting);
  impl_->learn_order(
      redirect_edges(outputs, inputs, impl_->redirections[impl_->gradients]));
}

void ReplicaSet::check_devices() const {
  impl_->check_devices();
}

void ReplicaSet::check_unwritten() const {
  for (const Entry& entry : impl_->entries) {
    if (version_of(entry.original) == entry.version) {
      continue;
    }
    for (size_t replica = 1; replica < impl_->devices.size(); ++replica) {
      TORCH_CHECK(!impl_->shares(entry, replica), impl_->function, ": ",
                  entry.name,
                  " was written while forward ran, by forward or by another "
                  "thread; it is a parameter, which replicas on ",
                  impl_->devices[replica],
                  " share, so that they could meet half-written values; what "
                  "forward writes to must be a buffer");
    }
  }
}

void ReplicaSet::clear_stashes() {
  for (const auto& stash : impl_->stashes) {
    stash->clear();
  }
}

StashScope::StashScope(ReplicaSet& set) : set_(set) {
  at::autocast::clear_cache();
  set_.clear_stashes();
  set_.set_gradients(ReplicaSet::Gradients::kToStashes);
}

StashScope::~StashScope() {
  at::autocast::clear_cache();
  set_.clear_stashes();
  set_.set_gradients(ReplicaSet::Gradients::kToOriginals);
}

std::vector<ReplicaGradients> ReplicaSet::take_gradients() {
  std::vector<ReplicaGradients> result;
  for (const size_t entry : impl_->trained) {
    result.push_back({impl_->entries[entry].original, {}});
  }
  for (const auto& stash : impl_->stashes) {
    std::vector<at::Tensor> of_replica = stash->take();
    for (size_t k = 0; k < result.size(); ++k) {
      result[k].parts.push_back(std::move(of_replica[k]));
    }
  }
  std::erase_if(result, [](const ReplicaGradients& gradients) {
    return std::none_of(gradients.parts.begin(), gradients.parts.end(),
                        [](const at::Tensor& part) { return part.defined(); });
  });
  return result;
}

}  // namespace dataparallel::detail
