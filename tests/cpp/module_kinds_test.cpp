#include <dataparallel/data_parallel.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// Every kind of module that can be wrapped: a module holder, `Sequential`, a
// shared pointer, `AnyModule`, TorchScript, and what a factory makes.

namespace {

namespace dp = dataparallel;
using Catch::Contains;
using test::batch_on;
using test::Mlp;
using test::on;

using test::MlpImpl;
static_assert(dp::detail::is_module_kind<Mlp>());
static_assert(dp::detail::is_module_kind<torch::nn::Sequential>());
static_assert(dp::detail::is_module_kind<torch::nn::AnyModule>());
static_assert(dp::detail::is_module_kind<std::shared_ptr<MlpImpl>>());
static_assert(dp::detail::is_module_kind<torch::jit::Module>());
static_assert(!dp::detail::is_module_kind<MlpImpl>());
static_assert(!dp::detail::is_module_kind<MlpImpl*>());
static_assert(!dp::detail::is_module_kind<std::unique_ptr<MlpImpl>>());

/// A scripted layer with a buffer, a mode, a number, and tensors in a list, a
/// dictionary and a tuple.
torch::jit::Module scripted(torch::Device device) {
  torch::manual_seed(3);
  const auto options = test::float64_on(device);
  const auto values = [&] { return torch::randn({3}, options); };
  torch::jit::Module module("scripted");
  module.register_parameter(
      "weight", torch::randn({4, 3}, options).requires_grad_(), false);
  module.register_parameter("bias", values().requires_grad_(), false);
  module.register_buffer("offset", values());
  module.register_attribute("training", c10::BoolType::get(), true);
  module.register_attribute("scale", c10::FloatType::get(), 1.5);
  module.register_attribute("plain", c10::TensorType::get(), values());
  module.register_attribute("listed",
                            c10::ListType::create(c10::TensorType::get()),
                            c10::List<at::Tensor>({values(), values()}));
  c10::Dict<std::string, at::Tensor> named;
  named.insert("a", values());
  module.register_attribute(
      "named",
      c10::DictType::create(c10::StringType::get(), c10::TensorType::get()),
      named);
  module.register_attribute(
      "pair",
      c10::TupleType::create({c10::TensorType::get(), c10::IntType::get()}),
      c10::ivalue::Tuple::create(values(), int64_t{2}));
  module.define(R"(
def forward(self, x, times: float = 1.0):
    y = torch.mm(x, self.weight) + self.bias + self.offset * self.plain
    y = y + self.listed[0] * self.listed[1] + self.named["a"]
    y = y + self.pair[0] * self.pair[1]
    if self.training:
        y = torch.tanh(y)
    return y * self.scale * times
)");
  return module;
}

/// A copy whose parameters are leaves, as the original's.
torch::jit::Module twin_of(const torch::jit::Module& module) {
  torch::NoGradGuard no_grad;
  torch::jit::Module copy = module.deepcopy();
  for (at::Tensor parameter : copy.parameters()) {
    parameter.requires_grad_();
  }
  return copy;
}

std::vector<at::Tensor> all_tensors(const torch::jit::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : module._ivalue()->slots()) {
    value.visit([&](const c10::IValue& inner) {
      if (inner.isTensor()) {
        tensors.push_back(inner.toTensor());
      }
      return false;
    });
  }
  return tensors;
}

struct NotCloneableImpl : torch::nn::Module {
  explicit NotCloneableImpl(double factor) : factor(factor) {
    layer = register_module("layer", torch::nn::Linear(4, 3));
    shift = register_buffer("shift", torch::rand({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return (layer(x) + shift) * factor;
  }
  double factor;
  torch::nn::Linear layer{nullptr};
  torch::Tensor shift;
};
TORCH_MODULE(NotCloneable);

}  // namespace

TEST_CASE("a Sequential trains as on one device", "[module_kinds]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::Tanh(),
                            torch::nn::Linear(6, 3));
  net->to(devices[0], torch::kDouble);
  auto single =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  dp::DataParallel<torch::nn::Sequential> model(net, on(devices));
  const auto x = batch_on(devices[0]);
  const torch::Tensor y = model(x);
  test::check_equal("output", y, single->forward(x));
  y.pow(2).mean().backward();
  single->forward(x).pow(2).mean().backward();
  test::check_same_gradients(*net, *single);
}

TEST_CASE("a Sequential that returns no tensor says its result type",
          "[module_kinds]") {
  torch::nn::Sequential net(torch::nn::GRU(4, 3));
  dp::DataParallel<torch::nn::Sequential> model(net, on(test::cpu(3)).dim(1));
  using Result = std::tuple<torch::Tensor, torch::Tensor>;
  const auto x = torch::randn({2, 5, 4});
  const auto [y, state] = model->forward<Result>(x);
  const auto [expected, expected_state] = net->forward<Result>(x);
  test::check_equal("output", y, expected);
  test::check_equal("state", state, expected_state);
}

TEST_CASE("a shared pointer to a module trains as on one device",
          "[module_kinds]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Mlp>(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<std::shared_ptr<test::MlpImpl>> model(net.ptr(),
                                                         on(devices));
  CHECK(model->module() == net.ptr());
  const auto x = batch_on(devices[0]);
  test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
}

