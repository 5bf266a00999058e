#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/devices.h>
#include <dataparallel/export.h>
#include <dataparallel/module_traits.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace dataparallel {

/// The size of a bucket of parameters, 25 MiB.
inline constexpr int64_t kDefaultBucketBytes = int64_t{25} << 20;

/// What carries parameters and gradients between devices.
enum class Transport {
  /// NCCL where it serves the devices and no link between them lies, else
  /// torch's copies.
  kAutomatic,
  /// NCCL, through torch's own: for CUDA devices, each once.
  kNccl,
  /// torch's copies, for any devices.
  kPeerCopies,
};

namespace detail {

/// One original's gradients, by replica; undefined where it was not used.
struct ReplicaGradients {
  at::Tensor original;
  std::vector<at::Tensor> parts;
};

/// The replicas of one module, whatever its type; see `Replicas`.
class DATAPARALLEL_EXPORT ReplicaSet {
 public:
  /// Where the replicas' gradients go.
  enum class Gradients {
    /// To the originals, through one node a bucket.
    kToOriginals,
    /// Into one stash a replica, for a backward of each replica on its own.
    kToStashes,
  };

  /// `modules[0]` is the original. `made_by_user`: by a factory.
  ReplicaSet(const std::string& function, std::vector<at::Device> devices,
             int64_t bucket_bytes,
             std::vector<std::unique_ptr<ModuleAccess>> modules,
             bool made_by_user, Transport transport = Transport::kAutomatic);
  ~ReplicaSet();

  /// False if parameters or buffers have come, gone or changed their names.
  bool same_structure() const;
  /// Brings values, modes and gradient edges of the replicas up to date.
  void refresh();
  /// The same without the parameters' values, unless torch's version counters
  /// say that one has changed.
  void refresh_buffers();
  /// Everything but the values.
  void refresh_edges();
  void set_gradients(Gradients where);

  /// Leads the gradients of the original, in the graph that made `outputs` out
  /// of `inputs`, the same way as the replicas'. See Note [The gradient
  /// bridge]. Thread safety: any thread.
  void redirect(const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& inputs);

  /// Throws if the original is no longer on the first of the devices.
  void check_devices() const;

  /// After a forward: throws if a parameter whose memory several replicas share
  /// was written meanwhile.
  void check_unwritten() const;

  /// Forgets what earlier backwards left in the stashes. Not open, a backward
  /// that reaches one is an error.
  void clear_stashes(bool open);
  /// What the stashes hold of each original that got a gradient.
  std::vector<ReplicaGradients> take_gradients();
  /// Adds up the parts of each step-th of `gradients`, from the first-th on, in
  /// an order that is always the same; one part is left, on the first device.
  /// `bucket_bytes` of them travel together. Thread safety: any thread, for
  /// different gradients.
  void add_up(std::vector<ReplicaGradients>& gradients, size_t first,
              size_t step) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// While it lives, gradients go to the stashes. Autocast's cache is emptied at
/// both ends: it keeps casts of the module's weights together with their edges.
class DATAPARALLEL_EXPORT StashScope {
 public:
  explicit StashScope(ReplicaSet& set);
  ~StashScope();
  StashScope(const StashScope&) = delete;
  StashScope& operator=(const StashScope&) = delete;

 private:
  ReplicaSet& set_;
};

}  // namespace detail

/// Replicas of a module, one a device, kept for as long as this lives.
///
/// Replica 0 is the module itself, on `devices[0]`. The others are made once,
/// by the module's `clone` (`deepcopy` for TorchScript) or by a factory, and
/// compared with it: names, shapes, dtypes, `requires_grad`, values, and which
/// names share a tensor. Parameters of replicas on the module's own device
/// share its memory; those on other devices are slices of flat buffers.
///
///     const std::vector<torch::Device> devices{torch::Device("cuda:0"),
///                                              torch::Device("cuda:1")};
///     dataparallel::Replicas<Net> replicas(net, devices);
///     replicas.refresh();               // before each forward
///     replicas[1]->forward(images);     // gradients arrive in net
///
/// Not thread-safe: one thread at a time, and no forward of a replica while
/// `refresh` runs. Copies are issued on the current streams of the calling
/// thread; a replica must run on its device's current stream, or wait for it.
template <class M>
class Replicas {
  static_assert(detail::is_module_kind<M>(),
                "M is no kind of module that can be replicated: expected a "
                "module holder (of NetImpl, its holder Net), a std::shared_ptr "
                "to a module, torch::nn::AnyModule or torch::jit::Module");

