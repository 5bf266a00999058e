#include "checkpoint/pickle.h"

#include <charconv>

#include "checkpoint/containers.h"
#include "checkpoint/known.h"
#include "checkpoint/opcode.h"
#include "checkpoint/problem.h"
#include "checkpoint/text.h"
#include "checkpoint/walk.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

constexpr unsigned char kNewestProtocol = 5;

uint64_t to_index(std::string_view text) {
  uint64_t index = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail("the pickle has a damaged number");
  }
  return index;
}

}  // namespace

c10::IValue PickleMachine::run() {
  uint64_t offset = cursor_.offset();
  try {
    while (true) {
      offset = cursor_.offset();
      if (!step(cursor_.byte())) {
        break;
      }
    }
    return objects_.heap().finish(pop());
  } catch (Problem& problem) {
    if (!problem.offset) {
      problem.offset = offset;
    }
    if (problem.key.empty()) {
      problem.key = path();
    }
    throw;
  } catch (const c10::Error& error) {
    Problem problem(error.what_without_backtrace());
    problem.offset = offset;
    problem.key = path();
    throw problem;
  }
}

bool PickleMachine::step(unsigned char opcode) {
  switch (opcode) {
    case kStop:
      return false;
    case kProto:
      if (const int protocol = cursor_.byte(); protocol > kNewestProtocol) {
        fail("the pickle has protocol " + std::to_string(protocol) +
             ", expected 5 at most");
      }
      return true;
    case kFrame:
      if (cursor_.number(8) > cursor_.remaining()) {
        fail("a frame of the pickle is longer than what is left");
      }
      return true;
    case kMark:
      marks_.push_back(stack_.size());
      return true;
    case kPop:
      if (!marks_.empty() && stack_.size() == marks_.back()) {
        marks_.pop_back();
      } else {
        pop();
      }
      return true;
    case kPopMark:
      stack_.resize(pop_mark());
      return true;
    case kDup:
      push(top());
      return true;
    case kNextBuffer:
    case kReadOnlyBuffer:
      fail("the pickle wants a buffer that is not in the file");
    default:
      break;
  }
  if (!step_scalar(opcode) && !step_memo(opcode) && !step_container(opcode) &&
      !step_object(opcode)) {
    fail("the pickle has the unknown opcode " + std::to_string(opcode));
  }
  return true;
}

bool PickleMachine::step_memo(unsigned char opcode) {
  switch (opcode) {
    case kMemoize:
      remember(memo_.size() + far_memo_.size());
      return true;
    case kBinPut:
      remember(cursor_.byte());
      return true;
    case kLongBinPut:
      remember(cursor_.number(4));
      return true;
    case kPut:
      remember(to_index(cursor_.line()));
      return true;
    case kBinGet:
      recall(cursor_.byte());
      return true;
    case kLongBinGet:
      recall(cursor_.number(4));
      return true;
    case kGet:
      recall(to_index(cursor_.line()));
      return true;
    default:
      return false;
  }
}

bool PickleMachine::step_container(unsigned char opcode) {
  switch (opcode) {
    case kEmptyTuple:
      push_tuple(stack_.size());
      return true;
    case kTuple1:
    case kTuple2:
    case kTuple3: {
      const size_t count = opcode - kTuple1 + size_t{1};
      if (stack_.size() < floor() + count) {
        fail("the pickle takes more values than there are");
      }
      push_tuple(stack_.size() - count);
      return true;
    }
    case kTuple:
      push_tuple(pop_mark());
      return true;
    case kEmptyList:
      push(new_list());
      return true;
    case kList: {
      const size_t height = pop_mark();
      const c10::IValue list = new_list();
      objects_.append(list, above(height));
      stack_.resize(height);
      push(list);
      return true;
    }
    case kAppend: {
      const size_t height = stack_.size() - 1;
      objects_.append(below(height), above(height));
      stack_.resize(height);
      return true;
    }
    case kAppends:
    case kAddItems: {
      const size_t height = pop_mark();
      objects_.append(below(height), above(height));
      stack_.resize(height);
      return true;
    }
    case kEmptyDict:
      push(new_dict());
      return true;
    case kDict: {
      const size_t height = pop_mark();
      const c10::IValue dict = objects_.set_items(new_dict(), above(height));
      stack_.resize(height);
      push(dict);
      return true;
    }
    case kSetItem: {
      const size_t height = stack_.size() - 2;
      c10::IValue& target = below(height);
      target = objects_.set_items(target, above(height));
      stack_.resize(height);
      return true;
    }
    case kSetItems: {
      const size_t height = pop_mark();
      c10::IValue& target = below(height);
      target = objects_.set_items(target, above(height));
      stack_.resize(height);
      return true;
    }
    case kEmptySet:
      push(make_opaque("builtins.set"));
      return true;
    case kFrozenSet: {
      const size_t height = pop_mark();
      const c10::IValue set = make_opaque("builtins.frozenset");
      objects_.append(set, above(height));
      stack_.resize(height);
      push(set);
      return true;
    }
    default:
      return false;
  }
}

