#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "checkpoint/locations.h"
#include "checkpoint/source.h"
#include "checkpoint/storages.h"

namespace dataparallel::checkpoint {

/// A checkpoint as it was read.
struct Contents {
  c10::IValue value;
  std::string kind;
  /// The location tags of the tensors' memory, by its `StorageImpl`.
  std::unordered_map<const void*, std::string> tags;
  std::map<std::string, std::string> metadata;  ///< of safetensors
  /// The classes of pickled modules, of which state_dicts were made.
  std::set<std::string> module_classes;
};

/// The value that a pickle describes: what `cursor` sees of `source`.
Contents read_pickled(Source& source, Cursor& cursor, Storages& storages);

/// The value in `source`, whatever its format.
Contents read_contents(Source& source, Locations& locations);

// Each format's own.
Contents read_zip(Source& source, Locations& locations);
Contents read_legacy(Source& source, Locations& locations);
Contents read_safetensors(Source& source, Locations& locations);
bool is_legacy(Source& source);
bool is_safetensors(Source& source);

/// What is in `contents`, which were read onto the meta device.
CheckpointInfo describe(const Contents& contents);

/// What a file of that size may make the reader copy.
uint64_t budget_for(const Source& source);

}  // namespace dataparallel::checkpoint
