#include <ATen/ATen.h>
#include <dataparallel/data_parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "detail/device_name.h"
#include "detail/links.h"

namespace dataparallel {
namespace {

at::Device named(const std::string& argument, const char* name) {
  const auto device = detail::parse_device(name);
  TORCH_CHECK_VALUE(device.has_value(), "DataParallelOptions: ", argument,
                    " is \"", name,
                    "\", expected a device, such as \"cpu\" or \"cuda:0\"");
  return *device;
}

}  // namespace

DataParallelOptions& DataParallelOptions::devices(
    std::vector<at::Device> value) {
  TORCH_CHECK_VALUE(!value.empty(),
                    "DataParallelOptions: devices is empty, expected one at "
                    "least");
  devices_ = std::move(value);
  return *this;
}
DataParallelOptions& DataParallelOptions::devices(
    std::initializer_list<const char*> names) {
  std::vector<at::Device> value;
  for (const char* name : names) {
    value.push_back(named(c10::str("devices[", value.size(), "]"), name));
  }
  return devices(std::move(value));
}
DataParallelOptions& DataParallelOptions::output_device(at::Device value) {
  output_device_ = value;
  return *this;
}
DataParallelOptions& DataParallelOptions::output_device(const char* name) {
  return output_device(named("output_device", name));
}
DataParallelOptions& DataParallelOptions::dim(int64_t value) {
  scatter_.dim(value);
  return *this;
}
DataParallelOptions& DataParallelOptions::inputs(
    std::map<int64_t, InputRule> value) {
  scatter_.inputs(std::move(value));
  return *this;
}
DataParallelOptions& DataParallelOptions::output_dims(
    std::vector<int64_t> value) {
  output_dims_ = std::move(value);
  return *this;
}
DataParallelOptions& DataParallelOptions::chunk_shares(
    std::vector<double> value) {
  scatter_.chunk_shares(std::move(value));
  return *this;
}
DataParallelOptions& DataParallelOptions::bucket_bytes(int64_t value) {
  bucket_bytes_ = value;
  return *this;
}
DataParallelOptions& DataParallelOptions::transport(Transport value) {
  transport_ = value;
  return *this;
}
DataParallelOptions& DataParallelOptions::refresh(RefreshPolicy value) {
  refresh_ = value;
  return *this;
}

namespace detail {
namespace {

struct HeldGradients : torch::CustomClassHolder {
  std::vector<at::Tensor> gradients;
};

/// A root of a graph whose backward gives the held gradients to `originals`.
/// Passed to `backward` as they are, the engine would keep them until the end,
/// and each accumulator would copy what it could have kept.
struct HandOver : torch::autograd::Function<HandOver> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            at::TensorList originals,
                            const c10::intrusive_ptr<HeldGradients>& held) {
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    return at::zeros({}, at::device(originals.front().device()));
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& /*unread*/) {
    const auto held = context->saved_data["held"].toCapsule();
    auto gradients =
        std::move(static_cast<HeldGradients*>(held.get())->gradients);
    gradients.emplace_back();  // for `held`
    return gradients;
  }
};

/// The identity, by a tensor that is no view of the leaf: forward may write to
/// it in place.
struct SameMemory : torch::autograd::Function<SameMemory> {
  static at::Tensor forward(torch::autograd::AutogradContext*,
                            const at::Tensor& leaf) {
    if (leaf.layout() != at::kStrided) {
      return leaf.clone();
    }
    return at::empty({0}, leaf.options())
        .set_(leaf.storage(), leaf.storage_offset(), leaf.sizes(),
              leaf.strides());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*,
      torch::autograd::variable_list gradients) {
    return gradients;
  }
};

}  // namespace

void CutGraph::tensor(at::Tensor& tensor, const std::string&) {
  if (!tensor.defined() || !tensor.requires_grad()) {
    return;
  }
  at::Tensor& cut = cut_[tensor.unsafeGetTensorImpl()];
  if (!cut.defined()) {
    const at::Tensor leaf = tensor.detach().requires_grad_();
    cuts.emplace_back(tensor, leaf);
    cut = SameMemory::apply(leaf);
  }
  tensor = cut;
}

void CutGraph::packed(torch::nn::utils::rnn::PackedSequence& sequence,
                      const std::string& path) {
  at::Tensor data = sequence.data();
  tensor(data, path);
  sequence = torch::nn::utils::rnn::PackedSequence(data, sequence.batch_sizes(),
                                                   sequence.sorted_indices(),
                                                   sequence.unsorted_indices());
}

void CollectTensors::tensor(at::Tensor& tensor, const std::string&) {
  if (tensor.defined()) {
    tensors.push_back(tensor);
  }
}

void CollectTensors::packed(torch::nn::utils::rnn::PackedSequence& sequence,
                            const std::string&) {
  tensors.push_back(sequence.data());
}

