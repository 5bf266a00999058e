#pragma once

#include <ATen/core/ivalue.h>
#include <dataparallel/state_dict.h>

#include <string>
#include <vector>

namespace dataparallel::command_line {

/// The keys of a checkpoint, joined by dots, that do not lead to `dict`, which
/// was found in it.
std::vector<std::string> left_out(const c10::IValue& checkpoint,
                                  const StateDict& dict);

}  // namespace dataparallel::command_line
