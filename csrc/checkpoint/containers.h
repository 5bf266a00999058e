#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

namespace dataparallel::checkpoint {

/// Python's containers hold values of any type.
inline c10::impl::GenericList new_list() {
  return c10::impl::GenericList(c10::AnyType::get());
}
inline c10::impl::GenericDict new_dict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

}  // namespace dataparallel::checkpoint
