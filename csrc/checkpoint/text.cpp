#include "checkpoint/text.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dataparallel::checkpoint {
namespace {

void append_utf8(std::string& text, uint32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  const uint32_t lead = more == 1 ? 0xC0 : more == 2 ? 0xE0 : 0xF0;
  text += static_cast<char>(lead | code >> (6 * more));
  for (int i = more - 1; i >= 0; --i) {
    text += static_cast<char>(0x80 | (code >> (6 * i) & 0x3F));
  }
}

/// The character at `at`, which moves behind it; none: not UTF-8.
std::optional<uint32_t> next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) {
    return static_cast<unsigned char>(text[i]);
  };
  const unsigned char lead = byte(at);
  if (lead < 0x80) {
    ++at;
    return lead;
  }
  const int more = lead >= 0xC2 && lead < 0xE0   ? 1
                   : lead >= 0xE0 && lead < 0xF0 ? 2
                   : lead >= 0xF0 && lead < 0xF5 ? 3
                                                 : 0;
  if (more == 0 || text.size() - at <= static_cast<size_t>(more)) {
    return std::nullopt;
  }
  uint32_t code = lead & (0x3F >> more);
  for (int i = 1; i <= more; ++i) {
    const unsigned char next = byte(at + static_cast<size_t>(i));
    if ((next & 0xC0) != 0x80) {
      return std::nullopt;
    }
    code = code << 6 | (next & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
  if (code < kLeast[more] || code > 0x10FFFF) {
    return std::nullopt;
  }
  at += static_cast<size_t>(more) + 1;
  return code;
}

/// `count` hexadecimal digits at `at`.
std::optional<uint32_t> hexadecimal(std::string_view text, size_t at,
                                    size_t count) {
  uint32_t value = 0;
  for (size_t i = at; i < at + count; ++i) {
    const char digit = i < text.size() ? text[i] : ' ';
    if (digit >= '0' && digit <= '9') {
      value = value << 4 | static_cast<uint32_t>(digit - '0');
    } else if ((digit | 32) >= 'a' && (digit | 32) <= 'f') {
      value = value << 4 | static_cast<uint32_t>((digit | 32) - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return value;
}

/// Reads one escape of a byte string, behind the backslash.
bool decode_escape(std::string_view line, size_t& at, std::string& out) {
  static constexpr std::string_view kNames = "\\'\"abfnrtv";
  static constexpr std::string_view kBytes = "\\'\"\a\b\f\n\r\t\v";
  const char escape = line[at];
  if (const size_t known = kNames.find(escape); known != kNames.npos) {
    out += kBytes[known];
    ++at;
    return true;
  }
  if (escape == 'x') {
    const auto value = hexadecimal(line, at + 1, 2);
    if (!value) {
      return false;
    }
    out += static_cast<char>(*value);
    at += 3;
    return true;
  }
  if (escape >= '0' && escape <= '7') {
    int value = 0;
    for (int i = 0;
         i < 3 && at < line.size() && line[at] >= '0' && line[at] <= '7'; ++i) {
      value = value * 8 + (line[at++] - '0');
    }
    out += static_cast<char>(value);
    return true;
  }
  out += '\\';  // no escape at all
  return true;
}

}  // namespace

bool is_utf8(std::string_view bytes) {
  for (size_t at = 0; at < bytes.size();) {
    if (!next_character(bytes, at)) {
      return false;
    }
  }
  return true;
}

std::string latin1_to_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const char byte : bytes) {
    append_utf8(text, static_cast<unsigned char>(byte));
  }
  return text;
}

std::optional<std::string> utf8_to_latin1(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const auto code = next_character(text, at);
    if (!code || *code > 0xFF) {
      return std::nullopt;
    }
    bytes += static_cast<char>(*code);
  }
  return bytes;
}

std::optional<std::string> decode_unicode_line(std::string_view line) {
  std::string text;
  for (size_t at = 0; at < line.size();) {
    const char byte = line[at];
    const char kind = at + 1 < line.size() ? line[at + 1] : ' ';
    if (byte != '\\' || (kind != 'u' && kind != 'U')) {
      append_utf8(text, static_cast<unsigned char>(byte));
      ++at;
      continue;
    }
    const size_t digits = kind == 'u' ? 4 : 8;
    const auto code = hexadecimal(line, at + 2, digits);
    if (!code || *code > 0x10FFFF) {
      return std::nullopt;
    }
    append_utf8(text, *code);
    at += 2 + digits;
  }
  return text;
}

std::optional<std::string> decode_string_line(std::string_view line) {
  while (!line.empty() && (line.back() == ' ' || line.back() == '\r')) {
    line.remove_suffix(1);
  }
  if (line.size() < 2 || line.front() != line.back() ||
      (line.front() != '\'' && line.front() != '"')) {
    return std::nullopt;
  }
  line = line.substr(1, line.size() - 2);
  std::string out;
  for (size_t at = 0; at < line.size();) {
    if (line[at] != '\\') {
      out += line[at++];
      continue;
    }
    ++at;
    if (at == line.size() || !decode_escape(line, at, out)) {
      return std::nullopt;
    }
  }
  return out;
}

std::string integer_text(std::string_view bytes) {
  const bool negative =
      !bytes.empty() && (static_cast<unsigned char>(bytes.back()) & 0x80) != 0;
  std::vector<uint8_t> magnitude(bytes.begin(), bytes.end());
  if (negative) {
    int carry = 1;
    for (uint8_t& byte : magnitude) {
      const int value = (~byte & 0xFF) + carry;
      byte = static_cast<uint8_t>(value);
      carry = value >> 8;
    }
    if (carry != 0) {
      magnitude.push_back(1);
    }
  }
  while (!magnitude.empty() && magnitude.back() == 0) {
    magnitude.pop_back();
  }
  std::string text;  // from the last digit to the first
  constexpr size_t kDecimalBytes = 256;
  if (magnitude.size() > kDecimalBytes) {
    for (const uint8_t byte : magnitude) {
      text += "0123456789abcdef"[byte & 15];
      text += "0123456789abcdef"[byte >> 4];
    }
    text += "x0";
  }
  while (magnitude.size() <= kDecimalBytes && !magnitude.empty()) {
    uint32_t rest = 0;
    for (size_t i = magnitude.size(); i-- > 0;) {
      const uint32_t value = rest << 8 | magnitude[i];
      magnitude[i] = static_cast<uint8_t>(value / 10);
      rest = value % 10;
    }
    text += static_cast<char>('0' + rest);
    while (!magnitude.empty() && magnitude.back() == 0) {
      magnitude.pop_back();
    }
  }
  if (text.empty()) {
    text += '0';
  }
  if (negative) {
    text += '-';
  }
  std::reverse(text.begin(), text.end());
  return text;
}

}  // namespace dataparallel::checkpoint
