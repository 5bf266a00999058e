#include <dataparallel/data_parallel.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// What is refused when a wrapper is built, by name, and what is mended instead.

namespace {

namespace dp = dataparallel;
using Catch::Contains;
using test::Mlp;

template <class Net>
void wrap(Net net, size_t replicas = 3) {
  dp::DataParallel<Net> model(
      net, dp::DataParallelOptions().devices(test::cpu(replicas)));
}

struct BareImpl : torch::nn::Module {
  BareImpl() { layer = register_module("layer", torch::nn::Linear(4, 3)); }
  torch::Tensor forward(const torch::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Bare);

/// Registers its parameter outside reset, so that a clone lacks it.
struct HalfResetImpl : torch::nn::Cloneable<HalfResetImpl> {
  HalfResetImpl() {
    reset();
    extra = register_parameter("extra", torch::ones({3}));
  }
  void reset() override {}
  torch::Tensor forward(const torch::Tensor& x) { return x * extra; }
  torch::Tensor extra;
};
TORCH_MODULE(HalfReset);

/// Its clone has as many parameters, one under another name.
struct RenamedImpl : torch::nn::Cloneable<RenamedImpl> {
  RenamedImpl() { reset(); }
  void reset() override {
    static int made = 0;
    weight = register_parameter("weight_" + std::to_string(made++),
                                torch::ones({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
  torch::Tensor weight;
};
TORCH_MODULE(Renamed);

struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  explicit TiedImpl(bool in_reset) : in_reset(in_reset) { reset(); }
  void reset() override {
    encoder = register_module("encoder", torch::nn::Linear(4, 4));
    decoder = register_module("decoder", torch::nn::Linear(4, 4));
    if (in_reset) {
      decoder->weight = encoder->weight;
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return decoder(torch::tanh(encoder(x)));
  }
  bool in_reset;
  torch::nn::Linear encoder{nullptr};
  torch::nn::Linear decoder{nullptr};
};
TORCH_MODULE(Tied);

/// Fills a list in reset(), after emptying it or not.
struct ListedImpl : torch::nn::Cloneable<ListedImpl> {
  explicit ListedImpl(bool empties) : empties(empties) { reset(); }
  void reset() override {
    if (empties) {
      layers.clear();
    }
    for (int i = 0; i < 2; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(4, 4)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
    }
    return x;
  }
  bool empties;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Listed);

/// While its first clone is made, somebody copies a handle of its weight.
struct ObservedImpl : torch::nn::Cloneable<ObservedImpl> {
  ObservedImpl() { reset(); }
  void reset() override {
    if (copied && !copied->defined()) {
      *copied = layer->weight;  // the original's still
    }
    layer = register_module("layer", torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
  std::shared_ptr<torch::Tensor> copied;
};
TORCH_MODULE(Observed);

struct WithBufferImpl : torch::nn::Cloneable<WithBufferImpl> {
  WithBufferImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 4));
    mean = register_buffer("mean", torch::zeros({4}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layer(x - mean); }
  torch::nn::Linear layer{nullptr};
  torch::Tensor mean;
};
TORCH_MODULE(WithBuffer);

/// One layer registered under two names.
struct SharedImpl : torch::nn::Cloneable<SharedImpl> {
  SharedImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(4, 4));
    second = register_module("second", first);
    weight = register_parameter("weight", first->weight);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::tanh(second(torch::tanh(first(x)))).matmul(weight);
  }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  torch::Tensor weight;
};
TORCH_MODULE(Shared);

struct ElsewhereImpl : torch::nn::Cloneable<ElsewhereImpl> {
  ElsewhereImpl(torch::Device weight, torch::Device table)
      : weight(weight), table(table) {
    reset();
  }
  void reset() override {
    register_parameter("weight", torch::ones({3}, weight));
    register_buffer("table", torch::ones({3}, table));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x; }
  torch::Device weight;
  torch::Device table;
};
TORCH_MODULE(Elsewhere);

}  // namespace

TEST_CASE("a module that cannot be cloned is refused with both ways out",
          "[replicate][errors]") {
  CHECK_THROWS_AS(wrap(Bare()), c10::TypeError);
  CHECK_THROWS_WITH(wrap(Bare()), Contains("BareImpl") &&
                                      Contains("Cloneable<") &&
                                      Contains("factory"));
  CHECK_NOTHROW(wrap(Bare(), 1));
}

TEST_CASE("a half-written reset is refused", "[replicate][errors]") {
  CHECK_THROWS_AS(wrap(HalfReset()), c10::TypeError);
  CHECK_THROWS_WITH(wrap(HalfReset()),
                    Contains("HalfResetImpl") && Contains("reset()"));
}

TEST_CASE("a clone with other names is refused", "[replicate][errors]") {
  CHECK_THROWS_AS(wrap(Renamed()), c10::TypeError);
  CHECK_THROWS_WITH(wrap(Renamed()), Contains("weight_"));
}

TEST_CASE("a tie made by assigning a member is refused by name",
          "[replicate][errors]") {
  Tied net(/*in_reset=*/false);
  CHECK_NOTHROW(wrap(net));
  net->decoder->weight = net->encoder->weight;
  CHECK_THROWS_WITH(wrap(net), Contains("parameter decoder.weight") &&
                                   Contains("holds another tensor"));
}

TEST_CASE("a tie made by assignment is seen beside an optimizer made before",
          "[replicate][errors]") {
  Tied net(/*in_reset=*/false);
  torch::optim::Adam all(net->parameters());
  CHECK_NOTHROW(wrap(net));
  net->decoder->weight = net->encoder->weight;
  CHECK_THROWS_WITH(wrap(net), Contains("parameter decoder.weight"));
}

TEST_CASE("an optimizer of some parameters is taken for no tie",
          "[replicate][errors]") {
  Tied net(/*in_reset=*/false);
  const auto head = net->decoder->parameters();
  torch::optim::SGD of_head(head, /*lr=*/0.1);
  CHECK_NOTHROW(wrap(net));
  torch::optim::SGD of_weight({net->encoder->weight}, /*lr=*/0.1);
  CHECK_NOTHROW(wrap(net));
  const std::vector<torch::Tensor> kept{net->encoder->weight};
  CHECK_NOTHROW(wrap(net));
}

TEST_CASE("a clone that still holds the original's layers is refused",
          "[replicate][errors]") {
  CHECK_THROWS_WITH(wrap(Listed(/*empties=*/false)),
                    Contains("still holds the original's layer layer0") &&
                        Contains("reset()") && Contains("factory"));
  CHECK_NOTHROW(wrap(Listed(/*empties=*/true)));
}

TEST_CASE("a handle that another thread copies meanwhile is no refusal",
          "[replicate]") {
  Observed net;
  net->copied = std::make_shared<torch::Tensor>();
  CHECK_NOTHROW(wrap(net));
  CHECK(net->copied->is_same(net->layer->weight));
}

TEST_CASE("a buffer whose member was assigned is refused by name",
          "[replicate][errors]") {
  WithBuffer net;
  CHECK_NOTHROW(wrap(net));
  net->mean = torch::ones({4});
  CHECK_THROWS_WITH(
      wrap(net), Contains("buffer mean") && Contains("holds another tensor"));
}

TEST_CASE("a buffer registered after wrapping, outside reset, is an error",
          "[replicate][errors]") {
  WithBuffer net;
  dp::DataParallel<WithBuffer> model(net, test::on(test::cpu(2)));
  net->register_buffer("more", torch::ones({4}));
  CHECK_THROWS_WITH(model(torch::ones({4, 4})), Contains("number of buffers"));
}

TEST_CASE("a child added after wrapping is there at the next forward",
          "[replicate]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  torch::nn::Sequential net(torch::nn::Linear(4, 4));
  net->to(devices[0], torch::kDouble);
  dp::DataParallel<torch::nn::Sequential> model(net, test::on(devices));
  const auto x = test::batch_on(devices[0]);
  test::check_equal("before", model(x), net->forward(x));
  net->push_back(torch::nn::Tanh());
  test::check_equal("after", model(x), net->forward(x));
}

TEST_CASE("an empty holder is refused", "[replicate][errors]") {
  CHECK_THROWS_WITH(wrap(std::shared_ptr<test::MlpImpl>()),
                    Contains("DataParallel: the module is empty"));
  CHECK_THROWS_WITH(wrap(Mlp(nullptr)), Contains("the module is empty"));
}

TEST_CASE("a tie made by assignment after wrapping is refused when asked for",
          "[replicate][errors]") {
  Tied net(/*in_reset=*/false);
  dp::DataParallel<Tied> model(net,
                               dp::DataParallelOptions().devices(test::cpu(2)));
  net->decoder->weight = net->encoder->weight;
  CHECK_THROWS_WITH(model->refresh_structure(),
                    Contains("parameter decoder.weight"));
}

TEST_CASE("a tie made in reset trains as on one device", "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Tied>(devices[0], /*in_reset=*/true);
  const auto x = torch::randn({7, 4}, test::float64_on(devices[0]));
  // The registered decoder.weight is unused in the original, and so it is in
  // the replicas: they tie the same member.
  test::check_trains_as_on_one_device(
      net, dp::DataParallelOptions().devices(devices),
      [&](auto& model, int) { return model(x).pow(2).mean(); });
}

TEST_CASE("a layer registered twice trains as on one device",
          "[data_parallel]") {
  const auto devices = GENERATE(from_range(test::short_device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Shared>(devices[0]);
  const auto x = torch::randn({7, 4}, test::float64_on(devices[0]));
  test::check_trains_as_on_one_device(
      net, dp::DataParallelOptions().devices(devices),
      [&](auto& model, int) { return model(x).pow(2).mean(); });
}

TEST_CASE("a module on another device than the first is refused by name",
          "[data_parallel][errors]") {
  Elsewhere net(torch::kMeta, torch::kCPU);
  CHECK_THROWS_AS(wrap(net), c10::ValueError);
  CHECK_THROWS_WITH(wrap(net),
                    Contains("DataParallel: parameter weight is on meta, "
                             "expected cpu (the first of devices)"));
  CHECK_THROWS_WITH(wrap(Elsewhere(torch::kCPU, torch::kMeta)),
                    Contains("DataParallel: buffer table is on meta, expected "
                             "cpu (the first of devices)"));
}

TEST_CASE("a wrapped wrapper is refused, at the root and inside",
          "[data_parallel][errors]") {
  dp::DataParallel<Mlp> model(Mlp(),
                              dp::DataParallelOptions().devices(test::cpu(2)));
  CHECK_THROWS_WITH(wrap(model), Contains("is data-parallel already"));
  struct OuterImpl : torch::nn::Cloneable<OuterImpl> {
    explicit OuterImpl(dp::DataParallel<Mlp> model) {
      inner = register_module("inner", model);
    }
    void reset() override {}
    torch::Tensor forward(const torch::Tensor& x) { return inner(x); }
    dp::DataParallel<Mlp> inner{nullptr};
  };
  TORCH_MODULE(Outer);
  CHECK_THROWS_WITH(wrap(Outer(model)), Contains("is data-parallel already"));
}

TEST_CASE("what clone un-freezes is frozen again in the replicas",
          "[replicate]") {
  auto net = test::make<Mlp>(torch::kCPU);
  net->first->weight.requires_grad_(false);
  REQUIRE(std::dynamic_pointer_cast<test::MlpImpl>(net->clone())
              ->first->weight.requires_grad());
  dp::Replicas<Mlp> replicas(net, test::cpu(2));
  CHECK_FALSE(replicas[1]->first->weight.requires_grad());
  CHECK(replicas[1]->second->weight.requires_grad());
}

TEST_CASE("a factory that hands out the module itself is refused",
          "[replicate][errors]") {
  Bare net;
  const auto x = torch::randn({4, 4});
  const torch::Tensor before = net->forward(x);
  CHECK_THROWS_AS(dp::Replicas<Bare>(net, test::cpu(2), 1 << 20,
                                     [&](torch::Device) { return net; }),
                  c10::TypeError);
  CHECK(net->layer->weight.is_leaf());
  CHECK(torch::equal(net->forward(x), before));
}

TEST_CASE("a factory that hands out one module twice is refused",
          "[replicate][errors]") {
  Bare net;
  Bare other;
  CHECK_THROWS_AS(dp::Replicas<Bare>(net, test::cpu(3), 1 << 20,
                                     [&](torch::Device) { return other; }),
                  c10::TypeError);
}

TEST_CASE("a factory that hands out nothing is refused",
          "[replicate][errors]") {
  CHECK_THROWS_WITH(
      dp::Replicas<Bare>(Bare(), test::cpu(2), 1 << 20,
                         [](torch::Device) { return Bare(nullptr); }),
      Contains("the factory returned an empty module"));
}

TEST_CASE("a factory of another module is refused by name",
          "[replicate][errors]") {
  CHECK_THROWS_WITH(dp::Replicas<Mlp>(Mlp(5), test::cpu(2), 1 << 20,
                                      [](torch::Device) { return Mlp(6); }),
                    Contains("parameter first.weight") &&
                        Contains("the factory must build the same module"));
}
