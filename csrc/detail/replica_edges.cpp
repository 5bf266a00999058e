#include "detail/replica_edges.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "detail/flat_layout.h"
#include "detail/snapshot.h"

namespace dataparallel::detail {
namespace {

using torch::autograd::Edge;

/// Of the gradients that are ready first: the sooner the links have work.
constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;

void set_edge(const at::Tensor& tensor, const Edge& edge) {
  auto* meta = torch::autograd::impl::materialize_autograd_meta(tensor);
  meta->requires_grad_ = false;
  meta->grad_fn_ = edge.function;
  meta->output_nr_ = edge.input_nr;
}

void clear_edge(const at::Tensor& tensor) {
  if (torch::autograd::impl::get_view_autograd_meta(tensor) != nullptr) {
    // Made as a view of something (`randn({12}).view({4, 3})`): autograd would
    // make its edge anew, to that, whenever its version moves.
    tensor.unsafeGetTensorImpl()->set_autograd_meta(
        std::make_unique<torch::autograd::AutogradMeta>());
  }
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    meta->requires_grad_ = false;
    meta->grad_fn_ = nullptr;
    meta->output_nr_ = 0;
  }
}

}  // namespace

ReplicaEdges::ReplicaEdges(size_t replicas, int64_t bucket_bytes,
                           std::shared_ptr<Communicator> communicator,
                           const std::vector<Counterpart>& counterparts)
    : replicas_(replicas),
      bucket_bytes_(bucket_bytes),
      communicator_(std::move(communicator)),
      counterparts_(counterparts),
      edges_(counterparts.size()) {
  for (size_t i = counterparts_.size(); i-- > 0;) {
    ready_order_.push_back(i);
  }
}

void ReplicaEdges::clear() {
  for (const Counterpart& one : counterparts_) {
    for (const auto& of_replica : one.copies) {
      for (const at::Tensor& copy : of_replica) {
        clear_edge(copy);
      }
    }
  }
}

void ReplicaEdges::lay_out() {
  trained_.clear();
  for (const size_t i : ready_order_) {
    edges_[i] = {};
    if (counterparts_[i].original.requires_grad() && replicas_ > 1) {
      trained_.push_back(i);
    }
  }
  order_changed_ = false;
  counterpart_of_.clear();
  redirections_.clear();
  stashes_.clear();
  if (trained_.empty()) {
    return;
  }
  int64_t number = 0;
  for (const std::vector<size_t>& bucket : buckets()) {
    lay_out_bucket(bucket, number++);
  }
  for (size_t replica = 0; replica < replicas_; ++replica) {
    lay_out_stash(replica);
  }
  for (const size_t i : trained_) {
    const Edge own =
        torch::autograd::impl::gradient_edge(counterparts_[i].original);
    counterpart_of_[own] = i;
    redirections_[Gradients::kToOriginals][own] = edges_[i].to_original[0];
    redirections_[Gradients::kToStashes][own] = edges_[i].to_stash[0];
  }
  put();
}

// The accumulators behind a bucket's node all run, those of unused parameters
// with an undefined gradient, and so do hooks on these; one device calls none.
// So a parameter has a node of its own if it has hooks, or if the first forward
// did not use it (hooks may come between a forward and its backward). And so
// has a buffer that is computed from others: the nodes that made it would run
// too, and give back what they have saved for their own backward.
bool ReplicaEdges::stands_alone(size_t i) const {
  const at::Tensor& original = counterparts_[i].original;
  return unused_.count(i) > 0 || has_hooks(original) || !original.is_leaf();
}

std::vector<std::vector<size_t>> ReplicaEdges::buckets() const {
  std::vector<std::vector<size_t>> result;
  std::vector<size_t> plain;
  std::vector<at::Tensor> originals;
  for (const size_t i : trained_) {
    if (stands_alone(i)) {
      result.push_back({i});
    } else {
      plain.push_back(i);
      originals.push_back(counterparts_[i].original);
    }
  }
  for (const auto& [first, count] :
       split_by_bytes(originals, bucket_bytes_, kFirstBucketBytes)) {
    result.emplace_back(plain.begin() + first, plain.begin() + first + count);
  }
  return result;
}

