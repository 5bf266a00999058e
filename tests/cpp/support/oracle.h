#pragma once

#include <dataparallel/data_parallel.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "support/catch.h"

// The oracle: the same module, with the same values, on one device with the
// whole batch.

namespace test {

inline dataparallel::DataParallelOptions on(
    const std::vector<torch::Device>& devices) {
  return dataparallel::DataParallelOptions().devices(devices);
}

inline double tolerance(torch::ScalarType dtype) {
  return dtype == torch::kDouble || dtype == torch::kComplexDouble ? 1e-10
                                                                   : 1e-5;
}

/// Both undefined, or alike in dtype, shape and values.
inline void check_equal(const std::string& what, const torch::Tensor& got,
                        const torch::Tensor& expected, double within = -1) {
  INFO(what);
  REQUIRE(got.defined() == expected.defined());
  if (!got.defined()) {
    return;
  }
  REQUIRE(got.scalar_type() == expected.scalar_type());
  REQUIRE(got.sizes() == expected.sizes());
  const double bound = within < 0 ? tolerance(got.scalar_type()) : within;
  const torch::Tensor a = got.detach().to(torch::kCPU).to_dense();
  const torch::Tensor b = expected.detach().to(torch::kCPU).to_dense();
  const bool close = torch::allclose(a, b, /*rtol=*/bound, /*atol=*/bound,
                                     /*equal_nan=*/true);
  if (close) {
    SUCCEED();
  } else {
    FAIL_CHECK("got " << a << "\nexpected " << b);
  }
}

inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         torch::equal(a.detach()
                          .to(torch::kCPU)
                          .contiguous()
                          .view(-1)
                          .view(torch::kByte),
                      b.detach()
                          .to(torch::kCPU)
                          .contiguous()
                          .view(-1)
                          .view(torch::kByte));
}

/// A copy on the same device; unlike `clone`, frozen and in eval mode where
/// the original is.
template <class Net>
Net twin(Net& net) {
  using Impl = typename Net::ContainedType;
  Net copy(std::dynamic_pointer_cast<Impl>(net->clone()));
  const auto from = net->named_parameters();
  for (auto& item : copy->named_parameters()) {
    item.value().requires_grad_(from[item.key()].requires_grad());
  }
  const auto modules = net->modules();
  const auto copies = copy->modules();
  for (size_t i = 0; i < copies.size(); ++i) {
    copies[i]->train(modules[i]->is_training());
  }
  return copy;
}

inline void check_same_gradients(const torch::nn::Module& got,
                                 const torch::nn::Module& expected,
                                 double within = -1) {
  const auto expected_parameters = expected.named_parameters();
  for (const auto& item : got.named_parameters()) {
    check_equal("gradient of " + item.key(), item.value().grad(),
                expected_parameters[item.key()].grad(), within);
  }
}

inline void check_same_values(const torch::nn::Module& got,
                              const torch::nn::Module& expected) {
  const auto expected_parameters = expected.named_parameters();
  for (const auto& item : got.named_parameters()) {
    check_equal(item.key(), item.value(), expected_parameters[item.key()]);
  }
}

/// Outputs of `act(model)` and the gradients that its mean square leaves.
/// `model` wraps or is `net`; `single` is the oracle.
template <class Model, class Net, class Act>
void check_same_step(Model& model, Net& net, Net& single, Act&& act) {
  net->zero_grad();
  single->zero_grad();
  const torch::Tensor got = act(model);
  const torch::Tensor expected = act(single);
  check_equal("output", got, expected);
  got.pow(2).mean().backward();
  expected.pow(2).mean().backward();
  check_same_gradients(*net, *single);
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    bool adam, const std::vector<torch::Tensor>& parameters) {
  if (adam) {
    return std::make_unique<torch::optim::Adam>(
        parameters, torch::optim::AdamOptions(0.01));
  }
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// Three steps of SGD and three of Adam, wrapped and on one device: losses,
/// gradients and parameters. `loss_of(model, step)` is a loss with its graph.
template <class Net, class LossOf>
void check_trains_as_on_one_device(
    Net net, const dataparallel::DataParallelOptions& options,
    LossOf&& loss_of) {
  for (const bool adam : {false, true}) {
    INFO((adam ? "Adam" : "SGD"));
    Net wrapped = twin(net);
    Net single = twin(net);
    dataparallel::DataParallel<Net> model(wrapped, options);
    const auto optimizer = make_optimizer(adam, model->parameters());
    const auto single_optimizer = make_optimizer(adam, single->parameters());
    for (int step = 0; step < 3; ++step) {
      INFO("step " << step);
      optimizer->zero_grad();
      single_optimizer->zero_grad();
      torch::Tensor loss = loss_of(model, step);
      torch::Tensor expected = loss_of(single, step);
      check_equal("loss", loss, expected);
      loss.backward();
      expected.backward();
      check_same_gradients(*wrapped, *single);
      optimizer->step();
      single_optimizer->step();
      check_same_values(*wrapped, *single);
    }
  }
}

}  // namespace test
