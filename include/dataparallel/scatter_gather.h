#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <dataparallel/devices.h>
#include <dataparallel/export.h>
#include <dataparallel/nested.h>

#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dataparallel {

/// How one argument reaches the replicas; made by `split`, `copy` and
/// `split_by_sample`.
struct InputRule {
  enum class Kind { kSplit, kCopy, kSplitBySample };
  Kind kind = Kind::kSplit;
  int64_t dim = 0;
  bool operator==(const InputRule&) const = default;
};

/// Each tensor of the argument is cut along `dim` (negative: from the end).
DATAPARALLEL_EXPORT InputRule split(int64_t dim);
/// The argument goes whole to every replica, its tensors moved to the device.
DATAPARALLEL_EXPORT InputRule copy();
/// The argument is a list (`vector`, or a list in an `IValue`) with one entry a
/// sample: each replica gets the entries of its own samples. An optional
/// argument may be left out.
DATAPARALLEL_EXPORT InputRule split_by_sample();

struct DATAPARALLEL_EXPORT ScatterOptions {
  /// The batch dimension of the arguments that have no rule. Default 0.
  ScatterOptions& dim(int64_t value);
  /// Rules by position; arguments not named are split along `dim()`.
  ScatterOptions& inputs(std::map<int64_t, InputRule> rules);
  /// Each device's share of the batch, any positive numbers, one a device.
  /// Default: equal, chunks differing by one sample at most, larger first.
  ScatterOptions& chunk_shares(std::vector<double> shares);

  int64_t dim() const { return dim_; }
  const std::map<int64_t, InputRule>& inputs() const { return inputs_; }
  const std::vector<double>& chunk_shares() const { return chunk_shares_; }

 private:
  int64_t dim_ = 0;
  std::map<int64_t, InputRule> inputs_;
  std::vector<double> chunk_shares_;
};

/// The sizes of `devices` chunks of `samples`, zeros at devices without one.
/// Equal shares: they differ by one at most, the larger first (5 on 4: 2, 1,
/// 1, 1). Given shares: by largest remainder; the first device gets a sample
/// whenever there is one. Always sums to `samples`.
///
/// Throws `c10::ValueError`: `samples` below 0, `devices` below 1, shares that
/// are no positive number for each device.
DATAPARALLEL_EXPORT std::vector<int64_t> chunk_sizes(
    int64_t samples, int64_t devices,
    const std::vector<double>& chunk_shares = {});

namespace detail {

/// The samples of one replica.
struct Chunk {
  int64_t replica;
  at::Device device;
  int64_t start;
  int64_t size;
};

/// Finds the batch size of all arguments that are split; they must agree.
class DATAPARALLEL_EXPORT BatchSize : public LeafVisitor {
 public:
  explicit BatchSize(std::string function) : function_(std::move(function)) {}
  void tensor(at::Tensor& tensor, const std::string& path) override;
  void packed(torch::nn::utils::rnn::PackedSequence& sequence,
              const std::string& path) override;
  void list(int64_t length, const std::string& path);
  /// Throws: an argument of this `type` is marked `split_by_sample`.
  [[noreturn]] void not_a_list(const std::string& path,
                               const std::string& type) const;

  InputRule rule;
  /// None where no argument is split.
  std::optional<int64_t> samples;

 private:
  void agree(int64_t size, const std::string& path);
  std::string function_;
  std::string first_path_;
};

/// Replaces each leaf by one replica's part of it, on the replica's device. A
/// tensor that comes more than once gives one part: copied once, and a write to
/// it is seen through all, as on one device.
class DATAPARALLEL_EXPORT TakeChunk : public LeafVisitor {
 public:
  explicit TakeChunk(Chunk chunk, bool whole) : chunk(chunk), whole(whole) {}
  void tensor(at::Tensor& tensor, const std::string& path) override;
  void packed(torch::nn::utils::rnn::PackedSequence& sequence,
              const std::string& path) override;

  InputRule rule;
  Chunk chunk;
  /// There is one chunk, which is the whole batch.
  bool whole;
  /// Parts are never views of the batch; see Note [Parts of a batch].
  bool apart = false;

