#include <ATen/ATen.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "simulated/clock.h"
#include "simulated/counters.h"
#include "simulated/device.h"
#include "simulated/events.h"
#include "simulated/memory.h"
#include "simulated/race_detector.h"
#include "simulated/shapes.h"
#include "simulated/tensors.h"

// The operators that the fallback cannot serve: they make memory, cross
// devices, or have no kernel for the CPU.

namespace dataparallel::simulated {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor optional(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  const auto index = device.has_value() && device->has_index()
                         ? device->index()
                         : current_device();
  check_ordinal(index);
  return index;
}

at::Tensor empty_like_meta(const at::Tensor& meta, c10::DeviceIndex index) {
  int64_t elements = meta.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; elements > 0 && d < meta.dim(); ++d) {
    elements += (meta.size(d) - 1) * meta.stride(d);
  }
  const auto bytes = static_cast<size_t>(elements) * meta.element_size();
  return make_tensor(make_storage(allocate(bytes, index), bytes), meta);
}

at::Tensor empty_memory_format(at::IntArrayRef size,
                               std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>,
                               std::optional<c10::Device> device,
                               std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  return empty_like_meta(
      at::empty(size, at::TensorOptions().dtype(dtype).device(at::kMeta),
                format),
      index_of(device));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>,
                         std::optional<c10::Device> device,
                         std::optional<bool>) {
  return empty_like_meta(
      at::empty_strided(size, stride,
                        at::TensorOptions().dtype(dtype).device(at::kMeta)),
      index_of(device));
}

/// In a dry run there is nothing to read.
void check_has_values(const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_dry(), what,
      ": a dry run (simulated::Options().dry_run) has shapes and no "
      "values, so none can be read");
}

// As CUDA orders copies: between two devices both current streams wait for each
// other, and the copy runs on the source's; else it runs on the one device's
// current stream. A copy to the CPU is waited for, unless it is asked not to be
// and the memory is pinned.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target,
                     bool non_blocking) {
  if (!is_simulated(target)) {
    check_has_values("copy to the CPU");
  }
  Launch launch("aten::copy_", /*kernel=*/false);
  const c10::Device from = source.device();
  const c10::Device to = target.device();
  const auto bytes = static_cast<int64_t>(target.nbytes());
  RaceDetector& detector = RaceDetector::get();
  const auto stream = [](c10::Device device) {
    return key_of(current_stream(device.index()));
  };
  const std::vector<RaceDetector::Access> both{
      access_to(source, /*write=*/false), access_to(target, /*write=*/true)};
  if (from == to) {
    count_kernel(to.index());
    detector.access("aten::copy_", stream(to), both);
    if (Clock::is_on()) {
      Clock::get().kernel("aten::copy_", stream(to),
                          bytes_of(source) + bytes_of(target), {}, both);
    }
  } else if (!is_simulated(source)) {
    count_copy(from, to, bytes);
    detector.access("aten::copy_", stream(to), both);
    if (Clock::is_on()) {
      const bool pinned = is_pinned(source.const_data_ptr());
      Clock::get().copy(stream(to), from, to, bytes, pinned,
                        /*host_waits=*/!non_blocking || !pinned, {both[1]});
    }
  } else if (!is_simulated(target)) {
    count_copy(from, to, bytes);
    detector.access("aten::copy_", stream(from), both);
    const bool pinned = is_pinned(target.const_data_ptr());
    const bool waits = !non_blocking || !pinned;
    if (waits) {
      detector.synchronize(stream(from));
    }
    if (Clock::is_on()) {
      Clock::get().copy(stream(from), from, to, bytes, pinned, waits,
                        {both[0]});
    }
  } else {
    count_copy(from, to, bytes);
    order(stream(to), stream(from));
    detector.access("aten::copy_", stream(from), both);
    if (Clock::is_on()) {
      Clock::get().copy(stream(from), from, to, bytes, /*pinned=*/true,
                        /*host_waits=*/false, both);
    }
    order(stream(from), stream(to));
  }
  if (is_dry()) {
    return target;
  }
  Launch source_side("aten::copy_", /*kernel=*/false);
  const at::Tensor host_source = source_side.read(source);
  const at::Tensor host_target = launch.write(target);
  host_target.copy_(host_source);
  if (is_corrupt(from, to)) {
    host_target.zero_();
  }
  return target;
}

