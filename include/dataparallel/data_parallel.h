#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <dataparallel/devices.h>
#include <dataparallel/export.h>
#include <dataparallel/module_traits.h>
#include <dataparallel/one_call.h>
#include <dataparallel/parallel_apply.h>
#include <dataparallel/replicate.h>
#include <dataparallel/scatter_gather.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dataparallel {

/// When a forward brings the replicas up to date.
enum class RefreshPolicy {
  /// Before every forward; nothing is ever stale.
  kEveryForward,
  /// Values only when `refresh()` is called: for evaluation. Modes,
  /// `requires_grad` and what is registered are still followed, and parameters
  /// of replicas on the module's own device, which share its memory. For the
  /// passes of a gradient accumulation see `accumulate()`.
  kWhenAsked,
};

struct DATAPARALLEL_EXPORT DataParallelOptions {
  /// The module lies on the first. A device may come more than once. Default:
  /// `default_devices()`; `c10::ValueError` for an empty list.
  DataParallelOptions& devices(std::vector<at::Device> value);
  /// The same by name: `devices({"cuda:0", "cuda:1"})`.
  DataParallelOptions& devices(std::initializer_list<const char*> names);
  /// Where results lie, any device. Default: the first of `devices`.
  DataParallelOptions& output_device(at::Device value);
  DataParallelOptions& output_device(const char* name);
  /// The batch dimension of inputs and outputs. Default 0.
  DataParallelOptions& dim(int64_t value);
  /// Rules by position for arguments that are not split along `dim`. One for an
  /// argument that a call leaves out, as it has a default, is for other calls.
  DataParallelOptions& inputs(std::map<int64_t, InputRule> value);
  /// The dimension along which each output tensor is joined: one for all, or
  /// one each in their order. Default: `dim`.
  DataParallelOptions& output_dims(std::vector<int64_t> value);
  /// Each device's share of the batch, positive numbers. Default: equal.
  DataParallelOptions& chunk_shares(std::vector<double> value);
  /// Parameters of so many bytes are copied, and their gradients reduced,
  /// together. Default 25 MiB.
  DataParallelOptions& bucket_bytes(int64_t value);
  /// What carries parameters and gradients between devices.
  DataParallelOptions& transport(Transport value);
  DataParallelOptions& refresh(RefreshPolicy value);

  const std::vector<at::Device>& devices() const { return devices_; }
  const std::optional<at::Device>& output_device() const {
    return output_device_;
  }
  int64_t dim() const { return scatter_.dim(); }
  const std::vector<int64_t>& output_dims() const { return output_dims_; }
  int64_t bucket_bytes() const { return bucket_bytes_; }
  Transport transport() const { return transport_; }
  RefreshPolicy refresh() const { return refresh_; }
  const ScatterOptions& scatter() const { return scatter_; }

 private:
  std::vector<at::Device> devices_;
  std::optional<at::Device> output_device_;
  ScatterOptions scatter_;
  std::vector<int64_t> output_dims_;
  int64_t bucket_bytes_ = kDefaultBucketBytes;
  Transport transport_ = Transport::kAutomatic;
  RefreshPolicy refresh_ = RefreshPolicy::kEveryForward;
};

namespace detail {

/// How one argument of a call is kept for the replicas: nested values by value
/// (each replica has its own), plain ones by reference to the caller's.
template <class Arg>
using Kept = std::conditional_t<
    Nested<std::remove_cvref_t<Arg>>, std::remove_cvref_t<Arg>,
    std::conditional_t<std::is_lvalue_reference_v<Arg>,
                       std::reference_wrapper<std::remove_reference_t<Arg>>,
                       std::decay_t<Arg>>>;

/// The argument as the caller wrote it: an lvalue stays one, and so on.
template <class Arg>
decltype(auto) as_written(Kept<Arg>& kept) {
  if constexpr (!Nested<std::remove_cvref_t<Arg>> &&
                std::is_lvalue_reference_v<Arg>) {
    return static_cast<Arg>(kept.get());
  } else if constexpr (std::is_array_v<std::remove_cvref_t<Arg>>) {
    return (kept);
  } else {
    return static_cast<Arg&&>(kept);
  }
}

/// The parts of one call's arguments, and which replicas they are for.
template <class... Args>
struct Call {
  std::vector<Chunk> chunks;
  std::vector<std::tuple<Kept<Args>...>> parts;  // as chunks
  /// None: there was nothing to split. 0: an empty batch.
  std::optional<int64_t> samples;

