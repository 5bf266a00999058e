#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "checkpoint/heap.h"
#include "checkpoint/known.h"
#include "checkpoint/storages.h"

namespace dataparallel::checkpoint {

/// What torch's function of that kind (kDeviceTensorFrom..., kFromType,
/// kMetaTensor, kParameter, kSparseTensor, kTensorV2, ...) returns for `args`.
c10::IValue rebuild(Callable function, c10::ArrayRef<c10::IValue> args,
                    Heap& heap, Storages& storages);

/// What `__setstate__` of a tensor of torch before 0.4 does.
c10::IValue set_tensor_state(const c10::IValue& tensor,
                             const c10::IValue& state, Heap& heap,
                             Storages& storages);

}  // namespace dataparallel::checkpoint
