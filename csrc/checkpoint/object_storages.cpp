#include "checkpoint/objects.h"

#include "checkpoint/arguments.h"
#include "checkpoint/problem.h"

// The part of Objects that reads what a pickle says of storages.
namespace dataparallel::checkpoint {

c10::IValue Objects::persistent(const c10::IValue& id) {
  if (id.isTuple() && storages_ != nullptr) {
    const Arguments parts = id.toTupleRef().elements();
    if (parts.size() >= 2 && parts[0].isString()) {
      if (parts[0].toStringRef() == "module") {
        return parts[1];  // a class, with its source
      }
      if (parts[0].toStringRef() == "storage") {
        return storage(parts);
      }
    }
  }
  fail("an object outside the pickle is named by a value of type " +
       python_type_name(id) + ", expected a storage's description");
}

c10::IValue Objects::storage(Arguments id) {
  const Reference* type = id.size() < 5 ? nullptr : as_reference(id[1]);
  if (type == nullptr || type->callable != Callable::kStorage ||
      !id[3].isString() || !id[4].isInt() ||
      !(id[2].isString() || id[2].isInt())) {
    fail("a storage's description is damaged");
  }
  StorageClaim claim;
  claim.class_name = type->name;
  claim.dtype = type->dtype;
  claim.key =
      id[2].isString() ? id[2].toStringRef() : std::to_string(id[2].toInt());
  claim.tag = id[3].toStringRef();
  const int64_t item =
      static_cast<int64_t>(c10::elementSize(type->dtype.value_or(at::kByte)));
  const auto to_bytes = [&](const c10::IValue& elements) {
    int64_t nbytes = 0;
    if (!elements.isInt() || elements.toInt() < 0 ||
        __builtin_mul_overflow(elements.toInt(), item, &nbytes)) {
      fail("storage \"" + claim.key + "\" has an impossible size");
    }
    return static_cast<uint64_t>(nbytes);
  };
  claim.nbytes = to_bytes(id[4]);
  auto root = storages_->get(claim);
  if (id.size() < 6 || id[5].isNone()) {
    return from_opaque(root);
  }
  // A view of a storage, as files before torch 0.4 have them.
  const Arguments view = to_elements(id[5], "a storage's view");
  if (view.size() != 3) {
    fail("a storage's description is damaged");
  }
  auto part = c10::make_intrusive<StorageRef>(root->class_name, root->storage);
  part->dtype = root->dtype;
  part->tag = root->tag;
  part->base_bytes = to_bytes(view[1]);
  part->nbytes = to_bytes(view[2]);
  if (part->base_bytes > root->nbytes ||
      part->nbytes > root->nbytes - part->base_bytes) {
    fail("a view of storage \"" + claim.key + "\" lies outside it");
  }
  return from_opaque(std::move(part));
}

}  // namespace dataparallel::checkpoint