  bool empty_batch() const { return samples.value_or(0) == 0; }
};

template <class... Args>
Call<Args...> scatter_call(const std::vector<at::Device>& devices,
                           const ScatterOptions& options,
                           const std::vector<std::string>& names,
                           Args&&... args) {
  RECORD_USER_SCOPE("dataparallel::scatter");
  Call<Args...> call;
  BatchSize batch("DataParallel");
  const auto each = [&](auto&& act) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (act(args, std::integral_constant<size_t, I>()), ...);
    }
    (std::index_sequence_for<Args...>());
  };
  each([&](const auto& arg, auto index) {
    batch.rule = rule_of(options, static_cast<int64_t>(index()));
    measure(arg, names[index()], batch);
  });
  call.samples = batch.samples;
  call.chunks = make_chunks(batch.samples, devices, options.chunk_shares());
  const auto on_device_of = [&](const Chunk& chunk) {
    return std::count_if(
        call.chunks.begin(), call.chunks.end(),
        [&](const Chunk& other) { return other.device == chunk.device; });
  };
  for (const Chunk& chunk : call.chunks) {
    TakeChunk take_chunk(chunk, call.chunks.size() == 1);
    take_chunk.apart = at::GradMode::is_enabled() && on_device_of(chunk) > 1;
    [&]<size_t... I>(std::index_sequence<I...>) {
      const auto part = [&]<class Arg>(Arg&& arg, size_t index) -> Kept<Arg> {
        if constexpr (Nested<std::remove_cvref_t<Arg>>) {
          take_chunk.rule = rule_of(options, static_cast<int64_t>(index));
          return take(std::as_const(arg), names[index], take_chunk);
        } else {
          return Kept<Arg>(arg);
        }
      };
      call.parts.emplace_back(
          part.template operator()<Args>(static_cast<Args&&>(args), I)...);
    }
    (std::index_sequence_for<Args...>());
  }
  return call;
}

/// Puts each tensor that needs a gradient behind a leaf of its own, so that
/// replicas can run backward without meeting in one graph.
class DATAPARALLEL_EXPORT CutGraph : public LeafVisitor {
 public:
  void tensor(at::Tensor& tensor, const std::string& path) override;
  void packed(torch::nn::utils::rnn::PackedSequence& sequence,
              const std::string& path) override;
  /// What follows is another replica's: tensors that come again are cut again.
  void next_replica() { cut_.clear(); }
  /// The tensors before, and the leaves behind those that took their places.
  std::vector<std::pair<at::Tensor, at::Tensor>> cuts;

 private:
  std::unordered_map<const at::TensorImpl*, at::Tensor> cut_;
};

/// The tensors inside a value.
class DATAPARALLEL_EXPORT CollectTensors : public LeafVisitor {
 public:
  void tensor(at::Tensor& tensor, const std::string& path) override;
  void packed(torch::nn::utils::rnn::PackedSequence& sequence,
              const std::string& path) override;
  std::vector<at::Tensor> tensors;
};

/// Hands what `add_up` left to the autograd engine, as a part of `call`.
DATAPARALLEL_EXPORT void backward_into(std::vector<ReplicaGradients> gradients,
                                       OneCall& call);

