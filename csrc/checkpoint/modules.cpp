#include "checkpoint/modules.h"

#include <algorithm>
#include <string_view>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"

namespace dataparallel::checkpoint {
namespace {

using Mapping = c10::impl::GenericDict;

/// Classes of torch with code for their state_dict, and modules all of whose
/// classes are such (they end with a dot).
constexpr std::string_view kWithCode[] = {
    "torch.ao.nn.intrinsic.quantized.dynamic.modules.linear_relu.",
    "torch.ao.nn.intrinsic.quantized.modules.conv_add.",
    "torch.ao.nn.intrinsic.quantized.modules.conv_relu.",
    "torch.ao.nn.intrinsic.quantized.modules.linear_relu.",
    "torch.ao.nn.quantized.dynamic.modules.conv.",
    "torch.ao.nn.quantized.dynamic.modules.linear.",
    "torch.ao.nn.quantized.dynamic.modules.rnn.GRUCell",
    "torch.ao.nn.quantized.dynamic.modules.rnn.LSTMCell",
    "torch.ao.nn.quantized.dynamic.modules.rnn.PackedParameter",
    "torch.ao.nn.quantized.dynamic.modules.rnn.RNNCell",
    "torch.ao.nn.quantized.dynamic.modules.rnn.RNNCellBase",
    "torch.ao.nn.quantized.modules.conv.",
    "torch.ao.nn.quantized.modules.embedding_ops.EmbeddingPackedParams",
    "torch.ao.nn.quantized.modules.functional_modules.QFunctional",
    "torch.ao.nn.quantized.modules.linear.",
    "torch.ao.nn.quantized.reference.modules.conv.",
    "torch.ao.nn.quantized.reference.modules.linear.",
    "torch.ao.nn.quantized.reference.modules.sparse.",
    "torch.ao.nn.quantized.reference.modules.utils.",
    "torch.ao.nn.sparse.quantized.",
    "torch.ao.pruning._experimental.pruner.parametrization."
    "FakeStructuredSparsity",
    "torch.ao.pruning.sparsifier.utils.FakeSparsity",
    "torch.distributed.nn.api.remote_module.",
};

bool has_code(std::string_view class_name) {
  constexpr size_t kLongest = 200;
  if (class_name.rfind("torch.", 0) != 0 || class_name.size() > kLongest) {
    return false;
  }
  // Where the quantized modules were before torch 1.10.
  std::string name(class_name);
  for (const std::string_view old :
       {"torch.nn.intrinsic.quantized.", "torch.nn.quantized."}) {
    if (class_name.rfind(old, 0) == 0) {
      name.insert(std::string_view("torch.").size(), "ao.");
    }
  }
  return std::any_of(std::begin(kWithCode), std::end(kWithCode),
                     [&name](std::string_view known) {
                       return known.back() == '.' ? name.rfind(known, 0) == 0
                                                  : name == known;
                     });
}

/// Whether these hooks leave the tensors of a state_dict alone.
bool are_harmless(const Mapping& hooks) {
  constexpr size_t kMostToLookAt = 100;
  return hooks.size() <= kMostToLookAt &&
         std::all_of(hooks.begin(), hooks.end(), [](const auto& item) {
           const Opaque* hook = as_opaque(item.value());
           return hook != nullptr &&
                  hook->class_name ==
                      "torch.nn.utils.spectral_norm.SpectralNormStateDictHook";
         });
}

}  // namespace

struct Modules::Module {
  std::string class_name;
  Mapping parameters;
  Mapping buffers;
  Mapping modules;
  c10::IValue left_out;  // a set: the names of buffers not persistent
};

std::optional<Mapping> Modules::dict_of(const c10::IValue& value) const {
  const c10::IValue resolved = heap_.resolve(value);
  return resolved.isGenericDict() ? std::optional(resolved.toGenericDict())
                                  : std::nullopt;
}

std::optional<Modules::Module> Modules::as_module(
    const c10::IValue& value) const {
  const Opaque* opaque = as_opaque(value);
  if (opaque == nullptr || has_code(opaque->class_name)) {
    return std::nullopt;
  }
  const auto new_dict = [] { return make_mapping("dict"); };
  const auto& args = opaque->args;
  if (opaque->class_name == "torch._dynamo.eval_frame.OptimizedModule" &&
      !args.empty()) {  // what torch.compile was given
    Module module{opaque->class_name, new_dict(), new_dict(), new_dict(), {}};
    module.modules.insert("_orig_mod", args[0]);
    return module;
  }
  // The `__dict__`, with `__slots__` beside it in some classes.
  c10::IValue state = heap_.resolve(opaque->state);
  if (state.isTuple() && state.toTupleRef().elements().size() == 2) {
    state = state.toTupleRef().elements()[0];
  }
  if (opaque->class_name == "torch.fx.graph_module.reduce_graph_module" &&
      !args.empty()) {  // (__dict__, imports of its code)
    state = args[0];
  }
  const auto dict = dict_of(state);
  if (!dict) {
    return std::nullopt;
  }
  const auto member = [&](const char* name) {
    const auto found = dict->find(name);
    return found == dict->end() ? std::nullopt : dict_of(found->value());
  };
  for (const char* name : {"_state_dict_hooks", "_state_dict_pre_hooks"}) {
    const auto hooks = member(name);
    if (hooks && !are_harmless(*hooks)) {
      return std::nullopt;
    }
  }
  const auto parameters = member("_parameters");
  const auto buffers = member("_buffers");
  const auto modules = member("_modules");
  if (!parameters || !buffers || !modules) {
    return std::nullopt;
  }
  const auto left_out = dict->find("_non_persistent_buffers_set");
  return Module{opaque->class_name, *parameters, *buffers, *modules,
                left_out == dict->end() ? c10::IValue() : left_out->value()};
}

c10::IValue Modules::replace(const c10::IValue& value) {
  if (!value.isCapsule()) {
    return value;
  }
  const auto known = replaced_.find(value.internalToPointer());
  if (known != replaced_.end()) {
    return known->second;
  }
  const auto module = as_module(value);
  if (!module) {
    return value;
  }
  StateCollector collector(budget_bytes_);
  collect(value, *module, "", collector);
  return replaced_.emplace(value.internalToPointer(), collector.take())
      .first->second;
}

void Modules::collect(const c10::IValue& value, const Module& module,
                      const std::string& prefix, StateCollector& collector) {
  if (!on_the_way_.insert(value.internalToPointer()).second) {
    fail("the module \"" + prefix + "\" contains itself");
  }
  if (on_the_way_.size() > kMaxDepth) {
    fail("modules are nested deeper than " + std::to_string(kMaxDepth) +
         " levels");
  }
  collector.spend(prefix);
  classes_.insert(module.class_name);
  collect_tensors(module.parameters, prefix, collector, {});
  std::unordered_set<std::string> left_out;
  if (const Opaque* names = as_opaque(module.left_out)) {
    for (const c10::IValue& name : names->elements) {
      if (name.isString()) {
        collector.spend(name.toStringRef());
        left_out.insert(name.toStringRef());
      }
    }
  }
  collect_tensors(module.buffers, prefix, collector, left_out);
  for (const auto& item : module.modules) {
    if (!item.key().isString()) {
      continue;
    }
    const std::string name = prefix + item.key().toStringRef();
    const c10::IValue inner = heap_.resolve(item.value());
    if (const auto submodule = as_module(inner)) {
      collect(inner, *submodule, name + ".", collector);
    } else if (!inner.isNone()) {
      collector.add(name, inner);
    }
  }
  on_the_way_.erase(value.internalToPointer());
}

void Modules::collect_tensors(
    const Mapping& tensors, const std::string& prefix,
    StateCollector& collector,
    const std::unordered_set<std::string>& left_out) const {
  for (const auto& item : tensors) {
    if (!item.key().isString() ||
        left_out.count(item.key().toStringRef()) != 0) {
      continue;
    }
    const std::string name = prefix + item.key().toStringRef();
    const c10::IValue value = heap_.resolve(item.value());
    if (value.isTensor()) {
      collector.add_tensor(name, value.toTensor());
    } else if (!value.isNone()) {
      collector.add(name, value);
    }
  }
}

}  // namespace dataparallel::checkpoint
