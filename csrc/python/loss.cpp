#include <ATen/ATen.h>
#include <dataparallel/data_parallel.h>
#include <torch/csrc/autograd/python_variable.h>

#include <numeric>

#include "python/bindings.h"
#include "python/nested.h"
#include "python/parallel_apply.h"
#include "python/replicas.h"

// The loss of a whole batch, computed in the replicas; what
// `DataParallel::loss` and `forward_backward` do in C++, for Python's modules
// and loss functions.

namespace dataparallel::python {
namespace {

/// What a loss function returned: a loss, or a loss and its weight.
detail::WeightedLoss to_loss(const py::object& value) {
  py::object loss = value;
  py::object weight;
  if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    TORCH_CHECK_VALUE(py::len(value) == 2, "loss_fn: returned ", py::len(value),
                      " values, expected the loss, or the loss and its weight");
    loss = value[py::int_(0)];
    weight = value[py::int_(1)];
  }
  TORCH_CHECK_TYPE(
      THPVariable_Check(loss.ptr()), "loss_fn: returned a ",
      py::type::handle_of(loss).attr("__name__").cast<std::string>(),
      ", expected a tensor without dimensions");
  detail::WeightedLoss result{THPVariable_Unpack(loss.ptr()), {}};
  if (weight) {
    result.weight = THPVariable_Check(weight.ptr())
                        ? THPVariable_Unpack(weight.ptr())
                        : detail::scalar(weight.cast<double>());
  }
  detail::check_loss(result);
  return result;
}

/// One call of `loss` or `forward_backward`.
class LossCall {
 public:
  LossCall(Replicas& replicas, const std::vector<at::Device>& devices,
           std::vector<int64_t> used, const py::list& modules,
           const py::object& loss_fn, const py::list& args,
           std::vector<int64_t> sizes)
      : replicas_(replicas),
        devices_(devices),
        used_(std::move(used)),
        modules_(modules),
        loss_fn_(loss_fn),
        args_(args),
        sizes_(std::move(sizes)),
        losses_(used_.size()) {}

  at::Tensor loss(at::Device output_device) {
    run([](size_t) {});
    py::gil_scoped_release unlocked;
    if (used_.size() > 1 && at::GradMode::is_enabled()) {
      const auto& [loss, weight] = losses_.front();
      replicas_.set().redirect(
          weight.defined() ? std::vector{loss, weight} : std::vector{loss},
          first_inputs_);
    }
    return weighted(output_device);
  }

  at::Tensor forward_backward(at::Device output_device) {
    TORCH_CHECK(at::GradMode::is_enabled(),
                "forward_backward: gradients are switched off (torch.no_grad "
                "or inference mode)");
    if (used_.size() == 1) {
      run([](size_t) {});
      py::gil_scoped_release unlocked;
      detail::check_any_graph(losses_);
      replicas_.calls().backward({losses_.front().loss});
      return losses_.front().loss.detach().to(output_device);
    }
    std::optional<detail::StashScope> stashes;
    {
      py::gil_scoped_release unlocked;
      stashes.emplace(replicas_.set());
    }
    detail::CutGraph cut;
    for (size_t i = 0; i < used_.size(); ++i) {
      cut.next_replica();
      args_[i] = visit(args_[i], "inputs", cut);
    }
    const int64_t samples =
        std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
    run([&](size_t i) {
      if (!losses_[i].weight.defined()) {
        const double share =
            static_cast<double>(sizes_[i]) / static_cast<double>(samples);
        const at::Tensor& loss = losses_[i].loss;
        backward(detail::weighted_sum({loss}, {detail::scalar(share)},
                                      loss.device()));
      }
    });
    py::gil_scoped_release unlocked;
    if (losses_.front().weight.defined()) {
      const auto roots = detail::backward_roots(losses_);
      in_workers([&](size_t i) {
        if (roots[i].defined()) {
          backward(roots[i]);
        }
      });
    }
    detail::check_any_graph(losses_);
    auto gradients = replicas_.set().take_gradients();
    add_up(gradients);
    for (auto& [before, leaf] : cut.cuts) {
      if (leaf.grad().defined()) {
        gradients.push_back({before, {std::move(leaf.mutable_grad())}});
      }
    }
    detail::backward_into(std::move(gradients), replicas_.calls());
    const at::NoGradGuard no_grad;
    return weighted(output_device).detach();
  }

