#include <algorithm>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/script.h"

namespace dataparallel::checkpoint {
namespace {

/// Where the code of class `__torch__.a.b.Name` lies, and "Name".
std::pair<std::string, std::string> code_of(const std::string& class_name) {
  const size_t dot = class_name.rfind('.');
  if (dot == std::string::npos) {
    return {"", class_name};
  }
  std::string file = class_name.substr(0, dot);
  std::replace(file.begin(), file.end(), '.', '/');
  return {"code/" + file + ".py", class_name.substr(dot + 1)};
}

/// The name that `torch::serialize::OutputArchive` gives every module, apart
/// from numbers that keep them apart: "__torch__.___torch_mangle_3.Module".
bool is_archive_class(const std::string& class_name) {
  const std::string first = "__torch__.";
  const std::string mangled = "__torch__.___torch_mangle_";
  const std::string last = ".Module";
  if (class_name == first + "Module") {
    return true;
  }
  return class_name.rfind(mangled, 0) == 0 &&
         class_name.size() > mangled.size() + last.size() &&
         class_name.find('.', mangled.size()) ==
             class_name.size() - last.size() &&
         class_name.substr(class_name.size() - last.size()) == last;
}

}  // namespace

Script::Script(ZipArchive& zip, std::string root)
    : zip_(zip), root_(std::move(root)) {}

ScriptClass Script::find_class(const std::string& name) {
  const auto known = classes_.find(name);
  if (known != classes_.end()) {
    return known->second;
  }
  const auto [file, last] = code_of(name);
  auto code = code_.find(file);
  if (code == code_.end()) {
    ZipEntry* entry = zip_.find(root_ + file);
    code = code_.emplace(file, entry == nullptr ? "" : zip_.text(*entry)).first;
  }
  return classes_.emplace(name, find_script_class(code->second, last))
      .first->second;
}

bool Script::is_archive(const c10::IValue& value) {
  const Opaque* root = as_opaque(value);
  if (root == nullptr || !is_archive_class(root->class_name)) {
    return false;
  }
  find_class(root->class_name);
  // An archive has no code at all: a module of that name would have a method.
  return code_[code_of(root->class_name).first].find("  def ") ==
         std::string::npos;
}

c10::IValue Script::state_dict(const c10::IValue& value,
                               uint64_t budget_bytes) {
  const Opaque* root = as_opaque(value);
  if (root == nullptr || !find_class(root->class_name).is_module) {
    fail("is a TorchScript archive without a module");
  }
  return script_state_dict(
      value, [this](const std::string& name) { return find_class(name); },
      is_archive(value), budget_bytes);
}

}  // namespace dataparallel::checkpoint
