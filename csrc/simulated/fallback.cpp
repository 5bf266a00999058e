#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

#include "simulated/clock.h"
#include "simulated/device.h"
#include "simulated/flops.h"
#include "simulated/memory.h"
#include "simulated/shapes.h"
#include "simulated/tensors.h"

// Note [The fallback]
//
// Every operator that has no kernel of its own for simulated devices comes
// here, boxed: its simulated tensors are replaced by CPU tensors over the same
// memory, the operator is called again (it now lands at the CPU's kernel), and
// what it returns is made simulated. The schema says what is written; operators
// that only make views are no kernels, so that they neither count nor race.

namespace dataparallel::simulated {
namespace {

/// Operators with tensor arguments that belong on the CPU, as on CUDA.
bool takes_cpu_tensors(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index",
      "aten::index_put",
      "aten::index_put_",
      "aten::_index_put_impl_",
      "aten::_unsafe_index",
      "aten::_pack_padded_sequence",
      "aten::_pack_padded_sequence_backward",
      "aten::_pad_packed_sequence",
  };
  return names.count(name) > 0;
}

/// Arguments that are written though the schema does not say so.
bool writes_unsaid(const std::string& name, const std::string& argument) {
  return name == "aten::native_batch_norm" &&
         (argument == "running_mean" || argument == "running_var");
}

bool only_views(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) {
    return false;
  }
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) {
      return false;
    }
  }
  return true;
}

bool is_training(const c10::FunctionSchema& schema,
                 const torch::jit::Stack& stack, size_t base) {
  const auto index = schema.argumentIndexWithName("training");
  return !index.has_value() || stack[base + *index].toBool();
}

// Shapes only: torch's meta kernel, or ours. What has none and only writes into
// its arguments changes no shapes.
void run_dry(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  if (run_shapes(schema.name(), stack, count)) {
    return;
  }
  const bool in_place = schema.name().back() == '_';
  if (in_place && !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    const c10::IValue self = torch::jit::last(stack, count)[0];
    torch::jit::drop(stack, count);
    if (!schema.returns().empty()) {
      stack.push_back(self);
    }
    return;
  }
  try {
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, schema.name(),
        ": not in a dry run (simulated::Options().dry_run): its result's shape "
        "depends on values, or torch has no meta kernel for it; it says: ",
        error.what_without_backtrace());
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet,
              torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  const size_t count = schema.arguments().size();
  const size_t base = stack->size() - count;
  Launch launch(name, !only_views(schema));
  if (takes_cpu_tensors(name)) {
    launch.allow_cpu();
  }
  if (Clock::is_on()) {
    launch.set_flops(
        flops_of(name, torch::jit::last(*stack, schema.arguments().size())));
  }
  const bool training = is_training(schema, *stack, base);
  std::optional<size_t> generator;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[base + i];
    const c10::Argument& argument = schema.arguments()[i];
    const bool write =
        (argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
         (training || name.find("batch_norm") == std::string::npos)) ||
        (training && writes_unsaid(name, argument.name()));
    const auto view = [&](const at::Tensor& tensor) {
      return write ? launch.write(tensor) : launch.read(tensor);
    };
    if (value.isTensor()) {
      value = view(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        views.push_back(view(tensor));
      }
      value = std::move(views);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const std::optional<at::Tensor> tensor :
           value.toOptionalTensorList()) {
        views.push_back(tensor.has_value() ? std::optional(view(*tensor))
                                           : std::nullopt);
      }
      value = std::move(views);
    } else if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      launch.on(value.toDevice());
      value = c10::Device(is_dry() ? c10::kMeta : c10::kCPU);
    } else if (argument.name() == "pin_memory" && value.isBool()) {
      value = false;
    } else if (argument.name() == "generator") {
      generator = base + i;
    }
  }
  if (generator.has_value()) {
    c10::IValue& value = (*stack)[*generator];
    if (is_dry()) {
      value = c10::IValue();
    } else if (value.isNone()) {
      value = drawing_generator(launch.device().index());
    } else if (value.toGenerator().device().type() == kDeviceType) {
      value = drawing_generator(value.toGenerator());
    }
  }
  launch.start();
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::autocast_dispatch_keyset);
    if (is_dry()) {
      run_dry(op, *stack);
    } else {
      op.callBoxed(stack);
    }
  }
  const size_t returns = stack->size() - schema.returns().size();
  launch.finish();
  for (size_t i = returns; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = launch.result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        results.push_back(launch.result(tensor));
      }
      value = std::move(results);
    }
  }
}

}  // namespace
}  // namespace dataparallel::simulated

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<
                   &dataparallel::simulated::fallback>());
}
// Torch would serve these by their `out` forms with a scalar as `out`, which
// the CPU resizes on the way to the result, and warns.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"mse_loss", "smooth_l1_loss"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<
                           &dataparallel::simulated::fallback>());
  }
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<
                   &dataparallel::simulated::fallback>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