at::Tensor ReplicaEdges::placeholder(size_t i, size_t replica) const {
  return replica == 0 ? counterparts_[i].original.detach()
                      : counterparts_[i].copies[replica].front().detach();
}

void ReplicaEdges::lay_out_bucket(const std::vector<size_t>& bucket,
                                  int64_t number) {
  std::vector<std::vector<at::Tensor>> placeholders(replicas_);
  std::vector<at::Tensor> originals;
  for (const size_t i : bucket) {
    originals.push_back(counterparts_[i].original);
    for (size_t replica = 0; replica < replicas_; ++replica) {
      placeholders[replica].push_back(placeholder(i, replica));
    }
  }
  const auto edges =
      make_bridge(originals, placeholders, communicator_, number);
  for (size_t k = 0; k < bucket.size(); ++k) {
    for (const auto& of_replica : edges) {
      edges_[bucket[k]].to_original.push_back(of_replica[k]);
    }
  }
}

void ReplicaEdges::lay_out_stash(size_t replica) {
  std::vector<at::Tensor> placeholders;
  for (const size_t i : trained_) {
    placeholders.push_back(placeholder(i, replica));
  }
  stashes_.push_back(c10::make_intrusive<GradientStash>(trained_.size()));
  const auto edges = make_stash_edges(stashes_.back(), placeholders);
  for (size_t k = 0; k < trained_.size(); ++k) {
    edges_[trained_[k]].to_stash.push_back(edges[k]);
  }
}

void ReplicaEdges::put() {
  for (const size_t i : trained_) {
    const auto& edges = gradients_ == Gradients::kToOriginals
                            ? edges_[i].to_original
                            : edges_[i].to_stash;
    for (size_t replica = 1; replica < replicas_; ++replica) {
      for (const at::Tensor& copy : counterparts_[i].copies[replica]) {
        set_edge(copy, edges[replica]);
      }
    }
  }
}

void ReplicaEdges::set_gradients(Gradients where) {
  if (gradients_ != where) {
    gradients_ = where;
    put();
  }
}

void ReplicaEdges::redirect(const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs) {
  std::lock_guard lock(redirecting_);
  learn_order(redirect_edges(outputs, inputs, redirections_[gradients_]));
}

// A parameter's gradient is whole when backward has done the last of the nodes
// that use it, the one with the lowest number.
void ReplicaEdges::learn_order(const std::vector<Redirected>& found) {
  if (order_learned_ || found.empty()) {
    return;
  }
  std::unordered_map<size_t, uint64_t> last_use;
  for (const auto& [edge, sequence_nr] : found) {
    const auto [use, fresh] =
        last_use.emplace(counterpart_of_.at(edge), sequence_nr);
    use->second = std::min(use->second, sequence_nr);
  }
  const auto number = [&](size_t i) {
    const auto use = last_use.find(i);
    return use == last_use.end() ? 0 : use->second + 1;
  };
  std::vector<size_t> order = ready_order_;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return number(a) > number(b); });
  for (const size_t i : trained_) {
    if (last_use.count(i) == 0) {
      unused_.insert(i);
    }
  }
  order_learned_ = true;
  order_changed_ = order != ready_order_ || !unused_.empty();
  ready_order_ = std::move(order);
}

void ReplicaEdges::clear_stashes(bool open) {
  for (const auto& stash : stashes_) {
    stash->clear(open);
  }
}

std::vector<ReplicaGradients> ReplicaEdges::take_gradients() {
  std::vector<ReplicaGradients> result;
  for (const size_t i : trained_) {
    result.push_back({counterparts_[i].original, {}});
  }
  for (const auto& stash : stashes_) {
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
