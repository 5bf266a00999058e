#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/TensorImpl.h>

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/heap.h"

namespace dataparallel::checkpoint {

// Note [What tensors lose]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// In Python a tensor can be of a subclass and have attributes of any kind,
// which a tensor in C++ cannot hold. What was lost is noted at the tensor
// itself, as names alone (values could contain the tensor again), in the one
// place that torch leaves to others: BackendMeta, which goes along with
// detach() and which nothing reads for the devices that there are.

/// What a tensor had in Python.
struct Dropped : public c10::BackendMeta {
  std::string class_name;  ///< "" for a plain tensor or parameter
  /// Name and type of each attribute, in order.
  std::vector<std::pair<std::string, std::string>> attributes;
};

/// Null: nothing was dropped.
const Dropped* dropped_of(const at::Tensor& tensor);

/// `type` is that of a tensor in Python: noted unless it says no more than
/// that.
void drop_class(const at::Tensor& tensor, const std::string& type, Heap& heap);

/// `state` is what Python would restore the attributes from: a dictionary, or
/// one with another one for `__slots__`.
void drop_state(const at::Tensor& tensor, const c10::IValue& state, Heap& heap);

void drop_attribute(const at::Tensor& tensor, const std::string& name,
                    const c10::IValue& value, Heap& heap);

/// Forgets the attributes, not the class.
void drop_attributes(const at::Tensor& tensor);

}  // namespace dataparallel::checkpoint
