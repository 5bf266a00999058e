#include "checkpoint/modules.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/walk.h"

namespace dataparallel::checkpoint {
namespace {

using Mapping = c10::impl::GenericDict;

/// A mapping of names, whether c10 or Python made it: an `Opaque` mapping has
/// other keys too, and is none.
std::optional<Mapping> as_mapping(const c10::IValue& value) {
  return value.isGenericDict() ? std::optional(value.toGenericDict())
                               : std::nullopt;
}

std::optional<Mapping> member(const Mapping& state, const char* name) {
  const auto found = state.find(name);
  return found == state.end() ? std::nullopt : as_mapping(found->value());
}

/// The `__dict__` of a pickled `nn.Module`; none: it is something else.
std::optional<Mapping> module_state(const c10::IValue& value) {
  const Opaque* opaque = as_opaque(value);
  const auto state =
      opaque == nullptr ? std::nullopt : as_mapping(opaque->state);
  if (!state || !member(*state, "_parameters") || !member(*state, "_buffers") ||
      !member(*state, "_modules")) {
    return std::nullopt;
  }
  return state;
}

std::unordered_set<std::string> non_persistent(const Mapping& state) {
  std::unordered_set<std::string> names;
  const auto found = state.find("_non_persistent_buffers_set");
  const Opaque* set =
      found == state.end() ? nullptr : as_opaque(found->value());
  if (set != nullptr) {
    for (const c10::IValue& name : set->elements) {
      if (name.isString()) {
        names.insert(name.toStringRef());
      }
    }
  }
  return names;
}

/// A state_dict while it is put together. Modules can be shared, so a small
/// file can describe a state_dict of any size: it may take `budget_bytes`.
class Collector {
 public:
  explicit Collector(uint64_t& budget_bytes) : budget_bytes_(budget_bytes) {}

  Mapping take() { return std::move(result_); }

  void add_tensor(const std::string& name, const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      add(name, value.toTensor().detach());
    }
  }

  void add(const std::string& name, const c10::IValue& value) {
    spend(name);
    result_.insert_or_assign(name, value);
  }

  void spend(const std::string& name) {
    constexpr uint64_t kEntryBytes = 400;
    const uint64_t bytes = kEntryBytes + name.size();
    if (bytes > budget_bytes_) {
      fail("a module has more members than a file of its size can need");
    }
    budget_bytes_ -= bytes;
  }

 private:
  uint64_t& budget_bytes_;
  Mapping result_ = make_mapping("collections.OrderedDict");
};

void collect_module(const Mapping& state, const std::string& prefix,
                    Collector& collector) {
  collector.spend(prefix);
  const Mapping parameters = *member(state, "_parameters");
  for (const auto& item : parameters) {
    if (item.key().isString()) {
      collector.add_tensor(prefix + item.key().toStringRef(), item.value());
    }
  }
  const auto left_out = non_persistent(state);
  const Mapping buffers = *member(state, "_buffers");
  for (const auto& item : buffers) {
    if (item.key().isString() &&
        left_out.count(item.key().toStringRef()) == 0) {
      collector.add_tensor(prefix + item.key().toStringRef(), item.value());
    }
  }
  const Mapping modules = *member(state, "_modules");
  for (const auto& item : modules) {
    const auto child = module_state(item.value());
    if (child && item.key().isString()) {
      collect_module(*child, prefix + item.key().toStringRef() + ".",
                     collector);
    }
  }
}

void collect_classes(const c10::IValue& module,
                     std::unordered_set<const void*>& seen,
                     std::vector<std::string>& classes) {
  if (!seen.insert(module.internalToPointer()).second) {
    return;
  }
  classes.push_back(as_opaque(module)->class_name);
  const Mapping modules = *member(*module_state(module), "_modules");
  for (const auto& item : modules) {
    if (module_state(item.value())) {
      collect_classes(item.value(), seen, classes);
    }
  }
}

class Replacer {
 public:
  Replacer(std::vector<std::string>& classes, uint64_t budget_bytes)
      : classes_(classes), budget_bytes_(budget_bytes) {}

  c10::IValue replace(const c10::IValue& value) {
    if (!is_container(value)) {
      return value;
    }
    const auto known = replaced_.find(value.internalToPointer());
    if (known != replaced_.end()) {
      return known->second;
    }
    c10::IValue result = value;
    if (const auto state = module_state(value)) {
      Collector collector(budget_bytes_);
      collect_module(*state, "", collector);
      collect_classes(value, seen_, classes_);
      result = collector.take();
    } else {
      for (const Child& child : container_children(value)) {
        const c10::IValue other = replace(child.value);
        if (!other.is(child.value)) {
          replace_child(value, child, other);
        }
      }
    }
    replaced_.emplace(value.internalToPointer(), result);
    kept_.push_back(value);
    return result;
  }

 private:
  std::vector<std::string>& classes_;
  uint64_t budget_bytes_;
  std::unordered_map<const void*, c10::IValue> replaced_;
  std::vector<c10::IValue> kept_;  // so that no address is used twice
  std::unordered_set<const void*> seen_;
};

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

void collect_script(const c10::IValue& module, const std::string& prefix,
                    const FindScriptClass& find_class, bool everything,
                    Collector& collector) {
  const Opaque* opaque = as_opaque(module);
  if (opaque == nullptr || !opaque->state.isGenericDict()) {
    return;
  }
  const ScriptClass type = find_class(opaque->class_name);
  if (!type.is_module) {
    return;
  }
  collector.spend(prefix);
  const Mapping state = opaque->state.toGenericDict();
  for (const auto* names : {&type.parameters, &type.buffers}) {
    for (const auto& item : state) {
      if (item.key().isString() && has(*names, item.key().toStringRef())) {
        collector.add_tensor(prefix + item.key().toStringRef(), item.value());
      }
    }
  }
  for (const auto& item : state) {
    if (!item.key().isString()) {
      continue;
    }
    const std::string name = prefix + item.key().toStringRef();
    if (item.value().isCapsule()) {
      collect_script(item.value(), name + ".", find_class, everything,
                     collector);
    } else if (everything && !has(type.parameters, item.key().toStringRef()) &&
               !has(type.buffers, item.key().toStringRef())) {
      collector.add(name, item.value());
    }
  }
}

}  // namespace

c10::IValue replace_modules(const c10::IValue& value,
                            std::vector<std::string>& classes,
                            uint64_t budget_bytes) {
  return Replacer(classes, budget_bytes).replace(value);
}

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

c10::IValue script_state_dict(const c10::IValue& module,
                              const FindScriptClass& find_class,
                              bool everything, uint64_t budget_bytes) {
  Collector collector(budget_bytes);
  collect_script(module, "", find_class, everything, collector);
  return collector.take();
}

}  // namespace dataparallel::checkpoint
