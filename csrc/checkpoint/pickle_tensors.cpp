#include <ATen/ATen.h>

#include "checkpoint/known.h"
#include "checkpoint/opcode.h"
#include "checkpoint/pickle_writer.h"
#include "checkpoint/view.h"
#include "detail/wording.h"

// The tensors' part of PickleWriter: what `Tensor.__reduce_ex__` gives.

namespace dataparallel::checkpoint {
namespace {

constexpr const char* kUtils = "torch._utils";

/// The storage class of a dtype that has one; null for newer dtypes.
const char* storage_class(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "BFloat16Storage";
    case at::kBool:
      return "BoolStorage";
    case at::kByte:
      return "ByteStorage";
    case at::kChar:
      return "CharStorage";
    case at::kComplexDouble:
      return "ComplexDoubleStorage";
    case at::kComplexFloat:
      return "ComplexFloatStorage";
    case at::kDouble:
      return "DoubleStorage";
    case at::kFloat:
      return "FloatStorage";
    case at::kHalf:
      return "HalfStorage";
    case at::kInt:
      return "IntStorage";
    case at::kLong:
      return "LongStorage";
    case at::kQInt32:
      return "QInt32Storage";
    case at::kQInt8:
      return "QInt8Storage";
    case at::kQUInt2x4:
      return "QUInt2x4Storage";
    case at::kQUInt4x2:
      return "QUInt4x2Storage";
    case at::kQUInt8:
      return "QUInt8Storage";
    case at::kShort:
      return "ShortStorage";
    default:
      return nullptr;
  }
}

/// Python's functions that rebuild these lose requires_grad, or fail where it
/// is set; only for a Parameter there is a way.
bool needs_parameter(const at::Tensor& tensor) {
  return tensor.requires_grad() &&
         (tensor.layout() == at::kSparse || tensor.is_nested() ||
          (tensor.layout() == at::kStrided && !tensor.is_meta() &&
           storage_class(tensor.scalar_type()) == nullptr));
}

}  // namespace

void PickleWriter::save_tensor(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), "save: the tensor at ", path(),
                   " is undefined");
  const void* object = tensor.unsafeGetTensorImpl();
  if (fetch(object)) {
    return;
  }
  TORCH_CHECK_TYPE(!tensor._is_zerotensor(), "save: the tensor at ", path(),
                   " is a ZeroTensor, which has no memory of its own to write; "
                   "clone it");
  const at::Layout layout = tensor.layout();
  if (needs_parameter(tensor)) {
    save_parameter(tensor);
  } else if (tensor.is_meta() && layout == at::kStrided) {
    save_meta(tensor);
  } else if (layout == at::kSparse || layout == at::kSparseCsr ||
             layout == at::kSparseCsc || layout == at::kSparseBsr ||
             layout == at::kSparseBsc) {
    save_sparse(tensor);
  } else if (tensor.is_nested()) {
    save_nested(tensor);
  } else {
    TORCH_CHECK_TYPE(layout == at::kStrided && tensor.has_storage(),
                     "save: the tensor at ", path(),
                     " has no memory of its own to write (layout ", layout,
                     ", device ", tensor.device(), ")");
    TORCH_CHECK_VALUE(lies_in_storage(tensor), "save: the tensor at ", path(),
                      " goes beyond its storage, which has ",
                      detail::count_text(tensor.storage().nbytes(), "byte"));
    if (tensor.is_quantized()) {
      save_quantized(tensor);
    } else {
      save_strided(tensor);
    }
  }
  op(kReduce);
  memoize(object);
}

void PickleWriter::save_parameter(const at::Tensor& tensor) {
  global(kUtils, "_rebuild_parameter");
  save_part(tensor.detach());
  op(kNewTrue);
  save_empty_ordered_dict();
  end_tuple(3);
}

