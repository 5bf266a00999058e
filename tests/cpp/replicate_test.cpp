#include <dataparallel/replicate.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

namespace {

namespace dp = dataparallel;
using Catch::Contains;
using test::batch_on;
using test::Mlp;

/// What each replica gives for the same input, on the CPU.
template <class Net>
std::vector<torch::Tensor> outputs(dp::Replicas<Net>& replicas,
                                   const torch::Tensor& x) {
  std::vector<torch::Tensor> result;
  for (size_t i = 0; i < replicas.size(); ++i) {
    result.push_back(
        replicas[i]->forward(x.to(replicas.devices()[i])).to(torch::kCPU));
  }
  return result;
}

/// After `change`, every replica gives what the module gives.
void check_follows(const std::function<void(Mlp&)>& change) {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  dp::Replicas<Mlp> replicas(net, devices);
  const torch::Tensor x = batch_on(devices[0]);
  outputs(replicas, x);
  change(net);
  replicas.refresh();
  const torch::Tensor input = x.to(net->first->weight.scalar_type());
  const torch::Tensor expected = net->forward(input).to(torch::kCPU);
  for (const torch::Tensor& output : outputs(replicas, input)) {
    test::check_equal("output", output, expected);
  }
}

}  // namespace

TEST_CASE("replica 0 is the module itself and the others lie on their devices",
          "[replicate]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<test::ConvNet>(devices[0]);
  auto replicas = dp::replicate(net, devices);
  REQUIRE(replicas.size() == devices.size());
  CHECK(replicas[0].get() == net.get());
  for (size_t i = 0; i < replicas.size(); ++i) {
    const auto parameters = replicas[i]->named_parameters();
    const auto buffers = replicas[i]->named_buffers();
    REQUIRE(parameters.keys() == net->named_parameters().keys());
    REQUIRE(buffers.keys() == net->named_buffers().keys());
    for (const auto& item : net->named_parameters()) {
      CHECK(parameters[item.key()].device() == devices[i]);
      CHECK(test::same_bits(parameters[item.key()], item.value()));
    }
    for (const auto& item : net->named_buffers()) {
      CHECK(buffers[item.key()].device() == devices[i]);
      CHECK(test::same_bits(buffers[item.key()], item.value()));
    }
  }
}

TEST_CASE("values written through data() are followed", "[replicate][follow]") {
  check_follows([](Mlp& net) {
    for (torch::Tensor& parameter : net->parameters()) {
      parameter.data().mul_(1.5);
    }
  });
}

TEST_CASE("values written under no-grad are followed", "[replicate][follow]") {
  check_follows([](Mlp& net) {
    torch::NoGradGuard no_grad;
    net->second->weight.add_(0.25);
  });
}

TEST_CASE("set_data of a parameter is followed", "[replicate][follow]") {
  check_follows([](Mlp& net) {
    net->first->weight.set_data(torch::rand_like(net->first->weight));
  });
}

TEST_CASE("a state loaded into the module is followed", "[replicate][follow]") {
  check_follows([](Mlp& net) {
    auto other = test::make<Mlp>(net->first->weight.device());
    for (torch::Tensor& parameter : other->parameters()) {
      parameter.data().uniform_(-1, 1);
    }
    std::stringstream file;
    torch::save(other, file);
    torch::load(net, file, net->first->weight.device());
  });
}

TEST_CASE("another dtype is followed", "[replicate][follow]") {
  check_follows([](Mlp& net) { net->to(torch::kFloat); });
}

TEST_CASE("a parameter replaced through a subclass is followed",
          "[replicate][follow]") {
  struct Reach : torch::nn::Module {
    static void replace(torch::nn::Module& module, const std::string& name,
                        const torch::Tensor& tensor) {
      (module.*&Reach::parameters_)[name] = tensor;
    }
  };
  check_follows([](Mlp& net) {
    const torch::Tensor weight =
        torch::rand_like(net->first->weight).requires_grad_();
    Reach::replace(*net->first, "weight", weight);
    net->first->weight = weight;
  });
}

