#pragma once

#include <ATen/core/ivalue.h>
#include <dataparallel/simulated_hardware.h>

#include <string>

namespace dataparallel::simulated {

/// Floating-point operations of an operator, a multiplication and an addition
/// being two, and the peak that they are measured by. Of operators that are not
/// in the table: none, their time is that of their bytes.
struct Flops {
  double count = 0;
  /// Of the matrices.
  at::ScalarType dtype = at::kFloat;
  /// Convolutions and matrix products have switches of their own for TF32.
  bool convolution = false;
};

Flops flops_of(const std::string& name, at::ArrayRef<c10::IValue> arguments);
/// `output`: `[N, C, *]`, of the forward.
Flops convolution_flops(const at::Tensor& input, const at::Tensor& weight,
                        at::IntArrayRef output, bool transposed);

double flops_per_second(const DeviceModel& device, const Flops& flops);

}  // namespace dataparallel::simulated
