#include "command_line/left_out.h"

#include <dataparallel/python_values.h>

#include <unordered_set>

#include "command_line/python_text.h"
#include "detail/wording.h"

namespace dataparallel::command_line {
namespace {

/// Whether `dict` was made from the mapping.
bool is_origin(const c10::impl::GenericDict& mapping, const StateDict& dict) {
  if (mapping.size() != dict.size()) {
    return false;
  }
  for (const auto& item : mapping) {
    const c10::IValue* value =
        item.key().isString() ? dict.find(item.key().toStringRef()) : nullptr;
    if (value == nullptr || !value->is(item.value())) {
      return false;
    }
  }
  return true;
}

class Search {
 public:
  explicit Search(const StateDict& dict) : dict_(dict) {}

  /// Whether `value` is the dictionary's origin, or has it inside; then
  /// `others` has what lies beside the way to it.
  bool find(const c10::IValue& value, const std::string& path,
            std::vector<std::string>& others) {
    if (!value.isGenericDict() ||
        !seen_.insert(value.internalToPointer()).second) {
      return false;
    }
    const auto mapping = value.toGenericDict();
    if (is_origin(mapping, dict_)) {
      return true;
    }
    bool found = false;
    std::vector<std::string> beside;
    for (const auto& item : mapping) {
      const std::string name = item.key().isString() ? item.key().toStringRef()
                                                     : python_text(item.key());
      const std::string key =
          detail::shortened(path.empty() ? name : path + "." + name);
      if (!found && find(item.value(), key, others)) {
        found = true;
      } else {
        beside.push_back(key);
      }
    }
    if (found) {
      others.insert(others.begin(), beside.begin(), beside.end());
    }
    return found;
  }

 private:
  const StateDict& dict_;
  std::unordered_set<const void*> seen_;
};

}  // namespace

std::vector<std::string> left_out(const c10::IValue& checkpoint,
                                  const StateDict& dict) {
  std::vector<std::string> others;
  Search(dict).find(checkpoint, "", others);
  return others;
}

}  // namespace dataparallel::command_line
