#pragma once

#include <optional>
#include <stdexcept>
#include <string>

/// The program `dataparallel`: one function a subcommand. Each prints its
/// result on standard output and returns the exit code; errors are exceptions.
namespace dataparallel::command_line {

inline constexpr int kSuccess = 0;
inline constexpr int kDifferent = 1;  // of `diff` alone
inline constexpr int kUsage = 2;
inline constexpr int kFailure = 3;

/// Arguments that do not go together.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct InspectArguments {
  std::string file;
  bool json = false;
};
int inspect_file(const InspectArguments& arguments);

struct ConvertArguments {
  std::string input;
  std::string output;
  std::string key;
  std::optional<std::string> strip_prefix;
  std::optional<std::string> add_prefix;
  std::string dtype;
  bool allow_overflow = false;
  bool copy_shared = false;
  bool json = false;
};
int convert_file(const ConvertArguments& arguments);

struct DiffArguments {
  std::string a;
  std::string b;
  bool values_only = false;
  bool json = false;
};
int diff_files(const DiffArguments& arguments);

}  // namespace dataparallel::command_line
