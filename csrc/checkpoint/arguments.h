#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "checkpoint/storages.h"

// What a pickle hands to torch's functions, checked: anything else fails, and
// the message says `what` it was.
namespace dataparallel::checkpoint {

[[noreturn]] void wrong(const char* what, const c10::IValue& value,
                        const char* expected);

int64_t to_int(const c10::IValue& value, const char* what);
bool to_bool(const c10::IValue& value, const char* what);
const at::Tensor& to_tensor(const c10::IValue& value, const char* what);

/// A tensor that another one is made of, whose elements are gone through: a
/// dense one that has no more of them than its memory.
const at::Tensor& to_part(const c10::IValue& value, const char* what);

StorageRef& to_storage(const c10::IValue& value);

/// The text in an opaque constant: "float32" of `torch.float32`.
std::string to_constant(const c10::IValue& value, const char* class_name);
at::ScalarType to_dtype(const c10::IValue& value);

/// The elements of a tuple or a list.
c10::ArrayRef<c10::IValue> to_elements(const c10::IValue& value,
                                       const char* what);

/// The ints of a tuple, a list or a `torch.Size`.
std::vector<int64_t> to_ints(const c10::IValue& value, const char* what);

/// Fails where there are fewer arguments.
void need(c10::ArrayRef<c10::IValue> args, size_t least, const char* what);

}  // namespace dataparallel::checkpoint
