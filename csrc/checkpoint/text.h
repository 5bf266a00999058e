#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace dataparallel::checkpoint {

/// Whether `bytes` are UTF-8 as Python's pickler writes it: lone surrogates
/// are allowed.
bool is_utf8(std::string_view bytes);

std::string latin1_to_utf8(std::string_view bytes);

/// None where a character is beyond Latin-1.
std::optional<std::string> utf8_to_latin1(std::string_view text);

/// Protocol 0's text: Latin-1 with \uXXXX and \UXXXXXXXX. None: damaged.
std::optional<std::string> decode_unicode_line(std::string_view line);

/// Protocol 0's byte strings, as Python 2 prints them: 'it\'s\n'. None:
/// damaged.
std::optional<std::string> decode_string_line(std::string_view line);

/// The decimal digits of a little-endian two's complement number of any size;
/// hexadecimal ("0x...") where that would take too long.
std::string integer_text(std::string_view bytes);

}  // namespace dataparallel::checkpoint
