#include "command_line/compare_tensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace dataparallel::command_line {
namespace {

// So many at a time, so that large tensors need no large temporaries.
constexpr int64_t kPieceElements = int64_t{1} << 20;
constexpr double kTwoTo64 = 18446744073709551616.0;

/// The dtype as which stored elements can be computed with.
at::ScalarType stored_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kQInt8:
      return at::kChar;
    case at::kQInt32:
      return at::kInt;
    case at::kQUInt8:
    case at::kQUInt4x2:
    case at::kQUInt2x4:
      return at::kByte;
    default:
      return dtype;
  }
}

/// A dtype of that size whose elements can be moved.
at::ScalarType bits_dtype(size_t bytes) {
  switch (bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

/// The elements of which several share a byte, one a byte.
at::Tensor unpacked(const at::Tensor& tensor, int64_t per_byte) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.storage_offset() == 0,
              "a view of a tensor of dtype ",
              c10::getDtypeNames(tensor.scalar_type()).first);
  const int64_t bits = 8 / per_byte;
  const int64_t bytes = (tensor.numel() + per_byte - 1) / per_byte;
  at::Tensor packed = at::empty({0}, at::kByte);
  packed.set_(tensor.storage(), 0, {bytes}, {1});
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < per_byte; ++i) {
    parts.push_back(
        packed.bitwise_right_shift(i * bits).bitwise_and((1 << bits) - 1));
  }
  return at::stack(parts, 1).flatten().narrow(0, 0, tensor.numel());
}

/// All elements in order, as bits.
at::Tensor bits_of(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype == at::kQUInt4x2 || dtype == at::kQUInt2x4) {
    return unpacked(tensor, dtype == at::kQUInt4x2 ? 2 : 4);
  }
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  at::Tensor bits = at::empty({0}, bits_dtype(c10::elementSize(dtype)));
  bits.set_(plain.storage(), plain.storage_offset(), plain.sizes(),
            plain.strides());
  return bits.contiguous().view({-1});
}

bool is_number(at::ScalarType dtype) {
  try {
    at::zeros({1}, bits_dtype(c10::elementSize(dtype)))
        .view(dtype)
        .to(at::kComplexDouble);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

/// The numbers that the bits are, in a dtype that has arithmetic and order.
at::Tensor numbers(const at::Tensor& bits, at::ScalarType dtype) {
  if (dtype == at::kUInt64) {
    return bits.bitwise_xor(std::numeric_limits<int64_t>::min());
  }
  return bits.view(dtype).to(c10::isComplexType(dtype) ? at::kComplexDouble
                             : c10::isIntegralType(dtype, /*includeBool=*/true)
                                 ? at::kLong
                                 : at::kDouble);
}

at::Tensor distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != at::kLong) {
    return (a - b).abs().nan_to_num(INFINITY, INFINITY);
  }
  const at::Tensor wrapped = at::maximum(a, b) - at::minimum(a, b);
  return wrapped.to(at::kDouble) + kTwoTo64 * wrapped.lt(0).to(at::kDouble);
}

void compare_piece(const at::Tensor& a, const at::Tensor& b,
                   at::ScalarType dtype, TensorDifference& result) {
  const at::Tensor p = numbers(a, dtype), q = numbers(b, dtype);
  // Of complex numbers each part.
  const bool is_complex = p.is_complex();
  const at::Tensor x = is_complex ? at::view_as_real(p) : p;
  const at::Tensor y = is_complex ? at::view_as_real(q) : q;
  const at::Tensor x_nan = x.isnan(), y_nan = y.isnan();
  at::Tensor differs =
      x.ne(y).logical_and(x_nan.logical_and(y_nan).logical_not());
  at::Tensor nan_in_one = x_nan.logical_xor(y_nan);
  if (is_complex) {
    differs = differs.any(/*dim=*/-1);
    nan_in_one = nan_in_one.any(/*dim=*/-1);
  }
  result.different += differs.sum().item<int64_t>();
  result.nan_in_one += nan_in_one.sum().item<int64_t>();
  const at::Tensor both = differs.logical_and(nan_in_one.logical_not());
  if (both.any().item<bool>()) {
    const auto most = distance(p.masked_select(both), q.masked_select(both))
                          .max()
                          .item<double>();
    result.most = std::max(result.most.value_or(0), most);
  }
}

void compare_distinct(const at::Tensor& a, const at::Tensor& b,
                      TensorDifference& result) {
  const at::Tensor x = bits_of(a), y = bits_of(b);
  const at::ScalarType dtype = stored_dtype(a.scalar_type());
  std::optional<bool> number;
  for (int64_t begin = 0; begin < x.numel(); begin += kPieceElements) {
    const int64_t size = std::min(kPieceElements, x.numel() - begin);
    const at::Tensor p = x.narrow(0, begin, size), q = y.narrow(0, begin, size);
    if (std::memcmp(p.const_data_ptr(), q.const_data_ptr(), p.nbytes()) == 0) {
      continue;
    }
    if (!number.has_value()) {
      number = is_number(dtype);
    }
    if (*number) {
      compare_piece(p, q, dtype, result);
    } else {
      result.different += p.ne(q).sum().item<int64_t>();
    }
  }
}

