#include <ATen/ATen.h>
#include <dataparallel/python_values.h>
#include <dataparallel/state_dict.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <unordered_set>

#include "detail/key_prefix.h"
#include "detail/module_tree.h"
#include "detail/tensor_fit.h"
#include "detail/tensor_writer.h"
#include "detail/wording.h"

namespace dataparallel {
namespace {

using detail::ModuleNode;

constexpr const char* kExtraState = "_extra_state";
constexpr const char* kCounter = "num_batches_tracked";
constexpr int64_t kVersionWithCounter = 2;

/// `torch.Size([2, 3])`.
std::string size_text(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << "torch.Size([";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text << (i == 0 ? "" : ", ") << sizes[i];
  }
  text << "])";
  return text.str();
}

std::string type_text(const c10::IValue& value) {
  const bool is_none = value.isTensor();  // it is undefined
  return "<class '" + (is_none ? "NoneType" : python_type_name(value)) + "'>";
}

std::string quoted(const std::vector<std::string>& keys) {
  std::string text;
  for (const std::string& key : keys) {
    text += (text.empty() ? "\"" : ", \"") + key + "\"";
  }
  return text;
}

/// One of the module's tensors, and what the dictionary has for it.
struct Target {
  std::string key;
  const ModuleNode* node = nullptr;
  std::string name;  // in the node
  at::Tensor tensor;
  at::Tensor source;  // undefined: there is none, or it does not fit
  // Where either is not plainly dense: the values as the tensor will have them.
  at::Tensor staged;
};

class Loader {
 public:
  Loader(const StateDict& dict, const LoadStateDictOptions& options)
      : dict_(dict), options_(options) {}

  LoadStateDictResult load(const ModuleNode& root) {
    root_type_ = root.type_name;
    rename();
    visit(root, "");
    settle_ties();
    order_unexpected();
    check();
    write();
    return std::move(result_);
  }

 private:
  struct Entry {
    std::string original;
    const c10::IValue* value;
  };

  void rename() {
    for (const auto& [original, value] : dict_) {
      std::string key =
          options_.rename() ? options_.rename()(original) : original;
      const auto [at, is_new] = entries_.emplace(key, Entry{original, &value});
      TORCH_CHECK_VALUE(is_new, "load_state_dict: rename gives both '",
                        at->second.original, "' and '", original,
                        "' the name '", key, "'");
      keys_.push_back(std::move(key));
    }
  }

  void visit(const ModuleNode& node, const std::string& prefix) {
    // Where Python, which goes the same way, notices a name nobody has.
    order_.emplace(prefix, order_.size());
    for (const detail::NamedTensor& item : node.tensors) {
      const std::string key = prefix + item.name;
      names_.push_back(key);
      targets_.push_back({key, &node, item.name, item.tensor, {}, {}});
      if (const auto found = entries_.find(key); found != entries_.end()) {
        fit(targets_.back(), *found->second.value);
      } else if (item.name != kCounter || !lacks_counter(node, prefix)) {
        missing_.push_back(key);
      } else {
        targets_.pop_back();  // keeps its value
      }
    }
    for (const auto& [name, child] : node.children) {
      visit(child, prefix + name + ".");
    }
  }

  /// Whether the file is older than the counters of batch norms.
  bool lacks_counter(const ModuleNode& node, const std::string& prefix) const {
    if (!node.tolerates_missing_counter) {
      return false;
    }
    if (!dict_.metadata().has_value()) {
      return true;
    }
    std::string path = prefix;
    for (const detail::NamedTensor& item : node.tensors) {
      // The metadata has the file's names; a neighbour tells this module's.
      if (const auto found = entries_.find(prefix + item.name);
          found != entries_.end() &&
          found->second.original.ends_with("." + item.name)) {
        const std::string& original = found->second.original;
        path = original.substr(0, original.size() - item.name.size());
      }
    }
    const auto local =
        dict_.metadata()->find(path.substr(0, path.size() - !path.empty()));
    if (local == dict_.metadata()->end() || !local->value().isGenericDict()) {
      return true;
    }
    const auto values = local->value().toGenericDict();
    const auto version = values.find("version");
    return version == values.end() || !version->value().isInt() ||
           version->value().toInt() < kVersionWithCounter;
  }

