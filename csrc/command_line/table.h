#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace dataparallel::command_line {

/// Rows in columns as wide as their widest cell; the first row is the heading.
class Table {
 public:
  enum class Align { kLeft, kRight };
  explicit Table(std::vector<Align> columns) : columns_(std::move(columns)) {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// On standard output.
  void print() const;

 private:
  std::vector<Align> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// Text of a file that does not move a terminal's cursor.
std::string printable(const std::string& text);

/// With a newline; what is no UTF-8 is replaced.
std::string json_text(const nlohmann::ordered_json& json);

/// `1.5 MiB`.
std::string size_text(int64_t bytes);

/// `[2, 3]`.
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace dataparallel::command_line
