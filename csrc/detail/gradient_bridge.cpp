#include "detail/gradient_bridge.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <unordered_set>

#include "detail/reduce.h"
#include "detail/streams.h"
#include "detail/torch_compat.h"

// Note [The gradient bridge]
//
// A replica's parameter is no leaf: its gradient edge leads to one node a
// bucket, whose own edges lead to the gradient accumulators of the original
// parameters. The engine runs that node when the gradients of the bucket have
// come from all replicas that took part, and only from those; so unused
// parameters need no bookkeeping, `autograd::grad`, hooks and retained graphs
// work as ever, and with `create_graph` the additions are themselves recorded.
//
// The node is made once and kept: it saves no tensors, so that nothing is
// released by a backward, and any number of forwards may share it. It is made
// anew when the originals' edges change (a parameter replaced, frozen, of
// another dtype), because it holds their accumulators.
//
// Replica 0 is the module itself, whose parameters are leaves. If its gradients
// went straight to the accumulator, the order of addition would be the order of
// arrival: a parameter used twice in replica 0 would see (a1 + a2) + b or
// (a1 + b) + a2, by which device's thread is faster, and two runs would differ
// in the last bit. The leaves must stay leaves (users and saved tensors look at
// that), so the graph is changed instead: after replica 0's forward, its edges
// to the accumulators are led to the node (`redirect_edges`). An edge that is
// not found, of a tensor that forward hides from its result, still leads to
// the accumulator, and the sum is right all the same.
//
// Edges are replaced in place, which leaves the nodes' topological numbers one
// too low. The engine uses these only to skip nodes that cannot lead to a
// tensor asked for; behind the bridge there are accumulators alone, whose
// number is 0, so nothing is skipped that counts.
//
// The engine takes the ready node with the highest sequence number first.
// A bucket's node is older than the whole forward, so without
// kRunAsSoonAsReady it would wait until its thread has nothing else to do, and
// no reduction would overlap the computing. With replicas on several devices it
// works on the communication streams (see Note [Communication streams]), and
// the sums pass through a second node, Arrival, which makes the device's stream
// wait for them. That one has the lowest number: it runs when its thread has
// nothing else to launch, so that the wait does not stand before the rest of
// backward; and the accumulators behind it, the hooks there and whatever else
// feeds them (a penalty on the weights themselves) find the sums complete.

namespace dataparallel::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Edge;
using torch::autograd::Function;
using torch::autograd::variable_list;

variable_list detached(const std::vector<at::Tensor>& tensors) {
  variable_list result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.detach());
  }
  return result;
}

/// What the node of a bucket needs to add up its gradients.
struct Bucket : torch::CustomClassHolder {
  Bucket(int64_t number, std::vector<at::Device> devices, FlatLayout layout,
         std::shared_ptr<Communicator> communicator)
      : number(number),
        devices(std::move(devices)),
        streams(current_streams(this->devices)),
        layout(std::move(layout)),
        communicator(std::move(communicator)) {}
  int64_t number;
  std::vector<at::Device> devices;
  /// Those that forward runs on, and so backward; the engine makes only the
  /// first device's current for the node.
  std::vector<c10::Stream> streams;
  FlatLayout layout;
  std::shared_ptr<Communicator> communicator;
};

struct Bridge : Function<Bridge> {
  // `placeholders` is no at::TensorList, so autograd does not track it.
  static variable_list forward(AutogradContext* context,
                               at::TensorList /*originals*/,
                               const std::vector<at::Tensor>& placeholders,
                               const c10::intrusive_ptr<Bucket>& bucket) {
    context->set_materialize_grads(false);
    context->saved_data["bucket"] = c10::IValue::make_capsule(bucket);
    return detached(placeholders);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    const auto capsule = context->saved_data["bucket"].toCapsule();
    const auto& bucket = *static_cast<const Bucket*>(capsule.get());
    RECORD_USER_SCOPE(c10::str("dataparallel::reduce bucket ", bucket.number));
    const OnStreams on_streams(bucket.streams);
    std::vector<std::vector<at::Tensor>> by_replica;
    for (auto at = gradients.begin(); at != gradients.end();) {
      auto& of_replica = by_replica.emplace_back();
      for (size_t i = 0; i < bucket.layout.size(); ++i, ++at) {
        of_replica.push_back(std::move(*at));
      }
    }
    variable_list sums = reduce_add(std::move(by_replica), bucket.devices,
                                    bucket.layout, *bucket.communicator);
    if (torch::autograd::AnomalyMode::is_enabled()) {
      wait_for_comm(bucket.devices.front());  // the engine looks for NaN
    }
    sums.resize(sums.size() + 2);  // none for `placeholders` and `bucket`
    return sums;
  }
};

/// Stands between a bucket's node and the accumulators, and lets the current
/// stream wait for the sums.
struct Arrival : Function<Arrival> {
  static variable_list forward(AutogradContext* context,
                               at::TensorList originals) {
    context->set_materialize_grads(false);
    context->saved_data["device"] = originals.front().device();
    return detached(originals.vec());
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    wait_for_comm(context->saved_data["device"].toDevice());
    return gradients;
  }
};

