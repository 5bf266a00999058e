#include "simulated/shapes.h"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <ATen/native/ConvUtils.h>

#include <functional>
#include <map>
#include <vector>

namespace dataparallel::simulated {
namespace {

using Arguments = at::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;
using Shape = std::function<Results(Arguments)>;

at::Tensor like(const at::Tensor& tensor) {
  return at::empty_like(tensor);
}

/// New memory of the options of `tensor`.
at::Tensor sized(at::IntArrayRef sizes, const at::Tensor& tensor) {
  return at::empty(sizes, tensor.options());
}

at::Tensor undefined_unless(bool wanted, const at::Tensor& tensor) {
  return wanted ? tensor : at::Tensor();
}

/// As argument `i`: elementwise operators, and gradients of an input.
Shape as(size_t i) {
  return [i](Arguments in) -> Results { return {like(in[i].toTensor())}; };
}

/// Statistics are kept in float32 where numbers are shorter.
at::TensorOptions statistics(const at::Tensor& input) {
  return input.options().dtype(at::toOpMathType(input.scalar_type()));
}

bool flag(const c10::IValue& mask, size_t i) {
  return mask.toBoolList().get(i);
}

Results batch_norm(Arguments in) {
  const at::Tensor x = in[0].toTensor();
  const int64_t saved = in[5].toBool() ? x.size(1) : 0;
  return {like(x), at::empty({saved}, statistics(x)),
          at::empty({saved}, statistics(x))};
}

// (grad_out, input, weight, ..., train, eps, mask)
Results batch_norm_backward(Arguments in) {
  const at::Tensor x = in[1].toTensor();
  const bool affine = in[2].isTensor() && in[2].toTensor().defined();
  const auto channels = [&](bool wanted) {
    return undefined_unless(wanted,
                            sized({x.size(1)}, affine ? in[2].toTensor() : x));
  };
  return {undefined_unless(flag(in[9], 0), like(x)), channels(flag(in[9], 1)),
          channels(flag(in[9], 2))};
}

// (input, normalized_shape, weight, bias, eps)
Results layer_norm(Arguments in) {
  const at::Tensor x = in[0].toTensor();
  std::vector<int64_t> rows = x.sizes().vec();
  for (size_t i = 0; i < in[1].toIntVector().size(); ++i) {
    rows[rows.size() - 1 - i] = 1;
  }
  return {like(x), at::empty(rows, statistics(x)),
          at::empty(rows, statistics(x))};
}

// (grad_out, input, normalized_shape, mean, rstd, weight, bias, mask)
Results layer_norm_backward(Arguments in) {
  const at::Tensor x = in[1].toTensor();
  const auto parameter = [&](bool wanted) {
    return undefined_unless(wanted, sized(in[2].toIntVector(), x));
  };
  return {undefined_unless(flag(in[7], 0), like(x)), parameter(flag(in[7], 1)),
          parameter(flag(in[7], 2))};
}

// (input, weight, bias, N, C, HxW, groups, eps)
Results group_norm(Arguments in) {
  const at::Tensor x = in[0].toTensor();
  const std::vector<int64_t> groups{in[3].toInt(), in[6].toInt()};
  return {like(x), at::empty(groups, statistics(x)),
          at::empty(groups, statistics(x))};
}

// (grad_out, input, mean, rstd, weight, N, C, HxW, groups, mask)
Results group_norm_backward(Arguments in) {
  const at::Tensor x = in[1].toTensor();
  const auto parameter = [&](bool wanted) {
    return undefined_unless(wanted, sized({in[6].toInt()}, x));
  };
  return {undefined_unless(flag(in[9], 0), like(x)), parameter(flag(in[9], 1)),
          parameter(flag(in[9], 2))};
}

// (grad_out, indices, num_weights, ...)
Results embedding_backward(Arguments in) {
  const at::Tensor grad = in[0].toTensor();
  return {sized({in[2].toInt(), grad.size(-1)}, grad)};
}

Results index_select(Arguments in) {
  const at::Tensor x = in[0].toTensor();
  std::vector<int64_t> sizes = x.sizes().vec();
  if (!sizes.empty()) {
    sizes[c10::maybe_wrap_dim(in[1].toInt(), x.dim())] =
        in[2].toTensor().numel();
  }
  return {sized(sizes, x)};
}

Results adaptive_pool(Arguments in) {
  const at::Tensor x = in[0].toTensor();
  std::vector<int64_t> sizes = x.sizes().vec();
  const auto pooled = in[1].toIntVector();
  std::copy(pooled.begin(), pooled.end(),
            sizes.end() - static_cast<int64_t>(pooled.size()));
  return {
      at::empty(sizes, x.options().memory_format(x.suggest_memory_format()))};
}

Results where(Arguments in) {
  const at::Tensor a = in[1].toTensor();
  const at::Tensor b = in[2].toTensor();
  const auto sizes = at::infer_size_dimvector(
      at::infer_size_dimvector(in[0].toTensor().sizes(), a.sizes()), b.sizes());
  return {at::empty(sizes, a.options().dtype(at::result_type(a, b)))};
}

// (input, dim, correction, keepdim)
Results variance(Arguments in) {
  std::optional<std::vector<int64_t>> dims;
  if (!in[1].isNone()) {
    dims = in[1].toIntVector();
  }
  return {at::sum(in[0].toTensor(),
                  dims.has_value() ? at::OptionalIntArrayRef(*dims)
                                   : at::OptionalIntArrayRef(),
                  in[3].toBool())};
}

// (input, target, reduction, ...)
Results loss(Arguments in) {
  const at::Tensor x = in[0].toTensor();
  return {in[2].toInt() == at::Reduction::None
              ? at::empty(at::infer_size_dimvector(x.sizes(),
                                                   in[1].toTensor().sizes()),
                          x.options())
              : sized({}, x)};
}

Results variance_and_mean(Arguments in) {
  return {variance(in)[0], variance(in)[0]};
}

// (input), or (input, out)
Results absolute(Arguments in) {
  const at::Tensor x = in[0].toTensor();
  return {in.size() == 1 ? like(x) : in[1].toTensor().resize_(x.sizes())};
}

Results log_sigmoid(Arguments in) {
  return {like(in[0].toTensor()), like(in[0].toTensor())};
}

const std::map<std::string, Shape>& shapes() {
  static const std::map<std::string, Shape> table{
      {"aten::abs", absolute},
      {"aten::relu", as(0)},
      {"aten::hardtanh", as(0)},
      {"aten::hardswish", as(0)},
      {"aten::hardswish_backward", as(1)},
      {"aten::glu_backward", as(1)},
      {"aten::_prelu_kernel", as(0)},
      {"aten::flip", as(0)},
      {"aten::roll", as(0)},
      {"aten::mse_loss_backward", as(1)},
      {"aten::smooth_l1_loss_backward", as(1)},
      {"aten::huber_loss", loss},
      {"aten::huber_loss_backward", as(1)},
      {"aten::log_sigmoid_forward", log_sigmoid},
      {"aten::log_sigmoid_backward", as(1)},
      {"aten::_adaptive_avg_pool2d_backward", as(1)},
      {"aten::native_dropout_backward", as(0)},
      {"aten::native_batch_norm", batch_norm},
      {"aten::native_batch_norm_backward", batch_norm_backward},
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", layer_norm_backward},
      {"aten::native_group_norm", group_norm},
      {"aten::native_group_norm_backward", group_norm_backward},
      {"aten::embedding_dense_backward", embedding_backward},
      {"aten::index_select", index_select},
      {"aten::_adaptive_avg_pool2d", adaptive_pool},
      {"aten::where", where},
      {"aten::var", variance},
      {"aten::var_mean", variance_and_mean},
      {"aten::std", variance},
  };
  return table;
}

}  // namespace

bool run_shapes(const std::string& name, torch::jit::Stack& stack,
                size_t arguments) {
  const auto found = shapes().find(name);
  if (found == shapes().end()) {
    return false;
  }
  Results results = found->second(torch::jit::last(stack, arguments));
  torch::jit::drop(stack, arguments);
  for (c10::IValue& result : results) {
    stack.push_back(std::move(result));
  }
  return true;
}

at::Tensor convolution_shape(const at::Tensor& input, const at::Tensor& weight,
                             at::IntArrayRef stride, at::IntArrayRef padding,
                             at::IntArrayRef dilation, bool transposed,
                             at::IntArrayRef output_padding, int64_t groups) {
  const auto sizes =
      transposed ? at::native::conv_input_size(input.sizes(), weight.sizes(),
                                               padding, output_padding, stride,
                                               dilation, groups)
                 : at::native::conv_output_size(input.sizes(), weight.sizes(),
                                                padding, stride, dilation);
  const bool channels_last =
      input.dim() == 4 &&
      (input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
       weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast);
  return at::empty(sizes, input.options().memory_format(
                              channels_last ? at::MemoryFormat::ChannelsLast
                                            : at::MemoryFormat::Contiguous));
}

}  // namespace dataparallel::simulated
