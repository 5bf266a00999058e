#include "simulated/flops.h"

#include <ATen/Context.h>

#include <map>

namespace dataparallel::simulated {
namespace {

/// Of a batched matrix product `[*, n, k] x [*, k, m]`.
double product(const at::Tensor& a, const at::Tensor& b) {
  const auto columns = b.dim() > 1 ? b.size(-1) : 1;
  return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(columns);
}

/// Where the two matrices are among the arguments.
struct Operands {
  size_t first;
  size_t second;
};

const std::map<std::string, Operands>& products() {
  static const std::map<std::string, Operands> table{
      {"aten::mm", {0, 1}},         {"aten::bmm", {0, 1}},
      {"aten::mv", {0, 1}},         {"aten::dot", {0, 1}},
      {"aten::vdot", {0, 1}},       {"aten::addmm", {1, 2}},
      {"aten::addmm_", {1, 2}},     {"aten::_addmm_activation", {1, 2}},
      {"aten::addmv", {1, 2}},      {"aten::addmv_", {1, 2}},
      {"aten::baddbmm", {1, 2}},    {"aten::baddbmm_", {1, 2}},
      {"aten::addbmm", {1, 2}},     {"aten::addbmm_", {1, 2}},
      {"aten::_scaled_mm", {0, 1}}, {"aten::_int_mm", {0, 1}},
  };
  return table;
}

/// Forward: scores and values, `[*, L, E] x [*, E, S]` and `[*, L, S] x
/// [*, S, V]`.
double attention(const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value) {
  const auto rows = static_cast<double>(query.numel() / query.size(-1));
  return 2.0 * rows * static_cast<double>(key.size(-2)) *
         static_cast<double>(query.size(-1) + value.size(-1));
}

}  // namespace

// Layers that torch breaks up arrive here in their parts: linear as addmm,
// einsum and matmul as bmm, the products of LSTM and GRU as addmm (their fused
// cells are bound by their bytes), attention as two bmm and a softmax.
Flops flops_of(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  const auto tensor = [&](size_t i) -> const at::Tensor& {
    return arguments[i].toTensor();
  };
  const auto found = products().find(name);
  if (found != products().end()) {
    const auto [a, b] = found->second;
    return {product(tensor(a), tensor(b)), tensor(a).scalar_type(), false};
  }
  if (name == "aten::linear") {
    return {2.0 * static_cast<double>(tensor(0).numel()) *
                static_cast<double>(tensor(1).size(0)),
            tensor(0).scalar_type(), false};
  }
  if (name.find("_scaled_dot_product_") != std::string::npos) {
    // Backward: the gradient comes first, and there are five products to two.
    const bool backward = name.find("backward") != std::string::npos;
    const size_t at = backward ? 1 : 0;
    return {(backward ? 2.5 : 1.0) *
                attention(tensor(at), tensor(at + 1), tensor(at + 2)),
            tensor(at).scalar_type(), false};
  }
  return {};
}

Flops convolution_flops(const at::Tensor& input, const at::Tensor& weight,
                        at::IntArrayRef output, bool transposed) {
  // Each element of the output (of the input, where transposed) meets one
  // filter, [channels / groups, *].
  double count = 2.0 * static_cast<double>(weight.numel() / weight.size(0));
  for (const int64_t size : transposed ? input.sizes() : output) {
    count *= static_cast<double>(size);
  }
  return {count, input.scalar_type(), true};
}

double flops_per_second(const DeviceModel& device, const Flops& flops) {
  switch (flops.dtype) {
    case at::kDouble:
    case at::kComplexDouble:
      return device.fp64_flops_per_second;
    case at::kHalf:
      return device.fp16_flops_per_second;
    case at::kBFloat16:
      return device.bf16_flops_per_second;
    default:
      return (flops.convolution ? at::globalContext().allowTF32CuDNN()
                                : at::globalContext().allowTF32CuBLAS())
                 ? device.tf32_flops_per_second
                 : device.fp32_flops_per_second;
  }
}

}  // namespace dataparallel::simulated
