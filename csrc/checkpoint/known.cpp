#include "checkpoint/known.h"

#include <unordered_map>
#include <unordered_set>

namespace dataparallel::checkpoint {
namespace {

using Table = std::unordered_map<std::string_view, Callable>;

const Table& callables() {
  static const Table table = {
      {"_codecs.encode", Callable::kEncode},
      {"builtins.bytearray", Callable::kBytearray},
      {"builtins.bytes", Callable::kBytes},
      {"builtins.complex", Callable::kComplex},
      {"builtins.dict", Callable::kDict},
      {"builtins.frozenset", Callable::kFrozenSet},
      {"builtins.list", Callable::kList},
      {"builtins.set", Callable::kSet},
      {"builtins.slice", Callable::kSlice},
      {"collections.Counter", Callable::kCounter},
      {"collections.OrderedDict", Callable::kOrderedDict},
      {"collections.defaultdict", Callable::kDefaultDict},
      {"copyreg.__newobj__", Callable::kNewObject},
      {"copyreg.__newobj_ex__", Callable::kNewObjectEx},
      {"copyreg._reconstructor", Callable::kReconstructor},
      {"numpy._core.multiarray._reconstruct", Callable::kNumpyReconstruct},
      {"numpy._core.multiarray.scalar", Callable::kNumpyScalar},
      {"numpy._core.numeric._frombuffer", Callable::kNumpyFromBuffer},
      {"numpy.dtype", Callable::kNumpyDtype},
      {"numpy.ndarray", Callable::kNumpyArray},
      {"torch.Size", Callable::kSize},
      {"torch.Tensor", Callable::kTensorClass},
      {"torch._tensor.Tensor", Callable::kTensorClass},
      {"torch._tensor._rebuild_from_type", Callable::kFromType},
      {"torch._tensor._rebuild_from_type_v2", Callable::kFromType},
      {"torch._utils._rebuild_device_tensor_from_cpu_tensor",
       Callable::kDeviceTensorFromTensor},
      {"torch._utils._rebuild_device_tensor_from_numpy",
       Callable::kDeviceTensorFromNumpy},
      {"torch._utils._rebuild_meta_tensor_no_storage", Callable::kMetaTensor},
      {"torch._utils._rebuild_nested_tensor", Callable::kNestedTensor},
      {"torch._utils._rebuild_parameter", Callable::kParameterFunction},
      {"torch._utils._rebuild_parameter_with_state",
       Callable::kParameterFunction},
      {"torch._utils._rebuild_qtensor", Callable::kQuantizedTensor},
      {"torch._utils._rebuild_sparse_csr_tensor", Callable::kSparseCsrTensor},
      {"torch._utils._rebuild_sparse_tensor", Callable::kSparseTensor},
      {"torch._utils._rebuild_tensor", Callable::kTensor},
      {"torch._utils._rebuild_tensor_v2", Callable::kTensorV2},
      {"torch._utils._rebuild_tensor_v3", Callable::kTensorV3},
      {"torch._utils._rebuild_wrapper_subclass", Callable::kWrapperSubclass},
      {"torch._utils._rebuild_xla_tensor", Callable::kDeviceTensorFromNumpy},
      {"torch.autograd.variable.Variable", Callable::kVariable},
      {"torch.device", Callable::kDevice},
      {"torch.jit._pickle.build_boollist", Callable::kJitList},
      {"torch.jit._pickle.build_doublelist", Callable::kJitList},
      {"torch.jit._pickle.build_intlist", Callable::kJitList},
      {"torch.jit._pickle.build_tensorlist", Callable::kJitList},
      {"torch.jit._pickle.restore_type_tag", Callable::kJitTypeTag},
      {"torch.nn.parameter.Parameter", Callable::kParameter},
      {"torch.serialization._get_layout", Callable::kGetLayout},
      {"torch.storage.TypedStorage", Callable::kStorage},
      {"torch.storage.UntypedStorage", Callable::kStorage},
      {"torch.storage._TypedStorage", Callable::kStorage},
      {"torch.storage._UntypedStorage", Callable::kStorage},
  };
  return table;
}

/// The dtype of `torch.FloatStorage` and of `torch.FloatTensor`, by the part
/// before "Storage" or "Tensor".
std::optional<at::ScalarType> legacy_dtype(std::string_view name) {
  static const std::unordered_map<std::string_view, at::ScalarType> table = {
      {"BFloat16", at::kBFloat16},
      {"Bool", at::kBool},
      {"Byte", at::kByte},
      {"Char", at::kChar},
      {"ComplexDouble", at::kComplexDouble},
      {"ComplexFloat", at::kComplexFloat},
      {"Double", at::kDouble},
      {"Float", at::kFloat},
      {"Half", at::kHalf},
      {"Int", at::kInt},
      {"Long", at::kLong},
      {"QInt32", at::kQInt32},
      {"QInt8", at::kQInt8},
      {"QUInt2x4", at::kQUInt2x4},
      {"QUInt4x2", at::kQUInt4x2},
      {"QUInt8", at::kQUInt8},
      {"Short", at::kShort},
  };
  const auto found = table.find(name);
  return found == table.end() ? std::nullopt : std::optional(found->second);
}

/// The module that holds today what `module` of an older version held.
std::string_view present_module(std::string_view module) {
  static const std::unordered_map<std::string_view, std::string_view> table = {
      {"__builtin__", "builtins"},
      {"copy_reg", "copyreg"},
      {"exceptions", "builtins"},
      {"numpy.core.multiarray", "numpy._core.multiarray"},
      {"numpy.core.numeric", "numpy._core.numeric"},
      {"torch.cuda", "torch"},
      {"torch.tensor", "torch._tensor"},
  };
  const auto found = table.find(module);
  return found == table.end() ? module : found->second;
}

/// What Python 3 calls the built-in that Python 2 called `name`.
std::string_view present_builtin(std::string_view name) {
  static const std::unordered_map<std::string_view, std::string_view> table = {
      {"long", "int"},
      {"unichr", "chr"},
      {"unicode", "str"},
      {"xrange", "range"},
  };
  const auto found = table.find(name);
  return found == table.end() ? name : found->second;
}

/// torch's constants are pickled by their names alone.
const char* constant_class(std::string_view name) {
  static const std::unordered_map<std::string_view, const char*> table = {
      {"channels_last", "torch.memory_format"},
      {"channels_last_3d", "torch.memory_format"},
      {"contiguous_format", "torch.memory_format"},
      {"jagged", "torch.layout"},
      {"per_channel_affine", "torch.qscheme"},
      {"per_channel_affine_float_qparams", "torch.qscheme"},
      {"per_channel_symmetric", "torch.qscheme"},
      {"per_tensor_affine", "torch.qscheme"},
      {"per_tensor_symmetric", "torch.qscheme"},
      {"preserve_format", "torch.memory_format"},
      {"sparse_bsc", "torch.layout"},
      {"sparse_bsr", "torch.layout"},
      {"sparse_coo", "torch.layout"},
      {"sparse_csc", "torch.layout"},
      {"sparse_csr", "torch.layout"},
      {"strided", "torch.layout"},
  };
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

bool remove_suffix(std::string_view& text, std::string_view suffix) {
  if (text.size() < suffix.size() ||
      text.substr(text.size() - suffix.size()) != suffix) {
    return false;
  }
  text.remove_suffix(suffix.size());
  return true;
}

}  // namespace

Reference::Reference(const std::string& full_name)
    : Opaque("builtins.type"), name(full_name) {
  args.emplace_back(full_name);
}

c10::IValue resolve_global(std::string_view module, std::string_view name) {
  module = present_module(module);
  if (module == "builtins") {
    name = present_builtin(name);
  }
  constexpr std::string_view kFormatPrefix = "torch.";
  if (module == "torch._utils" && name.substr(0, 6) == kFormatPrefix) {
    // Where Python believes a memory format to be.
    module = "torch";
    name.remove_prefix(kFormatPrefix.size());
  }
  if (module == "torch") {
    if (const auto dtype = dtype_from_name(std::string(name))) {
      return make_opaque("torch.dtype", {dtype_name(*dtype)});
    }
    if (const char* of = constant_class(name)) {
      return make_opaque(of, {std::string(name)});
    }
  }
  auto reference = c10::make_intrusive<Reference>(std::string(module) + "." +
                                                  std::string(name));
  const auto found = callables().find(reference->name);
  if (found != callables().end()) {
    reference->callable = found->second;
  } else if (module == "torch") {
    std::string_view kind = name;
    if (remove_suffix(kind, "Storage")) {
      reference->dtype = legacy_dtype(kind);
      if (reference->dtype || kind == "Untyped") {
        reference->callable = Callable::kStorage;
      }
    } else if (remove_suffix(kind, "Tensor") && legacy_dtype(kind)) {
      reference->callable = Callable::kTensorClass;
    }
  }
  return from_opaque(std::move(reference));
}

Opaque* as_opaque(const c10::IValue& value) {
  if (!value.isCapsule()) {
    return nullptr;
  }
  return dynamic_cast<Opaque*>(value.toCapsule().get());
}

Reference* as_reference(const c10::IValue& value) {
  return dynamic_cast<Reference*>(as_opaque(value));
}

c10::IValue make_opaque(const char* class_name, std::vector<c10::IValue> args) {
  auto opaque = c10::make_intrusive<Opaque>(class_name);
  opaque->args = std::move(args);
  return from_opaque(std::move(opaque));
}

bool is_storage_class(const std::string& class_name) {
  const size_t dot = class_name.rfind('.');
  if (dot == std::string::npos) {
    return false;
  }
  const c10::IValue resolved =
      resolve_global(class_name.substr(0, dot), class_name.substr(dot + 1));
  const Reference* reference = as_reference(resolved);
  return reference != nullptr && reference->callable == Callable::kStorage;
}

std::optional<at::ScalarType> storage_dtype(const std::string& class_name) {
  const size_t dot = class_name.rfind('.');
  const c10::IValue resolved =
      resolve_global(class_name.substr(0, dot), class_name.substr(dot + 1));
  return as_reference(resolved)->dtype;
}

bool is_constant_class(std::string_view class_name) {
  return class_name == "torch.dtype" || class_name == "torch.layout" ||
         class_name == "torch.memory_format" || class_name == "torch.qscheme";
}

bool is_constant(std::string_view class_name, const std::string& name) {
  if (class_name == "torch.dtype") {
    return dtype_from_name(name).has_value();
  }
  const char* of = constant_class(name);
  return of != nullptr && class_name == of;
}

bool is_known_class(std::string_view class_name) {
  static const std::unordered_set<std::string_view> table = {
      "argparse.Namespace",
      "builtins.bytearray",
      "builtins.bytes",
      "builtins.dict",
      "builtins.frozenset",
      "builtins.int",
      "builtins.set",
      "builtins.slice",
      "collections.Counter",
      "collections.OrderedDict",
      "collections.defaultdict",
      "torch.Size",
      "torch.dtype",
      "torch.layout",
      "torch.memory_format",
      "torch.qscheme",
  };
  return table.count(class_name) > 0;
}

bool is_known_reference(std::string_view name) {
  static const std::unordered_set<std::string_view> table = {
      "builtins.bool", "builtins.complex", "builtins.float", "builtins.int",
      "builtins.list", "builtins.object",  "builtins.str",   "builtins.tuple",
      "torch.device",  "torch.Tensor",
  };
  return is_known_class(name) || table.count(name) > 0;
}

std::optional<at::ScalarType> dtype_from_name(const std::string& name) {
  const auto& table = c10::getStringToDtypeMap();
  const auto found = table.find(name);
  return found == table.end() ? std::nullopt : std::optional(found->second);
}

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace dataparallel::checkpoint
