#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <dataparallel/export.h>

#include <string>
#include <utility>
#include <vector>

/// How Python's values look as `c10::IValue`.
///
/// - None, bool, int (of 64 bits; a larger one is an `Opaque`), float, complex,
///   str, tensor, `torch.device`: the IValue of that kind. A Parameter or a
///   Buffer is a tensor with its requires_grad; a NumPy scalar is a number, a
///   NumPy array a tensor. A tensor of a subclass or with attributes of its own
///   loses these: see `dropped_entries`.
/// - list: a generic list of any type; tuple: a tuple.
/// - dict, OrderedDict, defaultdict, Counter: a generic dictionary in Python's
///   order, for which `class_name` and `attributes` say the rest.
/// - all else, known to the library or not: an `Opaque`.
namespace dataparallel {

/// A Python object for which IValue has no kind, as the file describes it:
/// what its class was called with, and what was put into it. Nothing of it was
/// run.
///
/// The library knows these itself (`known()`): "builtins.set" and
/// "builtins.frozenset" (elements), "builtins.slice" (args), "builtins.bytes"
/// and "builtins.bytearray" (args = [str]), "torch.Size" (elements),
/// "torch.dtype", "torch.layout", "torch.memory_format" and "torch.qscheme"
/// (args = [name, as "float32"]), "argparse.Namespace" (state = dict),
/// "builtins.type" (args = [name]: a class or function itself, not an object
/// of it), storages as "torch.FloatStorage" and "torch.storage.UntypedStorage"
/// (args = [a tensor over all of it]), "builtins.int" beyond 64 bits (args =
/// [its digits, or beyond 2048 bits "0x" and hexadecimal ones]), and the
/// mappings where a key is of a kind that `c10::Dict` cannot hash (items).
///
/// Unknown, but always of the same form: "dataparallel.BackReference" (args =
/// [path]), which stands where an object contains itself: the object at that
/// path in the whole value ("" is the value itself).
class DATAPARALLEL_EXPORT Opaque : public torch::CustomClassHolder {
 public:
  explicit Opaque(std::string name) : class_name(std::move(name)) {}
  ~Opaque() override;

  /// Module and qualified name: "argparse.Namespace".
  std::string class_name;
  std::vector<c10::IValue> args;
  std::vector<std::pair<c10::IValue, c10::IValue>> kwargs;
  /// What the object was restored from, often its `__dict__`; else None.
  c10::IValue state;
  std::vector<std::pair<c10::IValue, c10::IValue>> items;
  std::vector<c10::IValue> elements;

  /// Whether the class is one of those above; such values are written back
  /// as they were.
  bool known() const;
};

DATAPARALLEL_EXPORT bool is_opaque(const c10::IValue& value);

/// Throws `c10::TypeError` where `value` is something else.
DATAPARALLEL_EXPORT c10::intrusive_ptr<Opaque> to_opaque(
    const c10::IValue& value);

DATAPARALLEL_EXPORT c10::IValue from_opaque(c10::intrusive_ptr<Opaque> opaque);

/// Where an object of a class unknown to the library lies.
struct OpaqueEntry {
  /// `['extra'][3]`, `['options'].state['scheduler']`; one of more than 400
  /// bytes by its two ends, with "..." between.
  std::string path;
  std::string class_name;
};

/// All objects in `value` of unknown classes, each once, in order. Throws
/// `c10::ValueError` where it is nested more than 1000 deep.
DATAPARALLEL_EXPORT std::vector<OpaqueEntry> opaque_entries(
    const c10::IValue& value);

/// What the tensors in `value` had in Python and lost, because a tensor in C++
/// cannot have it, in order: a subclass, by its name at the tensor's path; each
/// attribute, by its type at `['weight'].name`. Known of tensors that `load`
/// made, not of their copies. Throws as `opaque_entries`.
DATAPARALLEL_EXPORT std::vector<OpaqueEntry> dropped_entries(
    const c10::IValue& value);

/// "dict", "collections.OrderedDict", "collections.defaultdict" or
/// "collections.Counter".
DATAPARALLEL_EXPORT std::string class_name(
    const c10::impl::GenericDict& mapping);

/// What a mapping carries beside its items, by name: an OrderedDict's
/// `_metadata`, a defaultdict's `default_factory`. A copy, often empty.
DATAPARALLEL_EXPORT c10::impl::GenericDict attributes(
    const c10::impl::GenericDict& mapping);

/// An empty mapping of that class (see `class_name`), to be filled.
///
/// Throws `c10::ValueError` for another class, and where `attributes` are
/// given for "dict", which can hold none.
DATAPARALLEL_EXPORT c10::impl::GenericDict make_mapping(
    const std::string& class_name, const c10::impl::GenericDict& attributes);
DATAPARALLEL_EXPORT c10::impl::GenericDict make_mapping(
    const std::string& class_name);

/// The tensor at the end of `keys`, which are keys of mappings, or decimal
/// indices of lists and tuples.
///
/// Throws `c10::ValueError` with the path where a key is missing, and
/// `c10::TypeError` with path and class where something else lies there.
DATAPARALLEL_EXPORT at::Tensor tensor_at(const c10::IValue& value,
                                         const std::vector<std::string>& keys);

/// What Python calls the value's type: "int", "collections.OrderedDict",
/// "Tensor", an opaque object's class name.
DATAPARALLEL_EXPORT std::string python_type_name(const c10::IValue& value);

}  // namespace dataparallel
