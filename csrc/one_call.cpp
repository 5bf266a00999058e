#include <ATen/ATen.h>
#include <dataparallel/one_call.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <set>
#include <thread>

namespace dataparallel::detail {

/// Where the call under way runs, beside the workers.
struct UnderWay : torch::CustomClassHolder {
  std::mutex mutex;
  std::thread::id thread;
  /// autograd's numbers of the backwards that are part of it.
  std::set<int> backwards;
};

namespace {

/// The identity on the roots of a backward: the first node to run, it tells the
/// backward's number before any hook does anything.
struct Begin : torch::autograd::Function<Begin> {
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* context, at::TensorList roots,
      const c10::intrusive_ptr<UnderWay>& call) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    torch::autograd::variable_list same;
    for (const at::Tensor& root : roots) {
      same.push_back(root.detach());
    }
    return same;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto capsule = context->saved_data["call"].toCapsule();
    auto& call = *static_cast<UnderWay*>(capsule.get());
    std::lock_guard lock(call.mutex);
    call.backwards.insert(torch::autograd::get_current_graph_task_id());
    gradients.emplace_back();  // for `call`
    return gradients;
  }
};

}  // namespace

struct OneCall::Impl {
  std::mutex mutex;  // held for a whole call
  c10::intrusive_ptr<UnderWay> call = c10::make_intrusive<UnderWay>();
};

OneCall::OneCall() : impl_(std::make_unique<Impl>()) {}
OneCall::~OneCall() = default;

OneCall::Scope::Scope(OneCall& calls, const std::string& function)
    : calls_(calls) {
  UnderWay& call = *calls_.impl_->call;
  {
    std::lock_guard lock(call.mutex);
    TORCH_CHECK(call.thread != std::this_thread::get_id() &&
                    call.backwards.count(
                        torch::autograd::get_current_graph_task_id()) == 0,
                function,
                ": called from inside a call of the same wrapper, by a hook in "
                "its backward, which cannot wait for itself");
  }
  lock_ = std::unique_lock(calls_.impl_->mutex);
  std::lock_guard lock(call.mutex);
  call.thread = std::this_thread::get_id();
}

OneCall::Scope::~Scope() {
  UnderWay& call = *calls_.impl_->call;
  std::lock_guard lock(call.mutex);
  call.thread = std::thread::id();
  call.backwards.clear();
}

void OneCall::backward(const std::vector<at::Tensor>& roots) {
  torch::autograd::backward(Begin::apply(at::TensorList(roots), impl_->call),
                            {});
}

}  // namespace dataparallel::detail