  /// Takes `value` as the source of `target`, or says what is wrong.
  void fit(Target& target, const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) {
      problems_.push_back("While copying the parameter named \"" + target.key +
                          "\", expected torch.Tensor or Tensor-like object "
                          "from checkpoint but received " +
                          type_text(value));
      return;
    }
    at::Tensor source = value.toTensor().detach();
    if (source.is_nested() || target.tensor.is_nested()) {
      problems_.push_back("While copying the parameter named \"" + target.key +
                          "\", a nested tensor is in the " +
                          (source.is_nested() ? "state_dict" : "model") +
                          ", which cannot be loaded.");
      return;
    }
    if (target.tensor.dim() == 0 && source.dim() == 1 && source.size(0) == 1) {
      source = source[0];
    }
    if (source.sizes() != target.tensor.sizes()) {
      result_.mismatched_keys.push_back(target.key);
      problems_.push_back("size mismatch for " + target.key +
                          ": copying a param with shape " +
                          size_text(source.sizes()) +
                          " from checkpoint, the shape in current model is " +
                          size_text(target.tensor.sizes()) + ".");
      return;
    }
    const std::string obstacle =
        options_.assign()
            ? detail::assign_obstacle(target.tensor, source,
                                      target.node->replace != nullptr)
            : trial_.obstacle(target.tensor, source, target.staged);
    if (!obstacle.empty()) {
      problems_.push_back("While copying the parameter named \"" + target.key +
                          "\", whose dimensions in the model are " +
                          size_text(target.tensor.sizes()) +
                          " and whose dimensions in the checkpoint are " +
                          size_text(source.sizes()) +
                          ", an exception occurred : " + obstacle);
      return;
    }
    target.source = std::move(source);
  }

  /// Names that share a tensor: one in the dictionary is enough, several must
  /// agree.
  void settle_ties() {
    std::map<detail::Place, std::vector<Target*>> places;
    for (Target& target : targets_) {
      places[detail::place_of(target.tensor)].push_back(&target);
    }
    std::set<std::string> provided;
    for (const auto& [place, tied] : places) {
      Target* first = nullptr;
      Target* last = nullptr;
      for (Target* target : tied) {
        if (!target->source.defined()) {
          continue;
        }
        if (first == nullptr) {
          first = target;
        } else if (detail::place_of(first->source) !=
                       detail::place_of(target->source) &&
                   !detail::same_values(first->source, target->source,
                                        target->tensor.scalar_type())) {
          differing_.emplace_back(first->key, target->key);
        }
        last = target;
      }
      for (Target* target : last == nullptr ? std::vector<Target*>() : tied) {
        provided.insert(target->key);
        if (options_.assign()) {
          target->source = last->source;
        }
      }
    }
    for (std::string& key : missing_) {
      if (provided.count(key) == 0) {
        result_.missing_keys.push_back(std::move(key));
      }
    }
  }