bool same_bytes(const at::Tensor& target, const at::Tensor& source) {
  return target.device() == source.device() &&
         target.scalar_type() == source.scalar_type() &&
         target.sizes() == source.sizes() &&
         target.strides() == source.strides() &&
         target.is_conj() == source.is_conj() &&
         target.is_neg() == source.is_neg() &&
         source.is_non_overlapping_and_dense();
}

// One kernel for all that are on one device, as CUDA has it.
void foreach_copy(at::TensorList targets, at::TensorList sources, bool) {
  TORCH_CHECK(targets.size() == sources.size(),
              "_foreach_copy_: expected as many sources as targets, but got ",
              sources.size(), " and ", targets.size());
  const c10::Device device = targets.front().device();
  double bytes = 0;
  std::vector<size_t> together;
  std::vector<RaceDetector::Access> reads;
  std::vector<RaceDetector::Access> writes;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].device() != device || !same_bytes(targets[i], sources[i])) {
      targets[i].copy_(sources[i]);
      continue;
    }
    if (targets[i].nbytes() == 0) {
      continue;
    }
    together.push_back(i);
    bytes += static_cast<double>(sources[i].nbytes());
    reads.push_back(access_to(sources[i], /*write=*/false));
    const auto write = access_to(targets[i], /*write=*/true);
    if (!writes.empty() && writes.back().storage == write.storage &&
        writes.back().end == write.begin) {
      writes.back().end = write.end;  // slices of one buffer, one by one
    } else {
      writes.push_back(write);
    }
  }
  if (together.empty()) {
    return;
  }
  count_kernel(device.index());
  reads.insert(reads.end(), writes.begin(), writes.end());
  const StreamKey stream = key_of(current_stream(device.index()));
  if (Clock::is_on()) {
    Clock::get().kernel("aten::_foreach_copy_", stream, 2 * bytes, {}, reads);
  }
  RaceDetector::get().access("aten::_foreach_copy_", stream, std::move(reads));
  if (is_dry()) {
    return;
  }
  for (const size_t i : together) {
    std::memcpy(targets[i].mutable_data_ptr(), sources[i].const_data_ptr(),
                sources[i].nbytes());
  }
}

