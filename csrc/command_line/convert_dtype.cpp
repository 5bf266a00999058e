#include "command_line/convert_dtype.h"

#include <ATen/ATen.h>

#include <map>
#include <utility>

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
      result = tensor.layout() == at::kStrided && tensor.has_storage()
                   ? view(tensor)
                   : tensor.detach().to(dtype_);
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

StateDict convert_dtype(const StateDict& dict, const std::string& dtype) {
  Converter convert(dtypes().at(dtype));
  StateDict converted;
  for (const auto& [name, value] : dict) {
    if (!value.isTensor()) {
      converted.insert(name, value);
      continue;
    }
    try {
      converted.insert(name, convert(value.toTensor()));
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(
          false, "convert: --dtype: '", name, "', of dtype ",
          c10::getDtypeNames(value.toTensor().scalar_type()).first,
          ", cannot become ", dtype, ": ", error.what_without_backtrace());
    }
  }
  converted.set_metadata(dict.metadata());
  return converted;
}

}  // namespace dataparallel::command_line