/// `weights[i] / sum(weights)`, as float64 on `target`; all alike where that
/// sum is 0. Differentiable.
DATAPARALLEL_EXPORT std::vector<at::Tensor> shares_of(
    const std::vector<at::Tensor>& weights, at::Device target);

/// `losses[i] * shares[i]`, summed on `target` in order. A loss whose share is
/// 0, a mean over nothing, counts for nothing, even if it is not a number.
DATAPARALLEL_EXPORT at::Tensor weighted_sum(
    const std::vector<at::Tensor>& losses,
    const std::vector<at::Tensor>& shares, at::Device target,
    bool shares_may_be_zero = false);

/// A float64 scalar on the CPU.
DATAPARALLEL_EXPORT at::Tensor scalar(double value);

/// A loss function returns the loss, or the loss and its weight.
struct WeightedLoss {
  at::Tensor loss;
  at::Tensor weight;  // undefined: the number of samples
};
inline WeightedLoss weighted_loss(at::Tensor loss) {
  return {loss, {}};
}
inline WeightedLoss weighted_loss(std::pair<at::Tensor, at::Tensor> loss) {
  return {loss.first, loss.second};
}
inline WeightedLoss weighted_loss(std::tuple<at::Tensor, at::Tensor> loss) {
  return {std::get<0>(loss), std::get<1>(loss)};
}
template <class T>
requires std::is_arithmetic_v<T> WeightedLoss
weighted_loss(const std::pair<at::Tensor, T>& loss) {
  return {loss.first, scalar(static_cast<double>(loss.second))};
}
template <class T>
requires std::is_arithmetic_v<T> WeightedLoss
weighted_loss(const std::tuple<at::Tensor, T>& loss) {
  return {std::get<0>(loss), scalar(static_cast<double>(std::get<1>(loss)))};
}

/// Throws unless loss and weight are real scalars, the loss of a floating
/// dtype.
DATAPARALLEL_EXPORT void check_loss(const WeightedLoss& loss);
/// Throws where only some replicas' loss functions returned a weight, or one
/// that is below 0 or no number. Weights on a device are waited for.
DATAPARALLEL_EXPORT void check_weights(const std::vector<WeightedLoss>& losses,
                                       const std::vector<Chunk>& chunks);
/// What each replica can run backward from by itself, so that together they
/// give the gradients of the weighted mean, those through the weights too.
/// Undefined where a replica's weight is 0.
DATAPARALLEL_EXPORT std::vector<at::Tensor> backward_roots(
    const std::vector<WeightedLoss>& losses);
/// Throws where no loss has a graph.
DATAPARALLEL_EXPORT void check_any_graph(
    const std::vector<WeightedLoss>& losses);

}  // namespace detail

/// What a `DataParallel<M>` holds; use that. `M` is a module holder (a
/// TORCH_MODULE, `torch::nn::Sequential`), a `shared_ptr` to a module,
/// `torch::nn::AnyModule` or `torch::jit::Module`.
template <class M>
class DataParallelImpl : public detail::WrapperBase {
 public:
  using Factory = typename Replicas<M>::Factory;

  /// See `accumulate`. Must not outlive the model.
  class Accumulation {
   public:
    explicit Accumulation(DataParallelImpl& model) : model_(model) {
      const auto lock = model_.one_call("accumulate");
      TORCH_CHECK(!model_.accumulating_,
                  "accumulate: the model accumulates already");
      model_.accumulating_ = true;
      model_.parameters_fresh_ = false;
    }
    ~Accumulation() { model_.accumulating_ = false; }
    Accumulation(const Accumulation&) = delete;
    Accumulation& operator=(const Accumulation&) = delete;

   private:
    DataParallelImpl& model_;
  };

