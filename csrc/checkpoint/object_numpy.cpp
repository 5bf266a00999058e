#include "checkpoint/objects.h"

#include "checkpoint/arguments.h"
#include "checkpoint/dropped.h"
#include "checkpoint/numpy.h"

// The part of Objects that makes NumPy's arrays and numbers.
namespace dataparallel::checkpoint {

c10::IValue Objects::numpy_call(const Reference& function, Arguments args) {
  switch (function.callable) {
    case Callable::kNumpyReconstruct: {
      // An array whose state follows.
      const Reference* type = args.empty() ? nullptr : as_reference(args[0]);
      return opaque_call(type == nullptr ? "numpy.ndarray" : type->name, {});
    }
    case Callable::kNumpyScalar:
      if (args.size() == 2) {
        const auto type = numpy_type(args[0]);
        const std::string* bytes = bytes_of(args[1]);
        if (type && bytes != nullptr) {
          if (auto number = numpy_scalar(*type, *bytes)) {
            return *number;
          }
        }
      }
      break;
    case Callable::kNumpyFromBuffer:  // (buffer, dtype, shape, order[, axes])
      if (args.size() >= 4) {
        const auto type = numpy_type(args[1]);
        const std::string* bytes = bytes_of(args[0]);
        const std::string order =
            args[3].isString() ? args[3].toStringRef() : "";
        const bool has_axes =
            order == "K" && args.size() == 5 && !args[4].isNone();
        if (type && bytes != nullptr &&
            (order == "C" || order == "F" || has_axes)) {
          heap_.spend(bytes->size());
          const at::Tensor array =
              numpy_array(*type, to_ints(args[2], "a NumPy array's shape"),
                          order == "F", *bytes);
          return has_axes ? numpy_transpose(
                                array, to_ints(args[4], "a NumPy array's axes"))
                          : array;
        }
      }
      break;
    default:
      break;
  }
  return opaque_call(function.name, args);
}

std::optional<c10::IValue> Objects::numpy_state(const Opaque& array,
                                                const c10::IValue& state) {
  const bool is_array = array.class_name == "numpy.ndarray" ||
                        array.class_name == "numpy.memmap" ||
                        array.class_name == "numpy.matrix";
  if (!is_array || !state.isTuple()) {
    return std::nullopt;
  }
  Arguments parts = state.toTupleRef().elements();
  if (parts.size() == 5) {
    parts = parts.slice(1);  // the version
  }
  const auto type = parts.size() == 4 ? numpy_type(parts[1]) : std::nullopt;
  const std::string* bytes = parts.size() == 4 ? bytes_of(parts[3]) : nullptr;
  if (type && bytes != nullptr) {
    heap_.spend(bytes->size());
    const bool fortran = parts[2].isBool()  ? parts[2].toBool()
                         : parts[2].isInt() ? parts[2].toInt() != 0
                                            : false;
    const at::Tensor tensor = numpy_array(
        *type, to_ints(parts[0], "a NumPy array's shape"), fortran, *bytes);
    drop_class(tensor, array.class_name, heap_);
    return tensor;
  }
  return std::nullopt;
}

}  // namespace dataparallel::checkpoint
