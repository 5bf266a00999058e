#pragma once

#include <cstdint>
#include <string>
#include <string_view>

// What the sentences of errors have in common.
namespace dataparallel::detail {

/// "1 byte", "2 bytes".
inline std::string count_text(uint64_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

/// "an int", "a list", "an OrderedDict".
inline std::string with_article(const std::string& name) {
  const bool vowel =
      !name.empty() &&
      std::string_view("aeioAEIO").find(name[0]) != std::string_view::npos;
  return (vowel ? "an " : "a ") + name;
}

inline constexpr size_t kLongestPath = 400;

/// Both ends of a text that has more than `most` bytes. Of a text that grows
/// at its end they stay the ends, however often it is shortened.
inline std::string shortened(std::string text, size_t most = kLongestPath) {
  constexpr std::string_view kGap = "...";
  if (text.size() <= most) {
    return text;
  }
  const auto inside = [&](size_t at) {  // a character of UTF-8
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  size_t head = (most - kGap.size()) / 2;
  size_t tail = text.size() - head;
  while (head > 0 && inside(head)) {
    --head;
  }
  while (tail < text.size() && inside(tail)) {
    ++tail;
  }
  return text.replace(head, tail - head, kGap);
}

}  // namespace dataparallel::detail
