#include <dataparallel/checkpoint.h>

#include <set>

#include "checkpoint/archive.h"
#include "checkpoint/dropped.h"
#include "checkpoint/known.h"
#include "checkpoint/walk.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

/// "model.layer.weight": keys and indices joined by dots.
std::string dotted(const std::string& path, const Child& child) {
  std::string step;
  switch (child.step) {
    case Child::Step::kIndex:
    case Child::Step::kArgument:
      step = std::to_string(child.index);
      break;
    case Child::Step::kState:
      return path;
    default:
      step =
          child.key.isString() ? child.key.toStringRef() : key_text(child.key);
  }
  return detail::shortened(path.empty() ? step : path + "." + step);
}

class Inspector {
 public:
  Inspector(const Contents& contents, CheckpointInfo& info,
            std::set<std::string>& unknown)
      : contents_(contents), info_(info), unknown_(unknown) {}

  void visit(const c10::IValue& value, const std::string& path) {
    if (value.isTensor()) {
      add(value.toTensor(), path);
      return;
    }
    // A container that is in several places is listed at the first.
    if (!is_container(value) ||
        !seen_.insert(value.internalToPointer()).second) {
      return;
    }
    for (const Child& child : children(value)) {
      visit(child.value, dotted(path, child));
    }
  }

 private:
  void add(const at::Tensor& tensor, const std::string& path) {
    if (!tensor.defined()) {
      return;
    }
    TensorInfo info;
    info.key = path;
    info.dtype = tensor.scalar_type();
    info.nbytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    info.shape = tensor.sizes().vec();
    info.device = device_of(tensor);
    info.requires_grad = tensor.requires_grad();
    info_.tensors.push_back(std::move(info));
    const Dropped* dropped = dropped_of(tensor);
    if (dropped != nullptr && !dropped->class_name.empty()) {
      unknown_.insert(dropped->class_name);
    }
  }

  std::string device_of(const at::Tensor& tensor) const {
    at::Tensor dense = tensor;
    if (tensor.layout() == at::kSparse) {
      dense = tensor._values();
    } else if (tensor.layout() != at::kStrided) {
      dense = tensor.values();
    }
    const auto tag =
        contents_.tags.find(dense.unsafeGetTensorImpl()->has_storage()
                                ? dense.storage().unsafeGetStorageImpl()
                                : nullptr);
    return tag == contents_.tags.end() ? tensor.device().str() : tag->second;
  }

  const Contents& contents_;
  CheckpointInfo& info_;
  std::set<std::string>& unknown_;
  std::set<const void*> seen_;
};

}  // namespace

CheckpointInfo describe(const Contents& contents) {
  CheckpointInfo info;
  info.kind = contents.kind;
  info.metadata = contents.metadata;
  std::set<std::string> unknown = contents.module_classes;
  Inspector(contents, info, unknown).visit(contents.value, "");
  info.opaque = opaque_entries(contents.value);
  for (const OpaqueEntry& entry : info.opaque) {
    unknown.insert(entry.class_name);
  }
  info.dropped = dropped_entries(contents.value);
  info.unknown_classes.assign(unknown.begin(), unknown.end());
  return info;
}

}  // namespace dataparallel::checkpoint