 private:
  at::Tensor part_of(const at::Tensor& tensor) const;
  struct Taken {
    at::Tensor tensor;  // kept, so that its address stays its own
    InputRule rule;
    at::Tensor part;
  };
  std::unordered_multimap<const at::TensorImpl*, Taken> taken_;
};

/// The chunks of a batch, devices without a sample left out. `samples` of 0 or
/// none: one chunk of everything, on the first device.
DATAPARALLEL_EXPORT std::vector<Chunk> make_chunks(
    std::optional<int64_t> samples, const std::vector<at::Device>& devices,
    const std::vector<double>& shares);

DATAPARALLEL_EXPORT void check_shares(const std::string& function,
                                      const std::vector<double>& shares,
                                      size_t devices);

/// Throws where `options.inputs()` has a position below 0 or, where that is
/// given, not below `arguments`.
DATAPARALLEL_EXPORT void check_rules(
    const std::string& function, const ScatterOptions& options,
    std::optional<size_t> arguments = std::nullopt);

DATAPARALLEL_EXPORT InputRule rule_of(const ScatterOptions& options,
                                      int64_t position);

DATAPARALLEL_EXPORT c10::IValue slice_list(const c10::IValue& list,
                                           const Chunk& chunk);

template <class T>
void measure(const T& value, const std::string& path, BatchSize& batch) {
  refuse_hidden_tensors<T>();
  if (batch.rule.kind == InputRule::Kind::kSplitBySample) {
    if constexpr (is_specialization<T, std::vector>) {
      batch.list(static_cast<int64_t>(value.size()), path);
      return;
    } else if constexpr (Optional<T>) {
      if (value.has_value()) {
        measure(*value, path, batch);
      }
      return;
    } else if constexpr (Dynamic<T>) {
      if (value.isNone()) {
        return;
      }
      if (value.isList()) {
        batch.list(static_cast<int64_t>(value.toListRef().size()), path);
        return;
      }
    }
    if constexpr (Dynamic<T>) {
      batch.not_a_list(path, value.tagKind());
    } else {
      batch.not_a_list(path, c10::demangle_type<T>());
    }
  }
  if constexpr (Nested<T>) {
    if (batch.rule.kind == InputRule::Kind::kSplit) {
      T seen = value;
      visit_leaves(seen, path, batch);
    }
  }
}

template <class T>
T take(const T& value, const std::string& path, TakeChunk& chunk) {
  if constexpr (Optional<T>) {
    return value.has_value() ? T(take(*value, path, chunk)) : T();
  }
  T part = value;
  if (chunk.rule.kind == InputRule::Kind::kSplitBySample && !chunk.whole) {
    const auto start = chunk.chunk.start;
    if constexpr (is_specialization<T, std::vector>) {
      part = T(value.begin() + start, value.begin() + start + chunk.chunk.size);
    } else if constexpr (Dynamic<T>) {
      part = value.isNone() ? value : slice_list(value, chunk.chunk);
    }
  }
  if constexpr (Nested<T>) {
    visit_leaves(part, path, chunk);
  }
  return part;
}

/// Joins leaves on one device. One dimension for all, or one a tensor in the
/// order in which they are met.
class DATAPARALLEL_EXPORT Join : public LeafMerger {
 public:
  Join(at::Device target, std::vector<int64_t> dims)
      : target_(target), dims_(std::move(dims)) {}
  at::Tensor tensors(const std::vector<at::Tensor>& tensors,
                     const std::string& path) override;
  torch::nn::utils::rnn::PackedSequence packed(
      const std::vector<torch::nn::utils::rnn::PackedSequence>& sequences,
      const std::string& path) override;
  /// Afterwards: throws if there are more dimensions than tensors.
  void finish(const std::string& path) const;

 private:
  int64_t next_dim(const std::string& path);
  at::Device target_;
  std::vector<int64_t> dims_;
  size_t met_ = 0;
};

/// Moves leaves to one device, shapes as they are.
class DATAPARALLEL_EXPORT MoveTo : public LeafVisitor {
 public:
  explicit MoveTo(at::Device target) : target_(target) {}
  void tensor(at::Tensor& tensor, const std::string& path) override;
  void packed(torch::nn::utils::rnn::PackedSequence& sequence,
              const std::string& path) override;

 private:
  at::Device target_;
};

}  // namespace detail

