#pragma once

#include <dataparallel/replicate.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "detail/counterparts.h"
#include "detail/gradient_bridge.h"

namespace dataparallel::detail {

/// The gradient edges of the replicas' parameters: to the originals, or into
/// one stash a replica. See Note [The gradient bridge].
///
/// `counterparts` must outlive it. Not thread-safe, save `redirect`.
class ReplicaEdges {
 public:
  using Gradients = ReplicaSet::Gradients;

  /// `communicator` is for all replicas' devices.
  ReplicaEdges(size_t replicas, int64_t bucket_bytes,
               std::shared_ptr<Communicator> communicator,
               const std::vector<Counterpart>& counterparts);

  /// Makes all copies leaves that need no gradient.
  void clear();
  /// Makes the nodes anew, for what needs a gradient now.
  void lay_out();
  /// A better order of the buckets has been learned since `lay_out`.
  bool order_changed() const { return order_changed_; }
  void set_gradients(Gradients where);
  /// See `ReplicaSet`. Learns the order in which gradients become ready.
  void redirect(const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& inputs);
  void clear_stashes(bool open);
  std::vector<ReplicaGradients> take_gradients();

 private:
  /// Of one counterpart: `[replica]`, both empty without `requires_grad`.
  struct Edges {
    std::vector<torch::autograd::Edge> to_original;
    std::vector<torch::autograd::Edge> to_stash;
  };

  bool stands_alone(size_t i) const;
  std::vector<std::vector<size_t>> buckets() const;
  void lay_out_bucket(const std::vector<size_t>& bucket, int64_t number);
  void lay_out_stash(size_t replica);
  at::Tensor placeholder(size_t i, size_t replica) const;
  void put();
  void learn_order(const std::vector<Redirected>& found);

  size_t replicas_;
  int64_t bucket_bytes_;
  std::shared_ptr<Communicator> communicator_;
  const std::vector<Counterpart>& counterparts_;
  std::vector<Edges> edges_;
  Gradients gradients_ = Gradients::kToOriginals;
  /// What needs a gradient, in the order of the stashes' slots.
  std::vector<size_t> trained_;
  std::vector<c10::intrusive_ptr<GradientStash>> stashes_;
  /// By where gradients go: an original's own edge, and replica 0's instead.
  std::map<Gradients, Redirections> redirections_;
  std::mutex redirecting_;
  /// All counterparts, in the order in which backward has their gradients
  /// ready. Until the first forward has shown it: the last first.
  std::vector<size_t> ready_order_;
  bool order_learned_ = false;
  bool order_changed_ = false;
  /// Not used by replica 0's first forward.
  std::unordered_set<size_t> unused_;
  /// By the originals' own edges.
  std::unordered_map<torch::autograd::Edge, size_t> counterpart_of_;
};

}  // namespace dataparallel::detail