void PickleWriter::save_strided(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool typed = storage_class(dtype) != nullptr;
  global(kUtils, typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  op(kMark);
  save_storage(tensor.storage(), typed ? std::optional(dtype) : std::nullopt);
  save_int(tensor.storage_offset());
  save_sizes(tensor.sizes());
  save_sizes(tensor.strides());
  op(tensor.requires_grad() ? kNewTrue : kNewFalse);
  save_empty_ordered_dict();
  if (!typed) {
    global("torch", dtype_name(dtype));
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    op(kEmptyDict);
    memoize();
    const bool both = tensor.is_conj() && tensor.is_neg();
    if (both) {
      op(kMark);
    }
    for (const bool is_neg : {true, false}) {
      if (is_neg ? tensor.is_neg() : tensor.is_conj()) {
        write_text(is_neg ? "neg" : "conj");
        op(kNewTrue);
      }
    }
    op(both ? kSetItems : kSetItem);
  }
  end_tuple(/*more than three*/ 6);
}

void PickleWriter::save_meta(const at::Tensor& tensor) {
  global(kUtils, "_rebuild_meta_tensor_no_storage");
  op(kMark);
  global("torch", dtype_name(tensor.scalar_type()));
  save_sizes(tensor.sizes());
  save_sizes(tensor.strides());
  op(tensor.requires_grad() ? kNewTrue : kNewFalse);
  end_tuple(4);
}

void PickleWriter::save_sparse(const at::Tensor& tensor) {
  global(kUtils, "_rebuild_sparse_tensor");
  const at::Layout layout = tensor.layout();
  std::string name = layout == at::kSparse      ? "sparse_coo"
                     : layout == at::kSparseCsr ? "sparse_csr"
                     : layout == at::kSparseCsc ? "sparse_csc"
                     : layout == at::kSparseBsr ? "sparse_bsr"
                                                : "sparse_bsc";
  save_layout(name);
  op(kMark);
  if (layout == at::kSparse) {
    save_part(tensor._indices());
    save_part(tensor._values());
    save_size_object(tensor.sizes());
    op(tensor.is_coalesced() ? kNewTrue : kNewFalse);
  } else {
    const bool by_rows = layout == at::kSparseCsr || layout == at::kSparseBsr;
    save_part(by_rows ? tensor.crow_indices() : tensor.ccol_indices());
    save_part(by_rows ? tensor.col_indices() : tensor.row_indices());
    save_part(tensor.values());
    save_size_object(tensor.sizes());
  }
  end_tuple(4);
  end_tuple(2);
}

void PickleWriter::save_nested(const at::Tensor& tensor) {
  global(kUtils, "_rebuild_nested_tensor");
  op(kMark);
  save_part(tensor.values());
  save_part(tensor._nested_tensor_size());
  save_part(tensor._nested_tensor_strides());
  save_part(tensor._nested_tensor_storage_offsets());
  end_tuple(4);
}

void PickleWriter::save_quantized(const at::Tensor& tensor) {
  global(kUtils, "_rebuild_qtensor");
  op(kMark);
  save_storage(tensor.storage(), tensor.scalar_type());
  save_int(tensor.storage_offset());
  save_sizes(tensor.sizes());
  save_sizes(tensor.strides());
  save_quantizer(tensor);
  op(tensor.requires_grad() ? kNewTrue : kNewFalse);
  save_empty_ordered_dict();
  end_tuple(7);
}

void PickleWriter::save_quantizer(const at::Tensor& tensor) {
  switch (tensor.qscheme()) {
    case at::kPerTensorAffine:
      global("torch", "per_tensor_affine");
      save_double(tensor.q_scale());
      save_int(tensor.q_zero_point());
      end_tuple(3);
      return;
    case at::kPerChannelAffine:
    case at::kPerChannelAffineFloatQParams:
      op(kMark);
      global("torch", "per_channel_affine");
      save_part(tensor.q_per_channel_scales());
      save_part(tensor.q_per_channel_zero_points());
      save_int(tensor.q_per_channel_axis());
      end_tuple(4);
      return;
    default:
      TORCH_CHECK_TYPE(false, "save: the quantized tensor at ", path(),
                       " has a scheme that Python cannot write either (",
                       c10::toString(tensor.qscheme()), ")");
  }
}

/// A tensor that is part of another one: not an object of the user's.
void PickleWriter::save_part(at::Tensor tensor) {
  kept_.emplace_back(tensor);
  save_tensor(tensor);
}

/// Python does not note storages: the same one again is a reference to the
/// same record.
void PickleWriter::save_storage_object(const Opaque& opaque) {
  TORCH_CHECK_TYPE(opaque.args.size() == 1 && opaque.args[0].isTensor() &&
                       opaque.args[0].toTensor().has_storage(),
                   "save: the ", opaque.class_name, " at ", path(),
                   " does not hold one tensor over its memory");
  const at::Tensor tensor = opaque.args[0].toTensor();
  const std::optional<at::ScalarType> dtype = storage_dtype(opaque.class_name);
  // Quantized elements are given as numbers or as bytes.
  const bool fits = !dtype.has_value() || *dtype == tensor.scalar_type() ||
                    (c10::isQIntType(*dtype) &&
                     (tensor.scalar_type() == at::kByte ||
                      tensor.scalar_type() == c10::toUnderlying(*dtype)));
  TORCH_CHECK_TYPE(fits, "save: the ", opaque.class_name, " at ", path(),
                   " holds a tensor of dtype ",
                   c10::getDtypeNames(tensor.scalar_type()).first,
                   ", expected ", c10::getDtypeNames(*dtype).first);
  const size_t rest =
      tensor.storage().nbytes() % c10::elementSize(dtype.value_or(at::kByte));
  TORCH_CHECK_VALUE(
      tensor.is_contiguous() && tensor.storage_offset() == 0 &&
          tensor.nbytes() == tensor.storage().nbytes() - rest,
      "save: the ", opaque.class_name, " at ", path(),
      " is a part of a larger storage, which the format cannot say; clone the "
      "tensor in its args");
  save_storage(tensor.storage(), dtype);
}

void PickleWriter::save_storage(const c10::Storage& storage,
                                std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(!storage.device().is_meta(), "save: the storage at ", path(),
                   " is on the meta device and has no bytes to write");
  const char* module = dtype.has_value() ? "torch" : "torch.storage";
  const std::string type =
      dtype.has_value() ? storage_class(*dtype) : "UntypedStorage";
  const auto [entry, is_new] = storage_entries_.emplace(
      storage.unsafeGetStorageImpl(), StorageEntry{storages_.size(), type});
  if (is_new) {
    storages_.push_back(storage);
  }
  TORCH_CHECK_VALUE(entry->second.type == type, "save: ", path(),
                    " shares the memory of another tensor or storage of "
                    "another dtype (",
                    type, " and ", entry->second.type,
                    "), which the format cannot say; clone one of them");
  op(kMark);
  save_constant("storage");
  global(module, type);
  if (const auto [at, first] =
          storage_keys_.emplace(entry->second.number, memo_size_);
      first) {
    write_text(std::to_string(entry->second.number));
  } else {
    get(at->second);
  }
  const at::Device device = storage.device();
  if (device.is_cpu()) {
    save_constant("cpu");
  } else {
    write_text(device.str());
  }
  save_int(static_cast<int64_t>(storage.nbytes() /
                                c10::elementSize(dtype.value_or(at::kByte))));
  end_tuple(5);
  op(kBinPersId);
}

void PickleWriter::save_sizes(at::IntArrayRef sizes) {
  begin_tuple(sizes.size());
  for (const int64_t size : sizes) {
    save_int(size);
  }
  end_tuple(sizes.size());
}

void PickleWriter::save_size_object(at::IntArrayRef sizes) {
  global("torch", "Size");
  save_sizes(sizes);
  end_tuple(1);
  op(kReduce);
  memoize();
}

/// In Python a layout is one object, however often it appears.
void PickleWriter::save_layout(const std::string& name) {
  if (const auto found = layouts_.find(name); found != layouts_.end()) {
    get(found->second);
    return;
  }
  global("torch.serialization", "_get_layout");
  write_text("torch." + name);
  end_tuple(1);
  op(kReduce);
  layouts_.emplace(name, memo_size_);
  memoize();
}

void PickleWriter::save_empty_ordered_dict() {
  global("collections", "OrderedDict");
  op(kEmptyTuple);
  op(kReduce);
  memoize();
}

}  // namespace dataparallel::checkpoint
