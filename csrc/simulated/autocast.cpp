#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

// Autocast on simulated devices: torch's own lists of operators, the same that
// CUDA uses.

// torch's macros name its types without their namespace, and which ones they
// name differs between versions.
using namespace at;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define DATAPARALLEL_LOWER_PRECISION(...) \
  KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define DATAPARALLEL_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define DATAPARALLEL_FP32_SET_OPT_DTYPE(...) \
  KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define DATAPARALLEL_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(DATAPARALLEL_LOWER_PRECISION)
  AT_FORALL_FP32(DATAPARALLEL_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(DATAPARALLEL_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(
      KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(DATAPARALLEL_PROMOTE)
}
