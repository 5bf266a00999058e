#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace dataparallel::checkpoint {

/// The objects of a value while it is built.
///
/// A pickle can build lists that contain themselves, which as values in C++
/// would never be freed, and nesting so deep that destroying it would overflow
/// the stack. So every object that holds other objects is kept here: those that
/// are not in the result are emptied one by one at the end, and the result is
/// checked before it is given out. Where an object in it contains itself, an
/// opaque "dataparallel.BackReference" is put instead.
class Heap {
 public:
  /// Copies that the file asks for may take `budget_bytes` in all.
  explicit Heap(uint64_t budget_bytes) : budget_bytes_(budget_bytes) {}
  Heap(const Heap&) = delete;
  ~Heap();

  /// A list, dictionary, tuple or opaque object got elements.
  void note(const c10::IValue& container);
  /// The same, where `element` is all that it got.
  void note(const c10::IValue& container, const c10::IValue& element) {
    if (holds_more(element)) {
      note(container);
    }
  }

  /// From now on `old` stands for `value`: objects that are known only after
  /// the file has referred to them.
  void forward(const c10::IValue& old, const c10::IValue& value);
  c10::IValue resolve(c10::IValue value) const;

  /// What stands in the result for an object: itself, or another one.
  using Substitute = std::function<c10::IValue(const c10::IValue&)>;
  void substitute(Substitute function) { substitute_ = std::move(function); }

  /// Fails where the copies made so far take more than the budget.
  void spend(uint64_t bytes);

  /// Checks the finished value, replaces what was forwarded or substituted,
  /// and gives it out.
  c10::IValue finish(c10::IValue root);

 private:
  c10::IValue in_its_place(const c10::IValue& value) const;

  static bool holds_more(const c10::IValue& value) {
    return value.isList() || value.isGenericDict() || value.isTuple() ||
           value.isCapsule();
  }

  uint64_t budget_bytes_;
  Substitute substitute_;
  std::vector<c10::IValue> containers_;
  std::unordered_map<const void*, std::pair<c10::IValue, c10::IValue>>
      forwards_;
  std::unordered_set<const void*> given_out_;
};

/// The deepest nesting that a value may have.
inline constexpr size_t kMaxDepth = 1000;

}  // namespace dataparallel::checkpoint