  /// Sorts them as Python finds them: module by module, extra state first.
  void order_unexpected() {
    const std::unordered_set<std::string> names(names_.begin(), names_.end());
    std::vector<std::tuple<size_t, bool, std::string>> found;
    for (const std::string& key : keys_) {
      if (names.count(key) != 0) {
        continue;
      }
      std::string module = key.substr(0, key.rfind('.') + 1);
      while (order_.count(module) == 0) {  // the innermost module there is
        module.pop_back();
        module.resize(module.rfind('.') + 1);
      }
      found.emplace_back(order_.at(module), key != module + kExtraState, key);
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) {
                       return std::tie(std::get<0>(a), std::get<1>(a)) <
                              std::tie(std::get<0>(b), std::get<1>(b));
                     });
    for (auto& [order, is_plain, key] : found) {
      result_.unexpected_keys.push_back(std::move(key));
    }
  }

  size_t matches() const {
    return static_cast<size_t>(std::count_if(
        names_.begin(), names_.end(),
        [&](const auto& name) { return entries_.count(name) != 0; }));
  }

  void check() {
    const auto prefix =
        result_.missing_keys.empty() && result_.unexpected_keys.empty()
            ? std::nullopt
            : detail::find_common_prefix(keys_, names_, matches());
    std::vector<std::string> texts;
    if (options_.strict() && !result_.missing_keys.empty()) {
      texts.push_back("Missing key(s) in state_dict: " +
                      quoted(result_.missing_keys) + ". ");
    }
    if (options_.strict() && !result_.unexpected_keys.empty()) {
      texts.push_back("Unexpected key(s) in state_dict: " +
                      quoted(result_.unexpected_keys) + ". ");
    }
    const bool nothing =
        !options_.strict() && !names_.empty() && matches() == 0;
    if (nothing) {
      texts.push_back("None of the model's " +
                      detail::count_text(names_.size(), "key") +
                      " is among the state_dict's " +
                      detail::count_text(keys_.size(), "key") + ".");
    }
    texts.insert(texts.end(), problems_.begin(), problems_.end());
    for (const auto& [one, other] : differing_) {
      const std::string text = "\"" + one + "\" and \"" + other +
                               "\" are one tensor in the model, but have "
                               "different values in the state_dict.";
      if (options_.strict()) {
        texts.push_back(text);
      } else if (texts.empty()) {
        TORCH_WARN("load_state_dict: ", text, " The latter's are taken.");
      }
    }
    if (texts.empty()) {
      warn_of_prefix(prefix);
      return;
    }
    if (prefix.has_value() && (options_.strict() || nothing)) {
      texts.push_back(hint(*prefix));
    }
    fail(texts);
  }

  std::string hint(const detail::CommonPrefix& prefix) const {
    return c10::str("With ", prefix.call(), " ",
                    prefix.matches == names_.size() ? "all " : "",
                    prefix.matches, " of the model's ",
                    detail::count_text(names_.size(), "key"),
                    " would be there.");
  }

  void warn_of_prefix(const std::optional<detail::CommonPrefix>& prefix) const {
    if (!options_.strict() && prefix.has_value() &&
        2 * matches() < names_.size()) {
      TORCH_WARN("load_state_dict: only ", matches(), " of the model's ",
                 detail::count_text(names_.size(), "key"),
                 " are in the state_dict. ", hint(*prefix));
    }
  }

  [[noreturn]] void fail(const std::vector<std::string>& texts) {
    std::string message =
        "Error(s) in loading state_dict for " + root_type_ + ":";
    for (const std::string& text : texts) {
      message += "\n\t" + text;
    }
    throw LoadStateDictError(std::move(message), std::move(result_));
  }

  /// Everything that may fail has been done before the first is written.
  void write() {
    const at::NoGradGuard no_grad;
    if (options_.assign()) {
      prepare_assigned();
    } else {
      prepare_written();
    }
    for (Target& target : targets_) {
      if (target.source.defined()) {
        write(target);
      }
    }
  }

  void write(Target& target) {
    try {
      if (options_.assign()) {
        assign(target);
      } else if (!target.staged.defined()) {
        writer_.write(target.tensor, target.source);
      } else if (target.tensor.layout() == at::kStrided) {
        target.tensor.copy_(target.staged);
      } else {
        target.tensor.set_data(target.staged);  // copy_ allocates
      }
    } catch (c10::Error& error) {
      error.add_context(c10::str("load_state_dict: while writing \"",
                                 target.key, "\"; ", result_.loaded_keys.size(),
                                 " of the tensors have their new values"));
      throw;
    }
    if (entries_.count(target.key) != 0) {
      result_.loaded_keys.push_back(target.key);
      if (converted_.count(target.key) != 0) {
        result_.converted_keys.push_back(target.key);
      }
    }
  }

  void prepare_assigned() {
    for (Target& target : targets_) {
      if (target.source.defined() && target.source.is_inference()) {
        target.source = target.source.clone();
      }
    }
  }

  /// A source in memory that is about to be written, as after renaming the
  /// entries of the module's own dictionary, is copied first.
  void prepare_written() {
    std::map<const void*, std::vector<detail::Place>> written;
    for (const Target& target : targets_) {
      if (target.source.defined() && target.tensor.has_storage()) {
        written[target.tensor.storage().unsafeGetStorageImpl()].push_back(
            detail::place_of(target.tensor));
      }
    }
    for (Target& target : targets_) {
      if (!target.source.defined()) {
        continue;
      }
      if (target.source.scalar_type() != target.tensor.scalar_type()) {
        converted_.insert(target.key);
      }
      if (target.staged.defined()) {
        continue;
      }
      if (target.source.has_storage() &&
          written.count(target.source.storage().unsafeGetStorageImpl()) != 0 &&
          detail::place_of(target.source) != detail::place_of(target.tensor)) {
        target.source = target.source.clone();
      }
      writer_.plan(target.tensor, target.source);
    }
    writer_.allocate();
  }

  void assign(Target& target) {
    if (at::_has_compatible_shallow_copy_type(target.tensor, target.source)) {
      target.tensor.mutable_grad() = at::Tensor();
      target.tensor.set_data(target.source);
    } else {
      target.source.requires_grad_(target.tensor.requires_grad());
      target.node->replace(target.name, target.source);
    }
  }

  const StateDict& dict_;
  const LoadStateDictOptions& options_;
  std::string root_type_;
  std::vector<std::string> keys_;  // of the dictionary, renamed
  std::unordered_map<std::string, Entry> entries_;  // by these
  std::vector<std::string> names_;                  // of the module
  std::map<std::string, size_t> order_;             // of modules, by prefix
  std::vector<Target> targets_;
  std::vector<std::string> missing_;  // whatever else shares their tensors
  std::vector<std::string> problems_;
  std::vector<std::pair<std::string, std::string>> differing_;
  std::set<std::string> converted_;
  detail::TensorWriter writer_;
  detail::CopyTrial trial_;
  LoadStateDictResult result_;
};

}  // namespace