TEST_CASE("an AnyModule trains as on one device", "[module_kinds]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::nn::Linear net(4, 3);
  net->to(devices[0], torch::kDouble);
  auto single = test::twin(net);
  dp::DataParallel<torch::nn::AnyModule> model(torch::nn::AnyModule(net),
                                               on(devices));
  const auto x = batch_on(devices[0]);
  test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
  const auto loss = model->forward_backward(
      [](const torch::Tensor& y, const torch::Tensor&) {
        return y.pow(2).mean();
      },
      x, x);
  test::check_equal("loss", loss, single(x).pow(2).mean());
}

TEST_CASE("an AnyModule that cannot be cloned is refused with both ways out",
          "[module_kinds][errors]") {
  CHECK_THROWS_WITH(
      dp::DataParallel<torch::nn::AnyModule>(
          torch::nn::AnyModule(NotCloneable(1.0)), on(test::cpu(2))),
      Contains("NotCloneableImpl") && Contains("Cloneable<") &&
          Contains("factory"));
}

TEST_CASE("a scripted module trains as on one device", "[module_kinds][jit]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::jit::Module net = scripted(devices[0]);
  torch::jit::Module single = twin_of(net);
  dp::DataParallel<torch::jit::Module> model(net, on(devices));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<at::Tensor> single_parameters;
  for (const auto& parameter : single.parameters()) {
    single_parameters.push_back(parameter);
  }
  torch::optim::SGD single_optimizer(single_parameters, 0.1);
  const auto x = batch_on(devices[0]);
  // Often enough for the profiling executor to compile and run its graph.
  for (int step = 0; step < 5; ++step) {
    INFO("step " << step);
    optimizer.zero_grad();
    single_optimizer.zero_grad();
    const torch::Tensor y = model(x).toTensor();
    const torch::Tensor expected = single.forward({x}).toTensor();
    test::check_equal("output", y, expected);
    y.pow(2).mean().backward();
    expected.pow(2).mean().backward();
    for (const char* name : {"weight", "bias"}) {
      test::check_equal(name, net.attr(name).toTensor().grad(),
                        single.attr(name).toTensor().grad());
    }
    optimizer.step();
    single_optimizer.step();
  }
}

TEST_CASE("no tensor of a scripted replica is the original's, all are moved",
          "[module_kinds][jit]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::jit::Module net = scripted(devices[0]);
  auto replicas = dp::replicate(net, devices);
  const auto originals = all_tensors(net);
  for (size_t i = 1; i < replicas.size(); ++i) {
    const auto copies = all_tensors(replicas[i]);
    REQUIRE(copies.size() == originals.size());
    for (size_t t = 0; t < copies.size(); ++t) {
      CHECK(copies[t].device() == devices[i]);
      CHECK_FALSE(copies[t].is_same(originals[t]));
      CHECK(test::same_bits(copies[t], originals[t]));
    }
  }
}