void backward_into(std::vector<ReplicaGradients> gradients, OneCall& call) {
  std::map<std::string, std::pair<std::vector<at::Tensor>,
                                  c10::intrusive_ptr<HeldGradients>>>
      by_device;
  for (auto& [original, parts] : gradients) {
    auto& [originals, held] = by_device[original.device().str()];
    if (!held) {
      held = c10::make_intrusive<HeldGradients>();
    }
    originals.push_back(original);
    held->gradients.push_back(std::move(parts.front()));
  }
  std::vector<at::Tensor> roots;
  for (auto& [device, group] : by_device) {
    auto& [originals, held] = group;
    roots.push_back(HandOver::apply(at::TensorList(originals), held));
  }
  if (!roots.empty()) {
    call.backward(roots);
  }
}

void check_loss(const WeightedLoss& loss) {
  const auto described = [](const at::Tensor& tensor) {
    return tensor.defined() ? c10::str("a ", tensor.scalar_type(),
                                       " tensor of shape ", tensor.sizes())
                            : std::string("None");
  };
  TORCH_CHECK_VALUE(
      loss.loss.defined() && loss.loss.dim() == 0 &&
          loss.loss.is_floating_point(),
      "DataParallel: the loss function returned ", described(loss.loss),
      ", expected a floating-point scalar, the mean over the replica's "
      "samples");
  TORCH_CHECK_VALUE(!loss.weight.defined() ||
                        (loss.weight.dim() == 0 && !loss.weight.is_complex()),
                    "DataParallel: the loss function returned as weight ",
                    described(loss.weight), ", expected a real scalar");
}

void check_weights(const std::vector<WeightedLoss>& losses,
                   const std::vector<Chunk>& chunks) {
  for (size_t i = 0; i < losses.size(); ++i) {
    const at::Tensor& weight = losses[i].weight;
    TORCH_CHECK_VALUE(
        weight.defined() == losses.front().weight.defined(),
        "DataParallel: the loss function returned a weight in some replicas "
        "and None in others, expected one in all");
    const double value = weight.defined() ? weight.item<double>() : 1;
    TORCH_CHECK_VALUE(value >= 0 && std::isfinite(value),
                      "DataParallel: the loss function returned the weight ",
                      value, " in replica ", chunks[i].replica,
                      ", expected a number of 0 or more");
  }
}

void check_any_graph(const std::vector<WeightedLoss>& losses) {
  TORCH_CHECK(std::any_of(losses.begin(), losses.end(),
                          [](const WeightedLoss& loss) {
                            return loss.loss.requires_grad();
                          }),
              "forward_backward: the loss does not require grad: nothing in "
              "forward or in the loss function depends on a parameter that "
              "does");
}

std::vector<at::Tensor> shares_of(const std::vector<at::Tensor>& weights,
                                  at::Device target) {
  std::vector<at::Tensor> shares;
  at::Tensor total;
  for (const at::Tensor& weight : weights) {
    shares.push_back(moved(weight, target).to(at::kDouble));
    total = total.defined() ? total + shares.back() : shares.back();
  }
  // No weight at all: what is a loss all the same counts evenly.
  const double even = 1.0 / static_cast<double>(weights.size());
  const at::Tensor none = total == 0;
  const at::Tensor divisor = at::where(none, 1.0, total);  // no NaN in backward
  for (at::Tensor& share : shares) {
    share = at::where(none, even, share / divisor);
  }
  return shares;
}

// With shares s_i = w_i / W, the mean L = sum(s_i * l_i) has the derivatives
// dL/dl_i = s_i and dL/dw_i = (l_i - L) / W; both are constants to replica i.
std::vector<at::Tensor> backward_roots(
    const std::vector<WeightedLoss>& losses) {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> values;
  at::Tensor total = scalar(0);
  for (const WeightedLoss& loss : losses) {
    weights.push_back(loss.weight.detach());
    values.push_back(loss.loss.detach());
    total = total + moved(weights.back(), at::kCPU);
  }
  const auto shares = shares_of(weights, at::kCPU);
  const at::Tensor mean = weighted_sum(values, shares, at::kCPU,
                                       /*shares_may_be_zero=*/true);
  std::vector<at::Tensor> roots;
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto& [loss, weight] = losses[i];
    if (shares[i].item<double>() == 0) {
      roots.emplace_back();
      continue;
    }
    at::Tensor root = weighted_sum({loss}, {shares[i]}, loss.device());
    if (weight.requires_grad() && total.item<double>() != 0) {
      const at::Tensor by_weight =
          (moved(values[i], at::kCPU) - mean).to(at::kDouble) / total;
      root = root + weighted_sum({weight}, {by_weight}, weight.device())
                        .to(loss.options());
    }
    roots.push_back(std::move(root));
  }
  return roots;
}

at::Tensor weighted_sum(const std::vector<at::Tensor>& losses,
                        const std::vector<at::Tensor>& shares,
                        at::Device target, bool shares_may_be_zero) {
  at::Tensor sum;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (shares_may_be_zero && shares[i].item<double>() == 0) {
      continue;  // not a product with 0, whose gradient may be no number
    }
    const at::Tensor share =
        moved(shares[i].to(losses[i].scalar_type()), target);
    const at::Tensor term = moved(losses[i], target) * share;
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

at::Tensor scalar(double value) {
  return at::scalar_tensor(value, at::kDouble);
}

}  // namespace detail
}  // namespace dataparallel
