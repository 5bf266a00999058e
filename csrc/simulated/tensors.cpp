#include "simulated/tensors.h"

#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>
#include <set>

#include "simulated/clock.h"
#include "simulated/counters.h"
#include "simulated/device.h"
#include "simulated/memory.h"
#include "simulated/race_detector.h"

namespace dataparallel::simulated {
namespace {

constexpr c10::DispatchKeySet kDenseKeys({
    c10::DispatchKey::PrivateUse1,
    c10::DispatchKey::AutogradPrivateUse1,
});
constexpr c10::DispatchKeySet kSparseKeys({
    c10::DispatchKey::SparsePrivateUse1,
    c10::DispatchKey::AutogradPrivateUse1,
});

void copy_layout(const at::Tensor& from, const at::Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(),
                              from.storage_offset());
  impl->_set_conj(from.is_conj());
  impl->_set_neg(from.is_neg());
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
}

RaceDetector::Access write_of(const c10::Storage& storage) {
  return {storage.data(), 0, static_cast<int64_t>(storage.nbytes()),
          /*write=*/true};
}

/// Whether written arguments are read too: `add_`, but not `out` arguments.
bool reads_what_it_writes(const std::string& name) {
  static const std::set<std::string> fills{
      "aten::zero_",        "aten::fill_",         "aten::normal_",
      "aten::uniform_",     "aten::random_",       "aten::bernoulli_",
      "aten::exponential_", "aten::log_normal_",   "aten::cauchy_",
      "aten::geometric_",   "aten::_foreach_zero_"};
  return !name.empty() && name.back() == '_' && fills.count(name) == 0;
}

/// A tensor of the CPU among the arguments, in a dry run.
at::Tensor on_meta(const at::Tensor& tensor) {
  at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(),
                                      tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return meta;
}

}  // namespace

bool is_simulated(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

c10::Storage make_storage(c10::DataPtr data, size_t bytes) {
  return {c10::Storage::use_byte_size_t(), bytes, std::move(data), allocator(),
          /*resizable=*/true};
}

at::Tensor make_tensor(c10::Storage storage, const at::Tensor& like) {
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), kDenseKeys, like.dtype());
  copy_layout(like, tensor);
  return tensor;
}

RaceDetector::Access access_to(const at::Tensor& tensor, bool write) {
  const size_t item = tensor.itemsize();
  const auto begin = static_cast<int64_t>(item) * tensor.storage_offset();
  const size_t extent =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), item);
  return {tensor.storage().data(), begin, begin + static_cast<int64_t>(extent),
          write};
}

double bytes_of(const at::Tensor& tensor) {
  const auto access = access_to(tensor, /*write=*/false);
  return static_cast<double>(std::min<int64_t>(
      access.end - access.begin, static_cast<int64_t>(tensor.nbytes())));
}

Launch::Launch(std::string name, bool kernel)
    : name_(std::move(name)),
      kernel_(kernel),
      exceptions_(std::uncaught_exceptions()),
      in_place_(reads_what_it_writes(name_)) {}

Launch::~Launch() {
  if (started_on_.has_value() && std::uncaught_exceptions() == exceptions_) {
    Clock::get().kernel(name_, *started_on_, bytes_, flops_, accesses_);
  }
}

void Launch::on(c10::Device device) {
  on_ =
      device.has_index() ? device : c10::Device(kDeviceType, current_device());
  check_ordinal(on_->index());
}

c10::Device Launch::device() const {
  return on_.value_or(
      device_.value_or(c10::Device(kDeviceType, current_device())));
}

void Launch::check_device(const at::Tensor& tensor) {
  const auto differ = [&](c10::Device one, c10::Device two) {
    TORCH_CHECK(false,
                "Expected all tensors to be on the same device, but found at "
                "least two devices, ",
                one, " and ", two, "! (when running ", name_, ")");
  };
  if (!is_simulated(tensor)) {
    if (allow_cpu_ || tensor.dim() == 0) {
      return;
    }
    cpu_seen_ = tensor.device();
  } else if (!device_.has_value()) {
    device_ = tensor.device();
  } else if (*device_ != tensor.device()) {
    differ(*device_, tensor.device());
  }
  if (cpu_seen_.has_value() && device_.has_value()) {
    is_simulated(tensor) ? differ(*cpu_seen_, *device_)
                         : differ(*device_, *cpu_seen_);
  }
}

at::Tensor Launch::dense_view(const at::Tensor& tensor, bool write) {
  const c10::Storage& storage = tensor.storage();
  const c10::DeviceType type = is_dry() ? c10::kMeta : c10::kCPU;
  // Resizable: the CPU puts new memory here when an `out` is too small.
  c10::Storage same_memory(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(is_dry() ? nullptr : storage.mutable_data(),
                   c10::Device(type)),
      c10::GetAllocator(type), /*resizable=*/true);
  at::Tensor cpu = at::detail::make_tensor<at::TensorImpl>(
      std::move(same_memory),
      c10::DispatchKeySet(is_dry() ? c10::DispatchKey::Meta
                                   : c10::DispatchKey::CPU),
      tensor.dtype());
  copy_layout(tensor, cpu);
  storage_at_.emplace(cpu.storage().unsafeGetStorageImpl(), seen_.size());
  seen_.push_back({cpu, tensor, write});
  accesses_.push_back(access_to(tensor, write));
  bytes_ += bytes_of(tensor) * (write && in_place_ ? 2 : 1);
  return cpu;
}

