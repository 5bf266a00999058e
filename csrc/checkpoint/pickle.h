#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/objects.h"
#include "checkpoint/source.h"

namespace dataparallel::checkpoint {

/// Runs one pickle: every opcode of the protocols 0 to 5, on a stack of its
/// own. Nothing that the pickle names is called; `Objects` makes what it
/// describes.
class PickleMachine {
 public:
  PickleMachine(Cursor& cursor, Objects& objects)
      : cursor_(cursor), objects_(objects) {}

  /// The value, checked; the cursor is then behind it. Throws `Problem` with
  /// the offset of the opcode and the path of the value in progress.
  c10::IValue run();

 private:
  using Values = c10::ArrayRef<c10::IValue>;

  bool step(unsigned char opcode);  // false: finished
  bool step_scalar(unsigned char opcode);
  bool step_container(unsigned char opcode);
  bool step_memo(unsigned char opcode);
  bool step_object(unsigned char opcode);

  // The stack. Nothing below the last mark can be reached.
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  void push(c10::IValue value) { stack_.push_back(std::move(value)); }
  c10::IValue pop();
  c10::IValue& top();
  void replace_top(c10::IValue value);
  c10::IValue& below(size_t height);
  size_t pop_mark();
  Values above(size_t height) const;

  void push_tuple(size_t height);
  void push_text(uint64_t size);
  void push_bytes(uint64_t size, const char* class_name);
  void push_python2_string(uint64_t size);
  void push_long(uint64_t size);
  void push_decimal(bool is_long);
  void push_float_line();
  void push_global(std::string_view module, std::string_view name);
  void remember(uint64_t index);
  void recall(uint64_t index);
  std::string path() const;

  Cursor& cursor_;
  Objects& objects_;
  std::vector<c10::IValue> stack_;
  std::vector<size_t> marks_;
  std::vector<c10::IValue> memo_;
  std::unordered_map<uint64_t, c10::IValue> far_memo_;
};

}  // namespace dataparallel::checkpoint