TEST_CASE("every attribute of a scripted module is followed",
          "[module_kinds][jit]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::NoGradGuard no_grad;
  torch::jit::Module net = scripted(devices[0]);
  dp::DataParallel<torch::jit::Module> model(net, on(devices));
  const auto x = batch_on(devices[0]);
  const auto check = [&](const char* change) {
    test::check_equal(change, model(x).toTensor(), net.forward({x}).toTensor());
  };
  const auto values = [&] {
    return torch::randn({3}, test::float64_on(devices[0]));
  };
  check("nothing");
  model->eval();
  CHECK_FALSE(net.is_training());
  check("eval");
  net.train();
  check("train");
  net.setattr("scale", 0.5);
  check("number");
  net.setattr("bias", values());
  check("replaced parameter");
  net.setattr("offset", values());
  check("replaced buffer");
  net.setattr("plain", values());
  check("plain tensor");
  net.attr("listed").toTensorList().set(0, values());
  check("listed tensor");
  net.attr("named").toGenericDict().insert_or_assign("a", values());
  check("named tensor");
  net.setattr("pair", c10::ivalue::Tuple::create(values(), int64_t{3}));
  check("tuple");
  net.attr("weight").toTensor().mul_(2);
  check("weight");
  test::check_equal("argument", model(x, 2.0).toTensor(),
                    net.forward({x, 2.0}).toTensor());
}

TEST_CASE("a scripted module shows its own names and modes",
          "[module_kinds][jit]") {
  torch::jit::Module net = scripted(torch::kCPU);
  dp::DataParallel<torch::jit::Module> model(net, on(test::cpu(2)));
  CHECK(model->named_parameters().keys() ==
        std::vector<std::string>{"module.weight", "module.bias"});
  CHECK(model->named_buffers().contains("module.offset"));
  model->to(torch::kFloat);
  CHECK(net.attr("weight").toTensor().scalar_type() == torch::kFloat);
}

TEST_CASE("wrapping a scripted module leaves its children's modes alone",
          "[module_kinds][jit]") {
  torch::jit::Module child("child");
  child.register_attribute("training", c10::BoolType::get(), true);
  child.define(R"(
    def forward(self, x):
        return x * 10 if self.training else x
  )");
  torch::jit::Module net("net");
  net.register_attribute("training", c10::BoolType::get(), true);
  net.register_module("child", child);
  net.define(R"(
    def forward(self, x):
        return self.child.forward(x)
  )");
  net.train();
  torch::jit::Module kept(net.attr("child").toModule());
  kept.eval();
  const auto x = torch::ones({4, 2});
  dp::DataParallel<torch::jit::Module> model(net, on(test::cpu(2)));
  CHECK(model->is_training());
  CHECK_FALSE(kept.is_training());
  test::check_equal("alone", net.forward({x}).toTensor(), x);
  test::check_equal("wrapped", model(x).toTensor(), x);
  kept.train();
  test::check_equal("followed", model(x).toTensor(), x * 10);
}

TEST_CASE("an empty scripted module is refused", "[module_kinds][errors]") {
  CHECK_THROWS_WITH(dp::DataParallel<torch::jit::Module>(torch::jit::Module(),
                                                         on(test::cpu(2))),
                    Catch::Contains("the module is empty"));
}

TEST_CASE("a scripted module is loaded, wrapped and saved again",
          "[module_kinds][jit]") {
  std::stringstream file;
  scripted(torch::kCPU).save(file);
  torch::jit::Module net = torch::jit::load(file);
  dp::DataParallel<torch::jit::Module> model(net, on(test::cpu(3)));
  const auto x = batch_on(torch::kCPU);
  test::check_equal("output", model(x).toTensor(), net.forward({x}).toTensor());
}

TEST_CASE("a scripted module of two outputs gives a tuple",
          "[module_kinds][jit]") {
  torch::jit::Module net("two");
  net.define("def forward(self, x, s: str):\n  return x * 2, {s: x.sum(1)}\n");
  dp::DataParallel<torch::jit::Module> model(net, on(test::cpu(3)));
  const auto x = batch_on(torch::kCPU);
  const c10::IValue result = model(x, std::string("key"));
  const auto& elements = result.toTupleRef().elements();
  test::check_equal("first", elements[0].toTensor(), x * 2);
  test::check_equal("second", elements[1].toGenericDict().at("key").toTensor(),
                    x.sum(1));
}

TEST_CASE("an error in a scripted replica names the replica",
          "[module_kinds][jit][errors]") {
  torch::jit::Module net("fails");
  net.define("def forward(self, x):\n  return torch.mm(x, x)\n");
  dp::DataParallel<torch::jit::Module> model(net, on(test::cpu(2)));
  CHECK_THROWS_WITH(model(batch_on(torch::kCPU)), Contains("replica 1 on cpu"));
}

