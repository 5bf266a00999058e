#include <ATen/ATen.h>
#include <dataparallel/scatter_gather.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "detail/links.h"
#include "detail/sparse_parts.h"

namespace dataparallel {

namespace rnn = torch::nn::utils::rnn;

InputRule split(int64_t dim) {
  return {InputRule::Kind::kSplit, dim};
}
InputRule copy() {
  return {InputRule::Kind::kCopy, 0};
}
InputRule split_by_sample() {
  return {InputRule::Kind::kSplitBySample, 0};
}

ScatterOptions& ScatterOptions::dim(int64_t value) {
  dim_ = value;
  return *this;
}
ScatterOptions& ScatterOptions::inputs(std::map<int64_t, InputRule> rules) {
  inputs_ = std::move(rules);
  return *this;
}
ScatterOptions& ScatterOptions::chunk_shares(std::vector<double> shares) {
  chunk_shares_ = std::move(shares);
  return *this;
}

std::vector<int64_t> chunk_sizes(int64_t samples, int64_t devices,
                                 const std::vector<double>& chunk_shares) {
  TORCH_CHECK_VALUE(samples >= 0, "chunk_sizes: samples is ", samples,
                    ", expected 0 at least");
  TORCH_CHECK_VALUE(devices >= 1, "chunk_sizes: devices is ", devices,
                    ", expected 1 at least");
  detail::check_shares("chunk_sizes", chunk_shares,
                       static_cast<size_t>(devices));
  std::vector<int64_t> sizes(devices, samples / devices);
  if (chunk_shares.empty()) {
    for (int64_t i = 0; i < samples % devices; ++i) {
      ++sizes[i];
    }
    return sizes;
  }
  // By a power of two, so that nothing is rounded: the largest is below 2, and
  // neither the sum nor a product overflows.
  std::vector<double> shares = chunk_shares;
  const int exponent =
      std::ilogb(*std::max_element(shares.begin(), shares.end()));
  for (double& share : shares) {
    share = std::ldexp(share, -exponent);
  }
  const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<double> remainders(devices);
  int64_t left = samples;
  for (int64_t i = 0; i < devices; ++i) {
    const double exact = static_cast<double>(samples) * shares[i] / total;
    sizes[i] = exact < static_cast<double>(left)
                   ? static_cast<int64_t>(std::floor(exact))
                   : left;
    remainders[i] = exact - static_cast<double>(sizes[i]);
    left -= sizes[i];
  }
  std::vector<int64_t> order(devices);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return remainders[a] > remainders[b];
  });
  for (int64_t i = 0; left > 0; i = (i + 1) % devices, --left) {
    ++sizes[order[i]];
  }
  if (samples > 0 && sizes[0] == 0) {
    // The module itself always works: its statistics are the ones that stay.
    --*std::max_element(sizes.begin(), sizes.end());
    ++sizes[0];
  }
  return sizes;
}

