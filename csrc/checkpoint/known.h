#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <dataparallel/python_values.h>

#include <optional>
#include <string>
#include <string_view>

namespace dataparallel::checkpoint {

/// The classes and functions whose meaning the reader knows. A file can name
/// any; only these do something, and all they do is written in this library.
enum class Callable : uint8_t {
  kUnknown,
  // Python's own
  kBytearray,
  kBytes,
  kComplex,
  kCounter,
  kDefaultDict,
  kDict,
  kEncode,
  kFrozenSet,
  kList,
  kNewObject,
  kNewObjectEx,
  kOrderedDict,
  kReconstructor,
  kSet,
  kSlice,
  // torch
  kDevice,
  kDeviceTensorFromNumpy,
  kDeviceTensorFromTensor,
  kFromType,
  kGetLayout,
  kJitList,
  kJitTypeTag,
  kMetaTensor,
  kNestedTensor,
  kParameter,
  kParameterFunction,
  kQuantizedTensor,
  kSize,
  kSparseCsrTensor,
  kSparseTensor,
  kStorage,
  kTensor,
  kTensorClass,
  kTensorV2,
  kTensorV3,
  kVariable,
  kWrapperSubclass,
  // NumPy
  kNumpyArray,
  kNumpyDtype,
  kNumpyFromBuffer,
  kNumpyReconstruct,
  kNumpyScalar,
};

/// A class or function itself, by its name. As a value it is an `Opaque`
/// "builtins.type" with the name in args.
class Reference : public Opaque {
 public:
  explicit Reference(const std::string& name);

  std::string name;
  Callable callable = Callable::kUnknown;
  /// Of a storage class that has one.
  std::optional<at::ScalarType> dtype;
};

/// What the name `module`.`name` stands for: a reference, or for torch's
/// constants the constant. Names of Python 2 and of older torch and NumPy
/// versions become the present ones.
c10::IValue resolve_global(std::string_view module, std::string_view name);

/// The reference that `value` is, or null.
Reference* as_reference(const c10::IValue& value);
/// The opaque object that `value` is, or null.
Opaque* as_opaque(const c10::IValue& value);

c10::IValue make_opaque(const char* class_name,
                        std::vector<c10::IValue> args = {});

/// torch.dtype, torch.layout, torch.memory_format, torch.qscheme: what they
/// have are constants of torch, by name.
bool is_constant_class(std::string_view class_name);
bool is_constant(std::string_view class_name, const std::string& name);

/// Whether values of that class are written back as they were.
bool is_known_class(std::string_view class_name);
/// The same for the class or function itself.
bool is_known_reference(std::string_view name);

/// "torch.FloatStorage", "torch.storage.UntypedStorage" and the like: an
/// opaque object with the storage's elements in args.
bool is_storage_class(const std::string& class_name);
/// Of its elements; none: they are bytes of any dtype.
std::optional<at::ScalarType> storage_dtype(const std::string& class_name);

/// "float32" → that dtype.
std::optional<at::ScalarType> dtype_from_name(const std::string& name);
std::string dtype_name(at::ScalarType dtype);

}  // namespace dataparallel::checkpoint
