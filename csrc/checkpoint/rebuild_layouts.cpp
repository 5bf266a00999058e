#include "checkpoint/rebuild_layouts.h"

#include <ATen/Functions.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>

#include <algorithm>

#include "checkpoint/arguments.h"
#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/view.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

at::QuantizerPtr make_quantizer(at::ScalarType dtype, at::Device device,
                                const std::vector<int64_t>& sizes,
                                c10::ArrayRef<c10::IValue> quantizer) {
  need(quantizer, 1, "a quantizer");
  const std::string scheme = to_constant(quantizer[0], "torch.qscheme");
  if (scheme == "per_tensor_affine") {
    need(quantizer, 3, "a quantizer");
    if (!quantizer[1].isDouble()) {
      wrong("a quantizer's scale", quantizer[1], "float");
    }
    return at::make_per_tensor_affine_quantizer(
        quantizer[1].toDouble(),
        to_int(quantizer[2], "a quantizer's zero point"), dtype);
  }
  const bool float_parameters = scheme == "per_channel_affine_float_qparams";
  if (scheme != "per_channel_affine" && !float_parameters) {
    fail("a quantized tensor has the unknown scheme " + scheme);
  }
  need(quantizer, 4, "a quantizer");
  const int64_t axis = to_int(quantizer[3], "a quantizer's axis");
  if (axis < 0 || axis >= static_cast<int64_t>(sizes.size())) {
    fail("a quantizer's axis " + std::to_string(axis) +
         " is none of a tensor of shape " + text_of(sizes));
  }
  const auto parameters = [&](const c10::IValue& value, const char* what) {
    at::Tensor tensor;
    if (value.isList()) {
      std::vector<double> numbers;
      for (const c10::IValue& element : value.toListRef()) {
        if (!element.isScalar()) {
          wrong(what, element, "a number");
        }
        numbers.push_back(element.toScalar().toDouble());
      }
      tensor = at::empty({static_cast<int64_t>(numbers.size())}, at::kDouble);
      std::copy(numbers.begin(), numbers.end(), tensor.data_ptr<double>());
      tensor = tensor.to(device);
    } else {
      tensor = to_part(value, what);
    }
    if (tensor.dim() != 1 ||
        tensor.size(0) != sizes[static_cast<size_t>(axis)] ||
        tensor.device() != device) {
      fail(std::string(what) + " are not one for each of the " +
           detail::count_text(
               static_cast<uint64_t>(sizes[static_cast<size_t>(axis)]),
               "channel"));
    }
    return tensor;
  };
  const at::Tensor scales = parameters(quantizer[1], "a quantizer's scales");
  const at::Tensor zero_points =
      parameters(quantizer[2], "a quantizer's zero points");
  const bool floats = float_parameters || zero_points.is_floating_point();
  return at::make_per_channel_affine_quantizer(
      scales.to(floats ? at::kFloat : at::kDouble),
      zero_points.to(floats ? at::kFloat : at::kLong), axis, dtype);
}

}  // namespace

c10::IValue rebuild_quantized(c10::ArrayRef<c10::IValue> args) {
  need(args, 6, "a quantized tensor");
  StorageRef& storage = to_storage(args[0]);
  if (!storage.dtype || !c10::isQIntType(*storage.dtype)) {
    fail("a quantized tensor's storage has no quantized dtype");
  }
  const ViewOptions view{*storage.dtype, to_int(args[1], "a tensor's offset"),
                         to_ints(args[2], "a tensor's shape"),
                         to_ints(args[3], "a tensor's strides")};
  check_view(view, storage.nbytes);
  const c10::Device device = storage.storage.device();
  if (device.is_meta()) {  // which quantized tensors cannot be
    return view_of(storage, view);
  }
  // Not by torch's own functions, all of which warn that they will be removed.
  const auto key =
      at::TensorOptions().dtype(view.dtype).device(device).computeDispatchKey();
  const at::Tensor tensor = at::detail::make_tensor<at::QTensorImpl>(
      c10::Storage(storage.storage), c10::DispatchKeySet(key),
      c10::scalarTypeToTypeMeta(view.dtype),
      make_quantizer(view.dtype, device, view.sizes,
                     to_elements(args[4], "a quantizer")));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      view.sizes, view.strides,
      view.offset + static_cast<int64_t>(storage.base_bytes /
                                         c10::elementSize(view.dtype)));
  return tensor;
}

