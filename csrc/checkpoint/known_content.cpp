#include "checkpoint/known_content.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "checkpoint/known.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

/// The members of `Opaque` in which a class has its content.
struct Members {
  bool args = false;
  bool items = false;
  bool elements = false;
  bool state = false;
};

Members members_of(std::string_view type) {
  if (type == "builtins.set" || type == "builtins.frozenset" ||
      type == "torch.Size") {
    return {.elements = true};
  }
  if (type == "argparse.Namespace") {
    return {.state = true};
  }
  if (type == "builtins.dict" || type == "collections.Counter") {
    return {.items = true};
  }
  if (type == "collections.OrderedDict") {
    return {.items = true, .state = true};
  }
  if (type == "collections.defaultdict") {
    return {.args = true, .items = true};
  }
  return {.args = true};
}

bool has_text_keys(const c10::IValue& value) {
  if (!value.isGenericDict()) {
    return false;
  }
  const auto mapping = value.toGenericDict();
  return std::all_of(mapping.begin(), mapping.end(),
                     [](const auto& item) { return item.key().isString(); });
}

std::string wrong_count(const char* member, size_t count,
                        const char* expected) {
  return "has " + std::to_string(count) + " " + member + ", expected " +
         expected;
}

/// `seen`: tuples that were looked at; a tuple may hold another one as often as
/// it likes.
bool is_hashable(const c10::IValue& value,
                 std::unordered_set<const void*>& seen) {
  if (value.isTuple()) {
    const auto elements = value.toTupleRef().elements().asArrayRef();
    return !seen.insert(value.internalToPointer()).second ||
           std::all_of(elements.begin(), elements.end(),
                       [&](const c10::IValue& element) {
                         return is_hashable(element, seen);
                       });
  }
  const Opaque* opaque = as_opaque(value);
  return !value.isList() && !value.isGenericDict() &&
         (opaque == nullptr || !(opaque->class_name == "builtins.set" ||
                                 opaque->class_name == "builtins.bytearray" ||
                                 opaque->class_name == "builtins.slice" ||
                                 opaque->class_name == "argparse.Namespace" ||
                                 members_of(opaque->class_name).items));
}

/// One value in a set, or a key.
std::string unhashable(const c10::IValue& value) {
  return "holds " + detail::with_article(python_type_name(value)) +
         ", which has no hash in Python, as a key or in a set";
}

}  // namespace

bool is_factory(const c10::IValue& value) {
  const Opaque* opaque = as_opaque(value);
  return value.isNone() ||
         (opaque != nullptr && opaque->class_name == "builtins.type");
}

bool is_hashable(const c10::IValue& value) {
  std::unordered_set<const void*> seen;
  return is_hashable(value, seen);
}

std::string known_content_problem(const Opaque& opaque) {
  const std::string& type = opaque.class_name;
  const Members members = members_of(type);
  const std::pair<const char*, bool> parts[] = {
      {"args", !members.args && !opaque.args.empty()},
      {"kwargs", !opaque.kwargs.empty()},
      {"items", !members.items && !opaque.items.empty()},
      {"elements", !members.elements && !opaque.elements.empty()},
      {"state", !members.state && !opaque.state.isNone()}};
  for (const auto& [name, is_too_much] : parts) {
    if (is_too_much) {
      return std::string("holds ") + name + ", which no " + type + " has";
    }
  }
  if (type == "builtins.slice" && opaque.args.size() != 3) {
    return wrong_count("args", opaque.args.size(), "start, stop and step");
  }
  if (type == "collections.defaultdict" && opaque.args.size() > 1) {
    return wrong_count("args", opaque.args.size(), "its default_factory");
  }
  if (members.state && !opaque.state.isNone() && !has_text_keys(opaque.state)) {
    return "has " + detail::with_article(python_type_name(opaque.state)) +
           " as its state, expected a mapping from names";
  }
  if (type == "builtins.set" || type == "builtins.frozenset") {
    for (const c10::IValue& element : opaque.elements) {
      if (!is_hashable(element)) {
        return unhashable(element);
      }
    }
  }
  for (const auto& [key, value] : opaque.items) {
    if (!is_hashable(key)) {
      return unhashable(key);
    }
  }
  if (type == "collections.defaultdict" && opaque.args.size() == 1 &&
      !is_factory(opaque.args[0])) {
    return "has " + detail::with_article(python_type_name(opaque.args[0])) +
           " as its default_factory, expected a class";
  }
  if (type == "torch.Size") {
    for (const c10::IValue& element : opaque.elements) {
      if (!element.isInt()) {
        return "holds " + detail::with_article(python_type_name(element)) +
               ", expected int";
      }
    }
  }
  return "";
}

}  // namespace dataparallel::checkpoint