at::Tensor copy_from_and_resize(const at::Tensor& source,
                                const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

// Sparse tensors are copied part by part.
at::Tensor& copy_sparse(at::Tensor& target, const at::Tensor& source,
                        bool non_blocking) {
  TORCH_CHECK(source.is_sparse() && target.is_sparse(),
              "copy_: expected two sparse tensors");
  target.sparse_resize_and_clear_(source.sizes(), source.sparse_dim(),
                                  source.dense_dim());
  const at::Tensor copied = at::_sparse_coo_tensor_unsafe(
      source._indices().to(target.device(), non_blocking),
      source._values().to(target.device(), target.scalar_type(), non_blocking),
      source.sizes(), target.options());
  target.unsafeGetTensorImpl()->shallow_copy_from(copied.getIntrusivePtr());
  return target._coalesced_(source.is_coalesced());
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  check_has_values("item");
  Launch launch("aten::_local_scalar_dense", /*kernel=*/false);
  const at::Tensor host = launch.read(self);
  const StreamKey stream = key_of(current_stream(self.device().index()));
  RaceDetector::get().access("aten::_local_scalar_dense", stream,
                             {access_to(self, /*write=*/false)});
  RaceDetector::get().synchronize(stream);
  if (Clock::is_on()) {
    Clock::get().copy(stream, self.device(), c10::Device(c10::kCPU),
                      static_cast<int64_t>(self.nbytes()), /*pinned=*/true,
                      /*host_waits=*/true, {access_to(self, /*write=*/false)});
  }
  return at::_local_scalar_dense(host);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size,
                      at::IntArrayRef stride, std::optional<int64_t> offset) {
  Launch launch("aten::as_strided", /*kernel=*/false);
  const at::Tensor host = launch.read(self);
  return launch.result(host.as_strided(size, stride, offset));
}

at::Tensor& set_storage_offset(at::Tensor& self, c10::Storage source,
                               int64_t offset, at::IntArrayRef size,
                               at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(),
              "Expected all tensors to be on the same device, but found at "
              "least two devices, ",
              self.device(), " and ", source.device(), "!");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto elements =
      static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(),
                            source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage_offset(
      self, make_storage(allocate(0, self.device().index()), 0), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  RaceDetector::get().used_on(self.storage().data(), key_of(stream));
}

bool shallow_copies(const at::Tensor& self, const at::Tensor& from) {
  return self.is_sparse() == from.is_sparse();
}

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const OptionalTensor&, double, bool,
                       std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const OptionalTensor& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation,
                       bool transposed, at::IntArrayRef output_padding,
                       int64_t groups) {
  Launch launch("aten::convolution");
  const at::Tensor x = launch.read(input);
  const at::Tensor w = launch.read(weight);
  const at::Tensor b = launch.read(optional(bias));
  launch.start();
  const at::Tensor y =
      is_dry() ? convolution_shape(x, w, stride, padding, dilation, transposed,
                                   output_padding, groups)
               : at::convolution(x, w, b, stride, padding, dilation, transposed,
                                 output_padding, groups);
  launch.set_flops(convolution_flops(x, w, y.sizes(), transposed));
  return launch.result(y);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input,
    const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  Launch launch("aten::convolution_backward");
  const at::Tensor grad = launch.read(grad_output);
  const at::Tensor x = launch.read(input);
  const at::Tensor w = launch.read(weight);
  launch.start();
  const std::vector<int64_t> bias_sizes{transposed ? w.size(1) * groups
                                                   : w.size(0)};
  at::Tensor grad_x;
  at::Tensor grad_w;
  at::Tensor grad_b;
  if (is_dry()) {
    grad_x = mask[0] ? at::empty_like(x) : grad_x;
    grad_w = mask[1] ? at::empty_like(w) : grad_w;
    grad_b = mask[2] ? at::empty(bias_sizes, w.options()) : grad_b;
  } else {
    std::tie(grad_x, grad_w, grad_b) = at::convolution_backward(
        grad, x, w, at::OptionalIntArrayRef(bias_sizes), stride, padding,
        dilation, transposed, output_padding, groups, mask);
  }
  Flops flops = convolution_flops(x, w, grad.sizes(), transposed);
  flops.count *= (mask[0] ? 1 : 0) + (mask[1] ? 1 : 0);
  launch.set_flops(flops);
  return {launch.result(grad_x), launch.result(grad_w), launch.result(grad_b)};
}

// Its schema has no generator, so the fallback could not pass the device's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input,
                                                  double p,
                                                  std::optional<bool> train) {
  Launch launch("aten::native_dropout");
  const at::Tensor x = launch.read(input);
  launch.start();
  if (is_dry()) {
    return {launch.result(at::empty_like(x)),
            launch.result(at::empty_like(x, x.options().dtype(at::kBool)))};
  }
  if (!train.value_or(true) || x.numel() == 0) {
    auto [kept, mask] = at::native_dropout(x, p, train);
    return {launch.result(kept), launch.result(mask)};
  }
  const at::Tensor mask =
      at::empty_like(x, x.options().dtype(at::kBool),
                     at::MemoryFormat::Contiguous)
          .bernoulli_(1 - p, drawing_generator(launch.device().index()));
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {launch.result(x.mul(mask).mul_(scale)), launch.result(mask)};
}

