#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <dataparallel/export.h>
#include <dataparallel/python_values.h>
#include <dataparallel/save.h>
#include <dataparallel/state_dict.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <istream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dataparallel {

/// Everything that is wrong with a checkpoint: what it is, with the file, the
/// place in the value and the byte where they are known. Python sees a
/// RuntimeError.
class DATAPARALLEL_EXPORT CheckpointError : public c10::Error {
 public:
  CheckpointError(std::string message, std::string file = "",
                  std::string key = "",
                  std::optional<uint64_t> offset = std::nullopt);

  /// The path as given; "" for a stream and for bytes.
  const std::string& file() const { return file_; }
  /// As in Python: `['state_dict']['layer.weight']`; "" where it is not known.
  /// One of more than 400 bytes is given by its two ends, with "..." between.
  const std::string& key() const { return key_; }
  /// Counted from the file's first byte.
  std::optional<uint64_t> offset() const { return offset_; }

 private:
  std::string file_;
  std::string key_;
  std::optional<uint64_t> offset_;
};

/// How `load` reads.
///
/// ```cpp
/// using dataparallel::LoadOptions;
/// load("a.pt", LoadOptions().map_location("cpu"));
/// load("a.pt", LoadOptions().map_location({{"cuda:7", "cuda:0"}}));
/// load("a.pt", LoadOptions().map_location([](const std::string& tag) {
///   return tag == "cpu" ? std::nullopt : std::optional<at::Device>("cuda:1");
/// }));
/// ```
class DATAPARALLEL_EXPORT LoadOptions {
 public:
  /// The device for a storage that the file tags with this location
  /// ("cpu", "cuda:0", ...); none: the one that the tag names.
  using LocationFunction =
      std::function<std::optional<at::Device>(const std::string& tag)>;

  /// All storages onto one device ("cuda" is the calling thread's current
  /// one; "meta" makes tensors without memory, and of a nested tensor one with
  /// all its elements). Throws `c10::ValueError` where
  /// the text names no device. Give text, not `at::Device("cuda:256")`: torch
  /// makes that cuda:0, since it keeps 8 bits of an index.
  template <class D>
  requires std::convertible_to<D, at::Device> ||
      std::convertible_to<D, std::string>
          LoadOptions& map_location(const D& device) {
    if constexpr (std::convertible_to<D, std::string>) {
      return map_all_to(device);
    } else {
      const at::Device target = device;
      return map_location(
          LocationFunction([target](const std::string&) { return target; }));
    }
  }
  /// Tag → device; tags that are not in the map keep their own device. Throws
  /// `c10::ValueError` where a device is none, and where a tag has an index
  /// that no device can have ("cuda:-1").
  LoadOptions& map_location(const std::map<std::string, std::string>& devices);
  LoadOptions& map_location(LocationFunction function);
  const LocationFunction& map_location() const { return map_location_; }

  /// Whether the tensors of a file lie in memory mapped from it, read when
  /// they are used (default), for the CPU.
  ///
  /// The pages are private: writing to the tensors does not change the file,
  /// and the file may be closed, removed, or replaced by another one of its
  /// name (which is what `save` does). But as with every mapping, a file that
  /// somebody overwrites or truncates in place (Python's `torch.save` to the
  /// same path does) changes under the tensors not read yet, or kills the
  /// program. Say `mmap(false)` where that may happen: then nothing depends
  /// on the file after `load`.
  LoadOptions& mmap(bool value) {
    mmap_ = value;
    return *this;
  }
  bool mmap() const { return mmap_; }

 private:
  LoadOptions& map_all_to(const std::string& device);

  LocationFunction map_location_;
  bool mmap_ = true;
};