namespace detail {
namespace {

int64_t wrapped_dim(const at::Tensor& tensor, int64_t dim,
                    const std::string& function, const std::string& path,
                    const char* verb) {
  const int64_t wrapped = dim < 0 ? dim + tensor.dim() : dim;
  TORCH_CHECK_VALUE(wrapped >= 0 && wrapped < tensor.dim(), function, ": ",
                    path, " has shape ", tensor.sizes(), ", which cannot be ",
                    verb, " along dimension ", dim);
  return wrapped;
}

at::Tensor cut(const at::Tensor& tensor, int64_t dim, int64_t start,
               int64_t size) {
  return tensor.is_sparse() ? sparse_narrow(tensor, dim, start, size)
                            : tensor.narrow(dim, start, size);
}

// Note [Parts of a batch]
//
// A part on the batch's own device is a view of it, where nothing speaks
// against that. Two things do:
//
// - Gradients flow through it: replicas that write to theirs in place at the
//   same time must not meet in the graph of the tensor they are views of.
// - Several replicas of a wrapper have parts on that device, and backward will
//   come (CPU replicas in training). All views of one tensor share its version
//   counter; so where one replica changes its part in place, autograd takes all
//   other parts that have been saved for changed, and backward throws, or does
//   not, by the timing of the threads.

rnn::PackedSequence moved_sequence(const rnn::PackedSequence& sequence,
                                   at::Device device) {
  const auto indices = [&](const at::Tensor& tensor) {
    return tensor.defined() ? moved(tensor, device) : tensor;
  };
  return rnn::PackedSequence(
      moved(sequence.data(), device), sequence.batch_sizes(),
      indices(sequence.sorted_indices()), indices(sequence.unsorted_indices()));
}

/// `sequence`'s samples in the caller's order, `[T, N, *]`, and their lengths.
/// `total_length` -1: the longest one's.
std::tuple<at::Tensor, at::Tensor> padded(const rnn::PackedSequence& sequence,
                                          int64_t total_length = -1) {
  return rnn::pad_packed_sequence(
      sequence, /*batch_first=*/false, /*padding_value=*/0.0,
      total_length < 0 ? std::nullopt : std::make_optional(total_length));
}

/// torch's `cat` has no kernel for some dtypes; joining moves bytes only.
std::optional<at::ScalarType> cat_dtype(at::ScalarType type) {
  if (c10::isFloat8Type(type)) {
    return at::kByte;
  }
  switch (type) {
    case at::kUInt16:
      return at::kShort;
    case at::kUInt32:
      return at::kInt;
    case at::kUInt64:
      return at::kLong;
    default:
      return std::nullopt;
  }
}

/// torch's `cat` would round all parts to the first one's scale.
std::string quantization(const at::Tensor& tensor) {
  if (!tensor.is_quantized() || tensor.qscheme() != at::kPerTensorAffine) {
    return tensor.is_quantized() ? "quantized by channel" : "not quantized";
  }
  return c10::str("quantized with scale ", tensor.q_scale(), " and zero point ",
                  tensor.q_zero_point());
}

at::Tensor concatenate(const std::vector<at::Tensor>& parts, int64_t dim) {
  if (parts.front().is_sparse()) {
    return sparse_cat(parts, dim);
  }
  const auto as = cat_dtype(parts.front().scalar_type());
  if (!as.has_value()) {
    return at::cat(parts, dim);
  }
  const at::ScalarType dtype = parts.front().scalar_type();
  std::vector<at::Tensor> same;
  if (c10::isFloat8Type(dtype) && at::GradMode::is_enabled() &&
      std::any_of(parts.begin(), parts.end(), [](const at::Tensor& part) {
        return part.requires_grad();
      })) {
    // Views as bytes have no gradient; float32 holds every float8.
    for (const at::Tensor& part : parts) {
      same.push_back(part.to(at::kFloat));
    }
    return at::cat(same, dim).to(dtype);
  }
  for (const at::Tensor& part : parts) {
    same.push_back(part.view(*as));
  }
  return at::cat(same, dim).view(dtype);
}

}  // namespace

void BatchSize::agree(int64_t size, const std::string& path) {
  if (!samples.has_value()) {
    samples = size;
    first_path_ = path;
    return;
  }
  TORCH_CHECK_VALUE(size == *samples, function_, ": ", path, " has ", size,
                    " samples, but ", first_path_, " has ", *samples,
                    "; all arguments that are split must agree (mark one that "
                    "is no batch with dataparallel::copy())");
}

void BatchSize::tensor(at::Tensor& tensor, const std::string& path) {
  if (!tensor.defined() || tensor.dim() == 0) {
    return;
  }
  TORCH_CHECK_VALUE(
      !tensor.is_nested() &&
          (tensor.layout() == at::kStrided || tensor.is_sparse()),
      function_, ": ", path, " has layout ", tensor.layout(),
      tensor.is_nested() ? " (nested)" : "",
      ", which cannot be split; mark it with dataparallel::copy()");
  TORCH_CHECK_VALUE(!tensor.is_meta(), function_, ": ", path,
                    " is a meta tensor, expected one that holds values");
  const int64_t dim = wrapped_dim(tensor, rule.dim, function_, path, "split");
  agree(tensor.size(dim), path);
}

void BatchSize::packed(rnn::PackedSequence& sequence, const std::string& path) {
  const at::Tensor& sizes = sequence.batch_sizes();
  agree(sizes.numel() == 0 ? 0 : sizes[0].item<int64_t>(), path);
}

void BatchSize::list(int64_t length, const std::string& path) {
  agree(length, path);
}

at::Tensor TakeChunk::part_of(const at::Tensor& tensor) const {
  const bool here = tensor.device() == chunk.device;
  if (whole) {
    return moved(tensor, chunk.device);
  }
  if (rule.kind == InputRule::Kind::kSplit && tensor.dim() > 0) {
    const int64_t dim = rule.dim < 0 ? rule.dim + tensor.dim() : rule.dim;
    const at::Tensor part = cut(tensor, dim, chunk.start, chunk.size);
    if (!here) {
      return moved(part, chunk.device);
    }
    return (apart || part.requires_grad()) && part.layout() == at::kStrided
               ? part.clone()
               : part;
  }
  if (here && tensor.dim() == 0) {
    return chunk.replica == 0 ? tensor : tensor.clone();
  }
  return moved(tensor, chunk.device);
}

void TakeChunk::tensor(at::Tensor& tensor, const std::string&) {
  if (!tensor.defined()) {
    return;
  }
  const auto* key = tensor.unsafeGetTensorImpl();
  const auto [first, last] = taken_.equal_range(key);
  for (auto at = first; at != last; ++at) {
    if (at->second.rule == rule) {
      tensor = at->second.part;
      return;
    }
  }
  at::Tensor part = part_of(tensor);
  if (!part.is_same(tensor)) {
    taken_.emplace(key, Taken{tensor, rule, part});
  }
  tensor = std::move(part);
}

void TakeChunk::packed(rnn::PackedSequence& sequence, const std::string&) {
  if (rule.kind == InputRule::Kind::kSplit && !whole) {
    auto [steps, lengths] = padded(sequence);
    sequence = rnn::pack_padded_sequence(
        steps.narrow(/*dim=*/1, chunk.start, chunk.size),
        lengths.narrow(/*dim=*/0, chunk.start, chunk.size),
        /*batch_first=*/false,
        /*enforce_sorted=*/!sequence.sorted_indices().defined());
  }
  sequence = moved_sequence(sequence, chunk.device);
}

std::vector<Chunk> make_chunks(std::optional<int64_t> samples,
                               const std::vector<at::Device>& devices,
                               const std::vector<double>& shares) {
  if (samples.value_or(0) == 0) {
    return {{0, devices.front(), 0, 0}};
  }
  std::vector<Chunk> chunks;
  int64_t start = 0;
  const std::vector<int64_t> sizes =
      chunk_sizes(*samples, static_cast<int64_t>(devices.size()), shares);
  for (size_t i = 0; i < devices.size(); ++i) {
    if (sizes[i] > 0) {
      chunks.push_back({static_cast<int64_t>(i), devices[i], start, sizes[i]});
    }
    start += sizes[i];
  }
  return chunks;
}

void check_shares(const std::string& function,
                  const std::vector<double>& shares, size_t devices) {
  TORCH_CHECK_VALUE(shares.empty() || shares.size() == devices, function,
                    ": chunk_shares has ", shares.size(),
                    " entries, expected one for each of the ", devices,
                    " devices");
  for (size_t i = 0; i < shares.size(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(shares[i]) && shares[i] > 0, function,
                      ": chunk_shares[", i, "] is ", shares[i],
                      ", expected a positive number");
  }
}

void check_rules(const std::string& function, const ScatterOptions& options,
                 std::optional<size_t> arguments) {
  for (const auto& [position, rule] : options.inputs()) {
    TORCH_CHECK_VALUE(position >= 0, function, ": inputs has a rule for ",
                      "argument ", position, ", expected 0 or more");
    TORCH_CHECK_VALUE(!arguments || position < static_cast<int64_t>(*arguments),
                      function, ": inputs has a rule for argument ", position,
                      ", but there are ", *arguments);
  }
}

InputRule rule_of(const ScatterOptions& options, int64_t position) {
  const auto found = options.inputs().find(position);
  return found == options.inputs().end() ? split(options.dim()) : found->second;
}

void BatchSize::not_a_list(const std::string& path,
                           const std::string& type) const {
  TORCH_CHECK_TYPE(false, function_, ": ", path,
                   " is marked split_by_sample, but is of type ", type,
                   ", expected a list");
}

c10::IValue slice_list(const c10::IValue& list, const Chunk& chunk) {
  const auto whole = list.toList();
  auto part = c10::impl::GenericList(whole.elementType());
  for (int64_t i = chunk.start; i < chunk.start + chunk.size; ++i) {
    part.push_back(whole.get(static_cast<size_t>(i)));
  }
  return part;
}

int64_t Join::next_dim(const std::string& path) {
  const size_t index = met_++;
  if (dims_.size() == 1) {
    return dims_.front();
  }
  TORCH_CHECK_VALUE(index < dims_.size(), "gather: output_dims has ",
                    dims_.size(), " entries, but ", path, " is tensor ",
                    index + 1);
  return dims_[index];
}

void Join::finish(const std::string& path) const {
  TORCH_CHECK_VALUE(dims_.size() <= 1 || met_ == dims_.size(),
                    "gather: output_dims has ", dims_.size(), " entries, but ",
                    path, " has ", met_, " tensors");
}

at::Tensor Join::tensors(const std::vector<at::Tensor>& tensors,
                         const std::string& path) {
  const int64_t asked_dim = next_dim(path);
  std::vector<std::string> descriptions;
  const auto all = [&](auto&& describe) {
    descriptions.clear();
    for (const at::Tensor& tensor : tensors) {
      descriptions.push_back(describe(tensor));
    }
    for (const std::string& description : descriptions) {
      if (description != descriptions.front()) {
        differ(path, descriptions);
      }
    }
  };
  all([](const at::Tensor& tensor) {
    return std::string(tensor.defined() ? "a tensor" : "None");
  });
  if (!tensors.front().defined()) {
    return {};
  }
  all([](const at::Tensor& tensor) {
    return std::string("of dtype ") + c10::toString(tensor.scalar_type());
  });
  all([](const at::Tensor& tensor) {
    std::ostringstream layout;
    layout << "of layout " << tensor.layout();
    return layout.str();
  });
  all(quantization);
  const at::Tensor& first = tensors.front();
  TORCH_CHECK_VALUE(tensors.size() == 1 ||
                        (!first.is_nested() &&
                         (first.layout() == at::kStrided || first.is_sparse())),
                    "gather: ", path, " has layout ", first.layout(),
                    first.is_nested() ? " (nested)" : "",
                    ", which cannot be joined");
  TORCH_CHECK_VALUE(tensors.size() == 1 || !first.is_quantized() ||
                        first.qscheme() == at::kPerTensorAffine,
                    "gather: ", path,
                    " is quantized by channel, which cannot be joined");
  all([](const at::Tensor& tensor) {
    return "of " + std::to_string(tensor.dim()) + " dimensions";
  });
  const bool scalars = tensors.front().dim() == 0;
  const int64_t dim = scalars ? 0
                              : wrapped_dim(tensors.front(), asked_dim,
                                            "gather", path, "joined");
  all([&](const at::Tensor& tensor) {
    std::string shape = "of shape [";
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      shape += (i == 0 ? "" : ", ") +
               (i == dim ? std::string("*") : std::to_string(tensor.size(i)));
    }
    return shape + "]";
  });
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(moved(scalars ? tensor.reshape({1}) : tensor, target_));
  }
  return parts.size() == 1 ? parts.front() : concatenate(parts, dim);
}

