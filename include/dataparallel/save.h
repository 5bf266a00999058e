#pragma once

#include <ATen/core/ivalue.h>
#include <dataparallel/export.h>
#include <dataparallel/state_dict.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace dataparallel {

/// Called while a file is written, with the bytes of tensors that have been and
/// that will be, first with 0. What it throws ends the writing, and nothing has
/// changed.
using SaveProgress = std::function<void(uint64_t done, uint64_t total)>;

/// Writes `value` (see python_values.h for what it may hold) as Python's
/// `torch.save` does, in the zip format of torch 1.6 and later, so that
/// `torch.load` reads back the same types, order, sharing, strides and
/// `requires_grad`; only a Parameter or a Buffer, which in C++ is a tensor,
/// comes back as one. Tensors may lie on any device; their storages are copied
/// to the host one at a time, and each is written once and whole, as in Python.
///
/// The file appears under its name complete or not at all: it is written to
/// a temporary name in the same folder, synced and renamed. A file that is
/// there keeps its permissions; a symbolic link keeps pointing at it. A device
/// or a pipe is written as it is.
///
/// Throws, before anything is written, `c10::ValueError` with their paths if
/// there are objects of unknown classes, and `c10::TypeError` with its path for
/// a value that has no form in Python; `CheckpointError` if the file cannot be
/// written, and then nothing has changed under its name. Not synchronised with
/// threads that change the tensors.
///
///     dataparallel::save(dataparallel::state_dict(*model), "model.pt");
DATAPARALLEL_EXPORT void save(const c10::IValue& value, const std::string& path,
                              const SaveProgress& progress = {});
/// As Python writes `module.state_dict()`: an `OrderedDict` with `_metadata`.
DATAPARALLEL_EXPORT void save(const StateDict& state_dict,
                              const std::string& path,
                              const SaveProgress& progress = {});

/// How `save_safetensors` works; setters can be chained.
class DATAPARALLEL_EXPORT SaveSafetensorsOptions {
 public:
  /// What to write as the file's `__metadata__`. Default: nothing.
  SaveSafetensorsOptions& metadata(std::map<std::string, std::string> value);
  /// Whether tensors that share memory, which the format cannot express, are
  /// each written as a copy. Default false: they are refused.
  SaveSafetensorsOptions& copy_shared(bool value);
  SaveSafetensorsOptions& progress(SaveProgress value);

  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }
  bool copy_shared() const { return copy_shared_; }
  const SaveProgress& progress() const { return progress_; }

 private:
  std::map<std::string, std::string> metadata_;
  bool copy_shared_ = false;
  SaveProgress progress_;
};

/// Writes the tensors in the safetensors format, by the reference writer's
/// order and alignment; atomic as `save`. Strides and `requires_grad` have no
/// place in the format: tensors are written contiguous.
///
/// Throws, before anything is written, `c10::ValueError`: tensors that share
/// memory, with both names; `c10::TypeError`: a value that is no dense tensor,
/// or a dtype that the format lacks; `CheckpointError` as `save`.
DATAPARALLEL_EXPORT void save_safetensors(
    const StateDict& state_dict, const std::string& path,
    const SaveSafetensorsOptions& options = {});

}  // namespace dataparallel