c10::IValue rebuild_sparse(const std::string& layout,
                           c10::ArrayRef<c10::IValue> data) {
  const bool coo = layout == "sparse_coo";
  const size_t values_at = coo ? 1 : 2;
  need(data, values_at + 2, "a sparse tensor");
  const at::Tensor indices = to_part(data[0], "a sparse tensor's index");
  const at::Tensor values = to_part(data[values_at], "a sparse tensor's value");
  const auto sizes = to_ints(data[values_at + 1], "a sparse tensor's shape");
  // Sizes may be as large as they like, but not too large to multiply.
  check_view({at::kByte, 0, sizes, std::vector<int64_t>(sizes.size(), 0)}, 1);
  const bool is_meta = values.device().is_meta();
  if (coo) {
    std::optional<bool> coalesced;
    if (data.size() > 3 && !data[3].isNone()) {
      coalesced = to_bool(data[3], "is_coalesced");
    }
    if (!is_meta) {
      at::_validate_sparse_coo_tensor_args(indices, values, sizes, coalesced,
                                           /*check_pinning=*/false);
    }
    return at::_sparse_coo_tensor_unsafe(indices, values, sizes,
                                         values.options().layout(at::kSparse),
                                         coalesced);
  }
  const at::Layout kind = layout == "sparse_csr"   ? at::kSparseCsr
                          : layout == "sparse_csc" ? at::kSparseCsc
                          : layout == "sparse_bsr" ? at::kSparseBsr
                          : layout == "sparse_bsc" ? at::kSparseBsc
                                                   : at::kStrided;
  if (kind == at::kStrided) {
    fail("a sparse tensor has the unknown layout " + layout);
  }
  const at::Tensor plain = to_part(data[1], "a sparse tensor's index");
  if (!is_meta) {
    at::_validate_sparse_compressed_tensor_args(indices, plain, values, sizes,
                                                kind, /*check_pinning=*/false);
  }
  const at::Tensor made = at::_sparse_compressed_tensor_unsafe(
      indices, plain, values, sizes, values.options().layout(kind));
  // The file says it of the values alone.
  return made.requires_grad_(data[values_at].toTensor().requires_grad());
}

/// A nested tensor: every piece must lie in the buffer.
c10::IValue rebuild_nested(c10::ArrayRef<c10::IValue> args) {
  need(args, 4, "a nested tensor");
  const at::Tensor buffer = to_part(args[0], "a nested tensor's buffer");
  const at::Tensor sizes = to_part(args[1], "a nested tensor's sizes");
  const at::Tensor strides = to_part(args[2], "a nested tensor's strides");
  const at::Tensor offsets = to_part(args[3], "a nested tensor's offsets");
  for (const at::Tensor& tensor : {buffer, sizes, strides, offsets}) {
    if (tensor.device().is_meta()) {
      return buffer;
    }
  }
  for (const at::Tensor& tensor : {sizes, strides, offsets}) {
    if (tensor.scalar_type() != at::kLong || !tensor.device().is_cpu()) {
      fail("a nested tensor's sizes are not of dtype int64 on the CPU");
    }
  }
  if (buffer.dim() != 1 || sizes.dim() != 2 || offsets.dim() != 1 ||
      !sizes.sizes().equals(strides.sizes()) ||
      offsets.size(0) != sizes.size(0)) {
    fail("a nested tensor's sizes, strides and offsets do not fit together");
  }
  const auto rows = [](const at::Tensor& table, int64_t row) {
    const at::Tensor line = table.select(0, row).contiguous();
    return std::vector<int64_t>(line.data_ptr<int64_t>(),
                                line.data_ptr<int64_t>() + line.numel());
  };
  for (int64_t i = 0; i < sizes.size(0); ++i) {
    check_view({at::kByte, offsets[i].item<int64_t>(), rows(sizes, i),
                rows(strides, i)},
               static_cast<uint64_t>(buffer.numel()));
  }
  return at::_nested_view_from_buffer(buffer.contiguous(), sizes, strides,
                                      offsets);
}

}  // namespace dataparallel::checkpoint
