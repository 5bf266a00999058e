#pragma once

#include <ATen/core/ivalue.h>

#include <string>

// Tensors that are more than a view of a storage.
namespace dataparallel::checkpoint {

/// `torch._utils._rebuild_qtensor(*args)`.
c10::IValue rebuild_quantized(c10::ArrayRef<c10::IValue> args);

/// `torch._utils._rebuild_sparse_tensor(layout, data)`. Indices are checked.
c10::IValue rebuild_sparse(const std::string& layout,
                           c10::ArrayRef<c10::IValue> data);

/// `torch._utils._rebuild_nested_tensor(*args)`: every piece must lie in the
/// buffer.
c10::IValue rebuild_nested(c10::ArrayRef<c10::IValue> args);

}  // namespace dataparallel::checkpoint