TEST_CASE("a factory makes the replicas of a module that cannot be cloned",
          "[module_kinds]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  NotCloneable net(2.0);
  net->to(devices[0], torch::kDouble);
  std::vector<torch::Device> asked;
  dp::DataParallel<NotCloneable> model(net, on(devices),
                                       [&](torch::Device device) {
                                         asked.push_back(device);
                                         return NotCloneable(2.0);
                                       });
  CHECK(asked ==
        std::vector<torch::Device>(devices.begin() + 1, devices.end()));
  const auto x = batch_on(devices[0]);
  const auto y = model(x);
  const auto expected = net(x);
  test::check_equal("output", y, expected);
  const auto got = torch::autograd::grad({y.pow(2).mean()}, net->parameters());
  const auto wanted =
      torch::autograd::grad({expected.pow(2).mean()}, net->parameters());
  for (size_t i = 0; i < got.size(); ++i) {
    test::check_equal("gradient", got[i], wanted[i]);
  }
}

TEST_CASE("a scripted recurrent layer trains as on one device",
          "[module_kinds][jit][R23]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  const auto options = test::float64_on(devices[0]);
  const auto trained = options.requires_grad(true);
  torch::manual_seed(3);
  torch::jit::Module net("recurrent");
  net.register_parameter("w_ih", torch::randn({20, 4}, trained), false);
  net.register_parameter("w_hh", torch::randn({20, 5}, trained), false);
  net.register_parameter("b_ih", torch::randn({20}, trained), false);
  net.register_parameter("b_hh", torch::randn({20}, trained), false);
  net.define(R"(
def forward(self, x):
    zeros = torch.zeros([1, x.size(0), 5], dtype=x.dtype, device=x.device)
    weights = [self.w_ih, self.w_hh, self.b_ih, self.b_hh]
    y, h, c = torch.lstm(x, [zeros, zeros], weights, True, 1, 0.0, False, False, True)
    return y
)");
  torch::jit::Module single = twin_of(net);
  dp::DataParallel<torch::jit::Module> model(net, on(devices));
  const auto x = torch::randn({5, 3, 4}, options);
  for (int pass = 0; pass < 3; ++pass) {
    const auto y = model(x).toTensor();
    const auto expected = single.forward({x}).toTensor();
    test::check_equal("output", y, expected);
    y.pow(2).mean().backward();
    expected.pow(2).mean().backward();
  }
  for (const auto& item : net.named_parameters()) {
    test::check_equal(item.name, item.value.grad(),
                      single.attr(item.name).toTensor().grad());
  }
}

TEST_CASE("a parameter that a TorchScript list holds too gets its gradients",
          "[module_kinds][R23]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  const auto options = test::float64_on(devices[0]);
  const auto w = torch::full({4}, 2.0, options).requires_grad_();
  torch::jit::Module net("listing");
  net.register_parameter("w", w, /*is_buffer=*/false);
  net.register_attribute("flat", c10::ListType::create(c10::TensorType::get()),
                         c10::List<at::Tensor>({w}));
  net.define("def forward(self, x):\n    return x * self.flat[0] * self.w\n");
  dp::DataParallel<torch::jit::Module> model(net, on(devices));
  const auto x = batch_on(devices[0]);
  for (int step = 0; step < 2; ++step) {
    w.mutable_grad() = torch::Tensor();
    const auto y = model(x).toTensor();
    test::check_equal("output", y, (x * w * w).detach());
    y.sum().backward();
    test::check_equal("gradient", w.grad(), (2 * w * x.sum(0)).detach());
    torch::NoGradGuard no_grad;
    w.add_(1);
  }
}

TEST_CASE("a TorchScript list of trained tensors that are no parameters",
          "[module_kinds][errors]") {
  torch::jit::Module net("listing");
  net.register_attribute(
      "flat", c10::ListType::create(c10::TensorType::get()),
      c10::List<at::Tensor>({torch::ones({4}, torch::requires_grad())}));
  net.define("def forward(self, x):\n    return x * self.flat[0]\n");
  CHECK_THROWS_WITH(
      dp::DataParallel<torch::jit::Module>(net, on(test::cpu(2))),
      Contains("attribute flat[0]") && Contains("its gradient would be lost"));
}
