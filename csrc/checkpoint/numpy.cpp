#include "checkpoint/numpy.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/storages.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {

std::optional<NumpyType> numpy_type(const c10::IValue& value) {
  static const std::unordered_map<std::string, at::ScalarType> table = {
      {"b1", at::kBool},         {"c16", at::kComplexDouble},
      {"c8", at::kComplexFloat}, {"f2", at::kHalf},
      {"f4", at::kFloat},        {"f8", at::kDouble},
      {"i1", at::kChar},         {"i2", at::kShort},
      {"i4", at::kInt},          {"i8", at::kLong},
      {"u1", at::kByte},         {"u2", at::kUInt16},
      {"u4", at::kUInt32},       {"u8", at::kUInt64},
  };
  const Opaque* opaque = as_opaque(value);
  if (opaque == nullptr || opaque->class_name != "numpy.dtype" ||
      opaque->args.empty() || !opaque->args[0].isString()) {
    return std::nullopt;
  }
  const auto found = table.find(opaque->args[0].toStringRef());
  if (found == table.end()) {
    return std::nullopt;
  }
  bool reversed = false;
  if (opaque->state.isTuple()) {  // (version, byte order, ...)
    const auto& state = opaque->state.toTupleRef().elements();
    reversed = state.size() > 1 && state[1].isString() &&
               state[1].toStringRef() == ">";
  }
  return NumpyType{found->second, reversed};
}

at::Tensor numpy_array(const NumpyType& type, const std::vector<int64_t>& shape,
                       bool fortran, const std::string& bytes) {
  const size_t item = c10::elementSize(type.dtype);
  uint64_t nbytes = item;
  bool overflow = false;
  for (const int64_t size : shape) {
    overflow |= size < 0 || __builtin_mul_overflow(
                                nbytes, static_cast<uint64_t>(size), &nbytes);
  }
  if (overflow || nbytes != bytes.size()) {
    fail("a NumPy array has " + detail::count_text(bytes.size(), "byte") +
         ", which is not what its shape needs");
  }
  std::vector<int64_t> sizes = shape;
  if (fortran) {
    std::reverse(sizes.begin(), sizes.end());
  }
  at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(type.dtype));
  if (nbytes > 0) {
    std::memcpy(tensor.data_ptr(), bytes.data(), nbytes);
  }
  if (type.reversed) {
    reverse_bytes(static_cast<char*>(tensor.data_ptr()), nbytes,
                  ordered_bytes(type.dtype));
  }
  if (fortran) {
    std::vector<int64_t> axes(sizes.size());
    std::iota(axes.rbegin(), axes.rend(), 0);
    tensor = tensor.permute(axes);
  }
  return tensor;
}

at::Tensor numpy_transpose(const at::Tensor& array,
                           const std::vector<int64_t>& axes) {
  std::vector<int64_t> all(static_cast<size_t>(array.dim()));
  std::iota(all.begin(), all.end(), 0);
  if (!std::is_permutation(axes.begin(), axes.end(), all.begin(), all.end())) {
    fail("a NumPy array's axes are no permutation of its dimensions");
  }
  return array.permute(axes);
}

std::optional<c10::IValue> numpy_scalar(const NumpyType& type,
                                        const std::string& bytes) {
  if (bytes.size() != c10::elementSize(type.dtype)) {
    return std::nullopt;
  }
  const at::Tensor tensor = numpy_array(type, {}, /*fortran=*/false, bytes);
  switch (type.dtype) {
    case at::kBool:
      return c10::IValue(tensor.item<bool>());
    case at::kUInt64: {
      uint64_t value = 0;
      std::memcpy(&value, tensor.data_ptr(), sizeof(value));
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return make_opaque("builtins.int", {std::to_string(value)});
      }
      return c10::IValue(static_cast<int64_t>(value));
    }
    case at::kComplexFloat:
    case at::kComplexDouble:
      return c10::IValue(tensor.item<c10::complex<double>>());
    default:
      return tensor.is_floating_point() ? c10::IValue(tensor.item<double>())
                                        : c10::IValue(tensor.item<int64_t>());
  }
}

}  // namespace dataparallel::checkpoint
