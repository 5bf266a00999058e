#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <dataparallel/export.h>

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace dataparallel {

/// A module's tensors by name, in order: what Python's `state_dict()` returns.
///
/// Values are tensors, as a rule; what Python's `get_extra_state` gave may be
/// anything. A copy shares the tensors. Thread safety: as of a `std::vector`.
class DATAPARALLEL_EXPORT StateDict {
 public:
  using Entry = std::pair<std::string, c10::IValue>;
  using const_iterator = std::vector<Entry>::const_iterator;

  StateDict() = default;
  StateDict(std::initializer_list<Entry> entries);

  size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  bool contains(const std::string& name) const;
  /// The tensor of that name.
  /// Throws `c10::IndexError` if there is none, `c10::TypeError` if the value
  /// is no tensor.
  at::Tensor at(const std::string& name) const;
  /// The value of that name, or null. Valid until something is inserted.
  const c10::IValue* find(const std::string& name) const;
  std::vector<std::string> keys() const;
  /// Appends an entry. Throws `c10::ValueError` if the name is there already.
  void insert(std::string name, c10::IValue value);

  const_iterator begin() const { return entries_.begin(); }
  const_iterator end() const { return entries_.end(); }

  /// Python's `_metadata`: the path of each module and, as a rule, its
  /// `{"version": n}`. None if the file or the maker gave none.
  const std::optional<c10::impl::GenericDict>& metadata() const {
    return metadata_;
  }
  void set_metadata(std::optional<c10::impl::GenericDict> metadata) {
    metadata_ = std::move(metadata);
  }

  /// An `OrderedDict` with its `_metadata` (see python_values.h).
  c10::IValue to_ivalue() const;
  /// Throws `c10::TypeError` unless `value` is a mapping with strings as keys.
  static StateDict from_ivalue(const c10::IValue& value);

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> positions_;
  std::optional<c10::impl::GenericDict> metadata_;
};

/// The module's parameters and buffers, detached, sharing its memory: the
/// names, the order and the metadata of Python's `state_dict()`. Of a
/// `DataParallel` the names begin with `module.`. Undefined tensors (the weight
/// of a batch norm that is not affine) are left out; a tensor registered under
/// two names appears under both.
///
/// Takes a `torch::nn::Module`, a `torch::jit::Module`, and whatever holds one:
/// module holders, `shared_ptr`, `torch::nn::AnyModule`.
DATAPARALLEL_EXPORT StateDict state_dict(const torch::nn::Module& module);
DATAPARALLEL_EXPORT StateDict state_dict(const torch::jit::Module& module);

/// How `load_state_dict` works; setters can be chained.
class DATAPARALLEL_EXPORT LoadStateDictOptions {
 public:
  /// Maps a name in the dictionary to a name in the module.
  using Rename = std::function<std::string(const std::string&)>;

  /// Whether missing and unexpected names are errors. Default true.
  LoadStateDictOptions& strict(bool value);
  /// Whether the module's tensors get the memory, dtype and device of the
  /// dictionary's, instead of having the values copied into them. Default
  /// false.
  ///
  /// As in Python, parameters keep their `requires_grad` and lose their
  /// gradients. Unlike there, they stay the same objects: optimizers made
  /// earlier, and the members of a `torch::nn::Module`, still hold them. So
  /// such a module refuses a tensor of another layout (a sparse one for a dense
  /// one) or to and from the meta device, which Python and a
  /// `torch::jit::Module` take.
  LoadStateDictOptions& assign(bool value);
  /// Renames the dictionary's entries first. Default: names as they are.
  LoadStateDictOptions& rename(Rename value);

  bool strict() const { return strict_; }
  bool assign() const { return assign_; }
  const Rename& rename() const { return rename_; }

 private:
  bool strict_ = true;
  bool assign_ = false;
  Rename rename_;
};

/// What became of the names, all as the module has them (after `rename`).
struct LoadStateDictResult {
  /// In the module, not in the dictionary.
  std::vector<std::string> missing_keys;
  /// In the dictionary, not in the module.
  std::vector<std::string> unexpected_keys;
  /// In both, but of another shape: always an error.
  std::vector<std::string> mismatched_keys;
  /// Written, in the module's order.
  std::vector<std::string> loaded_keys;
  /// Those of `loaded_keys` whose values were converted to another dtype.
  std::vector<std::string> converted_keys;
};

/// A dictionary that does not fit its module. The text is Python's.
class DATAPARALLEL_EXPORT LoadStateDictError : public c10::Error {
 public:
  LoadStateDictError(std::string message, LoadStateDictResult keys);
  ~LoadStateDictError() override;
  /// The keys that made it fail; `loaded_keys` is empty.
  const LoadStateDictResult& keys() const { return keys_; }

 private:
  LoadStateDictResult keys_;
};

/// Writes a dictionary's values into the module's tensors, all or nothing:
/// everything is checked, and all memory allocated that the copies take, before
/// the first is written. That is as much as the largest tensor takes, on the
/// value's device or the module's, where dtype or strides change on the way
/// between two devices; for sparse and quantized tensors all their new values.
///
/// Values are converted to the module's dtypes and devices as Python's `copy_`
/// does; complex into real is refused. A one-element vector fits a scalar.
/// Where names share a tensor, one of them in the dictionary is enough. A file
/// without the counters that batch norms have since version 2 fits, as in
/// Python.
///
///     auto weights = dataparallel::find_state_dict(dataparallel::load(path));
///     dataparallel::load_state_dict(
///         *net, dataparallel::strip_prefix(weights));
///
/// Not strict, a warning tells when fewer than half of the module's names are
/// there and a common prefix keeps more from fitting, or when names that share
/// a tensor have different values.
///
/// Takes the modules that `state_dict` takes. Kept replicas of a `DataParallel`
/// follow at its next forward. Not synchronised with a forward in another
/// thread.
///
/// Throws `LoadStateDictError`: missing or unexpected names (strict), nothing
/// that matches (not strict), other shapes, values that cannot be copied, names
/// that share a tensor with different values (strict), nested tensors;
/// `c10::ValueError`: two entries that `rename` gives one name;
/// `c10::OutOfMemoryError`. In all these cases nothing has changed. A device
/// that fails in the middle of the copies for another reason leaves them
/// undone from there on; its error then says at which name.
DATAPARALLEL_EXPORT LoadStateDictResult
load_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                const LoadStateDictOptions& options = {});
DATAPARALLEL_EXPORT LoadStateDictResult
load_state_dict(torch::jit::Module& module, const StateDict& state_dict,
                const LoadStateDictOptions& options = {});