  explicit DataParallelImpl(M module, DataParallelOptions options = {},
                            Factory factory = {})
      : WrapperBase("DataParallel"),
        options_(std::move(options)),
        replicas_(
            module,
            options_.devices().empty() ? default_devices() : options_.devices(),
            options_.bucket_bytes(), std::move(factory), "DataParallel",
            options_.transport()),
        team_(replicas_.devices()),
        output_device_(check_device(
            "DataParallel", "output_device",
            options_.output_device().value_or(replicas_.devices().front()))) {
    detail::check_shares("DataParallel", options_.scatter().chunk_shares(),
                         replicas_.size());
    detail::check_rules("DataParallel", options_.scatter());
    const auto shown = detail::ModuleTraits<M>::shown(replicas_[0]);
    train(shown->is_training());  // its own mode: it has no children yet
    register_module("module", shown);
  }

  /// The wrapped module itself; it is replica 0.
  M& module() { return replicas_[0]; }
  const std::vector<at::Device>& devices() const { return replicas_.devices(); }
  at::Device output_device() const { return output_device_; }

  /// `module()->forward(args...)` on the whole batch: its own argument types
  /// (default arguments work), its own return type.
  ///
  /// Arguments are split along `dim` (`[N, *]`, see `scatter`), each replica
  /// with samples runs in its own thread, and the results are joined on
  /// `output_device` (see `gather`). A batch of 0, or a call in which nothing
  /// is split: one call, on the first device, its result as it is.
  /// `Result` names the return type where forward is itself a template with
  /// one (`Sequential`, `AnyModule`).
  ///
  /// Thread safety: one call at a time, further ones wait; one from inside
  /// another (from forward, a loss function or a hook) is an error. The module
  /// must not be changed meanwhile.
  ///
  /// Throws what forward throws (of the lowest replica, after all have ended,
  /// with `replica 1 on cuda:1` added) and, before any work, what `scatter` and
  /// `Replicas` throw.
  template <class Result = void, class... Args>
  auto forward(Args&&... args) {
    using Traits = detail::ModuleTraits<M>;
    using Returned = std::decay_t<decltype(Traits::template forward<Result>(
        std::declval<M&>(), std::declval<Args>()...))>;
    const auto lock = one_call("forward");
    auto call = detail::scatter_call(devices(), options_.scatter(),
                                     argument_names(sizeof...(Args)),
                                     std::forward<Args>(args)...);
    prepare(call.chunks);
    if constexpr (std::is_void_v<Returned>) {
      run(call, [&](int64_t, auto&&... parts) {
        Traits::template forward<Result>(
            std::forward<decltype(parts)>(parts)...);
      });
    } else {
      std::vector<std::optional<Returned>> results(call.chunks.size());
      const std::vector<at::Tensor> inputs = first_inputs(call);
      run(call, [&](int64_t at, auto&&... parts) {
        results[at].emplace(Traits::template forward<Result>(
            std::forward<decltype(parts)>(parts)...));
      });
      if (call.chunks.size() > 1 && at::GradMode::is_enabled()) {
        detail::CollectTensors outputs;
        visit_leaves(*results.front(), "", outputs);
        replicas_.set().redirect(outputs.tensors, inputs);
      }
      return join(call, std::move(results));
    }
  }

  /// The mean loss of the whole batch, a scalar on `output_device` with its
  /// graph; the loss is computed in the replicas, and outputs are not joined.
  ///
  /// `inputs`: a `std::tuple` of forward's arguments, or the one argument.
  /// `targets`: anything nested, split along `dim`, or by the rule that
  /// `DataParallelOptions::inputs` has for the position after the last
  /// argument. `loss_fn(output, targets)` is called in each replica's thread,
  /// at the same time, and returns a scalar that is the mean over that
  /// replica's samples: replicas are weighted by their number of samples. Where
  /// that is not the divisor (`ignore_index`, padding), it returns a pair (or a
  /// tuple) of the loss and its weight, the divisor, 0 or more, as a number or
  /// a zero-dimensional tensor; one on a device is waited for, and gradients
  /// flow through one that has a graph.
  ///
  ///     const auto loss_fn = [](const auto& output, const auto& target) {
  ///       return torch::nn::functional::cross_entropy(output, target);
  ///     };
  ///     auto loss = model->loss(loss_fn, images, labels);
  ///
  /// Throws `c10::ValueError` if the loss is no scalar; else as `forward`.
  template <class LossFn, class Inputs, class Targets>
  at::Tensor loss(LossFn&& loss_fn, const Inputs& inputs,
                  const Targets& targets) {
    const auto lock = one_call("loss");
    return with_call(inputs, targets, [&](auto& call) {
      prepare(call.chunks);
      const std::vector<at::Tensor> inputs = first_inputs(call);
      auto losses = run_losses(call, loss_fn, [](auto&, int64_t) {});
      if (call.chunks.size() > 1 && at::GradMode::is_enabled()) {
        replicas_.set().redirect(roots_of(losses.front()), inputs);
      }
      return weighted(call, losses);
    });
  }

