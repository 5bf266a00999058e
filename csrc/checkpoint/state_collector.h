#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>

namespace dataparallel::checkpoint {

/// A state_dict while it is put together. Modules can be shared, so a small
/// file can describe a state_dict of any size: it may take `budget_bytes`,
/// which counts down.
class StateCollector {
 public:
  explicit StateCollector(uint64_t& budget_bytes);

  /// A parameter or buffer, detached; undefined tensors are none.
  void add_tensor(const std::string& name, const at::Tensor& tensor);
  void add(const std::string& name, const c10::IValue& value);

  /// Counts a module of that name. Fails where the budget is used up.
  void spend(const std::string& name);

  c10::impl::GenericDict take() { return std::move(result_); }

 private:
  uint64_t& budget_bytes_;
  c10::impl::GenericDict result_;
};

}  // namespace dataparallel::checkpoint
