#include "command_line/convert_dtype.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <utility>

#include "command_line/table.h"
#include "detail/wording.h"

namespace dataparallel::command_line {
namespace {

const std::map<std::string, at::ScalarType>& dtypes() {
  static const std::map<std::string, at::ScalarType> result = {
      {"bfloat16", at::kBFloat16},
      {"float16", at::kHalf},
      {"float32", at::kFloat},
      {"float64", at::kDouble},
      {"float8_e4m3fn", at::kFloat8_e4m3fn},
      {"float8_e5m2", at::kFloat8_e5m2},
  };
  return result;
}

/// Converts storages, each once and whole, so that views stay views.
class Converter {
 public:
  explicit Converter(at::ScalarType dtype) : dtype_(dtype) {}

  at::Tensor operator()(const at::Tensor& tensor) {
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype_) {
      return tensor;
    }
    at::Tensor& result = objects_[tensor.unsafeGetTensorImpl()];
    if (!result.defined()) {
      result = tensor.layout() == at::kStrided && tensor.has_storage() &&
                       !tensor.is_nested()
                   ? view(tensor)
                   : (tensor.is_nested() ? tensor.detach().contiguous()
                                         : tensor.detach())
                         .to(dtype_);
      result.set_requires_grad(tensor.requires_grad());
    }
    return result;
  }

 private:
  at::Tensor view(const at::Tensor& tensor) {
    const at::Tensor result = whole(tensor).as_strided(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    // Its elements were converted as they lie in memory, without their sign.
    result._set_neg(tensor.is_neg());
    return result;
  }

  /// All of the tensor's storage, converted.
  at::Tensor whole(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    at::Tensor& result =
        storages_[{storage.unsafeGetStorageImpl(), tensor.scalar_type()}];
    if (!result.defined()) {
      const auto elements =
          static_cast<int64_t>(storage.nbytes() / tensor.element_size());
      at::Tensor all = at::empty({0}, tensor.options().requires_grad(false));
      all.set_(storage, 0, {elements}, {1});
      result = all.to(dtype_);
    }
    return result;
  }

  at::ScalarType dtype_;
  std::map<const void*, at::Tensor> objects_;
  std::map<std::pair<const void*, at::ScalarType>, at::Tensor> storages_;
};

/// The elements that are numbers in memory; of a sparse tensor its values.
at::Tensor values_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? tensor.detach().contiguous().values()
         : tensor.layout() == at::kStrided ? tensor.detach()
         : tensor.layout() == at::kSparse  ? tensor.detach()._values()
                                           : tensor.detach().values();
}

double largest(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return std::numeric_limits<c10::Half>::max();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::max();
    case at::kFloat8_e4m3fn:
      return std::numeric_limits<c10::Float8_e4m3fn>::max();
    case at::kFloat8_e5m2:
      return std::numeric_limits<c10::Float8_e5m2>::max();
    case at::kFloat:
      return std::numeric_limits<float>::max();
    default:
      return std::numeric_limits<double>::max();
  }
}

/// How many finite elements lie beyond the largest number of `dtype`: torch
/// makes some of them inf, and cuts others off.
int64_t count_overflows(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!tensor.is_floating_point() || tensor.is_meta() ||
      tensor.scalar_type() == dtype) {
    return 0;
  }
  // There are no comparisons of the smaller dtypes.
  at::Tensor values = values_of(tensor);
  int64_t times = 1;
  for (int64_t dim = 0; dim < values.dim(); ++dim) {
    if (values.size(dim) > 1 && values.stride(dim) == 0) {
      times *= values.size(dim);  // one element, however often a file says
      values = values.narrow(dim, 0, 1);
    }
  }
  const at::Tensor sizes =
      (values.scalar_type() == at::kDouble ? values : values.to(at::kFloat))
          .abs();
  return sizes.gt(largest(dtype))
             .logical_and_(sizes.ne(std::numeric_limits<double>::infinity()))
             .sum()
             .item<int64_t>() *
         times;
}

/// "'a' (2 of 6 values), 'b' (1 of 1 value)"
class Overflows {
 public:
  void add(const std::string& name, const at::Tensor& tensor, int64_t count) {
    if (count > 0 && ++tensors_ <= kMost) {
      text_ += (text_.empty() ? "'" : ", '") + printable(name) + "' (" +
               std::to_string(count) + " of " +
               detail::count_text(
                   static_cast<uint64_t>(values_of(tensor).numel()), "value") +
               ")";
    }
  }

  void check(const std::string& dtype) const {
    TORCH_CHECK_VALUE(
        tensors_ == 0, "convert: --dtype ", dtype, ": values beyond ",
        fmt::format("{:.6g}", largest(dtypes().at(dtype))),
        ", its largest, in ", text_,
        tensors_ > kMost ? " and " + std::to_string(tensors_ - kMost) + " more"
                         : "",
        "; expected values that it can hold, or --allow-overflow");
  }

 private:
  static constexpr size_t kMost = 20;
  size_t tensors_ = 0;
  std::string text_;
};

}  // namespace

const std::vector<std::string>& convertible_dtypes() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, dtype] : dtypes()) {
      result.push_back(name);
    }
    return result;
  }();
  return names;
}

StateDict convert_dtype(const StateDict& dict, const std::string& dtype,
                        bool allow_overflow) {
  const at::ScalarType target = dtypes().at(dtype);
  Converter convert(target);
  StateDict converted;
  Overflows overflows;
  for (const auto& [name, value] : dict) {
    if (!value.isTensor()) {
      converted.insert(name, value);
      continue;
    }
    try {
      const at::Tensor result = convert(value.toTensor());
      if (!allow_overflow) {
        overflows.add(name, result, count_overflows(value.toTensor(), target));
      }
      converted.insert(name, result);
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(
          false, "convert: --dtype: '", name, "', of dtype ",
          c10::getDtypeNames(value.toTensor().scalar_type()).first,
          ", cannot become ", dtype, ": ", error.what_without_backtrace());
    }
  }
  overflows.check(dtype);
  converted.set_metadata(dict.metadata());
  return converted;
}

}  // namespace dataparallel::command_line
