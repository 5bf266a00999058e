#include "detail/counterparts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <unordered_set>

namespace dataparallel::detail {
namespace {

std::unordered_map<const at::TensorImpl*, int64_t> names_by_tensor(
    const std::vector<NamedTensor>& tensors) {
  std::unordered_map<const at::TensorImpl*, int64_t> names;
  for (const NamedTensor& item : tensors) {
    ++names[item.tensor.unsafeGetTensorImpl()];
  }
  return names;
}

std::string shape_of(const at::Tensor& tensor) {
  return c10::str(tensor.sizes(), " ", tensor.scalar_type());
}

struct Matching {
  void match(bool parameters);
  [[noreturn]] void refuse_assigned(const char* kind,
                                    const std::string& name) const;

  const std::string& function;
  const std::vector<std::unique_ptr<ModuleAccess>>& modules;
  bool made_by_user;
  std::vector<Counterpart> all;
  /// The tensors of the original and of the replicas seen so far.
  std::unordered_set<const at::TensorImpl*> taken;
};

// A member that was assigned after registration: forward uses a tensor that the
// registry does not know, which a clone cannot follow. Of torch's own layers
// `unregistered` tells; of others a registered tensor has fewer holders then
// than its fresh clone. Not seen where somebody else holds it too.
void Matching::refuse_assigned(const char* kind,
                               const std::string& name) const {
  TORCH_CHECK_TYPE(
      false, function, ": ", kind, " ", name, " of ", modules[0]->type_name(),
      " is registered, but its member holds another tensor (a tie made by "
      "assignment?), which a clone loses; use one tensor in forward "
      "(torch::nn::functional::linear(x, embedding->weight)), or pass a "
      "factory "
      "that makes a replica for a device and ties it");
}

// Compares each replica with the original; see "checked" in `Replicas`.
void Matching::match(bool parameters) {
  const char* kind = parameters ? "parameter" : "buffer";
  const auto tensors_of = [&](size_t replica) {
    return parameters ? modules[replica]->parameters()
                      : modules[replica]->buffers();
  };
  const auto originals = tensors_of(0);
  std::unordered_map<const at::TensorImpl*, size_t> known;
  for (size_t i = 0; i < all.size(); ++i) {
    known.emplace(all[i].original.unsafeGetTensorImpl(), i);
  }
  std::vector<size_t> entry_of;
  for (const NamedTensor& item : originals) {
    const auto [found, fresh] =
        known.emplace(item.tensor.unsafeGetTensorImpl(), all.size());
    if (fresh) {
      all.push_back({item.name, parameters, item.tensor,
                     std::vector<std::vector<at::Tensor>>(modules.size())});
    }
    entry_of.push_back(found->second);
    taken.insert(item.tensor.unsafeGetTensorImpl());
  }
  const auto names_of = names_by_tensor(originals);
  const char* ways_out = made_by_user
                             ? "; the factory must build the same module"
                             : "; register everything in reset(), or pass a "
                               "factory that makes a replica for a device";
  for (size_t replica = 1; replica < modules.size(); ++replica) {
    const auto copies = tensors_of(replica);
    const auto names_of_copy = names_by_tensor(copies);
    std::unordered_map<std::string, at::Tensor> by_name;
    for (const NamedTensor& item : copies) {
      by_name.emplace(item.name, item.tensor);
    }
    std::unordered_map<const at::TensorImpl*, size_t> stands_for;
    for (size_t i = 0; i < originals.size(); ++i) {
      const NamedTensor& item = originals[i];
      const auto found = by_name.find(item.name);
      TORCH_CHECK_TYPE(found != by_name.end(), function, ": ", kind, " ",
                       item.name, " of ", modules[0]->type_name(),
                       " is missing in its replica ", replica, ways_out);
      const at::Tensor& copy = found->second;
      TORCH_CHECK_TYPE(copy.sizes() == item.tensor.sizes(), function, ": ",
                       kind, " ", item.name, " of ", modules[0]->type_name(),
                       " is ", shape_of(item.tensor), ", but ", shape_of(copy),
                       " in its replica ", replica, ways_out);
      TORCH_CHECK_TYPE(taken.count(copy.unsafeGetTensorImpl()) == 0, function,
                       ": ", kind, " ", item.name, " of ",
                       modules[0]->type_name(),
                       " is the same tensor in its replica ", replica,
                       " and in one before, expected one each", ways_out);
      const auto [tie, fresh] =
          stands_for.emplace(copy.unsafeGetTensorImpl(), entry_of[i]);
      TORCH_CHECK_TYPE(tie->second == entry_of[i], function, ": ", kind, " ",
                       item.name, " of ", modules[0]->type_name(),
                       " shares a tensor with ", all[tie->second].name,
                       " in its replica ", replica, ", but not in the original",
                       ways_out);
      auto& handles = all[entry_of[i]].copies[replica];
      // Not holders in this sense: the lists here, one a name in `originals`,
      // two in `copies` and `by_name`; the entry; and the original's gradient
      // accumulator.
      if (!made_by_user && fresh) {
        const auto names = names_of.at(item.tensor.unsafeGetTensorImpl());
        const bool accumulator =
            torch::autograd::impl::try_get_grad_accumulator(item.tensor) !=
            nullptr;
        const auto holders = static_cast<int64_t>(item.tensor.use_count()) -
                             names - 1 - (accumulator ? 1 : 0);
        const auto of_copy = static_cast<int64_t>(copy.use_count()) -
                             2 * names_of_copy.at(copy.unsafeGetTensorImpl());
        if (holders < of_copy) {
          refuse_assigned(kind, item.name);
        }
      }
      handles.push_back(copy);
      by_name.erase(found);
    }
    TORCH_CHECK_TYPE(by_name.empty(), function, ": ", kind, " ",
                     by_name.begin()->first, " is in replica ", replica, " of ",
                     modules[0]->type_name(), ", but not in the original",
                     ways_out);
    for (const NamedTensor& item : copies) {
      taken.insert(item.tensor.unsafeGetTensorImpl());
    }
  }
}

}  // namespace

std::vector<Counterpart> match_replicas(
    const std::string& function,
    const std::vector<std::unique_ptr<ModuleAccess>>& modules,
    bool made_by_user) {
  Matching matching{function, modules, made_by_user, {}, {}};
  if (const auto name = modules[0]->unregistered(); name && !made_by_user) {
    matching.refuse_assigned("parameter", *name);
  }
  matching.match(/*parameters=*/true);
  matching.match(/*parameters=*/false);
  return std::move(matching.all);
}

}  // namespace dataparallel::detail