struct Stash : Function<Stash> {
  static variable_list forward(AutogradContext* context, at::Tensor /*leaf*/,
                               const std::vector<at::Tensor>& placeholders,
                               const c10::intrusive_ptr<GradientStash>& stash) {
    context->set_materialize_grads(false);
    context->saved_data["stash"] = c10::IValue::make_capsule(stash);
    return detached(placeholders);
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    const auto stash = context->saved_data["stash"].toCapsule();
    static_cast<GradientStash*>(stash.get())->add(gradients);
    return variable_list(3);
  }
};

std::vector<Edge> edges_of(const variable_list& outputs) {
  std::vector<Edge> edges;
  for (const at::Tensor& output : outputs) {
    edges.push_back(torch::autograd::impl::gradient_edge(output));
  }
  edges.front().function->set_sequence_nr(kRunAsSoonAsReady);
  return edges;
}

variable_list arrivals(const std::vector<at::Tensor>& originals) {
  variable_list outputs = Arrival::apply(at::TensorList(originals));
  const Edge edge = torch::autograd::impl::gradient_edge(outputs.front());
  edge.function->set_sequence_nr(kRunWhenNothingElseIs);
  return outputs;
}

}  // namespace

std::vector<std::vector<Edge>> make_bridge(
    const std::vector<at::Tensor>& originals,
    const std::vector<std::vector<at::Tensor>>& placeholders,
    const std::shared_ptr<Communicator>& communicator, int64_t number) {
  std::vector<at::Tensor> flat;
  std::vector<at::Device> devices;
  for (const auto& of_replica : placeholders) {
    flat.insert(flat.end(), of_replica.begin(), of_replica.end());
    devices.push_back(of_replica.front().device());
  }
  const bool far = std::any_of(
      devices.begin(), devices.end(),
      [&](const at::Device& device) { return device != devices.front(); });
  const auto bucket = c10::make_intrusive<Bucket>(
      number, std::move(devices), FlatLayout(originals), communicator);
  at::AutoGradMode grad_mode(true);
  const variable_list next = far ? arrivals(originals) : originals;
  const std::vector<Edge> edges =
      edges_of(Bridge::apply(at::TensorList(next), flat, bucket));
  std::vector<std::vector<Edge>> result;
  for (size_t replica = 0; replica < placeholders.size(); ++replica) {
    const auto begin =
        edges.begin() + static_cast<int64_t>(replica * originals.size());
    result.emplace_back(begin, begin + static_cast<int64_t>(originals.size()));
  }
  return result;
}

std::vector<Redirected> redirect_edges(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs,
                                       const Redirections& redirections) {
  using torch::autograd::Node;
  std::unordered_set<Node*> seen;
  std::vector<Node*> ahead;
  std::vector<Redirected> replaced;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      ahead.push_back(node);
    }
  };
  for (const at::Tensor& input : inputs) {
    if (input.grad_fn()) {
      seen.insert(input.grad_fn().get());
    }
  }
  for (const at::Tensor& output : outputs) {
    visit(output.grad_fn().get());
  }
  while (!ahead.empty()) {
    Node* node = ahead.back();
    ahead.pop_back();
    // Reached from an earlier forward whose result was fed back.
    if (dynamic_cast<torch::autograd::CppNode<Bridge>*>(node) != nullptr) {
      continue;
    }
    for (Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) {
        continue;
      }
      const auto found = redirections.find(edge);
      if (found != redirections.end()) {
        replaced.push_back({edge, node->sequence_nr()});
        edge = found->second;
      } else {
        visit(edge.function.get());
      }
    }
  }
  return replaced;
}

void GradientStash::clear(bool open) {
  std::lock_guard lock(mutex_);
  open_ = open;
  std::fill(gradients_.begin(), gradients_.end(), at::Tensor());
  ready_.clear();
}

void GradientStash::add(const std::vector<at::Tensor>& gradients) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(open_,
              "forward_backward: a backward through a graph that a replica's "
              "forward left behind comes after the call, which has taken the "
              "gradients; make it a part of the loss, or use loss()");
  std::vector<at::Device> devices;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) {
      continue;
    }
    gradients_[i] = gradients_[i].defined() ? plus(gradients_[i], gradients[i])
                                            : gradients[i];
    const at::Device device = gradients[i].device();
    if (!device.is_cpu() &&
        std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  for (const at::Device& device : devices) {
    c10::Event event(device.type());
    event.record(
        c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
    ready_.emplace_back(device, std::move(event));
  }
}

std::vector<at::Tensor> GradientStash::take() {
  std::lock_guard lock(mutex_);
  for (const auto& [device, event] : ready_) {
    event.block(
        c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
  }
  ready_.clear();
  std::vector<at::Tensor> taken(gradients_.size());
  std::swap(taken, gradients_);
  return taken;
}

std::vector<Edge> make_stash_edges(
    const c10::intrusive_ptr<GradientStash>& stash,
    const std::vector<at::Tensor>& placeholders) {
  at::AutoGradMode grad_mode(true);
  // The node needs an input that wants a gradient; this one never gets any.
  const at::Tensor leaf = at::zeros({}).requires_grad_();
  return edges_of(Stash::apply(leaf, placeholders, stash));
}

}  // namespace dataparallel::detail
