#pragma once

#include <array>
#include <cstdio>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

#include "support/temporary_folder.h"

// Python with torch as the oracle: the interpreter whose torch the tests are
// built with.

namespace test {

/// Runs a script, with `folder` as its argument, and returns what it prints.
/// Throws, with that, if it fails.
inline std::string python(const std::string& script,
                          const std::string& folder = "") {
  const TemporaryFolder own;
  write_file(own / "script.py", script);
  const std::string command = "\"" DATAPARALLEL_TEST_PYTHON "\" -W ignore \"" +
                              (own / "script.py") + "\" \"" + folder +
                              "\" 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    throw std::runtime_error("cannot run " + command);
  }
  std::string output;
  std::array<char, 4096> buffer;
  for (size_t got; (got = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    output.append(buffer.data(), got);
  }
  if (const int status = pclose(pipe); status != 0) {
    throw std::runtime_error("Python ended with " + std::to_string(status) +
                             ":\n" + output);
  }
  return output;
}

/// What a script printed after each line `== name`, without the last newline.
inline std::map<std::string, std::string> sections(const std::string& output) {
  std::map<std::string, std::string> result;
  std::istringstream lines(output);
  std::string name;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("== ", 0) == 0) {
      name = line.substr(3);
      result[name];
    } else {
      std::string& text = result[name];
      text += (text.empty() ? "" : "\n") + line;
    }
  }
  return result;
}

}  // namespace test
