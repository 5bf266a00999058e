#include <dataparallel/data_parallel.h>
#include <torch/torch.h>

#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/networks.h"
#include "support/oracle.h"

// Parameters, buffers and gradients of every dtype, shape and layout (R41).

namespace {

namespace dp = dataparallel;
using test::on;

const std::vector<torch::ScalarType> kDtypes{torch::kBool,
                                             torch::kUInt8,
                                             torch::kInt8,
                                             torch::kInt16,
                                             torch::kInt32,
                                             torch::kInt64,
                                             torch::kUInt16,
                                             torch::kUInt32,
                                             torch::kUInt64,
                                             torch::kFloat16,
                                             torch::kBFloat16,
                                             torch::kFloat32,
                                             torch::kFloat64,
                                             torch::kComplexHalf,
                                             torch::kComplexFloat,
                                             torch::kComplexDouble,
                                             torch::kFloat8_e4m3fn,
                                             torch::kFloat8_e5m2,
                                             torch::kFloat8_e4m3fnuz,
                                             torch::kFloat8_e5m2fnuz};

/// Arbitrary bytes, seen as `dtype`: [3, 5], or zeros and ones for bool.
torch::Tensor any_bits(torch::ScalarType dtype) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t limit = dtype == torch::kBool ? 2 : 256;
  return torch::randint(limit, {3, 5 * bytes}, torch::kByte).view(dtype);
}

struct BuffersImpl : torch::nn::Cloneable<BuffersImpl> {
  BuffersImpl() { reset(); }
  void reset() override {
    all.clear();
    for (const torch::ScalarType dtype : kDtypes) {
      all.push_back(register_buffer(c10::toString(dtype), any_bits(dtype)));
    }
    all.push_back(register_buffer("zero_size", torch::empty({0, 3})));
    all.push_back(register_buffer("zero_dim", torch::rand({})));
    all.push_back(register_buffer("transposed", torch::rand({3, 4}).t()));
    all.push_back(
        register_buffer("expanded", torch::rand({3, 1}).expand({3, 4})));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x; }
  std::vector<torch::Tensor> all;
};
TORCH_MODULE(Buffers);

/// Complex weights, a zero-size and a zero-dimensional one.
struct OddWeightsImpl : torch::nn::Cloneable<OddWeightsImpl> {
  OddWeightsImpl() { reset(); }
  void reset() override {
    turn = register_parameter("turn", torch::randn({4}, torch::kComplexDouble));
    scale = register_parameter("scale", torch::rand({}, torch::kDouble));
    nothing =
        register_parameter("nothing", torch::rand({0, 4}, torch::kDouble));
    shift = register_parameter("shift", torch::rand({4}, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::abs(x * turn) * scale + shift + nothing.sum();
  }
  torch::Tensor turn;
  torch::Tensor scale;
  torch::Tensor nothing;
  torch::Tensor shift;
};
TORCH_MODULE(OddWeights);

/// A table looked up sparsely, and used as a dense matrix by replicas that get
/// a first index below 5 (`mixed`).
struct LookupImpl : torch::nn::Cloneable<LookupImpl> {
  explicit LookupImpl(bool mixed) : mixed(mixed) { reset(); }
  void reset() override {
    table = register_module(
        "table",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)));
  }
  torch::Tensor forward(const torch::Tensor& indices) {
    if (mixed && indices[0].item<int64_t>() < 5) {
      return table->weight.index_select(0, indices);
    }
    return table(indices);
  }
  bool mixed;
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Lookup);

}  // namespace

TEST_CASE("a buffer of any dtype arrives bit for bit", "[R41]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  Buffers net;
  net->to(devices[0]);
  dp::Replicas<Buffers> replicas(net, devices);
  for (torch::Tensor& buffer : net->all) {
    if (buffer.numel() > 1 && buffer.is_contiguous()) {
      buffer.data().view(torch::kByte).fill_(1);  // true where it is bool
    }
  }
  replicas.refresh();
  for (size_t i = 1; i < replicas.size(); ++i) {
    for (size_t b = 0; b < net->all.size(); ++b) {
      INFO("buffer " << b);
      const torch::Tensor& copy = replicas[i]->all[b];
      CHECK(copy.device() == devices[i]);
      CHECK(test::same_bits(copy, net->all[b]));
    }
  }
}

TEST_CASE("complex, zero-size and zero-dimensional parameters train", "[R41]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  torch::manual_seed(3);
  OddWeights net;
  net->to(devices[0]);
  auto single = test::twin(net);
  dp::DataParallel<OddWeights> model(net, on(devices));
  const auto x = torch::randn({7, 4}, test::float64_on(devices[0]));
  for (int pass = 0; pass < 2; ++pass) {
    test::check_same_step(model, net, single, [&](auto& m) { return m(x); });
  }
  CHECK(net->turn.grad().scalar_type() == torch::kComplexDouble);
  const auto loss = model->forward_backward(
      [](const torch::Tensor& y, const torch::Tensor&) {
        return y.pow(2).mean();
      },
      x, x);
  test::check_equal("loss", loss, single(x).pow(2).mean());
}

TEST_CASE("sparse gradients are summed as sparse", "[R41]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  INFO(test::name(devices));
  auto net = test::make<Lookup>(devices[0], /*mixed=*/false);
  auto single = test::twin(net);
  dp::DataParallel<Lookup> model(net, on(devices));
  const auto indices = torch::tensor({0, 3, 3, 9, 1, 0, 2}).to(devices[0]);
  test::check_same_step(model, net, single,
                        [&](auto& m) { return m(indices); });
  CHECK(net->table->weight.grad().is_sparse());
  net->zero_grad();
  single->zero_grad();
  const auto mean_square = [](const torch::Tensor& y, const torch::Tensor&) {
    return y.pow(2).mean();
  };
  model->forward_backward(mean_square, indices, indices);
  mean_square(single(indices), indices).backward();
  CHECK(net->table->weight.grad().is_sparse());
  test::check_same_gradients(*net, *single);
}

TEST_CASE("a gradient sparse in one replica and dense in another is whole",
          "[R41]") {
  const auto devices = GENERATE(from_range(test::device_lists()));
  const bool dense_first = GENERATE(false, true);
  INFO(test::name(devices) << (dense_first ? "dense" : "sparse") << " first");
  auto net = test::make<Lookup>(devices[0], /*mixed=*/true);
  auto single = test::twin(net);
  dp::DataParallel<Lookup> model(net, on(devices));
  auto indices = torch::tensor({0, 1, 2, 6, 7, 8, 9}).to(devices[0]);
  indices = dense_first ? indices : indices.flip({0});
  model(indices).pow(2).mean().backward();
  single(indices).pow(2).mean().backward();
  test::check_equal("gradient", net->table->weight.grad().to_dense(),
                    single->table->weight.grad().to_dense());
}