TEST_CASE("a memory format is followed", "[replicate][follow]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<test::ConvNet>(devices[0]);
  dp::Replicas<test::ConvNet> replicas(net, devices);
  torch::Tensor& weight = net->convolution->weight;
  weight.set_data(
      weight.detach().contiguous(torch::MemoryFormat::ChannelsLast));
  replicas.refresh();
  for (size_t i = 0; i < replicas.size(); ++i) {
    CHECK(replicas[i]->convolution->weight.strides() == weight.strides());
    CHECK(test::same_bits(replicas[i]->convolution->weight, weight));
  }
}

TEST_CASE("train and eval of the root and of one child are followed",
          "[replicate][follow]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<test::ConvNet>(devices[0]);
  dp::Replicas<test::ConvNet> replicas(net, devices);
  const auto check = [&](bool root, bool norm) {
    replicas.refresh();
    for (size_t i = 0; i < replicas.size(); ++i) {
      CHECK(replicas[i]->is_training() == root);
      CHECK(replicas[i]->norm->is_training() == norm);
    }
  };
  check(true, true);
  net->eval();
  check(false, false);
  net->norm->train();
  check(false, true);
  net->train();
  net->norm->eval();
  check(true, false);
}

TEST_CASE("requires_grad is followed in any order of freezing",
          "[replicate][follow]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  net->first->weight.requires_grad_(false);
  dp::Replicas<Mlp> replicas(net, devices);
  const auto check = [&] {
    replicas.refresh();
    for (size_t i = 0; i < replicas.size(); ++i) {
      const auto parameters = replicas[i]->named_parameters();
      for (const auto& item : net->named_parameters()) {
        CHECK(parameters[item.key()].requires_grad() ==
              item.value().requires_grad());
      }
    }
  };
  check();
  net->second->bias.requires_grad_(false);
  net->first->weight.requires_grad_(true);
  check();
  for (torch::Tensor& parameter : net->parameters()) {
    parameter.requires_grad_(false);
  }
  check();
  CHECK_FALSE(replicas[replicas.size() - 1]
                  ->forward(batch_on(devices.back()))
                  .requires_grad());
}

TEST_CASE("a plain member and a new child are followed when asked for",
          "[replicate][follow]") {
  struct GrowingImpl : torch::nn::Cloneable<GrowingImpl> {
    GrowingImpl() { reset(); }
    void reset() override {
      layers = register_module("layers", torch::nn::ModuleList());
      for (int64_t i = 0; i < depth; ++i) {
        layers->push_back(torch::nn::Linear(4, 4));
      }
    }
    torch::Tensor forward(torch::Tensor x) {
      for (const auto& layer : *layers) {
        x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
      }
      return x * factor;
    }
    int64_t depth = 1;
    double factor = 1;
    torch::nn::ModuleList layers{nullptr};
  };
  TORCH_MODULE(Growing);
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Growing>(devices[0]);
  dp::Replicas<Growing> replicas(net, devices);
  net->factor = 2;
  replicas.refresh_structure();
  CHECK(replicas[1]->factor == 2);
  net->depth = 2;
  net->layers->push_back(torch::nn::Linear(4, 4));
  net->to(devices[0], torch::kDouble);
  replicas.refresh_structure();
  const torch::Tensor x = batch_on(devices[0]);
  const auto all = outputs(replicas, x);
  for (const torch::Tensor& output : all) {
    test::check_equal("output", output, all.front());
  }
}

TEST_CASE("a refresh of the structure that failed is tried again by the next",
          "[replicate][errors]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  struct BareImpl : torch::nn::Module {
    torch::Tensor forward(torch::Tensor x) { return x; }
  };
  struct HolderImpl : torch::nn::Cloneable<HolderImpl> {
    HolderImpl() { reset(); }
    void reset() override {
      inner = register_module("inner", torch::nn::Linear(4, 4));
    }
    torch::Tensor forward(torch::Tensor x) { return inner(x); }
    void grow() { register_module("bare", std::make_shared<BareImpl>()); }
    void shrink() { unregister_module("bare"); }
    torch::nn::Linear inner{nullptr};
  };
  TORCH_MODULE(Holder);
  auto net = test::make<Holder>(devices[0]);
  dp::Replicas<Holder> replicas(net, devices);
  net->grow();
  CHECK_THROWS_AS(replicas.refresh_structure(), c10::TypeError);
  CHECK_THROWS_AS(replicas.refresh(), c10::TypeError);
  net->shrink();
  replicas.refresh();
  const torch::Tensor x = batch_on(devices[0]);
  const auto all = outputs(replicas, x);
  for (const torch::Tensor& output : all) {
    test::check_equal("output", output, all.front());
  }
}

