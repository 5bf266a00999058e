#include "checkpoint/dropped.h"

#include <dataparallel/python_values.h>

#include <algorithm>

#include "checkpoint/walk.h"

namespace dataparallel::checkpoint {
namespace {

using Attributes = std::vector<std::pair<std::string, std::string>>;

/// The classes whose objects are nothing but tensors.
bool is_plain(const std::string& type) {
  return type == "torch.Tensor" || type == "torch._tensor.Tensor" ||
         type == "torch.nn.parameter.Parameter" ||
         type == "torch.nn.parameter.Buffer" || type == "numpy.ndarray";
}

void spend(const Attributes& names, Heap& heap) {
  for (const auto& [name, type] : names) {
    heap.spend(sizeof(names[0]) + name.size() + type.size());
  }
}

/// The note of `tensor`, for it alone: detached tensors have the same.
Dropped& own_note(const at::Tensor& tensor, Heap& heap) {
  auto note = c10::make_intrusive<Dropped>();
  if (const Dropped* old = dropped_of(tensor)) {
    heap.spend(old->class_name.size());
    spend(old->attributes, heap);
    note->class_name = old->class_name;
    note->attributes = old->attributes;
  }
  Dropped& result = *note;
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(note));
  return result;
}

/// Takes out what torch itself puts at a `Parameter` or a `Buffer`, to know it
/// among plain tensors.
void remove_marks(Attributes& names) {
  const auto is = [](const char* mark) {
    return [mark](const auto& attribute) { return attribute.first == mark; };
  };
  if (std::any_of(names.begin(), names.end(), is("_is_buffer"))) {
    std::erase_if(names, is("persistent"));
  }
  std::erase_if(names, is("_is_buffer"));
  std::erase_if(names, is("_is_param"));
}

void add(const at::Tensor& tensor, const Attributes& names, Heap& heap) {
  if (!names.empty()) {
    spend(names, heap);
    Attributes& noted = own_note(tensor, heap).attributes;
    noted.insert(noted.end(), names.begin(), names.end());
  }
}

void collect(const c10::IValue& state, Attributes& all) {
  if (!state.isGenericDict()) {
    all.emplace_back("__getstate__()", python_type_name(state));
    return;
  }
  for (const auto& item : state.toGenericDict()) {
    const std::string name =
        item.key().isString() ? item.key().toStringRef() : key_text(item.key());
    all.emplace_back(name, python_type_name(item.value()));
  }
}

}  // namespace

const Dropped* dropped_of(const at::Tensor& tensor) {
  return dynamic_cast<const Dropped*>(
      tensor.unsafeGetTensorImpl()->get_backend_meta());
}

void drop_class(const at::Tensor& tensor, const std::string& type, Heap& heap) {
  if (!is_plain(type)) {
    heap.spend(type.size());
    own_note(tensor, heap).class_name = type;
  }
}

void drop_state(const at::Tensor& tensor, const c10::IValue& state,
                Heap& heap) {
  Attributes all;
  if (state.isTuple() && state.toTupleRef().elements().size() == 2) {
    for (const c10::IValue& part : state.toTupleRef().elements()) {
      if (!part.isNone()) {
        collect(part, all);
      }
    }
  } else if (!state.isNone()) {
    collect(state, all);
  }
  remove_marks(all);
  add(tensor, all, heap);
}

void drop_attribute(const at::Tensor& tensor, const std::string& name,
                    const c10::IValue& value, Heap& heap) {
  add(tensor, {{name, python_type_name(value)}}, heap);
}

void drop_attributes(const at::Tensor& tensor) {
  if (const Dropped* old = dropped_of(tensor)) {
    auto note = c10::make_intrusive<Dropped>();
    note->class_name = old->class_name;
    tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(note));
  }
}

}  // namespace dataparallel::checkpoint