  /// `loss` and its backward, both in the replicas' threads; returns the loss,
  /// without a graph. Gradients are added to the module's parameters in replica
  /// order (two runs agree bit for bit), through the autograd engine, so that
  /// hooks on parameters run once with the whole gradient; and to inputs and
  /// targets that need one. On CPU replicas this is the way to run backward in
  /// parallel. Nothing has been added if something is thrown before the end,
  /// save to tensors that only `loss_fn` knows; a hook on a parameter that
  /// throws comes at the end.
  template <class LossFn, class Inputs, class Targets>
  at::Tensor forward_backward(LossFn&& loss_fn, const Inputs& inputs,
                              const Targets& targets) {
    TORCH_CHECK(at::GradMode::is_enabled(),
                "forward_backward: gradients are switched off "
                "(torch::NoGradGuard or inference mode)");
    const auto lock = one_call("forward_backward");
    return with_call(inputs, targets, [&](auto& call) {
      return forward_backward(call, loss_fn);
    });
  }

  /// Brings the replicas' values up to date (see `RefreshPolicy`).
  void refresh() {
    const auto lock = one_call("refresh");
    replicas_.refresh();
  }

  /// While the object that it returns lives, only the first forward copies the
  /// parameters to the replicas; for the passes between two optimizer steps:
  ///
  ///     {
  ///       const auto accumulation = model->accumulate();
  ///       for (const auto& [images, labels] : batches) {
  ///         model->loss(loss_fn, images, labels).backward();
  ///       }
  ///     }
  ///     optimizer.step();
  ///
  /// Buffers and all else are followed as ever, and so is a parameter that
  /// torch's version counters say has changed; they do not tell of writes
  /// through `.data()`, which LibTorch's own `SGD::step` makes. With
  /// `RefreshPolicy::kWhenAsked` no forward copies anything, here as elsewhere.
  [[nodiscard]] Accumulation accumulate() { return Accumulation(*this); }

  /// Call it after changing what cannot be seen from outside: a plain member
  /// of the module, or one that was assigned without being registered.
  void refresh_structure() {
    const auto lock = one_call("refresh_structure");
    if constexpr (!std::is_same_v<M, torch::jit::Module>) {
      replace_module("module", detail::ModuleTraits<M>::shown(replicas_[0]));
    }
    replicas_.refresh_structure();
  }

 private:
  detail::OneCall::Scope one_call(const char* function) {
    const std::string name = std::string("DataParallel::") + function;
    team_.refuse_inside(name);
    return {calls_, name};
  }