/// What a checkpoint holds (python_values.h says how), in Python's order.
///
/// Reads, and tells apart by their content: the zip files of Python's
/// `torch.save` (1.6 and later), its older files of stacked pickles (Python 2
/// too), TorchScript archives and C++ archives of `torch::save` (these give
/// what their `state_dict()` gives), and safetensors. Strides, storage sharing
/// and requires_grad are kept. Nothing from the file is ever executed: objects
/// of classes that the library does not know become `Opaque` values, see
/// `opaque_entries`; what tensors had in Python alone is lost, see
/// `dropped_entries`.
///
/// A pickled `nn.Module` becomes its state_dict: parameters and persistent
/// buffers, without `_metadata`. What its class adds by code of its own
/// (`get_extra_state`, `state_dict`) is not in the file and is missing. Where
/// that can be seen, the module stays opaque, alone or in the state_dict of the
/// module around it: torch's quantized modules, and modules with hooks for
/// their state_dict. So do what is registered but is no tensor, as a lazy
/// module's parameters.
///
/// Without `map_location` each storage goes to the device its tag names.
/// Storages are read one at a time, straight to their device.
///
/// Throws `CheckpointError` where the file cannot be read, is none of these,
/// is damaged, or needs a device that is not there; where entries of a zip file
/// are compressed (which `torch.save` never does, and `torch.load(mmap=True)`
/// reads wrong) or have one name; where a storage has another size than the
/// value says, be it longer (which `torch.load(mmap=True)` takes). An object
/// that contains itself is cut there, by an opaque
/// "dataparallel.BackReference". Thread safety: may be called from any thread.
///
/// ```cpp
/// auto checkpoint = dataparallel::load(
///     "model.pth", dataparallel::LoadOptions().map_location("cpu"));
/// for (const auto& item : checkpoint.toGenericDict()) { ... }
/// ```
DATAPARALLEL_EXPORT c10::IValue load(const std::string& path,
                                     const LoadOptions& options = {});

/// From the stream's position to its end. A stream that can seek is read where
/// needed; another is read into memory first.
DATAPARALLEL_EXPORT c10::IValue load(std::istream& stream,
                                     const LoadOptions& options = {});

/// From memory, which is not needed afterwards.
DATAPARALLEL_EXPORT c10::IValue load(const std::vector<char>& bytes,
                                     const LoadOptions& options = {});
DATAPARALLEL_EXPORT c10::IValue load(const char* bytes, size_t size,
                                     const LoadOptions& options = {});

/// A tensor of a checkpoint, as `inspect` sees it.
struct TensorInfo {
  /// "layer.weight"; "model.layer.weight" where nested. One of more than 400
  /// bytes by its two ends, with "..." between.
  std::string key;
  at::ScalarType dtype;
  std::vector<int64_t> shape;  ///< of a nested tensor: all its elements
  std::string device;          ///< the file's tag
  int64_t nbytes;              ///< of its elements
  bool requires_grad;
};

struct CheckpointInfo {
  std::string kind;  ///< "zip", "legacy", "TorchScript", "C++ archive",
                     ///< "safetensors"
  std::vector<TensorInfo> tensors;
  /// Sorted, each once: those of opaque objects, of tensors of a subclass, and
  /// of the modules whose state_dicts are given instead of them.
  std::vector<std::string> unknown_classes;
  std::vector<OpaqueEntry> opaque;   ///< what `opaque_entries` would list
  std::vector<OpaqueEntry> dropped;  ///< what `dropped_entries` would list
  std::map<std::string, std::string> metadata;  ///< of safetensors
};

/// What a file holds, without reading the bytes of its tensors and without
/// any device. Throws as `load`.
DATAPARALLEL_EXPORT CheckpointInfo inspect(const std::string& path);

/// The words of the names that state_dicts are usually saved under: "model" of
/// "model", "model_state_dict" and "best.model". "state_dict" alone is one too.
inline constexpr std::array<std::string_view, 10> kUsualNames = {
    "ema",    "model",   "module",  "net",    "network",
    "params", "student", "teacher", "weight", "weights"};

/// The state_dict in a checkpoint: `value` itself, or a mapping inside it.
///
/// A state_dict is a mapping from names to tensors alone (and to what
/// `get_extra_state` gave), or an OrderedDict with `_metadata`; optimizers'
/// are not looked at. With `key`, the one that lies there: a key of the
/// checkpoint, or several joined by dots; one that is no text as Python prints
/// it ("0"). Without, the only one that there is; where there are
/// several, the only one whose name is "state_dict" or has one of `kUsualNames`
/// among its words, which end at "_", "-", "." and " ".
///
/// An empty mapping is one where it is the value itself: that of a module
/// without tensors.
///
/// Throws `CheckpointError` where there is none, where there are several (with
/// the keys of all), and where `key` leads to no mapping from names.
DATAPARALLEL_EXPORT StateDict find_state_dict(const c10::IValue& value,
                                              const std::string& key = "");

}  // namespace dataparallel
