#include <bit>
#include <charconv>
#include <cstdlib>

#include "checkpoint/known.h"
#include "checkpoint/opcode.h"
#include "checkpoint/pickle.h"
#include "checkpoint/problem.h"
#include "checkpoint/text.h"

// The part of PickleMachine that reads numbers, texts and bytes.
namespace dataparallel::checkpoint {

bool PickleMachine::step_scalar(unsigned char opcode) {
  switch (opcode) {
    case kNone:
      push(c10::IValue());
      return true;
    case kNewTrue:
      push(true);
      return true;
    case kNewFalse:
      push(false);
      return true;
    case kBinInt:
      push(int64_t{static_cast<int32_t>(cursor_.number(4))});
      return true;
    case kBinInt1:
      push(int64_t{cursor_.byte()});
      return true;
    case kBinInt2:
      push(static_cast<int64_t>(cursor_.number(2)));
      return true;
    case kInt:
      push_decimal(/*is_long=*/false);
      return true;
    case kLong:
      push_decimal(/*is_long=*/true);
      return true;
    case kLong1:
      push_long(cursor_.byte());
      return true;
    case kLong4:
      push_long(cursor_.number(4));
      return true;
    case kFloat:
      push_float_line();
      return true;
    case kBinFloat: {
      const unsigned char* bytes = cursor_.take(8);
      uint64_t bits = 0;
      for (int i = 0; i < 8; ++i) {
        bits = bits << 8 | bytes[i];
      }
      push(std::bit_cast<double>(bits));
      return true;
    }
    case kShortBinUnicode:
      push_text(cursor_.byte());
      return true;
    case kBinUnicode:
      push_text(cursor_.number(4));
      return true;
    case kBinUnicode8:
      push_text(cursor_.number(8));
      return true;
    case kUnicode: {
      auto text = decode_unicode_line(cursor_.line());
      if (!text) {
        fail("the pickle has a damaged text");
      }
      push(std::move(*text));
      return true;
    }
    case kString: {
      auto bytes = decode_string_line(cursor_.line());
      if (!bytes) {
        fail("the pickle has a damaged text");
      }
      push(objects_.python2_string(std::move(*bytes)));
      return true;
    }
    case kShortBinString:
      push_python2_string(cursor_.byte());
      return true;
    case kBinString:
      push_python2_string(cursor_.number(4));
      return true;
    case kShortBinBytes:
      push_bytes(cursor_.byte(), "builtins.bytes");
      return true;
    case kBinBytes:
      push_bytes(cursor_.number(4), "builtins.bytes");
      return true;
    case kBinBytes8:
      push_bytes(cursor_.number(8), "builtins.bytes");
      return true;
    case kByteArray8:
      push_bytes(cursor_.number(8), "builtins.bytearray");
      return true;
    default:
      return false;
  }
}

void PickleMachine::push_text(uint64_t size) {
  const auto* bytes = reinterpret_cast<const char*>(cursor_.take(size));
  if (!is_utf8({bytes, size})) {
    fail("the pickle has a text that is not UTF-8");
  }
  push(std::string(bytes, size));
}

void PickleMachine::push_bytes(uint64_t size, const char* class_name) {
  const auto* bytes = reinterpret_cast<const char*>(cursor_.take(size));
  push(make_opaque(class_name, {std::string(bytes, size)}));
}

void PickleMachine::push_python2_string(uint64_t size) {
  const auto* bytes = reinterpret_cast<const char*>(cursor_.take(size));
  push(objects_.python2_string(std::string(bytes, size)));
}

void PickleMachine::push_long(uint64_t size) {
  const unsigned char* bytes = cursor_.take(size);
  // The sign may be repeated.
  const auto is_spare = [&] {
    const unsigned char sign = (bytes[size - 2] & 0x80) != 0 ? 0xff : 0;
    return bytes[size - 1] == sign;
  };
  while (size > 8 && is_spare()) {
    --size;
  }
  if (size <= 8) {
    uint64_t value = little_endian(bytes, static_cast<int>(size));
    if (size > 0 && size < 8 && (bytes[size - 1] & 0x80) != 0) {
      value |= ~uint64_t{0} << (8 * size);
    }
    push(static_cast<int64_t>(value));
    return;
  }
  push(make_opaque("builtins.int",
                   {integer_text(std::string_view(
                       reinterpret_cast<const char*>(bytes), size))}));
}

void PickleMachine::push_decimal(bool is_long) {
  std::string_view text = cursor_.line();
  if (!is_long && (text == "00" || text == "01")) {
    push(text == "01");
    return;
  }
  if (!text.empty() && text.back() == 'L') {
    text.remove_suffix(1);
  }
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (whole && error == std::errc()) {
    push(value);
    return;
  }
  if (!whole || error != std::errc::result_out_of_range) {
    fail("the pickle has a damaged number");
  }
  push(make_opaque("builtins.int", {std::string(text)}));
}

void PickleMachine::push_float_line() {
  const std::string text(cursor_.line());
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || end != text.c_str() + text.size()) {
    fail("the pickle has a damaged number");
  }
  push(value);
}

}  // namespace dataparallel::checkpoint