/// A new dictionary in which the names that begin with `prefix` have lost it,
/// once, and the others are as they were; order and metadata are kept.
/// Throws `c10::ValueError` if two entries would get one name, or one no name.
DATAPARALLEL_EXPORT StateDict strip_prefix(
    const StateDict& state_dict, const std::string& prefix = "module.");

/// A new dictionary in which `prefix` stands before every name.
DATAPARALLEL_EXPORT StateDict add_prefix(const StateDict& state_dict,
                                         const std::string& prefix = "module.");

namespace detail {

/// A module holder, an `AnyModule` or a pointer to a module.
template <class M>
concept HoldsModule = requires(const M& holder) {
  holder.ptr();
}
|| requires(const M& pointer) {
  *pointer;
};

/// Throws `c10::TypeError` for a null pointer, and what an empty holder throws.
template <HoldsModule M>
auto& held_module(const std::string& function, const M& holder) {
  if constexpr (requires { holder.ptr(); }) {
    return *holder.ptr();
  } else {
    if constexpr (requires { holder == nullptr; }) {
      TORCH_CHECK_TYPE(holder != nullptr, function,
                       ": module is a null pointer, expected a module");
    }
    return *holder;
  }
}

}  // namespace detail

template <detail::HoldsModule M>
StateDict state_dict(const M& holder) {
  return state_dict(detail::held_module("state_dict", holder));
}

template <detail::HoldsModule M>
LoadStateDictResult load_state_dict(const M& holder,
                                    const StateDict& state_dict,
                                    const LoadStateDictOptions& options = {}) {
  return load_state_dict(detail::held_module("load_state_dict", holder),
                         state_dict, options);
}

}  // namespace dataparallel
