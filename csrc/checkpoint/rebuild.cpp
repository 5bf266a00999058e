#include "checkpoint/rebuild.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "checkpoint/arguments.h"
#include "checkpoint/dropped.h"
#include "checkpoint/problem.h"
#include "checkpoint/rebuild_layouts.h"
#include "checkpoint/view.h"

namespace dataparallel::checkpoint {
namespace {

/// The complex conjugate and negative bits of a tensor; a device can have more.
void set_metadata(const at::Tensor& tensor, const c10::IValue& metadata,
                  Heap& heap) {
  if (!metadata.isGenericDict()) {
    return;
  }
  for (const auto& item : metadata.toGenericDict()) {
    const std::string name =
        item.key().isString() ? item.key().toStringRef() : "";
    const bool is_set = item.value().isBool() && item.value().toBool();
    if (name == "conj" && tensor.is_complex()) {
      tensor._set_conj(is_set);
    } else if (name == "neg") {
      tensor._set_neg(is_set);
    } else {
      drop_attribute(tensor, name, item.value(), heap);
    }
  }
}

/// Functions that older versions of torch wrote with a tensor.
void drop_hooks(const at::Tensor& tensor, const c10::IValue& hooks,
                Heap& heap) {
  const bool is_empty = hooks.isNone() || (hooks.isGenericDict() &&
                                           hooks.toGenericDict().empty());
  if (!is_empty) {
    drop_attribute(tensor, "_backward_hooks", hooks, heap);
  }
}

c10::IValue rebuild_dense(Callable function, c10::ArrayRef<c10::IValue> args,
                          Heap& heap, Storages& storages) {
  const bool v3 = function == Callable::kTensorV3;
  need(args, v3 ? 7 : 4, "a tensor");
  StorageRef& storage = to_storage(args[0]);
  const at::ScalarType dtype =
      v3 ? to_dtype(args[6]) : storage.dtype.value_or(at::kByte);
  if (c10::isQIntType(dtype)) {
    fail("a dense tensor is said to have the quantized dtype " +
         dtype_name(dtype));
  }
  storages.set_byte_order(storage, dtype);
  ViewOptions view{dtype, to_int(args[1], "a tensor's offset"),
                   to_ints(args[2], "a tensor's shape"),
                   to_ints(args[3], "a tensor's strides"),
                   args.size() > 4 && to_bool(args[4], "requires_grad")};
  const at::Tensor tensor = view_of(storage, view);
  if (args.size() > 5) {
    drop_hooks(tensor, args[5], heap);
  }
  const size_t metadata = v3 ? 7 : 6;
  if (args.size() > metadata) {
    set_metadata(tensor, args[metadata], heap);
  }
  return tensor;
}

/// `args`: data, requires_grad, hooks, state; the last two may be missing.
c10::IValue rebuild_parameter(c10::ArrayRef<c10::IValue> args,
                              bool requires_grad, Heap& heap) {
  need(args, 1, "a parameter");
  if (args.size() > 1) {
    requires_grad = to_bool(args[1], "requires_grad");
  }
  // Also of a parameter that is memory without values (a lazy module's).
  const at::Tensor tensor = to_tensor(args[0], "a parameter's data").detach();
  set_requires_grad(tensor, requires_grad);
  if (args.size() > 2) {
    drop_hooks(tensor, args[2], heap);
  }
  if (args.size() > 3) {
    drop_state(tensor, args[3], heap);
  }
  return tensor;
}

c10::IValue rebuild_on_device(c10::ArrayRef<c10::IValue> args, Heap& heap,
                              Storages& storages) {
  need(args, 4, "a tensor of a device");
  const at::Tensor data = to_tensor(args[0], "a tensor's data");
  const at::ScalarType dtype = to_dtype(args[1]);
  if (!args[2].isString() && !args[2].isDevice()) {
    wrong("a tensor's device", args[2], "str");
  }
  const std::string tag =
      args[2].isString() ? args[2].toStringRef() : args[2].toDevice().str();
  if (data.layout() != at::kStrided) {
    fail("a tensor of a device is described by a sparse one");
  }
  heap.spend(static_cast<uint64_t>(data.numel()) *
             std::max(c10::elementSize(dtype), data.itemsize()));
  const at::Tensor tensor = data.to(storages.device(tag), dtype);
  set_requires_grad(tensor, to_bool(args[3], "requires_grad"));
  return tensor;
}

c10::IValue rebuild_meta(c10::ArrayRef<c10::IValue> args) {
  need(args, 4, "a meta tensor");
  const ViewOptions view{to_dtype(args[0]), 0,
                         to_ints(args[1], "a tensor's shape"),
                         to_ints(args[2], "a tensor's strides")};
  check_view(view, UINT64_MAX);
  const at::Tensor tensor = at::empty_strided(
      view.sizes, view.strides,
      at::TensorOptions().dtype(view.dtype).device(at::kMeta));
  set_requires_grad(tensor, to_bool(args[3], "requires_grad"));
  return tensor;
}

/// A tensor subclass or one with attributes: the tensor itself; one that has no
/// memory of its own (its tensors are in its state) stays opaque.
c10::IValue rebuild_subclass(c10::ArrayRef<c10::IValue> args, Heap& heap,
                             Storages& storages) {
  need(args, 4, "a tensor of a subclass");
  const Reference* function = as_reference(args[0]);
  const Reference* type = as_reference(args[1]);
  if (function == nullptr || type == nullptr) {
    fail("a tensor of a subclass is described by no function and class");
  }
  if (function->callable == Callable::kUnknown ||
      function->callable == Callable::kFromType ||
      function->callable == Callable::kWrapperSubclass) {
    auto opaque = c10::make_intrusive<Opaque>(type->name);
    opaque->args = to_elements(args[2], "a tensor's arguments").vec();
    opaque->state = args[3];
    const c10::IValue value = from_opaque(std::move(opaque));
    heap.note(value);
    return value;
  }
  c10::IValue tensor =
      rebuild(function->callable, to_elements(args[2], "a tensor's arguments"),
              heap, storages);
  drop_class(tensor.toTensor(), type->name, heap);
  drop_state(tensor.toTensor(), args[3], heap);
  return tensor;
}

}  // namespace

c10::IValue rebuild(Callable function, c10::ArrayRef<c10::IValue> args,
                    Heap& heap, Storages& storages) {
  switch (function) {
    case Callable::kTensor:
    case Callable::kTensorV2:
    case Callable::kTensorV3:
      return rebuild_dense(function, args, heap, storages);
    case Callable::kParameter:
    case Callable::kParameterFunction:
      return rebuild_parameter(args, /*requires_grad=*/true, heap);
    case Callable::kVariable:
      return rebuild_parameter(args, /*requires_grad=*/false, heap);
    case Callable::kQuantizedTensor:
      return rebuild_quantized(args);
    case Callable::kSparseTensor:
    case Callable::kSparseCsrTensor:
      need(args, 2, "a sparse tensor");
      return rebuild_sparse(to_constant(args[0], "torch.layout"),
                            to_elements(args[1], "a sparse tensor"));
    case Callable::kNestedTensor:
      return rebuild_nested(args);
    case Callable::kDeviceTensorFromNumpy:
    case Callable::kDeviceTensorFromTensor:
      return rebuild_on_device(args, heap, storages);
    case Callable::kMetaTensor:
      return rebuild_meta(args);
    case Callable::kFromType:
      return rebuild_subclass(args, heap, storages);
    default:
      fail("this function makes no tensor");
  }
}

c10::IValue set_tensor_state(const c10::IValue& tensor,
                             const c10::IValue& state, Heap& heap,
                             Storages& storages) {
  if (state.isTuple() || state.isList()) {
    const auto parts = to_elements(state, "a tensor's state");
    if (parts.size() == 4) {  // (storage, offset, size, stride)
      return rebuild(Callable::kTensor, parts, heap, storages);
    }
    if (parts.size() == 5) {  // (data, grad, hooks, requires_grad, volatile)
      const c10::IValue variable = rebuild(
          Callable::kVariable, {parts[0], parts[3], parts[2]}, heap, storages);
      if (!parts[1].isNone()) {
        drop_attribute(variable.toTensor(), "grad", parts[1], heap);
      }
      return variable;
    }
    if (parts.size() == 3 &&
        tensor.isTensor()) {  // (requires_grad, ..., hooks)
      set_requires_grad(tensor.toTensor(), to_bool(parts[0], "requires_grad"));
      drop_hooks(tensor.toTensor(), parts[2], heap);
      return tensor;
    }
  }
  if (tensor.isTensor()) {  // attributes that somebody gave it
    drop_state(tensor.toTensor(), state, heap);
    return tensor;
  }
  fail("a tensor has a state of type " + python_type_name(state));
}

}  // namespace dataparallel::checkpoint
