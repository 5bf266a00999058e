#include <algorithm>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/script.h"
#include "checkpoint/state_collector.h"

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

/// The texts in `["a", "b", ]`, where such a list starts the line.
std::vector<std::string> read_list(const std::string& line) {
  std::vector<std::string> names;
  for (size_t at = line.find('['); at < line.size(); ++at) {
    if (line[at] != '"') {
      continue;
    }
    std::string name;
    for (++at; at < line.size() && line[at] != '"'; ++at) {
      if (line[at] == '\\' && at + 1 < line.size()) {
        ++at;
      }
      name += line[at];
    }
    names.push_back(name);
  }
  return names;
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Reads `class Name(Module):` and the two lists below it from the code of the
/// archive, which is otherwise left alone.
ScriptClass find_script_class(const std::string& code,
                              const std::string& name) {
  ScriptClass result;
  const std::string head = "class " + name + "(Module):\n";
  size_t at = code.rfind(head, 0) == 0 ? 0 : code.find("\n" + head);
  if (at == std::string::npos) {
    return result;
  }
  result.is_module = true;
  at = code.find("(Module):\n", at) + std::string("(Module):\n").size();
  while (at < code.size()) {
    const size_t end = std::min(code.find('\n', at), code.size());
    const std::string line = code.substr(at, end - at);
    if (line.rfind("  __parameters__ = ", 0) == 0) {
      result.parameters = read_list(line);
    } else if (line.rfind("  __buffers__ = ", 0) == 0) {
      result.buffers = read_list(line);
      break;  // the last that is wanted
    } else if (line.rfind("  def ", 0) == 0 || line.rfind("  ", 0) != 0) {
      break;
    }
    at = end + 1;
  }
  return result;
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

void Script::collect(const c10::IValue& module, const std::string& prefix,
                     bool everything, StateCollector& collector) {
  const Opaque* opaque = as_opaque(module);
  if (opaque == nullptr || !opaque->state.isGenericDict()) {
    return;
  }
  const ScriptClass type = find_class(opaque->class_name);
  if (!type.is_module) {
    return;
  }
  collector.spend(prefix);
  const auto state = opaque->state.toGenericDict();
  for (const auto* names : {&type.parameters, &type.buffers}) {
    for (const auto& item : state) {
      if (item.key().isString() && has(*names, item.key().toStringRef()) &&
          item.value().isTensor()) {
        collector.add_tensor(prefix + item.key().toStringRef(),
                             item.value().toTensor());
      }
    }
  }
  for (const auto& item : state) {
    if (!item.key().isString()) {
      continue;
    }
    const std::string name = prefix + item.key().toStringRef();
    if (item.value().isCapsule()) {
      collect(item.value(), name + ".", everything, collector);
    } else if (everything && !has(type.parameters, item.key().toStringRef()) &&
               !has(type.buffers, item.key().toStringRef())) {
      collector.add(name, item.value());
    }
  }
}

c10::IValue Script::state_dict(const c10::IValue& value,
                               uint64_t budget_bytes) {
  const Opaque* root = as_opaque(value);
  if (root == nullptr || !find_class(root->class_name).is_module) {
    fail("is a TorchScript archive without a module");
  }
  StateCollector collector(budget_bytes);
  collect(value, "", is_archive(value), collector);
  return collector.take();
}

}  // namespace dataparallel::checkpoint
