#include "command_line/output.h"

#include <cerrno>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <system_error>

namespace dataparallel::command_line {
namespace {

void check(bool written) {
  if (!written) {
    throw std::runtime_error("standard output cannot be written (" +
                             std::generic_category().message(errno) + ")");
  }
}

}  // namespace

void print(const std::string& text) {
  check(std::fwrite(text.data(), 1, text.size(), stdout) == text.size());
}

void flush_output() {
  check(std::cout.flush().good() && std::fflush(stdout) == 0);
}

}  // namespace dataparallel::command_line
