#pragma once

#include <torch/torch.h>

#include <string>
#include <typeinfo>
#include <vector>

#include "support/catch.h"

// What tests compare by: tensors bit for bit, exceptions by type and text.

namespace test {

/// Bit for bit equal with one dtype, shape and layout, wherever they lie.
inline bool same(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    return a.defined() == b.defined();
  }
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes() ||
      a.layout() != b.layout()) {
    return false;
  }
  if (a.is_sparse()) {
    const torch::Tensor x = a.coalesce(), y = b.coalesce();
    return same(x.indices(), y.indices()) && same(x.values(), y.values());
  }
  if (a.numel() == 0) {
    return true;
  }
  const auto bytes = [](const torch::Tensor& tensor) {
    return tensor.detach()
        .cpu()
        .resolve_conj()
        .clone(at::MemoryFormat::Contiguous)
        .view({-1})
        .view(torch::kByte);
  };
  return torch::equal(bytes(a), bytes(b));
}

/// Every dtype that a batch may have.
inline std::vector<torch::ScalarType> dtypes() {
  return {torch::kBool,          torch::kUInt8,        torch::kInt8,
          torch::kInt16,         torch::kInt32,        torch::kInt64,
          torch::kUInt16,        torch::kUInt32,       torch::kUInt64,
          torch::kFloat16,       torch::kBFloat16,     torch::kFloat32,
          torch::kFloat64,       torch::kComplexHalf,  torch::kComplexFloat,
          torch::kComplexDouble, torch::kFloat8_e5m2,  torch::kFloat8_e4m3fn,
          at::kFloat8_e5m2fnuz,  at::kFloat8_e4m3fnuz, at::kFloat8_e8m0fnu};
}

/// Random bits of that dtype and shape (one dimension at least).
inline torch::Tensor random_bits(std::vector<int64_t> shape,
                                 torch::ScalarType dtype) {
  if (dtype == torch::kBool) {
    return torch::randint(0, 2, shape).to(torch::kBool);
  }
  shape.back() *= static_cast<int64_t>(c10::elementSize(dtype));
  return torch::randint(0, 256, shape, torch::kUInt8).view(dtype);
}

/// The message of the `E`, and no type derived from it, that `call` throws.
template <class E, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    if constexpr (std::is_polymorphic_v<E>) {
      CHECK(std::string(typeid(error).name()) == typeid(E).name());
    }
    if constexpr (std::derived_from<E, c10::Error>) {
      return error.what_without_backtrace();
    } else {
      return error.what();
    }
  } catch (const std::exception& error) {
    FAIL_CHECK("another type was thrown: " << error.what());
    return "";
  }
  FAIL_CHECK("nothing was thrown");
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  UNSCOPED_INFO("\"" << text << "\" should contain \"" << part << "\"");
  return text.find(part) != std::string::npos;
}

}  // namespace test
