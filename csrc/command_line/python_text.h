#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace dataparallel::command_line {

/// A value as Python prints it: `1.0`, `'text'`, `(1, 'a')`, `torch.float32`.
/// Two numbers of one text are the same, whatever their types; of tensors and
/// of objects the text says the kind alone, and "..." stands for the rest of a
/// value that holds more than a few thousand bytes.
std::string python_text(const c10::IValue& value);

/// `float32 [2, 3]`, and what else is special about it.
std::string tensor_text(const at::Tensor& tensor);

/// For a cell of a table: `dict of 3`, `float32 [2, 3]`, `'text'`; cut where
/// it is long.
std::string short_text(const c10::IValue& value);

}  // namespace dataparallel::command_line
