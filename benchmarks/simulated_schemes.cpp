#include "simulated_schemes.h"

#include <dataparallel/data_parallel.h>
#include <dataparallel/parallel_apply.h>
#include <torch/nn/parallel/data_parallel.h>

#include <numeric>

#include "simulated_ring.h"

namespace bench {
namespace {

namespace parallel = torch::nn::parallel;
using torch::Tensor;

Tensor loss_of(const Workload& workload, const Tensor& y, const Tensor& t) {
  return workload.name == "small" ? y.square().mean()
                                  : torch::nn::functional::cross_entropy(y, t);
}

Network on_device(const Workload& workload, torch::Device device) {
  Network net(workload);
  net->to(device);
  return net;
}

// As `zero_grad`, which refuses gradients that are slices of one buffer.
void forget_gradients(const Network& net) {
  for (const Tensor& parameter : net->parameters()) {
    parameter.mutable_grad() = Tensor();
  }
}

/// What all have in common: the module on the first device, the batch on the
/// host, SGD.
class Trainer : public Scheme {
 public:
  Trainer(const Workload& workload, Devices devices)
      : devices_(std::move(devices)),
        workload_(workload),
        net_(on_device(workload, devices_[0])),
        inputs_(inputs(workload, count())),
        labels_(labels(workload, count())),
        optimizer_(net_->parameters(), /*lr=*/0.1) {}

  void step() override {
    forget_gradients(net_);
    backward();
    optimizer_.step();
  }

 protected:
  virtual void backward() = 0;
  int64_t count() const { return static_cast<int64_t>(devices_.size()); }
  Tensor loss(const Tensor& y, const Tensor& t) const {
    return loss_of(workload_, y, t);
  }
  std::vector<Tensor> scattered(const Tensor& batch) const {
    std::vector<Tensor> parts = batch.chunk(count());
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i] = parts[i].to(devices_[i], /*non_blocking=*/true);
    }
    return parts;
  }
  Tensor gathered(std::vector<Tensor> parts) const {
    for (Tensor& part : parts) {
      part = part.to(devices_[0], /*non_blocking=*/true);
    }
    return torch::cat(parts);
  }
  Tensor labels_here() const {
    return labels_.to(devices_[0], /*non_blocking=*/true);
  }

  Devices devices_;
  Workload workload_;
  Network net_;
  Tensor inputs_;
  Tensor labels_;
  torch::optim::SGD optimizer_;
};

struct OneModule : Trainer {
  OneModule(const Workload& workload, const Devices& devices)
      : Trainer(workload, {devices[0]}) {}
  void backward() override {
    loss(net_(inputs_.to(devices_[0], /*non_blocking=*/true)), labels_here())
        .backward();
  }
};

struct Ours : Trainer {
  Ours(const Workload& workload, const Devices& devices, bool in_replicas)
      : Trainer(workload, devices),
        in_replicas_(in_replicas),
        model_(net_, dataparallel::DataParallelOptions().devices(devices),
               [workload](torch::Device device) {
                 return on_device(workload, device);
               }) {}
  void backward() override {
    if (in_replicas_) {
      model_->forward_backward(
          [this](const Tensor& y, const Tensor& t) { return loss(y, t); },
          inputs_, labels_);
    } else {
      loss(model_(inputs_), labels_here()).backward();
    }
  }
  bool in_replicas_;
  dataparallel::DataParallel<Network> model_;
};

struct LibTorch : Trainer {
  using Trainer::Trainer;
  void backward() override {
    const auto parts = scattered(inputs_);
    auto replicas = parallel::replicate(net_, devices_);
    const auto outputs = parallel::parallel_apply(replicas, parts, devices_);
    loss(gathered(outputs), labels_here()).backward();
  }
};

/// nn.DataParallel's.
struct AllAtOnce : Trainer {
  AllAtOnce(const Workload& workload, const Devices& devices)
      : Trainer(workload, devices), replicas_{net_} {
    for (size_t i = 1; i < devices.size(); ++i) {
      replicas_.push_back(on_device(workload, devices[i]));
    }
    for (const Network& replica : replicas_) {
      parameters_.push_back(replica->parameters());
    }
  }
  void backward() override {
    broadcast();
    const auto outputs =
        dataparallel::parallel_apply(replicas_, scattered(inputs_), devices_);
    loss(gathered(outputs), labels_here()).backward();
    reduce();
  }

