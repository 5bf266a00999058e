#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/state_collector.h"
#include "checkpoint/zip.h"

namespace dataparallel::checkpoint {

/// The attributes of a TorchScript module that belong to its state_dict.
struct ScriptClass {
  bool is_module = false;
  std::vector<std::string> parameters;
  std::vector<std::string> buffers;
};

/// A TorchScript archive, or one that `torch::save` made of a C++ object:
/// data.pkl holds the modules, the code says which of their attributes are
/// parameters and buffers.
class Script {
 public:
  /// `root` is the folder of data.pkl.
  Script(ZipArchive& zip, std::string root);

  /// Whether `torch::save` made it.
  bool is_archive(const c10::IValue& value);

  /// What the `state_dict()` of the module in data.pkl gives; of a C++ archive
  /// all that was written, under dotted names.
  c10::IValue state_dict(const c10::IValue& value, uint64_t budget_bytes);

 private:
  ScriptClass find_class(const std::string& name);
  void collect(const c10::IValue& module, const std::string& prefix,
               bool everything, StateCollector& collector);

  ZipArchive& zip_;
  std::string root_;
  std::unordered_map<std::string, std::string> code_;
  std::unordered_map<std::string, ScriptClass> classes_;
};

}  // namespace dataparallel::checkpoint
