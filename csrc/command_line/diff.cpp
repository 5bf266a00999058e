#include <dataparallel/checkpoint.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "command_line/commands.h"
#include "command_line/compare.h"
#include "command_line/output.h"
#include "command_line/progress.h"
#include "command_line/table.h"
#include "detail/wording.h"

namespace dataparallel::command_line {
namespace {

using Json = nlohmann::ordered_json;

/// "2 of 3 elements differ, by 0.5 at most".
std::string elements_text(const TensorDifference& tensor) {
  std::string text = fmt::format("{} of {} differ{}", tensor.different,
                                 detail::count_text(tensor.elements, "element"),
                                 tensor.different == 1 ? "s" : "");
  if (tensor.most.has_value()) {
    text += fmt::format(", by {:.3g} at most", *tensor.most);
  }
  if (tensor.nan_in_one > 0) {
    text += fmt::format(", {} of them NaN in one file only", tensor.nan_in_one);
  }
  return text;
}

std::string difference_text(const Difference& difference) {
  if (difference.a.empty() || difference.b.empty()) {
    return difference.a.empty() ? "only in B" : "only in A";
  }
  std::vector<std::string> texts;
  for (const std::string& property : difference.properties) {
    texts.push_back("another " + property);
  }
  if (difference.tensor.different > 0) {
    texts.push_back(elements_text(difference.tensor));
  }
  return fmt::format("{}", fmt::join(texts, "; "));
}

Json text_or_null(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

void print_json(const std::vector<Difference>& differences) {
  Json list = Json::array();
  for (const Difference& difference : differences) {
    Json item = {{"key", difference.key},
                 {"a", text_or_null(difference.a)},
                 {"b", text_or_null(difference.b)},
                 {"different", difference.properties}};
    const TensorDifference& tensor = difference.tensor;
    if (tensor.different > 0) {
      item["different"].push_back("elements");
      item["different_elements"] = tensor.different;
      item["nan_in_one"] = tensor.nan_in_one;
      // JSON has no infinity.
      item["max_difference"] = !tensor.most.has_value()   ? Json()
                               : std::isinf(*tensor.most) ? Json("inf")
                                                          : Json(*tensor.most);
    }
    list.push_back(std::move(item));
  }
  const Json all = {{"same", differences.empty()}, {"differences", list}};
  print(json_text(all));
}

void print_table(const std::vector<Difference>& differences,
                 uint64_t compared) {
  if (differences.empty()) {
    print("the same, " + detail::count_text(compared, "value") + " compared\n");
    return;
  }
  const auto cell = [](const std::string& text) {
    return text.empty() ? std::string("-") : text;
  };
  using Align = Table::Align;
  Table table({Align::kLeft, Align::kLeft, Align::kLeft, Align::kLeft});
  table.add({"KEY", "A", "B", "DIFFERENCE"});
  for (const Difference& difference : differences) {
    table.add({difference.key.empty() ? "(all)" : difference.key,
               cell(difference.a), cell(difference.b),
               difference_text(difference)});
  }
  table.print();
  print("\n" + detail::count_text(differences.size(), "difference") + "\n");
}

}  // namespace

int diff_files(const DiffArguments& arguments) {
  const auto options = LoadOptions().map_location("cpu");
  const c10::IValue a = load(arguments.a, options);
  const c10::IValue b = load(arguments.b, options);
  std::vector<Difference> differences;
  uint64_t compared = 0;
  {
    const uint64_t total = count_values(a);
    Progress progress("comparing");
    Comparison comparison(arguments.values_only, [&](uint64_t done) {
      progress.update(std::min(done, total), total);
    });
    comparison.compare(a, b);
    differences = comparison.differences();
    compared = comparison.compared();
  }
  if (arguments.json) {
    print_json(differences);
  } else {
    print_table(differences, compared);
  }
  return differences.empty() ? kSuccess : kDifferent;
}

}  // namespace dataparallel::command_line