at::Tensor Launch::view(const at::Tensor& tensor, bool write) {
  if (!tensor.defined()) {
    return tensor;
  }
  check_device(tensor);
  if (!is_simulated(tensor)) {
    return is_dry() && tensor.is_cpu() && tensor.layout() == at::kStrided
               ? on_meta(tensor)
               : tensor;
  }
  const auto known = seen_at_.find(tensor.unsafeGetTensorImpl());
  if (known != seen_at_.end() && (seen_[known->second].written || !write)) {
    return seen_[known->second].cpu;
  }
  if (!tensor.is_sparse()) {
    seen_at_[tensor.unsafeGetTensorImpl()] = seen_.size();
    return dense_view(tensor, write);
  }
  auto* impl = at::sparse::get_sparse_impl(tensor);
  const at::Tensor indices = dense_view(impl->indices(), write);
  const at::Tensor values = dense_view(impl->values(), write);
  at::Tensor cpu = at::_sparse_coo_tensor_unsafe(
      indices, values, tensor.sizes(), values.options().layout(at::kSparse),
      impl->coalesced());
  seen_at_[tensor.unsafeGetTensorImpl()] = seen_.size();
  seen_.push_back({cpu, tensor, write});
  return cpu;
}

void Launch::start() {
  if (!kernel_) {
    return;
  }
  const auto index = device().index();
  count_kernel(index);
  const StreamKey stream = key_of(current_stream(index));
  RaceDetector::get().access(name_, stream, accesses_);
  if (Clock::is_on()) {
    started_on_ = stream;
  }
}

at::Tensor Launch::result(const at::Tensor& tensor) {
  if (!tensor.defined() || !(tensor.is_cpu() || tensor.is_meta())) {
    return tensor;
  }
  for (const Seen& seen : seen_) {
    if (seen.cpu.is_same(tensor)) {
      return seen.simulated;
    }
  }
  if (tensor.is_sparse()) {
    auto* impl = at::sparse::get_sparse_impl(tensor);
    const c10::DeviceGuard guard(device());  // a new sparse tensor's device
    at::Tensor sparse = at::detail::make_tensor<at::SparseTensorImpl>(
        kSparseKeys, tensor.dtype());
    auto* target = at::sparse::get_sparse_impl(sparse);
    target->raw_resize_(impl->sparse_dim(), impl->dense_dim(), tensor.sizes());
    target->set_indices_and_values_unsafe(result(impl->indices()),
                                          result(impl->values()));
    target->set_coalesced(impl->coalesced());
    return sparse;
  }
  if (tensor.layout() != at::kStrided) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, name_, ": simulated devices have no ",
                                tensor.layout(), " tensors");
  }
  const auto same_memory =
      storage_at_.find(tensor.storage().unsafeGetStorageImpl());
  if (same_memory != storage_at_.end()) {
    // As torch's own views: of a normal tensor a normal one, in inference mode
    // too.
    const at::Tensor& base = seen_[same_memory->second].simulated;
    at::Tensor view = at::detail::make_tensor<at::TensorImpl>(
        at::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
        tensor.dtype());
    copy_layout(tensor, view);
    return view;
  }
  const auto index = device().index();
  const size_t bytes = tensor.storage().nbytes();
  c10::Storage storage = make_storage(
      is_dry() ? allocate(bytes, index) : adopt(tensor.storage(), index),
      bytes);
  if (kernel_) {
    RaceDetector::get().access(name_, key_of(current_stream(index)),
                               {write_of(storage)});
    accesses_.push_back(write_of(storage));
    bytes_ += static_cast<double>(bytes);
  }
  return make_tensor(std::move(storage), tensor);
}

void Launch::finish_dense(const at::Tensor& cpu, const at::Tensor& simulated) {
  auto* storage = simulated.storage().unsafeGetStorageImpl();
  const bool moved = is_dry() ? cpu.storage().nbytes() != storage->nbytes()
                              : cpu.storage().data() != storage->data();
  if (moved) {
    const size_t bytes = cpu.storage().nbytes();
    const auto index = simulated.device().index();
    storage->set_data_ptr_noswap(is_dry() ? allocate(bytes, index)
                                          : adopt(cpu.storage(), index));
    storage->set_nbytes(bytes);
    if (kernel_) {
      RaceDetector::get().access(
          name_, key_of(current_stream(simulated.device().index())),
          {write_of(simulated.storage())});
      accesses_.push_back(write_of(simulated.storage()));
      bytes_ += static_cast<double>(bytes);
    }
  }
  if (cpu.sizes() != simulated.sizes() ||
      cpu.strides() != simulated.strides() ||
      cpu.storage_offset() != simulated.storage_offset()) {
    simulated.unsafeGetTensorImpl()->set_sizes_and_strides(
        cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
}

void Launch::finish() {
  const std::vector<Seen> seen = seen_;
  for (const Seen& one : seen) {
    if (!one.written) {
      continue;
    }
    if (!one.simulated.is_sparse()) {
      finish_dense(one.cpu, one.simulated);
      continue;
    }
    auto* from = at::sparse::get_sparse_impl(one.cpu);
    auto* to = at::sparse::get_sparse_impl(one.simulated);
    const at::Tensor indices = result(from->indices());
    const at::Tensor values = result(from->values());
    to->raw_resize_(from->sparse_dim(), from->dense_dim(), one.cpu.sizes());
    to->set_indices_and_values_unsafe(indices, values);
    to->set_coalesced(from->coalesced());
  }
}

}  // namespace dataparallel::simulated
