#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/heap.h"
#include "checkpoint/state_collector.h"

namespace dataparallel::checkpoint {

// Note [What a pickled module tells]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A module's state_dict is what its `_parameters`, `_buffers` and `_modules`
// hold, unless its class has code for it (`get_extra_state`, `state_dict`,
// `_save_to_state_dict`), which is not in the file. So:
// - Classes that the library does not know are believed to have none: most
//   have none, and nothing in the file tells.
// - torch's own classes are known: those that have such code, mostly quantized
//   ones, stay opaque. So do modules with hooks that change the state_dict.
// - What is registered but is no tensor and no module (a lazy module's
//   parameter, a submodule of which only other things than its `__dict__` were
//   pickled) is in the state_dict, opaque, under its own name.
// Whatever is opaque, `opaque_entries` lists.

/// Gives for pickled `nn.Module`s what their `state_dict()` gives: parameters
/// and persistent buffers, detached, under dotted names.
class Modules {
 public:
  /// The new names may take `budget_bytes` in all.
  Modules(const Heap& heap, uint64_t budget_bytes)
      : heap_(heap), budget_bytes_(budget_bytes) {}

  /// The state_dict of a module; another value as it is. Fails where a module
  /// contains itself, and where the names take more than the budget.
  c10::IValue replace(const c10::IValue& value);

  /// Those of the modules replaced.
  const std::set<std::string>& classes() const { return classes_; }

 private:
  struct Module;

  std::optional<Module> as_module(const c10::IValue& value) const;
  std::optional<c10::impl::GenericDict> dict_of(const c10::IValue& value) const;
  void collect(const c10::IValue& value, const Module& module,
               const std::string& prefix, StateCollector& collector);
  void collect_tensors(const c10::impl::GenericDict& tensors,
                       const std::string& prefix, StateCollector& collector,
                       const std::unordered_set<std::string>& left_out) const;

  const Heap& heap_;
  uint64_t budget_bytes_;
  std::set<std::string> classes_;
  std::unordered_map<const void*, c10::IValue> replaced_;
  std::unordered_set<const void*> on_the_way_;
};

}  // namespace dataparallel::checkpoint
