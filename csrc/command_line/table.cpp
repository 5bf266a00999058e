#include "command_line/table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "command_line/output.h"

namespace dataparallel::command_line {
namespace {

/// How many columns of a terminal UTF-8 text takes, wide characters aside.
size_t width(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string printable(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result;
}

void Table::print() const {
  std::vector<std::vector<std::string>> rows;
  std::vector<size_t> widths(columns_.size());
  for (const auto& row : rows_) {
    rows.emplace_back();
    for (size_t i = 0; i < row.size(); ++i) {
      rows.back().push_back(printable(row[i]));
      widths[i] = std::max(widths[i], width(rows.back()[i]));
    }
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - width(row[i]), ' ');
      line += i == 0 ? "" : "  ";
      line += columns_[i] == Align::kLeft ? row[i] + space : space + row[i];
    }
    line.resize(line.find_last_not_of(' ') + 1);
    command_line::print(line + "\n");
  }
}

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', /*ensure_ascii=*/false,
                   nlohmann::ordered_json::error_handler_t::replace) +
         "\n";
}

std::string size_text(int64_t bytes) {
  if (bytes < 1024) {
    return fmt::format("{} B", bytes);
  }
  auto value = static_cast<double>(bytes);
  const char* unit = "";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) {
      break;
    }
    value /= 1024;
    unit = next;
  }
  return fmt::format("{:.1f} {}", value, unit);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace dataparallel::command_line