 private:
  void broadcast() {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> flat{flatten(parameters_[0])};
    for (size_t i = 1; i < devices_.size(); ++i) {
      flat.push_back(torch::empty_like(flat[0], devices_[i]));
    }
    for (size_t have = 1; have < flat.size(); have *= 2) {
      for (size_t i = 0; i < have && have + i < flat.size(); ++i) {
        flat[have + i].copy_(flat[i], /*non_blocking=*/true);
      }
    }
    for (size_t i = 1; i < flat.size(); ++i) {
      at::_foreach_copy_(parameters_[i], slices(flat[i], parameters_[i]));
    }
  }
  void reduce() {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> flat;
    for (const auto& of_replica : parameters_) {
      std::vector<Tensor> gradients;
      for (const Tensor& parameter : of_replica) {
        gradients.push_back(parameter.grad());
        parameter.mutable_grad() = Tensor();
      }
      flat.push_back(flatten(gradients));
    }
    for (size_t step = 1; step < flat.size(); step *= 2) {
      for (size_t i = 0; i + step < flat.size(); i += 2 * step) {
        flat[i].add_(flat[i + step].to(devices_[i], /*non_blocking=*/true));
        flat[i + step] = Tensor();
      }
    }
    const auto sums = slices(flat[0], parameters_[0]);
    for (size_t i = 0; i < sums.size(); ++i) {
      parameters_[0][i].mutable_grad() = sums[i];
    }
  }

  std::vector<Network> replicas_;
  std::vector<std::vector<Tensor>> parameters_;  // [replica]
};

/// DistributedDataParallel's.
struct Distributed : Trainer {
  Distributed(const Workload& workload, const Devices& devices)
      : Trainer(workload, devices), ring_(devices) {
    for (const torch::Device& device : devices) {
      ranks_.push_back(
          {device == devices[0] ? net_ : on_device(workload, device), nullptr});
      Rank& rank = ranks_.back();
      rank.optimizer = std::make_unique<torch::optim::SGD>(
          rank.net->parameters(), /*lr=*/0.1);
      ring_.add(rank.net->parameters());
    }
  }
  void step() override {
    const auto work = [this](int64_t i) {
      Rank& rank = ranks_[i];
      forget_gradients(rank.net);
      loss(rank.net(part(inputs_, i)), part(labels_, i)).backward();
      ring_.finish(i);
      rank.optimizer->step();
      return i;
    };
    std::vector<std::function<int64_t(int64_t)>> works(devices_.size(), work);
    std::vector<int64_t> numbers(devices_.size());
    std::iota(numbers.begin(), numbers.end(), 0);
    dataparallel::parallel_apply(works, numbers, devices_);
  }
  void backward() override {}

 private:
  struct Rank {
    Network net;
    std::unique_ptr<torch::optim::SGD> optimizer;
  };
  Tensor part(const Tensor& batch, int64_t i) const {
    return batch.narrow(0, i * workload_.samples, workload_.samples)
        .to(devices_[i], /*non_blocking=*/true);
  }
  std::vector<Rank> ranks_;
  Ring ring_;
};

template <class Type, class... Arguments>
MakeScheme maker(Arguments... arguments) {
  return [=](const Workload& workload, const Devices& devices) {
    return std::make_unique<Type>(workload, devices, arguments...);
  };
}

}  // namespace

std::unique_ptr<Scheme> one_module(const Workload& workload,
                                   const Devices& devices) {
  return std::make_unique<OneModule>(workload, devices);
}

std::vector<NamedScheme> schemes() {
  return {{"forward_backward", maker<Ours>(/*in_replicas=*/true)},
          {"forward", maker<Ours>(/*in_replicas=*/false)},
          {"libtorch", maker<LibTorch>()},
          {"nn.DataParallel", maker<AllAtOnce>()},
          {"DDP", maker<Distributed>()}};
}

}  // namespace bench
