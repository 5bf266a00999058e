#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "detail/communicator.h"

namespace dataparallel::detail {

/// One autograd node between the replicas' tensors and the originals: its input
/// `replica * originals.size() + i` is the gradient of original i in that
/// replica; it adds them up in replica order and passes the sum on to original
/// i's own gradient edge.
///
/// `placeholders[replica][i]` has the shape, dtype and device of original i in
/// that replica. `number` is what profilers show. Returns the edges,
/// `[replica][i]`. See Note [The gradient
/// bridge] in gradient_bridge.cpp.
std::vector<std::vector<torch::autograd::Edge>> make_bridge(
    const std::vector<at::Tensor>& originals,
    const std::vector<std::vector<at::Tensor>>& placeholders,
    const std::shared_ptr<Communicator>& communicator, int64_t number);

/// The gradients that one replica's own backward leaves, instead of passing
/// them on.
class GradientStash : public torch::CustomClassHolder {
 public:
  explicit GradientStash(size_t size) : gradients_(size) {}

  /// Forgets what an earlier backward left, and whether it takes more.
  void clear(bool open);
  /// Adds to what is there; called by the autograd engine, on any thread.
  void add(const std::vector<at::Tensor>& gradients);
  /// Moves the gradients out; the calling thread's current streams wait for
  /// the work that makes them.
  std::vector<at::Tensor> take();

 private:
  std::mutex mutex_;
  bool open_ = false;
  std::vector<at::Tensor> gradients_;
  std::vector<std::pair<at::Device, c10::Event>> ready_;
};

/// The edges into `stash` for tensors like `placeholders`.
std::vector<torch::autograd::Edge> make_stash_edges(
    const c10::intrusive_ptr<GradientStash>& stash,
    const std::vector<at::Tensor>& placeholders);

/// An edge, and the one to take instead.
using Redirections =
    std::unordered_map<torch::autograd::Edge, torch::autograd::Edge>;

/// An edge that was replaced, and when backward comes to the node that it left:
/// the engine takes nodes with high numbers first.
struct Redirected {
  torch::autograd::Edge from;
  uint64_t sequence_nr;
};

/// In the graph between `inputs` and `outputs`, replaces edges by their
/// redirections; returns those it found.
std::vector<Redirected> redirect_edges(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs,
                                       const Redirections& redirections);

}  // namespace dataparallel::detail
