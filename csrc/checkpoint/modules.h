#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace dataparallel::checkpoint {

/// Puts in the place of every pickled `nn.Module` in `value` what its
/// `state_dict()` gives: parameters and persistent buffers, detached, under
/// dotted names. Adds the classes of these modules to `classes`. Fails where
/// the new names take more than `budget_bytes`.
c10::IValue replace_modules(const c10::IValue& value,
                            std::vector<std::string>& classes,
                            uint64_t budget_bytes);

/// The attributes of a TorchScript module that belong to its state_dict.
struct ScriptClass {
  bool is_module = false;
  std::vector<std::string> parameters;
  std::vector<std::string> buffers;
};

/// Reads `class Name(Module):` and the two lists below it from the code of a
/// TorchScript archive, which is otherwise left alone.
ScriptClass find_script_class(const std::string& code, const std::string& name);

/// Knows the classes of an archive by their qualified names.
using FindScriptClass = std::function<ScriptClass(const std::string&)>;

/// What `torch.jit.load(...).state_dict()` gives for the pickled `module`;
/// with `everything`, all attributes of the module and those inside it.
c10::IValue script_state_dict(const c10::IValue& module,
                              const FindScriptClass& find_class,
                              bool everything, uint64_t budget_bytes);

}  // namespace dataparallel::checkpoint