LoadStateDictOptions& LoadStateDictOptions::strict(bool value) {
  strict_ = value;
  return *this;
}
LoadStateDictOptions& LoadStateDictOptions::assign(bool value) {
  assign_ = value;
  return *this;
}
LoadStateDictOptions& LoadStateDictOptions::rename(Rename value) {
  rename_ = std::move(value);
  return *this;
}

LoadStateDictError::LoadStateDictError(std::string message,
                                       LoadStateDictResult keys)
    : c10::Error({"load_state_dict", __FILE__, uint32_t{__LINE__}},
                 std::move(message)),
      keys_(std::move(keys)) {}
LoadStateDictError::~LoadStateDictError() = default;

LoadStateDictResult detail::load_state_dict(
    const ModuleNode& module, const StateDict& state_dict,
    const LoadStateDictOptions& options) {
  return Loader(state_dict, options).load(module);
}

LoadStateDictResult load_state_dict(torch::nn::Module& module,
                                    const StateDict& state_dict,
                                    const LoadStateDictOptions& options) {
  return Loader(state_dict, options).load(detail::module_tree(module));
}

LoadStateDictResult load_state_dict(torch::jit::Module& module,
                                    const StateDict& state_dict,
                                    const LoadStateDictOptions& options) {
  return Loader(state_dict, options).load(detail::module_tree(module));
}

}  // namespace dataparallel