/// Both strided, of one dtype and shape.
void compare_elements(at::Tensor a, at::Tensor b, TensorDifference& result) {
  result.elements += a.numel();
  if (a.numel() == 0) {
    return;
  }
  // What is one element many times in both, however often a file says.
  int64_t times = 1;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) == 0 && b.stride(dim) == 0) {
      times *= a.size(dim);
      a = a.narrow(dim, 0, 1);
      b = b.narrow(dim, 0, 1);
    }
  }
  TensorDifference once;
  compare_distinct(a, b, once);
  result.different += once.different * times;
  result.nan_in_one += once.nan_in_one * times;
  if (once.most.has_value()) {
    result.most = std::max(result.most.value_or(0), *once.most);
  }
}

bool same_quantizer(const at::Tensor& a, const at::Tensor& b) {
  if (a.qscheme() != b.qscheme()) {
    return false;
  }
  if (a.qscheme() == at::kPerTensorAffine) {
    return (a.q_scale() == b.q_scale() ||
            (std::isnan(a.q_scale()) && std::isnan(b.q_scale()))) &&
           a.q_zero_point() == b.q_zero_point();
  }
  const at::Tensor x = a.q_per_channel_scales(), y = b.q_per_channel_scales();
  return a.q_per_channel_axis() == b.q_per_channel_axis() &&
         x.sizes() == y.sizes() &&
         x.eq(y)
             .logical_or(x.isnan().logical_and(y.isnan()))
             .all()
             .item<bool>() &&
         at::equal(a.q_per_channel_zero_points(),
                   b.q_per_channel_zero_points());
}

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_nested()) {
    return at::equal(a._nested_tensor_size(), b._nested_tensor_size());
  }
  return a.sizes() == b.sizes();
}

/// Of dtypes that torch cannot add, as it is.
at::Tensor coalesced(const at::Tensor& tensor) {
  try {
    return tensor.is_coalesced() ? tensor : tensor.coalesce();
  } catch (const c10::NotImplementedError&) {
    return tensor;
  }
}

/// Dense tensors that a tensor is made of; the last of a sparse one are its
/// values, those before its indices.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach();
  if (plain.is_nested()) {
    return plain.unbind();
  }
  switch (plain.layout()) {
    case at::kSparse: {
      const at::Tensor ordered = coalesced(plain);
      return {ordered._indices(), ordered._values()};
    }
    case at::kSparseCsr:
    case at::kSparseBsr:
      return {plain.crow_indices(), plain.col_indices(), plain.values()};
    case at::kSparseCsc:
    case at::kSparseBsc:
      return {plain.ccol_indices(), plain.row_indices(), plain.values()};
    default:
      return {plain};
  }
}

}  // namespace

std::string contents_of(const at::Tensor& tensor) {
  std::string contents;
  if (!tensor.defined() || tensor.is_meta()) {
    return contents;
  }
  for (at::Tensor part : parts_of(tensor)) {
    for (int64_t dim = 0; dim < part.dim(); ++dim) {
      if (part.size(dim) > 1 && part.stride(dim) == 0) {
        part = part.narrow(dim, 0, 1);
      }
    }
    if (part.numel() > 0) {
      const at::Tensor bits = bits_of(part);
      contents.append(static_cast<const char*>(bits.const_data_ptr()),
                      bits.nbytes());
    }
  }
  return contents;
}

TensorDifference compare_tensors(const at::Tensor& a, const at::Tensor& b,
                                 bool with_requires_grad) {
  TensorDifference result;
  const auto note = [&](bool same, const char* property) {
    if (!same) {
      result.properties.emplace_back(property);
    }
    return same;
  };
  if (!a.defined() || !b.defined()) {
    note(a.defined() == b.defined(), "presence");
    return result;
  }
  const bool comparable =
      note(a.scalar_type() == b.scalar_type(), "dtype") &
      (note(a.layout() == b.layout() && a.is_nested() == b.is_nested(),
            "layout") &&
       note(same_shape(a, b), "shape")) &
      note(a.is_meta() == b.is_meta(), "presence of values");
  if (with_requires_grad) {
    note(a.requires_grad() == b.requires_grad(), "requires_grad");
  }
  if (!comparable || a.is_meta()) {
    return result;
  }
  if (a.is_quantized()) {
    note(same_quantizer(a, b), "quantization");
  }
  const std::vector<at::Tensor> x = parts_of(a), y = parts_of(b);
  const size_t indices = a.layout() == at::kStrided ? 0 : x.size() - 1;
  for (size_t i = 0; i < x.size(); ++i) {
    if (i < indices) {
      if (!note(at::equal(x[i], y[i]), "indices")) {
        return result;
      }
    } else if (note(x[i].sizes() == y[i].sizes(), "block shape")) {
      compare_elements(x[i], y[i], result);
    }
  }
  return result;
}

}  // namespace dataparallel::command_line