bool PickleMachine::step_object(unsigned char opcode) {
  switch (opcode) {
    case kGlobal: {
      const std::string module(cursor_.line());
      push_global(module, cursor_.line());
      return true;
    }
    case kStackGlobal: {
      const c10::IValue name = pop();
      const c10::IValue module = pop();
      if (!name.isString() || !module.isString()) {
        fail("the pickle names a class by something that is no text");
      }
      push_global(module.toStringRef(), name.toStringRef());
      return true;
    }
    case kExt1:
    case kExt2:
    case kExt4: {
      const uint64_t code = cursor_.number(opcode == kExt1   ? 1
                                           : opcode == kExt2 ? 2
                                                             : 4);
      push_global("copyreg", "extension_" + std::to_string(code));
      return true;
    }
    case kReduce: {
      const c10::IValue args = pop();
      if (!args.isTuple()) {
        fail("the pickle calls a function with arguments of type " +
             python_type_name(args));
      }
      replace_top(objects_.call(top(), args.toTupleRef().elements()));
      return true;
    }
    case kNewObj: {
      const c10::IValue args = pop();
      if (!args.isTuple()) {
        fail("the pickle makes an object with arguments of type " +
             python_type_name(args));
      }
      replace_top(
          objects_.make(top(), args.toTupleRef().elements(), c10::IValue()));
      return true;
    }
    case kNewObjEx: {
      const c10::IValue kwargs = pop();
      const c10::IValue args = pop();
      if (!args.isTuple()) {
        fail("the pickle makes an object with arguments of type " +
             python_type_name(args));
      }
      replace_top(objects_.make(top(), args.toTupleRef().elements(), kwargs));
      return true;
    }
    case kInst: {
      const std::string module(cursor_.line());
      const c10::IValue type = resolve_global(module, cursor_.line());
      const size_t height = pop_mark();
      const c10::IValue object =
          objects_.make(type, above(height), c10::IValue());
      stack_.resize(height);
      push(object);
      return true;
    }
    case kObj: {
      const size_t height = pop_mark();
      const Values values = above(height);
      if (values.empty()) {
        fail("the pickle takes more values than there are");
      }
      const c10::IValue object =
          objects_.make(values[0], values.slice(1), c10::IValue());
      stack_.resize(height);
      push(object);
      return true;
    }
    case kBuild: {
      const c10::IValue state = pop();
      const c10::IValue object = top();
      const c10::IValue built = objects_.build(object, state);
      if (!built.is(object)) {
        objects_.heap().forward(object, built);
        top() = built;
      }
      return true;
    }
    case kPersId:
      fail("the pickle names an object outside it, \"" +
           std::string(cursor_.line()) + "\"");
    case kBinPersId:
      replace_top(objects_.persistent(top()));
      return true;
    default:
      return false;
  }
}

c10::IValue PickleMachine::pop() {
  if (stack_.size() <= floor()) {
    fail("the pickle takes more values than there are");
  }
  c10::IValue value = std::move(stack_.back());
  stack_.pop_back();
  return value;
}

c10::IValue& PickleMachine::top() {
  if (stack_.size() <= floor()) {
    fail("the pickle takes more values than there are");
  }
  return stack_.back();
}

void PickleMachine::replace_top(c10::IValue value) {
  top() = std::move(value);
}

c10::IValue& PickleMachine::below(size_t height) {
  if (height > stack_.size() || height <= floor()) {
    fail("the pickle takes more values than there are");
  }
  return stack_[height - 1];
}

size_t PickleMachine::pop_mark() {
  if (marks_.empty()) {
    fail("the pickle ends a list that it did not begin");
  }
  const size_t height = marks_.back();
  marks_.pop_back();
  return height;
}

PickleMachine::Values PickleMachine::above(size_t height) const {
  return Values(stack_).slice(height);
}

void PickleMachine::push_tuple(size_t height) {
  const Values elements = above(height);
  c10::IValue tuple;
  switch (elements.size()) {
    case 1:
      tuple = c10::ivalue::Tuple::create(elements[0]);
      break;
    case 2:
      tuple = c10::ivalue::Tuple::create(elements[0], elements[1]);
      break;
    case 3:
      tuple = c10::ivalue::Tuple::create(elements[0], elements[1], elements[2]);
      break;
    default:
      tuple = c10::ivalue::Tuple::create(elements.vec());
  }
  for (const c10::IValue& element : elements) {
    objects_.heap().note(tuple, element);
  }
  stack_.resize(height);
  push(std::move(tuple));
}

void PickleMachine::push_global(std::string_view module,
                                std::string_view name) {
  if (!is_utf8(module) || !is_utf8(name)) {
    fail("the pickle has a text that is not UTF-8");
  }
  push(resolve_global(module, name));
}

void PickleMachine::remember(uint64_t index) {
  // Picklers count up; other indices cost more, and no more than they are.
  if (index == memo_.size()) {
    memo_.push_back(top());
  } else if (index < memo_.size()) {
    memo_[index] = top();
  } else {
    far_memo_[index] = top();
  }
}

void PickleMachine::recall(uint64_t index) {
  if (index < memo_.size()) {
    push(objects_.heap().resolve(memo_[index]));
    return;
  }
  const auto found = far_memo_.find(index);
  if (found == far_memo_.end()) {
    fail("the pickle refers to a value that it did not give, number " +
         std::to_string(index));
  }
  push(objects_.heap().resolve(found->second));
}

std::string PickleMachine::path() const {
  // Each dictionary that is being filled lies below a mark, and above it keys
  // and values in turn: an odd one is the key of what is in progress.
  std::string path;
  for (size_t i = 0; i < marks_.size(); ++i) {
    const size_t begin = marks_[i];
    const size_t end = i + 1 < marks_.size() ? marks_[i + 1] : stack_.size();
    if (begin == 0 || begin >= end || end > stack_.size()) {
      continue;
    }
    if (stack_[begin - 1].isGenericDict()) {
      // The last of an odd number, or what is being made follows its key.
      const size_t key = begin + (end - begin - 1) / 2 * 2;
      path = detail::shortened(path + "[" + key_text(stack_[key]) + "]");
    } else if (stack_[begin - 1].isList()) {
      path =
          detail::shortened(path + "[" + std::to_string(end - begin - 1) + "]");
    }
  }
  return path;
}

}  // namespace dataparallel::checkpoint
