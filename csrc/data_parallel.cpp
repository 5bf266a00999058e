#include <ATen/ATen.h>
#include <dataparallel/data_parallel.h>
#include <torch/csrc/autograd/autograd.h>

namespace dataparallel {

DataParallelOptions& DataParallelOptions::devices(
    std::vector<at::Device> value) {
  devices_ = std::move(value);
  return *this;
}
DataParallelOptions& DataParallelOptions::devices(
    std::initializer_list<const char*> names) {
  devices_.clear();
  for (const char* name : names) {
    devices_.emplace_back(name);
  }
  return *this;
}
DataParallelOptions& DataParallelOptions::output_device(at::Device value) {
  output_device_ = value;
  return *this;
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
DataParallelOptions& DataParallelOptions::refresh(RefreshPolicy value) {
  refresh_ = value;
  return *this;
}

namespace detail {

void CutGraph::tensor(at::Tensor& tensor, const std::string&) {
  if (tensor.defined() && tensor.requires_grad()) {
    at::Tensor leaf = tensor.detach().requires_grad_();
    cuts.emplace_back(tensor, leaf);
    tensor = std::move(leaf);
  }
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

void backward_into(
    std::vector<std::pair<at::Tensor, at::Tensor>> tensors_and_gradients) {
  if (tensors_and_gradients.empty()) {
    return;
  }
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> gradients;
  for (auto& [tensor, gradient] : tensors_and_gradients) {
    tensors.push_back(std::move(tensor));
    gradients.push_back(std::move(gradient));
  }
  torch::autograd::backward(tensors, gradients);
}

void check_loss(const at::Tensor& loss) {
  TORCH_CHECK_VALUE(
      loss.defined() && loss.dim() == 0, "loss: the loss function returned ",
      loss.defined() ? c10::str("a tensor of shape ", loss.sizes())
                     : std::string("None"),
      ", expected a scalar, the mean over the replica's samples");
}

std::vector<at::Tensor> shares_of(const std::vector<at::Tensor>& weights,
                                  at::Device target) {
  std::vector<at::Tensor> shares;
  at::Tensor total;
  for (const at::Tensor& weight : weights) {
    shares.push_back(weight.to(target, at::kDouble));
    total = total.defined() ? total + shares.back() : shares.back();
  }
  for (at::Tensor& share : shares) {
    share = share / total;
  }
  return shares;
}

at::Tensor weighted_sum(const std::vector<at::Tensor>& losses,
                        const std::vector<at::Tensor>& shares,
                        at::Device target, bool shares_may_be_zero) {
  at::Tensor sum;
  for (size_t i = 0; i < losses.size(); ++i) {
    const at::Tensor share = shares[i].to(target, losses[i].scalar_type());
    at::Tensor term = losses[i].to(target) * share;
    if (shares_may_be_zero) {
      term = at::where(share == 0, at::zeros_like(share), term);
    }
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

at::Tensor scalar(double value) {
  return at::scalar_tensor(value, at::kDouble);
}

void run_backward(const at::Tensor& loss) {
  loss.backward();
}

WeightedLoss weighted_loss(std::pair<at::Tensor, double> loss) {
  return {loss.first, scalar(loss.second)};
}

}  // namespace detail
}  // namespace dataparallel
