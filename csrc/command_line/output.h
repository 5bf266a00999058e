#pragma once

#include <string>

namespace dataparallel::command_line {

/// On standard output. Throws `std::runtime_error` if that cannot be written.
void print(const std::string& text);

/// Throws `std::runtime_error` if not all that was printed has arrived.
void flush_output();

}  // namespace dataparallel::command_line