rnn::PackedSequence Join::packed(
    const std::vector<rnn::PackedSequence>& sequences,
    const std::string& path) {
  next_dim(path);
  if (sequences.size() == 1) {
    return moved_sequence(sequences.front(), target_);
  }
  int64_t longest = 0;
  for (const rnn::PackedSequence& sequence : sequences) {
    longest = std::max(longest, sequence.batch_sizes().numel());
  }
  bool sorted = true;
  std::vector<at::Tensor> steps;
  std::vector<at::Tensor> lengths;
  for (const rnn::PackedSequence& sequence : sequences) {
    sorted = sorted && !sequence.sorted_indices().defined();
    auto [part, part_lengths] =
        padded(moved_sequence(sequence, target_), longest);
    steps.push_back(part);
    lengths.push_back(part_lengths);
  }
  const at::Tensor all_lengths = at::cat(lengths, /*dim=*/0);
  // Sorted parts are not always sorted together.
  sorted = sorted && at::diff(all_lengths).le(0).all().item<bool>();
  return rnn::pack_padded_sequence(at::cat(steps, /*dim=*/1), all_lengths,
                                   /*batch_first=*/false, sorted);
}

void MoveTo::tensor(at::Tensor& tensor, const std::string&) {
  if (tensor.defined()) {
    tensor = moved(tensor, target_);
  }
}

void MoveTo::packed(rnn::PackedSequence& sequence, const std::string&) {
  sequence = moved_sequence(sequence, target_);
}

}  // namespace detail
}  // namespace dataparallel