  static std::vector<std::string> argument_names(size_t count) {
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) {
      names.push_back(detail::index_path("args", i));
    }
    return names;
  }

  void prepare(const std::vector<detail::Chunk>& chunks) {
    if (chunks.size() == 1) {
      // The module itself does all the work.
      replicas_.set().check_devices();
      return;
    }
    RECORD_USER_SCOPE("dataparallel::refresh");
    if (accumulating_ && parameters_fresh_) {
      replicas_.refresh_buffers();
    } else if (options_.refresh() == RefreshPolicy::kEveryForward) {
      replicas_.refresh();
      parameters_fresh_ = true;
    } else {
      replicas_.refresh_edges();
    }
  }

  /// Calls `body(position, module, arguments...)` for each chunk of `call`.
  template <class... Args, class Body>
  void run(detail::Call<Args...>& call, Body&& body) {
    std::vector<int64_t> used;
    std::vector<int64_t> position(replicas_.size(), 0);
    for (size_t i = 0; i < call.chunks.size(); ++i) {
      used.push_back(call.chunks[i].replica);
      position[used.back()] = static_cast<int64_t>(i);
    }
    team_.run(used, [&](int64_t replica) {
      const int64_t at = position[replica];
      [&]<size_t... I>(std::index_sequence<I...>) {
        body(at, replicas_[replica],
             detail::as_written<Args>(std::get<I>(call.parts[at]))...);
      }
      (std::index_sequence_for<Args...>());
    });
    if (used.size() > 1) {
      replicas_.set().check_unwritten();
    }
  }

  /// The tensors that replica 0 gets.
  template <class... Args>
  static std::vector<at::Tensor> first_inputs(detail::Call<Args...>& call) {
    detail::CollectTensors inputs;
    std::apply([&](auto&... kept) { (visit_nested(kept, inputs), ...); },
               call.parts.front());
    return inputs.tensors;
  }

  template <class Kept>
  static void visit_nested(Kept& kept, LeafVisitor& visitor) {
    if constexpr (detail::Nested<Kept>) {
      visit_leaves(kept, "", visitor);
    }
  }

  template <class... Args, class Returned>
  Returned join(const detail::Call<Args...>& call,
                std::vector<std::optional<Returned>> results) {
    RECORD_USER_SCOPE("dataparallel::gather");
    if (call.empty_batch()) {
      detail::MoveTo move(output_device_);
      visit_leaves(*results.front(), "result", move);
      return std::move(*results.front());
    }
    detail::Join join(output_device_, options_.output_dims().empty()
                                          ? std::vector<int64_t>{options_.dim()}
                                          : options_.output_dims());
    std::vector<Returned> values;
    for (size_t i = 0; i < results.size(); ++i) {
      join.replicas.push_back(call.chunks[i].replica);
      values.push_back(std::move(*results[i]));
    }
    Returned result = merge_nested(values, "result", join);
    join.finish("result");
    return result;
  }

  template <class Inputs, class Targets, class Act>
  at::Tensor with_call(const Inputs& inputs, const Targets& targets,
                       Act&& act) {
    const auto scatter = [&](const auto&... args) {
      std::vector<std::string> names = argument_names(sizeof...(args));
      names.push_back("targets");
      ScatterOptions options = options_.scatter();
      auto rules = options.inputs();
      rules.try_emplace(sizeof...(args), split(options.dim()));
      options.inputs(std::move(rules));
      auto call =
          detail::scatter_call(devices(), options, names, args..., targets);
      return act(call);
    };
    if constexpr (detail::is_specialization<Inputs, std::tuple>) {
      return std::apply(scatter, inputs);
    } else {
      return scatter(inputs);
    }
  }

  /// Forward and loss in each replica, then `then(losses[i], i)` there too.
  template <class... Args, class LossFn, class Then>
  std::vector<detail::WeightedLoss> run_losses(detail::Call<Args...>& call,
                                               LossFn& loss_fn, Then&& then) {
    std::vector<detail::WeightedLoss> losses(call.chunks.size());
    run(call, [&](int64_t at, M& module, auto&&... parts) {
      auto all = std::forward_as_tuple(std::forward<decltype(parts)>(parts)...);
      constexpr size_t kInputs = sizeof...(parts) - 1;
      auto output = [&]<size_t... I>(std::index_sequence<I...>) {
        return detail::ModuleTraits<M>::template forward<void>(
            module, std::get<I>(std::move(all))...);
      }
      (std::make_index_sequence<kInputs>());
      using Returned =
          std::decay_t<decltype(loss_fn(output, std::get<kInputs>(all)))>;
      static_assert(
          requires(Returned loss) { detail::weighted_loss(std::move(loss)); },
          "loss_fn must return a torch::Tensor, or a pair or tuple of one and "
          "its weight (a number or a torch::Tensor)");
      losses[at] =
          detail::weighted_loss(loss_fn(output, std::get<kInputs>(all)));
      detail::check_loss(losses[at]);
      then(losses[at], at);
    });
    detail::check_weights(losses, call.chunks);
    return losses;
  }

  static std::vector<at::Tensor> roots_of(const detail::WeightedLoss& loss) {
    return loss.weight.defined() ? std::vector{loss.loss, loss.weight}
                                 : std::vector{loss.loss};
  }

  template <class... Args>
  at::Tensor weighted(const detail::Call<Args...>& call,
                      const std::vector<detail::WeightedLoss>& losses) {
    RECORD_USER_SCOPE("dataparallel::gather");
    std::vector<at::Tensor> values;
    for (const detail::WeightedLoss& loss : losses) {
      values.push_back(loss.loss);
    }
    // The loss functions' own weights are read: a replica may have none.
    const bool own = losses.front().weight.defined();
    return detail::weighted_sum(
        values,
        detail::shares_of(weights(call, losses),
                          own ? at::Device(at::kCPU) : output_device_),
        output_device_, own);
  }

  template <class... Args>
  std::vector<at::Tensor> weights(
      const detail::Call<Args...>& call,
      const std::vector<detail::WeightedLoss>& losses) {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < losses.size(); ++i) {
      result.push_back(losses[i].weight.defined()
                           ? losses[i].weight
                           : detail::scalar(static_cast<double>(
                                 std::max<int64_t>(1, call.chunks[i].size))));
    }
    return result;
  }

  template <class... Args, class LossFn>
  at::Tensor forward_backward(detail::Call<Args...>& call, LossFn& loss_fn) {
    constexpr bool kOwnWeights =
        !std::is_same_v<std::decay_t<decltype(loss_of(call, loss_fn))>,
                        at::Tensor>;
    prepare(call.chunks);
    if (call.chunks.size() == 1) {
      const auto losses = run_losses(call, loss_fn, [](auto&, int64_t) {});
      detail::check_any_graph(losses);
      calls_.backward({losses.front().loss});
      return losses.front().loss.detach().to(output_device_);
    }
    detail::StashScope stashes(replicas_.set());
    detail::CutGraph cut;
    for (auto& part : call.parts) {
      cut.next_replica();
      std::apply([&](auto&... kept) { (visit_nested(kept, cut), ...); }, part);
    }
    const auto backward = [&](const at::Tensor& root) {
      if (root.requires_grad()) {  // else no sample of this chunk counts
        replicas_.set().redirect({root}, {});
        calls_.backward({root});
      }
    };
    std::vector<detail::WeightedLoss> losses;
    if constexpr (kOwnWeights) {
      losses = run_losses(call, loss_fn, [](auto&, int64_t) {});
      const auto roots = detail::backward_roots(losses);
      run(call, [&](int64_t at, auto&&...) {
        if (roots[at].defined()) {
          backward(roots[at]);
        }
      });
    } else {
      losses = run_losses(
          call, loss_fn, [&](const detail::WeightedLoss& loss, int64_t at) {
            const double share = static_cast<double>(call.chunks[at].size) /
                                 static_cast<double>(*call.samples);
            backward(detail::weighted_sum({loss.loss}, {detail::scalar(share)},
                                          loss.loss.device()));
          });
    }
    detail::check_any_graph(losses);
    auto gradients = replicas_.set().take_gradients();
    add_up(call, gradients);
    for (auto& [before, leaf] : cut.cuts) {
      if (leaf.grad().defined()) {
        gradients.push_back({before, {std::move(leaf.mutable_grad())}});
      }
    }
    detail::backward_into(std::move(gradients), calls_);
    const at::NoGradGuard no_grad;
    return weighted(call, losses).detach();
  }

  /// In the workers where these are CPU replicas: in the calling thread it
  /// would leave OpenMP's threads spinning beside the next forward.
  template <class... Args>
  void add_up(detail::Call<Args...>& call,
              std::vector<detail::ReplicaGradients>& gradients) {
    if (!devices().front().is_cpu()) {
      return replicas_.set().add_up(gradients, /*first=*/0, /*step=*/1);
    }
    const size_t step = call.chunks.size();
    run(call, [&](int64_t at, auto&&...) {
      replicas_.set().add_up(gradients, static_cast<size_t>(at), step);
    });
  }

  /// Never called: what `loss_fn` returns.
  template <class... Args, class LossFn>
  auto loss_of(detail::Call<Args...>& call, LossFn& loss_fn) {
    auto all = [&]<size_t... I>(std::index_sequence<I...>) {
      return std::forward_as_tuple(
          detail::as_written<Args>(std::get<I>(call.parts[0]))...);
    }
    (std::index_sequence_for<Args...>());
    constexpr size_t kInputs = sizeof...(Args) - 1;
    auto output = [&]<size_t... I>(std::index_sequence<I...>) {
      return detail::ModuleTraits<M>::template forward<void>(
          replicas_[0], std::get<I>(std::move(all))...);
    }
    (std::make_index_sequence<kInputs>());
    return loss_fn(output, std::get<kInputs>(all));
  }

  DataParallelOptions options_;
  Replicas<M> replicas_;
  WorkerTeam team_;
  at::Device output_device_;
  detail::OneCall calls_;
  std::atomic<bool> accumulating_ = false;
  /// The parameters have been copied since the accumulation began.
  bool parameters_fresh_ = false;
};