/// Cuts a batch into one part a device, and moves each part to its device.
///
/// `inputs` is anything nested (see `nested.h`); where it is a `tuple` (the
/// arguments of a call), `options.inputs()` are its positions, else position 0
/// is the value itself. By default tensors of one dimension or more are cut
/// along `options.dim()`, and everything else goes to each device as it is.
/// Devices without a sample get no part: the result is as long as the devices
/// used, in their order. A batch of 0 gives one part, on the first device;
/// where nothing is split, each device gets one part.
///
///     const std::vector<torch::Device> devices{torch::Device("cuda:0"),
///                                              torch::Device("cuda:1")};
///     auto parts = dataparallel::scatter(images, devices);
///
/// Differentiable. Parts on the tensor's own device are views of it, unless
/// gradients flow: then they are copies. A tensor that comes more than once
/// (`query, key, value` of one attention) gives one part. What goes whole to
/// several replicas on one device is one tensor for all of them, save one
/// without dimensions. Strides (channels-last), dtype and layout stay; a sparse
/// COO tensor is cut too. Copies are issued on the current streams of the
/// calling thread, from pinned memory without waiting. Thread safety: any
/// thread.
///
/// Throws `c10::ValueError` before any copy: devices that do not exist, sizes
/// that disagree (both arguments and sizes are named), a dimension that a
/// tensor does not have.
template <class T>
std::vector<T> scatter(const T& inputs, const std::vector<at::Device>& devices,
                       const ScatterOptions& options = {}) {
  const auto checked = check_devices("scatter", devices);
  detail::check_shares("scatter", options.chunk_shares(), checked.size());
  if constexpr (detail::is_specialization<T, std::tuple>) {
    detail::check_rules("scatter", options, std::tuple_size_v<T>);
  } else {
    detail::check_rules("scatter", options, 1);
  }
  detail::BatchSize batch("scatter");
  const auto each_argument = [&](auto&& value, auto&& act) {
    if constexpr (detail::is_specialization<T, std::tuple>) {
      [&]<size_t... I>(std::index_sequence<I...>) {
        (act(std::get<I>(value), I, detail::index_path("inputs", I)), ...);
      }
      (std::make_index_sequence<std::tuple_size_v<T>>());
    } else {
      act(value, 0, std::string("inputs"));
    }
  };
  each_argument(inputs, [&](const auto& value, int64_t i, std::string path) {
    batch.rule = detail::rule_of(options, i);
    detail::measure(value, path, batch);
  });
  std::vector<detail::Chunk> chunks =
      detail::make_chunks(batch.samples, checked, options.chunk_shares());
  if (!batch.samples.has_value()) {
    chunks.clear();
    for (size_t i = 0; i < checked.size(); ++i) {
      chunks.push_back({static_cast<int64_t>(i), checked[i], 0, 0});
    }
  }
  std::vector<T> parts;
  for (const detail::Chunk& chunk : chunks) {
    detail::TakeChunk take_chunk(
        chunk, !batch.samples.has_value() || chunks.size() == 1);
    T part = inputs;
    each_argument(part, [&](auto& value, int64_t i, std::string path) {
      take_chunk.rule = detail::rule_of(options, i);
      value = detail::take(value, path, take_chunk);
    });
    parts.push_back(std::move(part));
  }
  return parts;
}

/// Joins the replicas' values into one on `target`, in their order.
///
/// Tensors (`[N_i, *]`) are joined along `dim` to `[sum N_i, *]`;
/// zero-dimensional ones become a vector `[len(values)]`, whatever `dim` is.
/// Packed sequences are joined by sample. None in all stays None; equal plain
/// values stay, in an `IValue` different ones become a list.
/// `output_dims`, where not empty, holds one dimension for all tensors or one
/// for each, in the order in which `visit_leaves` meets them.
///
/// Differentiable. Works on the current streams of the calling thread; when
/// `target` is the CPU, the result is there on return.
///
/// Throws `c10::ValueError` with the path and the replica numbers where
/// lengths, keys, types, dtypes or shapes do not fit.
template <class T>
T gather(const std::vector<T>& values, at::Device target, int64_t dim = 0,
         std::vector<int64_t> output_dims = {}) {
  TORCH_CHECK_VALUE(!values.empty(),
                    "gather: values is empty, expected one value at least");
  detail::Join join(
      check_device("gather", "target", target),
      output_dims.empty() ? std::vector<int64_t>{dim} : std::move(output_dims));
  for (size_t i = 0; i < values.size(); ++i) {
    join.replicas.push_back(static_cast<int64_t>(i));
  }
  T result = merge_nested(values, "result", join);
  join.finish("result");
  return result;
}

}  // namespace dataparallel