 private:
  /// Forward and loss in each replica, then `then(i)` there, without the lock.
  template <class Then>
  void run(Then&& then) {
    TensorsInside inputs;
    look(args_[0], "", inputs);
    first_inputs_ = std::move(inputs.tensors);
    apply_in(replicas_.team(devices_), used_, [&](size_t i) {
      const py::tuple all = args_[i];
      const auto count = static_cast<Py_ssize_t>(all.size()) - 1;
      const py::object output =
          modules_[i](*py::tuple(all[py::slice(0, count, 1)]));
      losses_[i] = to_loss(loss_fn_(output, all[static_cast<size_t>(count)]));
      {
        py::gil_scoped_release unlocked;
        then(i);
      }
      return py::object(py::none());
    });
    py::gil_scoped_release unlocked;
    std::vector<detail::Chunk> chunks;
    for (const int64_t replica : used_) {
      chunks.push_back({replica, devices_[static_cast<size_t>(replica)], 0, 0});
    }
    detail::check_weights(losses_, chunks);
    if (used_.size() > 1) {
      replicas_.set().check_unwritten();
    }
  }

  /// `body(i)` in each replica's worker, without the interpreter lock.
  template <class Body>
  void in_workers(Body&& body) {
    std::vector<size_t> places(devices_.size());
    for (size_t i = 0; i < used_.size(); ++i) {
      places[static_cast<size_t>(used_[i])] = i;
    }
    replicas_.team(devices_).run(used_, [&](int64_t replica) {
      body(places[static_cast<size_t>(replica)]);
    });
  }

  void backward(const at::Tensor& root) {
    if (root.requires_grad()) {  // else no sample of this chunk counts
      replicas_.set().redirect({root}, {});
      replicas_.calls().backward({root});
    }
  }

  /// As in C++: in the workers where these are CPU replicas.
  void add_up(std::vector<detail::ReplicaGradients>& gradients) {
    if (!devices_.front().is_cpu()) {
      return replicas_.set().add_up(gradients, /*first=*/0, /*step=*/1);
    }
    in_workers(
        [&](size_t i) { replicas_.set().add_up(gradients, i, used_.size()); });
  }

  std::vector<at::Tensor> weights() const {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < losses_.size(); ++i) {
      result.push_back(losses_[i].weight.defined()
                           ? losses_[i].weight
                           : detail::scalar(static_cast<double>(
                                 std::max<int64_t>(1, sizes_[i]))));
    }
    return result;
  }

  at::Tensor weighted(at::Device output_device) const {
    std::vector<at::Tensor> values;
    for (const detail::WeightedLoss& loss : losses_) {
      values.push_back(loss.loss);
    }
    const bool own = losses_.front().weight.defined();
    return detail::weighted_sum(
        values,
        detail::shares_of(weights(),
                          own ? at::Device(at::kCPU) : output_device),
        output_device, own);
  }

  Replicas& replicas_;
  const std::vector<at::Device>& devices_;
  std::vector<int64_t> used_;
  py::list modules_;
  py::object loss_fn_;
  py::list args_;  // a tuple a replica, the targets last
  std::vector<int64_t> sizes_;
  std::vector<detail::WeightedLoss> losses_;
  std::vector<at::Tensor> first_inputs_;
};

at::Tensor batch_loss(Replicas& self, const std::vector<at::Device>& devices,
                      std::vector<int64_t> used, const py::list& modules,
                      const py::object& loss_fn, const py::list& args,
                      std::vector<int64_t> sizes, at::Device output_device,
                      bool backward) {
  LossCall call(self, devices, std::move(used), modules, loss_fn, args,
                std::move(sizes));
  return backward ? call.forward_backward(output_device)
                  : call.loss(output_device);
}

}  // namespace

void bind_loss(py::module_& module) {
  module.def("batch_loss", &batch_loss, py::arg("replicas"), py::arg("devices"),
             py::arg("used"), py::arg("modules"), py::arg("loss_fn"),
             py::arg("args"), py::arg("sizes"), py::arg("output_device"),
             py::arg("backward"));
}

}  // namespace dataparallel::python