/// A module that runs another one on several devices at once, each on its part
/// of the batch, with the numbers of one device.
///
/// It is itself a `torch::nn` module holder: `model->parameters()` are the
/// wrapped module's own (give them to an optimizer), names have the prefix
/// `module.`, `train`, `eval` and `to` reach it. What forward writes on the
/// module (running statistics, counters) is what replica 0, the module itself,
/// saw: the first chunk of the batch.
///
///     Net net;
///     net->to(torch::Device("cuda:0"));
///     dataparallel::DataParallel<Net> model(
///         net, dataparallel::DataParallelOptions().devices(
///                  {"cuda:0", "cuda:1"}));
///     auto [logits, state] = model(images, mask);
///
/// See `DataParallelImpl` for its methods, and `Replicas` for what is followed
/// when the module changes.
template <class M>
class DataParallel : public torch::nn::ModuleHolder<DataParallelImpl<M>> {
 public:
  using torch::nn::ModuleHolder<DataParallelImpl<M>>::ModuleHolder;

  template <class... Args>
  auto operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};

/// One call of `module` on the whole batch over `devices` (default:
/// `default_devices()`); the function form of `DataParallel`, which makes the
/// replicas for this call only. `input`: one argument, or a `std::tuple` of
/// them. Where calls repeat, keep a `DataParallel`.
template <class M, class Input>
auto data_parallel(M module, const Input& input,
                   std::vector<at::Device> devices = {},
                   std::optional<at::Device> output_device = std::nullopt,
                   int64_t dim = 0) {
  DataParallelOptions options;
  options.dim(dim);
  if (!devices.empty()) {
    options.devices(std::move(devices));
  }
  if (output_device.has_value()) {
    options.output_device(*output_device);
  }
  DataParallel<M> model(std::move(module), std::move(options));
  if constexpr (detail::is_specialization<Input, std::tuple>) {
    return std::apply(model, input);
  } else {
    return model(input);
  }
}

}  // namespace dataparallel