TEST_CASE("a module moved to another device is refused by name",
          "[replicate][errors]") {
  const test::Devices devices = test::sim(3);
  auto net = test::make<Mlp>(devices[0]);
  dp::Replicas<Mlp> replicas(net, devices);
  net->to(devices[1]);
  const auto text = Contains(
      "replicate: parameter first.weight is on sim:1, "
      "expected sim:0 (the first of devices)");
  CHECK_THROWS_WITH(replicas.refresh(), text);
  CHECK_THROWS_WITH(dp::Replicas<Mlp>(net, devices), text);
  net->to(devices[0]);
  CHECK_NOTHROW(replicas.refresh());
}

TEST_CASE("parameters on the module's own device share its memory",
          "[replicate]") {
  auto net = test::make<Mlp>(torch::kCPU);
  dp::Replicas<Mlp> replicas(net, test::cpu(3));
  for (size_t i = 1; i < 3; ++i) {
    CHECK(replicas[i]->first->weight.data_ptr() ==
          net->first->weight.data_ptr());
    CHECK_FALSE(replicas[i]->first->weight.is_leaf());
  }
}

TEST_CASE("buffers are never shared, since replicas write to them at once",
          "[replicate]") {
  auto net = test::make<test::ConvNet>(torch::kCPU);
  dp::Replicas<test::ConvNet> replicas(net, test::cpu(3));
  CHECK(replicas[1]->norm->running_mean.data_ptr() !=
        net->norm->running_mean.data_ptr());
  CHECK(replicas[1]->norm->running_mean.data_ptr() !=
        replicas[2]->norm->running_mean.data_ptr());
}

TEST_CASE("making replicas leaves the random state as it was", "[replicate]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  auto net = test::make<Mlp>(devices[0]);
  torch::manual_seed(11);
  const torch::Tensor expected = torch::rand({8});
  const torch::Tensor expected_there = torch::rand({8}, devices.back());
  torch::manual_seed(11);
  dp::Replicas<Mlp> replicas(net, devices);
  replicas.refresh_structure();
  CHECK(torch::equal(torch::rand({8}), expected));
  CHECK(torch::equal(torch::rand({8}, devices.back()).cpu(),
                     expected_there.cpu()));
}

TEST_CASE("any bucket size gives the same values in the replicas",
          "[replicate]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  const int64_t bytes = GENERATE(1, 100, int64_t{1} << 30);
  auto net = test::make<test::ConvNet>(devices[0]);
  dp::Replicas<test::ConvNet> replicas(net, devices, bytes);
  for (torch::Tensor& parameter : net->parameters()) {
    parameter.data().uniform_(-1, 1);
  }
  replicas.refresh();
  const auto parameters = replicas[2]->named_parameters();
  for (const auto& item : net->named_parameters()) {
    CHECK(test::same_bits(parameters[item.key()], item.value()));
  }
}

TEST_CASE("a bucket of no bytes is refused", "[replicate][errors]") {
  auto net = test::make<Mlp>(torch::kCPU);
  CHECK_THROWS_WITH(dp::Replicas<Mlp>(net, test::cpu(2), 0),
                    Contains("bucket_bytes is 0, expected a positive number"));
}

TEST_CASE("replicas stay where they are, step after step", "[replicate]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  INFO(test::name(devices));
  auto net = test::make<test::ConvNet>(devices[0]);
  dp::Replicas<test::ConvNet> replicas(net, devices);
  const auto places = [&] {
    std::vector<const void*> result;
    for (size_t i = 0; i < replicas.size(); ++i) {
      for (const torch::Tensor& tensor : replicas[i]->parameters()) {
        result.push_back(tensor.const_data_ptr());
      }
      for (const torch::Tensor& tensor : replicas[i]->buffers()) {
        result.push_back(tensor.const_data_ptr());
      }
    }
    return result;
  };
  const auto before = places();
  torch::optim::Adam optimizer(net->parameters());
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    replicas.refresh();
    const auto x = torch::randn({4, 2, 5, 5}, test::float64_on(devices.back()));
    replicas[devices.size() - 1]->forward(x).sum().backward();
    optimizer.step();
  }
  CHECK(places() == before);
}