// The fused cells: an input gate's part, a hidden state's part, biases.

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates,
    const at::Tensor& cx, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  Launch launch("aten::_thnn_fused_lstm_cell");
  at::Tensor gates = launch.read(input_gates);
  const at::Tensor hidden = launch.read(hidden_gates);
  const at::Tensor c = launch.read(cx);
  const at::Tensor b1 = launch.read(optional(input_bias));
  const at::Tensor b2 = launch.read(optional(hidden_bias));
  launch.start();
  gates = gates + hidden;
  if (b1.defined()) {
    gates = gates + b1 + b2;
  }
  const auto parts = gates.chunk(4, 1);
  const at::Tensor in = parts[0].sigmoid();
  const at::Tensor forget = parts[1].sigmoid();
  const at::Tensor cell = parts[2].tanh();
  const at::Tensor out = parts[3].sigmoid();
  const at::Tensor cy = forget * c + in * cell;
  const at::Tensor hy = out * cy.tanh();
  return {launch.result(hy), launch.result(cy),
          launch.result(at::cat({in, forget, cell, out}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
    const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace,
    bool has_bias) {
  Launch launch("aten::_thnn_fused_lstm_cell_backward_impl");
  at::Tensor gh = launch.read(optional(grad_hy));
  at::Tensor gc = launch.read(optional(grad_cy));
  const at::Tensor c_before = launch.read(cx);
  const at::Tensor c = launch.read(cy);
  const auto gates = launch.read(workspace).chunk(4, 1);
  launch.start();
  if (!gh.defined() && !gc.defined()) {
    return {};
  }
  gh = gh.defined() ? gh : at::zeros_like(c);
  gc = gc.defined() ? gc : at::zeros_like(c);
  const at::Tensor tanh_c = c.tanh();
  const at::Tensor g_cell = gc + gh * gates[3] * (1 - tanh_c * tanh_c);
  const auto through_sigmoid = [](const at::Tensor& g, const at::Tensor& y) {
    return g * y * (1 - y);
  };
  const at::Tensor grad_gates =
      at::cat({through_sigmoid(g_cell * gates[2], gates[0]),
               through_sigmoid(g_cell * c_before, gates[1]),
               g_cell * gates[0] * (1 - gates[2] * gates[2]),
               through_sigmoid(gh * tanh_c, gates[3])},
              1);
  return {launch.result(grad_gates), launch.result(g_cell * gates[1]),
          has_bias ? launch.result(grad_gates.sum(0)) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates,
                                            const at::Tensor& hidden_gates,
                                            const at::Tensor& hx,
                                            const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  Launch launch("aten::_thnn_fused_gru_cell");
  at::Tensor input = launch.read(input_gates);
  at::Tensor hidden = launch.read(hidden_gates);
  const at::Tensor h = launch.read(hx);
  const at::Tensor b1 = launch.read(optional(input_bias));
  const at::Tensor b2 = launch.read(optional(hidden_bias));
  launch.start();
  if (b1.defined()) {
    input = input + b1;
    hidden = hidden + b2;
  }
  const auto from_input = input.chunk(3, 1);
  const auto from_hidden = hidden.chunk(3, 1);
  const at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const at::Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const at::Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  const at::Tensor hy = fresh + update * (h - fresh);
  return {launch.result(hy),
          launch.result(at::cat({reset, update, fresh, h, from_hidden[2]}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
gru_cell_backward(const at::Tensor& grad_hy, const at::Tensor& workspace,
                  bool has_bias) {
  Launch launch("aten::_thnn_fused_gru_cell_backward");
  const at::Tensor grad = launch.read(grad_hy);
  const auto saved = launch.read(workspace).chunk(5, 1);
  launch.start();
  const at::Tensor& reset = saved[0];
  const at::Tensor& update = saved[1];
  const at::Tensor& fresh = saved[2];
  const at::Tensor g_update = grad * (saved[3] - fresh) * update * (1 - update);
  const at::Tensor g_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const at::Tensor g_reset = g_fresh * saved[4] * reset * (1 - reset);
  const at::Tensor grad_input = at::cat({g_reset, g_update, g_fresh}, 1);
  const at::Tensor grad_hidden =
      at::cat({g_reset, g_update, g_fresh * reset}, 1);
  return {launch.result(grad_input), launch.result(grad_hidden),
          launch.result(grad * update),
          has_bias ? launch.result(grad_input.sum(0)) : at::Tensor(),
          has_bias ? launch.result(grad_hidden.sum(0)) : at::Tensor()};
}

}  // namespace
}  // namespace dataparallel::simulated

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  namespace sim = dataparallel::simulated;
  library.impl("empty.memory_format", sim::empty_memory_format);
  library.impl("empty_strided", sim::empty_strided);
  library.impl("_copy_from", sim::copy_from);
  library.impl("_foreach_copy_", sim::foreach_copy);
  library.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  library.impl("_local_scalar_dense", sim::local_scalar_dense);
  library.impl("as_strided", sim::as_strided);
  library.impl("set_.source_Storage_storage_offset", sim::set_storage_offset);
  library.impl("set_.source_Storage", sim::set_storage);
  library.impl("set_.source_Tensor", sim::set_tensor);
  library.impl("set_", sim::set_nothing);
  library.impl("record_stream", sim::record_stream);
  library.impl("_has_compatible_shallow_copy_type", sim::shallow_copies);
  library.impl("_fused_sdp_choice", sim::math_attention);
  library.impl("convolution_overrideable", sim::convolution);
  library.impl("convolution_backward_overrideable", sim::convolution_backward);
  library.impl("native_dropout", sim::native_dropout);
  library.impl("_thnn_fused_lstm_cell", sim::lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", sim::lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", sim::gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", sim::gru_cell_backward);
}

// A copy takes conjugated and negated views as they are: torch resolves these
// by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type",
               dataparallel::simulated::shallow_copies);
}

// What a sparse tensor is made of, read from it without a launch.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  namespace sim = dataparallel::simulated;
  using at::sparse::get_sparse_impl;
  const auto sparse_dim = [](const at::Tensor& self) -> int64_t {
    return get_sparse_impl(self)->sparse_dim();
  };
  const auto dense_dim = [](const at::Tensor& self) -> int64_t {
    return get_sparse_impl(self)->dense_dim();
  };
  library.impl("sparse_dim", sparse_dim);
  library.impl("_dimI", sparse_dim);
  library.impl("dense_dim", dense_dim);
  library.impl("_dimV", dense_dim);
  library.impl("_nnz", [](const at::Tensor& self) -> int64_t {
    return get_sparse_impl(self)->nnz();
  });
  library.impl("is_coalesced", [](const at::Tensor& self) {
    return get_sparse_impl(self)->coalesced();
  });
  library.impl("_coalesced_", [](at::Tensor& self, bool on) -> at::Tensor& {
    get_sparse_impl(self)->set_coalesced(on);
    return self;
  });
  const auto indices = [](const at::Tensor& self) {
    return get_sparse_impl(self)->indices().alias();
  };
  const auto values = [](const at::Tensor& self) {
    return get_sparse_impl(self)->values().alias();
  };
  library.impl("_indices", indices);
  library.impl("indices", indices);
  library.impl("_values", values);
  library.impl("values", values);
  library.impl("copy_", sim::copy_sparse);
  library.impl("copy_sparse_to_sparse_", sim::copy_sparse);
  library.impl("_has_compatible_shallow_copy_type", sim::shallow_copies);
}