 public:
  using Factory = std::function<M(at::Device)>;

  /// Throws `c10::ValueError`: a device that does not exist, a parameter or
  /// buffer that is not on `devices[0]`, a module that is data-parallel itself;
  /// `c10::TypeError`: an empty holder, a module that cannot be cloned, or
  /// whose clone differs and cannot be mended, or still holds parts of the
  /// original. The message names the two ways out. `c10::ValueError` for
  /// `Transport::kNccl` where NCCL does not serve the devices.
  Replicas(M module, const std::vector<at::Device>& devices,
           int64_t bucket_bytes = kDefaultBucketBytes, Factory factory = {},
           std::string function = "replicate",
           Transport transport = Transport::kAutomatic)
      : function_(std::move(function)),
        devices_(check_devices(function_, devices)),
        bucket_bytes_(bucket_bytes),
        transport_(transport),
        factory_(std::move(factory)),
        modules_{std::move(module)} {
    TORCH_CHECK_TYPE(!detail::ModuleTraits<M>::empty(modules_[0]), function_,
                     ": the module is empty, expected a holder or a pointer "
                     "with a module in it");
    TORCH_CHECK_VALUE(bucket_bytes > 0, function_, ": bucket_bytes is ",
                      bucket_bytes, ", expected a positive number");
    refresh_structure();
  }

  size_t size() const { return devices_.size(); }
  const std::vector<at::Device>& devices() const { return devices_; }
  M& operator[](size_t replica) { return modules_.at(replica); }

  /// Brings the replicas up to date with the module. Followed, however they
  /// were changed (also through `.data()`): values of parameters and buffers,
  /// `requires_grad`, `train()`/`eval()` of any submodule, dtype, memory
  /// format, what is registered (a replaced parameter, a child more); for
  /// TorchScript every attribute. Not visible from outside, in C++: plain
  /// members, and a member that was assigned without being registered; after
  /// changing a plain member call `refresh_structure`.
  void refresh() {
    if (set_ == nullptr || !set_->same_structure()) {
      refresh_structure();
    }
    set_->refresh();
  }

  /// `refresh`, but no values are copied.
  void refresh_edges() {
    if (set_ == nullptr || !set_->same_structure()) {
      refresh_structure();
    }
    set_->refresh_edges();
  }

  /// `refresh`, but parameters whose version counters stand as they did are not
  /// copied.
  void refresh_buffers() {
    if (set_ == nullptr || !set_->same_structure()) {
      refresh_structure();
    }
    set_->refresh_buffers();
  }

  /// Makes the replicas anew, from the module as it is now. If it throws there
  /// are none, and the next `refresh` tries again: nothing is ever stale.
  void refresh_structure() {
    set_.reset();
    modules_.erase(modules_.begin() + 1, modules_.end());
    std::vector<std::unique_ptr<detail::ModuleAccess>> access;
    access.push_back(detail::ModuleTraits<M>::access(modules_[0]));
    detail::check_replicable(function_, *access[0], devices_[0]);
    for (size_t i = 1; i < devices_.size(); ++i) {
      modules_.push_back(detail::make_replica<M>(function_, modules_[0],
                                                 devices_[i], factory_));
      access.push_back(detail::ModuleTraits<M>::access(modules_[i]));
    }
    set_ = std::make_unique<detail::ReplicaSet>(
        function_, devices_, bucket_bytes_, std::move(access),
        static_cast<bool>(factory_), transport_);
  }

  /// For the wrappers: the part that does not depend on the module's type.
  detail::ReplicaSet& set() {
    if (set_ == nullptr) {
      refresh_structure();
    }
    return *set_;
  }

 private:
  std::string function_;
  std::vector<at::Device> devices_;
  int64_t bucket_bytes_;
  Transport transport_;
  Factory factory_;
  std::vector<M> modules_;
  std::unique_ptr<detail::ReplicaSet> set_;
};

/// `Replicas` of `module` on `devices`, up to date.
template <class M>
Replicas<M> replicate(M module, const std::vector<at::Device>& devices,
                      int64_t bucket_bytes = kDefaultBucketBytes,
                      typename Replicas<M>::Factory factory = {}) {
  return Replicas<M>(std::move(module), devices, bucket_bytes,
                     std::move(factory));
}

}  // namespace dataparallel
