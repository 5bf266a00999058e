#include <dataparallel/scatter_gather.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/values.h"

using c10::IValue;
using dataparallel::chunk_sizes;
using dataparallel::copy;
using dataparallel::gather;
using dataparallel::scatter;
using dataparallel::ScatterOptions;
using dataparallel::split;
using dataparallel::split_by_sample;
using test::Devices;
using test::message_of;
using test::same;
using torch::Tensor;
using torch::nn::utils::rnn::PackedSequence;

using Sizes = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

namespace {

/// The promise, written another way: sample i of n goes on counting round.
Sizes dealt(int64_t samples, size_t devices) {
  Sizes sizes(devices, 0);
  for (int64_t i = 0; i < samples; ++i) {
    ++sizes[i % devices];
  }
  return sizes;
}

Sizes without_zeros(Sizes sizes) {
  std::erase(sizes, 0);
  return sizes;
}

Sizes sizes_of(const Tensors& parts, int64_t dim) {
  Sizes sizes;
  for (const Tensor& part : parts) {
    sizes.push_back(part.size(dim));
  }
  return sizes;
}

bool lie_on(const Tensors& parts, const Devices& devices) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].device() != devices.at(i)) {
      return false;
    }
  }
  return true;
}

Tensor counted(std::vector<int64_t> shape) {
  const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1},
                                        std::multiplies<>());
  return torch::arange(numel, torch::kFloat64).reshape(shape);
}

template <class T>
std::string scatter_error(const T& inputs, const Devices& devices,
                          const ScatterOptions& options = {}) {
  return message_of<c10::ValueError>(
      [&] { scatter(inputs, devices, options); });
}

template <class T>
std::string gather_error(const std::vector<T>& values, int64_t dim = 0,
                         const Sizes& output_dims = {}) {
  return message_of<c10::ValueError>(
      [&] { gather(values, torch::kCPU, dim, output_dims); });
}

const std::string kSame = ", expected the same in every replica";

}  // namespace

// Sizes of the chunks.

TEST_CASE("chunks differ by one sample at most, the larger first",
          "[scatter]") {
  CHECK(chunk_sizes(5, 4) == Sizes{2, 1, 1, 1});
  CHECK(chunk_sizes(2, 4) == Sizes{1, 1, 0, 0});
  CHECK(chunk_sizes(0, 3) == Sizes{0, 0, 0});
  CHECK(chunk_sizes(7, 2) == Sizes{4, 3});
  for (int64_t samples = 0; samples < 40; ++samples) {
    for (int64_t devices = 1; devices < 9; ++devices) {
      CAPTURE(samples, devices);
      CHECK(chunk_sizes(samples, devices) == dealt(samples, devices));
    }
  }
}

TEST_CASE("shares are met by largest remainder", "[scatter]") {
  CHECK(chunk_sizes(10, 3, {1, 1, 2}) == Sizes{3, 2, 5});
  CHECK(chunk_sizes(8, 2, {1, 3}) == Sizes{2, 6});
  CHECK(chunk_sizes(8, 2, {0.25, 0.75}) == Sizes{2, 6});
  CHECK(chunk_sizes(6, 3, {2, 2, 2}) == Sizes{2, 2, 2});
  CHECK(chunk_sizes(0, 2, {1, 3}) == Sizes{0, 0});
  // The first device works whenever one does.
  CHECK(chunk_sizes(5, 2, {0.01, 1}) == Sizes{1, 4});
  CHECK(chunk_sizes(1, 3, {1, 2, 3}) == Sizes{1, 0, 0});
}

TEST_CASE("shares near the ends of double's range work", "[scatter]") {
  CHECK(chunk_sizes(10, 2, {1e308, 1e308}) == Sizes{5, 5});
  CHECK(chunk_sizes(8, 2, {0.5e308, 1.5e308}) == Sizes{2, 6});
  CHECK(chunk_sizes(8, 2, {1e-308, 1e308}) == Sizes{1, 7});
  CHECK(chunk_sizes(8, 2, {5e-324, 15e-324}) == Sizes{2, 6});
  const int64_t most = std::numeric_limits<int64_t>::max();
  CHECK(chunk_sizes(most, 1, {0.3}) == Sizes{most});
  const auto parts = scatter(counted({4, 2}), test::cpu(2),
                             ScatterOptions().chunk_shares({1e308, 1e308}));
  CHECK(sizes_of(parts, 0) == Sizes{2, 2});
}

TEST_CASE("chunk_sizes refuses sizes that cannot be", "[scatter]") {
  const auto error = [](int64_t samples, int64_t devices,
                        std::vector<double> shares = {}) {
    return test::message_of<c10::ValueError>(
        [&] { chunk_sizes(samples, devices, shares); });
  };
  CHECK(error(10, 0) == "chunk_sizes: devices is 0, expected 1 at least");
  CHECK(error(10, -1) == "chunk_sizes: devices is -1, expected 1 at least");
  CHECK(error(-3, 2) == "chunk_sizes: samples is -3, expected 0 at least");
  CHECK(error(4, 2, {1}) ==
        "chunk_sizes: chunk_shares has 1 entries, expected one for each of the "
        "2 devices");
  CHECK(error(4, 2, {1, 2, 3}) ==
        "chunk_sizes: chunk_shares has 3 entries, expected one for each of the "
        "2 devices");
  CHECK(error(4, 2, {1, -1}) ==
        "chunk_sizes: chunk_shares[1] is -1, expected a positive number");
}

TEST_CASE("shares of any size lose no sample and stay within one of exact",
          "[scatter]") {
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    const auto devices = std::uniform_int_distribution<int64_t>(1, 8)(random);
    const auto samples = std::uniform_int_distribution<int64_t>(0, 99)(random);
    std::vector<double> shares;
    for (int64_t d = 0; d < devices; ++d) {
      shares.push_back(
          std::exp(std::uniform_real_distribution<>(-20, 20)(random)));
    }
    CAPTURE(samples, shares);
    const Sizes sizes = chunk_sizes(samples, devices, shares);
    CHECK(static_cast<int64_t>(sizes.size()) == devices);
    CHECK(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == samples);
    CHECK((samples == 0 || sizes[0] > 0));
    const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
    for (int64_t d = 0; d < devices; ++d) {
      const double exact = static_cast<double>(samples) * shares[d] / total;
      CHECK(sizes[d] >= 0);
      CHECK(std::abs(static_cast<double>(sizes[d]) - exact) < 2);
    }
  }
}

// Scatter.

TEST_CASE("a batch is split over the devices and nothing is lost",
          "[scatter]") {
  for (const Devices& devices : test::device_lists()) {
    for (const int64_t samples : {1, 2, 3, 5, 7, 16}) {
      CAPTURE(test::name(devices), samples);
      const Tensor batch = counted({samples, 3});
      const Tensors parts = scatter(batch, devices);
      CHECK(sizes_of(parts, 0) ==
            without_zeros(dealt(samples, devices.size())));
      CHECK(lie_on(parts, devices));
      Tensors back;
      for (const Tensor& part : parts) {
        back.push_back(part.cpu());
      }
      CHECK(same(torch::cat(back), batch));
    }
  }
}

TEST_CASE("a batch of none is one part on the first device", "[scatter]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    const Tensors parts = scatter(torch::zeros({0, 3}), devices);
    REQUIRE(parts.size() == 1);
    CHECK(parts[0].sizes() == Sizes{0, 3});
    CHECK(parts[0].device() == devices[0]);
    const auto mixed =
        scatter(std::make_tuple(torch::zeros({0, 3}), std::string("x")),
                devices, ScatterOptions().inputs({{1, copy()}}));
    CHECK(mixed.size() == 1);
  }
}

TEST_CASE("the batch dimension may be any, counted from either end",
          "[scatter]") {
  for (const Devices& devices : test::device_lists()) {
    for (const int64_t dim : {0, 1, 2, -1, -2, -3}) {
      CAPTURE(test::name(devices), dim);
      const Tensor batch = counted({5, 6, 7});
      const Tensors parts = scatter(batch, devices, ScatterOptions().dim(dim));
      CHECK(sizes_of(parts, dim) ==
            without_zeros(dealt(batch.size(dim), devices.size())));
      int64_t start = 0;
      for (const Tensor& part : parts) {
        CHECK(same(part, batch.slice(dim, start, start + part.size(dim))));
        start += part.size(dim);
      }
      CHECK(start == batch.size(dim));
    }
  }
}

TEST_CASE("shares decide how many samples a device gets", "[scatter]") {
  const auto parts = scatter(counted({8, 2}), test::cpu(2),
                             ScatterOptions().chunk_shares({1, 3}));
  CHECK(sizes_of(parts, 0) == Sizes{2, 6});
}

TEST_CASE("shares that are no positive number for each device are refused",
          "[scatter]") {
  const auto error = [](std::vector<double> shares) {
    return scatter_error(torch::zeros({4}), test::cpu(2),
                         ScatterOptions().chunk_shares(std::move(shares)));
  };
  CHECK(error({1}) ==
        "scatter: chunk_shares has 1 entries, expected one for each of the 2 "
        "devices");
  CHECK(error({1, 2, 3}) ==
        "scatter: chunk_shares has 3 entries, expected one for each of the 2 "
        "devices");
  CHECK(error({1, 0}) ==
        "scatter: chunk_shares[1] is 0, expected a positive number");
  CHECK(error({-1, 1}) ==
        "scatter: chunk_shares[0] is -1, expected a positive number");
  CHECK(error({1, std::numeric_limits<double>::infinity()}) ==
        "scatter: chunk_shares[1] is inf, expected a positive number");
  CHECK(error({std::nan(""), 1}) ==
        "scatter: chunk_shares[0] is nan, expected a positive number");
}

TEST_CASE("devices that are none or not there are refused", "[scatter]") {
  CHECK(scatter_error(torch::zeros({4}), {}) ==
        "scatter: devices is empty, expected one device at least");
  CHECK(scatter_error(torch::zeros({4}),
                      {torch::kCPU, torch::Device("fpga:1")}) ==
        "scatter: devices[1] is fpga:1, but there are no fpga devices");
}

TEST_CASE("tensors without dimensions and plain values go to every device",
          "[scatter]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    const auto parts =
        scatter(std::make_tuple(counted({4}), torch::tensor(2.5), 7,
                                std::string("text"), std::optional<Tensor>(),
                                Tensor(), std::vector<int>{1, 2}),
                devices);
    CHECK(parts.size() == devices.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto& [batch, scalar, number, text, none, undefined, numbers] =
          parts[i];
      CHECK(batch.size(0) == dealt(4, devices.size())[i]);
      CHECK(same(scalar, torch::tensor(2.5)));
      CHECK(scalar.device() == devices[i]);
      CHECK(number == 7);
      CHECK(text == "text");
      CHECK_FALSE(none.has_value());
      CHECK_FALSE(undefined.defined());
      CHECK(numbers == std::vector<int>{1, 2});
    }
  }
}

TEST_CASE("where nothing is split each device gets one part", "[scatter]") {
  const Devices devices = test::cpu(3);
  CHECK(scatter(std::make_tuple(1, std::string("x")), devices).size() == 3);
  CHECK(scatter(std::tuple<>(), devices).size() == 3);
  CHECK(scatter(torch::tensor(1.0), devices).size() == 3);
  const auto copies = scatter(std::make_tuple(counted({5, 2})), devices,
                              ScatterOptions().inputs({{0, copy()}}));
  REQUIRE(copies.size() == 3);
  for (const auto& [whole] : copies) {
    CHECK(same(whole, counted({5, 2})));
  }
}

// R39
TEST_CASE("a table goes whole to each replica, captions by sample",
          "[scatter]") {
  for (const Devices& devices : test::short_device_lists()) {
    CAPTURE(test::name(devices));
    const Tensor table = counted({7, 2});
    const std::vector<std::string> captions{"a", "b", "c", "d", "e"};
    const auto parts = scatter(
        std::make_tuple(counted({5, 3}), table, captions, counted({3, 5})),
        devices,
        ScatterOptions().inputs(
            {{1, copy()}, {2, split_by_sample()}, {3, split(1)}}));
    REQUIRE(parts.size() == 3);
    int64_t start = 0;
    for (size_t i = 0; i < 3; ++i) {
      const auto& [batch, whole, own, columns] = parts[i];
      const int64_t end = start + Sizes{2, 2, 1}[i];
      CHECK(same(batch, counted({5, 3}).slice(0, start, end)));
      CHECK(same(whole, table));
      CHECK(whole.device() == devices[i]);
      CHECK(own == std::vector<std::string>(captions.begin() + start,
                                            captions.begin() + end));
      CHECK(same(columns, counted({3, 5}).slice(1, start, end)));
      start = end;
    }
  }
}

TEST_CASE("lists of any kind are split by sample", "[scatter]") {
  const auto by_sample = ScatterOptions().inputs({{0, split_by_sample()}});
  const auto numbers =
      scatter(std::vector<int>{1, 2, 3}, test::cpu(2), by_sample);
  CHECK(numbers == std::vector<std::vector<int>>{{1, 2}, {3}});
  const auto flags =
      scatter(std::vector<bool>{true, false, true}, test::cpu(2), by_sample);
  CHECK(flags == std::vector<std::vector<bool>>{{true, false}, {true}});

  const auto ivalues =
      scatter(c10::IValue(std::vector<std::string>{"a", "b", "c"}),
              test::cpu(2), by_sample);
  REQUIRE(ivalues.size() == 2);
  CHECK(ivalues[0] == c10::IValue(std::vector<std::string>{"a", "b"}));
  CHECK(ivalues[1] == c10::IValue(std::vector<std::string>{"c"}));
  CHECK(*ivalues[1].type() == *c10::ListType::create(c10::StringType::get()));

  // The tensors of a list by sample are whole samples: moved, not cut.
  for (const Devices& devices : test::short_device_lists()) {
    const auto samples =
        scatter(Tensors{counted({2}), counted({3}), counted({4}), counted({5})},
                devices, by_sample);
    REQUIRE(samples.size() == 3);
    CHECK(same(samples[0].at(1), counted({3})));
    CHECK(same(samples[2].at(0), counted({5})));
    CHECK(samples[2][0].device() == devices[2]);
  }
  // A list that may be left out.
  using MaybeNames = std::optional<std::vector<std::string>>;
  CHECK((scatter(MaybeNames({"a", "b", "c"}), test::cpu(2), by_sample) ==
         std::vector<MaybeNames>{{{"a", "b"}}, {{"c"}}}));
  CHECK((scatter(MaybeNames(), test::cpu(2), by_sample) ==
         std::vector<MaybeNames>{std::nullopt, std::nullopt}));
  CHECK(scatter(c10::IValue(), test::cpu(2), by_sample).front().isNone());
  // One sample, and none.
  CHECK(scatter(std::vector<int>{1}, test::cpu(2), by_sample) ==
        std::vector<std::vector<int>>{{1}});
  CHECK(scatter(std::vector<int>{}, test::cpu(2), by_sample) ==
        std::vector<std::vector<int>>{{}});
}

TEST_CASE("split_by_sample of what is no list is refused", "[scatter]") {
  const auto by_sample = ScatterOptions().inputs({{0, split_by_sample()}});
  const auto error = [&](const auto& value) {
    return message_of<c10::TypeError>(
        [&] { scatter(value, test::cpu(2), by_sample); });
  };
  const auto expected = [](const std::string& path, const std::string& type) {
    return "scatter: " + path + " is marked split_by_sample, but is of type " +
           type + ", expected a list";
  };
  CHECK(error(3.5) == expected("inputs", "double"));
  CHECK(error(std::make_tuple(3)) == expected("inputs[0]", "int"));
  CHECK(error(counted({3})) == expected("inputs", "at::Tensor"));
  CHECK(error(c10::IValue(3)) == expected("inputs", "Int"));
  CHECK_THAT(error(std::string("abc")), Catch::Contains("basic_string"));
  CHECK_THAT(error(std::map<int, int>{}), Catch::Contains("std::map<int"));
}

TEST_CASE("gradients of sparse parts are put together", "[scatter]") {
  const Tensor dense = (counted({6, 4, 2}) + 1) *
                       (torch::arange(24).reshape({6, 4, 1}) % 3 == 0);
  const Tensor weights = counted({6, 4, 2}) + 1;
  const auto gradient = [&](int64_t sparse_dim, const Devices& devices,
                            int64_t dim, bool sparse_gradient) {
    const Tensor batch = dense.to_sparse(sparse_dim).requires_grad_();
    Tensor loss = torch::zeros({}, torch::kFloat64);
    int64_t start = 0;
    for (const Tensor& part :
         scatter(batch, devices, ScatterOptions().dim(dim))) {
      const Tensor weight = weights.narrow(dim, start, part.size(dim));
      loss = loss + (sparse_gradient ? part.to_dense() * weight
                                     : torch::mul(part, weight).to_dense())
                        .pow(2)
                        .sum();
      start += part.size(dim);
    }
    loss.backward();
    return batch.grad().to_dense();
  };
  for (const int64_t sparse_dim : {3, 2, 1}) {
    for (const int64_t dim : {0, 1, 2}) {
      for (const bool sparse_gradient : {true, false}) {
        CAPTURE(sparse_dim, dim, sparse_gradient);
        const Tensor expected = 2 * dense * weights.pow(2);
        CHECK(same(gradient(sparse_dim, test::cpu(1), dim, sparse_gradient),
                   expected));
        CHECK(same(gradient(sparse_dim, test::cpu(2), dim, sparse_gradient),
                   expected));
      }
    }
  }
}

TEST_CASE("sizes that disagree are refused with both paths and sizes",
          "[scatter]") {
  const std::string hint =
      "; all arguments that are split must agree (mark one that is no batch "
      "with dataparallel::copy())";
  CHECK(scatter_error(std::make_tuple(counted({4}), counted({3})),
                      test::cpu(2)) ==
        "scatter: inputs[1] has 3 samples, but inputs[0] has 4" + hint);
  CHECK(scatter_error(
            std::make_tuple(
                std::map<std::string, Tensors>{
                    {"mask", {counted({4}), torch::tensor(1), counted({5})}}},
                1),
            test::cpu(1)) ==
        "scatter: inputs[0][\"mask\"][2] has 5 samples, but "
        "inputs[0][\"mask\"][0] has 4" +
            hint);
  CHECK(scatter_error(std::make_tuple(counted({4}), std::vector<int>{1, 2, 3}),
                      test::cpu(2),
                      ScatterOptions().inputs({{1, split_by_sample()}})) ==
        "scatter: inputs[1] has 3 samples, but inputs[0] has 4" + hint);
  CHECK(scatter_error(std::make_tuple(counted({2, 4}), counted({2, 4})),
                      test::cpu(2), ScatterOptions().inputs({{1, split(1)}})) ==
        "scatter: inputs[1] has 4 samples, but inputs[0] has 2" + hint);
  CHECK(scatter_error(std::make_tuple(counted({0}), counted({1})),
                      test::cpu(2)) ==
        "scatter: inputs[1] has 1 samples, but inputs[0] has 0" + hint);
}

TEST_CASE("a dimension that a tensor lacks is refused", "[scatter]") {
  CHECK(scatter_error(counted({4}), test::cpu(2), ScatterOptions().dim(1)) ==
        "scatter: inputs has shape [4], which cannot be split along "
        "dimension 1");
  CHECK(scatter_error(std::make_tuple(counted({4, 2}), counted({4})),
                      test::cpu(2), ScatterOptions().dim(-2)) ==
        "scatter: inputs[1] has shape [4], which cannot be split along "
        "dimension -2");
}

TEST_CASE("parts on the batch's own device are views of it", "[scatter]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    const Tensor batch = counted({8, 3}).to(devices[0]);
    const Tensors parts = scatter(batch, devices);
    for (size_t i = 0; i < parts.size(); ++i) {
      CHECK(parts[i].is_alias_of(batch) == (devices[i] == devices[0]));
    }
    CHECK(parts[0].data_ptr() == batch.data_ptr());
  }
}

TEST_CASE("a tensor that comes twice is one part, copied once", "[scatter]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    const Tensor batch = counted({8, 3}).to(devices[0]).requires_grad_() * 1.0;
    const auto parts =
        scatter(std::tuple(batch, Tensors{batch}, batch.t()), devices,
                ScatterOptions().inputs({{2, split(1)}}));
    for (const auto& [one, list, other_rule] : parts) {
      CHECK(one.is_same(list[0]));
      CHECK_FALSE(one.is_same(other_rule));
    }
    const Tensor table = counted({8, 3}).to(devices[0]);
    const auto both = scatter(std::pair(table, table), devices);
    for (size_t i = 0; i < devices.size(); ++i) {
      CHECK(both[i].first.is_same(both[i].second));
    }
  }
}

TEST_CASE("200 random batches are split without losing anything", "[scatter]") {
  torch::manual_seed(1);
  std::mt19937 random(1);
  const auto below = [&](int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
  };
  const auto lists = test::device_lists();
  for (int i = 0; i < 200; ++i) {
    std::vector<int64_t> shape(1 + below(4));
    for (int64_t& size : shape) {
      size = 1 + below(9);
    }
    const auto dims = static_cast<int64_t>(shape.size());
    const int64_t dim = below(2 * dims) - dims;
    const Devices& devices = lists[below(static_cast<int64_t>(lists.size()))];
    const auto dtypes = test::dtypes();
    const auto dtype = dtypes[below(static_cast<int64_t>(dtypes.size()))];
    Tensor batch = test::random_bits(shape, dtype);
    if (below(2) == 0) {
      batch = batch.transpose(0, -1);
    }
    ScatterOptions options;
    options.dim(dim);
    if (below(2) == 0) {
      std::vector<double> shares;
      for (size_t d = 0; d < devices.size(); ++d) {
        shares.push_back(static_cast<double>(1 + below(9)));
      }
      options.chunk_shares(shares);
    }
    CAPTURE(i, shape, dim, dtype, test::name(devices));
    const Tensors parts = scatter(batch, devices, options);
    int64_t start = 0;
    for (const Tensor& part : parts) {
      CHECK(part.size(dim) > 0);
      CHECK(same(part, batch.slice(dim, start, start + part.size(dim))));
      start += part.size(dim);
    }
    CHECK(start == batch.size(dim));
    CHECK(same(gather(parts, torch::kCPU, dim), batch));
  }
}

// R41
TEST_CASE("every dtype is scattered and gathered bit for bit",
          "[scatter][gather]") {
  torch::manual_seed(1);
  for (const Devices& devices : test::device_lists()) {
    for (const torch::ScalarType dtype : test::dtypes()) {
      for (const int64_t dim : {0, 1, -1}) {
        CAPTURE(test::name(devices), dtype, dim);
        const Tensor batch = test::random_bits({5, 4}, dtype);
        const Tensors parts =
            scatter(batch, devices, ScatterOptions().dim(dim));
        CHECK(parts.size() == std::min<size_t>(devices.size(), 4 + (dim == 0)));
        for (const Tensor& part : parts) {
          CHECK(part.dtype() == batch.dtype());
        }
        CHECK(same(gather(parts, devices.back(), dim), batch));
      }
    }
  }
}

TEST_CASE("channels-last stays channels-last", "[scatter][gather]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    const Tensor batch =
        counted({5, 3, 4, 6}).contiguous(at::MemoryFormat::ChannelsLast);
    const Tensors parts = scatter(batch, devices);
    for (const Tensor& part : parts) {
      CHECK(part.is_contiguous(at::MemoryFormat::ChannelsLast));
      CHECK(part.strides() == batch.strides());
    }
    const Tensor back = gather(parts, torch::kCPU);
    CHECK(same(back, batch));
    CHECK(back.strides() == batch.strides());
  }
}

TEST_CASE("a transposed batch keeps its strides", "[scatter]") {
  for (const Devices& devices : test::short_device_lists()) {
    CAPTURE(test::name(devices));
    const Tensor batch = counted({4, 6}).t();
    const Tensors parts = scatter(batch, devices, ScatterOptions().dim(1));
    for (const Tensor& part : parts) {
      CHECK(part.stride(0) == 1);
    }
    CHECK(same(gather(parts, torch::kCPU, 1), batch));
  }
}

TEST_CASE("a conjugate view keeps its values", "[scatter][gather]") {
  for (const Devices& devices : test::short_device_lists()) {
    CAPTURE(test::name(devices));
    const Tensor batch =
        test::random_bits({5, 2}, torch::kFloat32).clamp(-9, 9).nan_to_num();
    const Tensor complex = torch::complex(batch, batch + 1).conj();
    CHECK(same(gather(scatter(complex, devices), torch::kCPU), complex));
  }
}

TEST_CASE("a sparse batch is split and joined as sparse", "[scatter][gather]") {
  const Tensor dense =
      counted({6, 5}) * (torch::arange(30).reshape({6, 5}) % 3 == 0);
  const Tensor doubled = dense.to_sparse() + dense.to_sparse();
  const Tensor hybrid = counted({6, 5, 2}).to_sparse(1);
  for (const Devices& devices : {test::cpu(1), test::cpu(2), test::cpu(4)}) {
    for (const Tensor& batch : {dense.to_sparse(), doubled, hybrid,
                                dense.to_sparse().to(torch::kBool),
                                dense.to(torch::kComplexDouble).to_sparse()}) {
      for (const int64_t dim : {0, 1, -1}) {
        CAPTURE(devices.size(), batch.dtype(), dim);
        const Tensors parts =
            scatter(batch, devices, ScatterOptions().dim(dim));
        CHECK(sizes_of(parts, dim) ==
              without_zeros(dealt(batch.size(dim), devices.size())));
        int64_t start = 0;
        for (const Tensor& part : parts) {
          CHECK(part.layout() == torch::kSparse);
          CHECK(same(part.to_dense(), batch.to_dense().slice(
                                          dim, start, start + part.size(dim))));
          start += part.size(dim);
        }
        const Tensor back = gather(parts, torch::kCPU, dim);
        CHECK(back.layout() == torch::kSparse);
        CHECK(same(back.to_dense(), batch.to_dense()));
      }
    }
  }
}

TEST_CASE("layouts that cannot be split are refused but may be copied",
          "[scatter]") {
  const std::vector<std::pair<Tensor, std::string>> cases{
      {torch::eye(4).to_sparse_csr(), "SparseCsr"},
      {torch::eye(4).to_sparse_csc(), "SparseCsc"}};
  for (const auto& [batch, layout] : cases) {
    CHECK(scatter_error(batch, test::cpu(2)) ==
          "scatter: inputs has layout " + layout +
              ", which cannot be split; mark it with dataparallel::copy()");
    const auto copies =
        scatter(batch, test::cpu(2), ScatterOptions().inputs({{0, copy()}}));
    REQUIRE(copies.size() == 2);
    CHECK(torch::equal(copies[1].to_dense(), torch::eye(4)));
  }
  const Tensor nested =
      at::_nested_tensor_from_tensor_list({counted({2, 3}), counted({1, 3})});
  CHECK(test::contains(scatter_error(nested, test::cpu(2)),
                       "(nested), which cannot be split; mark it with "
                       "dataparallel::copy()"));
  if (at::hasMKLDNN()) {
    CHECK(test::contains(
        scatter_error(torch::ones({4, 4}).to_mkldnn(), test::cpu(2)),
        "which cannot be split; mark it with dataparallel::copy()"));
  }
}

TEST_CASE("scatter is differentiable, twice", "[scatter]") {
  for (const Devices& devices : test::device_lists()) {
    for (const int64_t dim : {0, 1}) {
      CAPTURE(test::name(devices), dim);
      const Tensor batch =
          (counted({5, 4}) / 10).to(devices[0]).requires_grad_();
      Tensor sum = torch::zeros({}, torch::kFloat64).to(devices[0]);
      int64_t i = 0;
      for (const Tensor& part :
           scatter(batch, devices, ScatterOptions().dim(dim))) {
        sum = sum + (part.pow(4) * ++i).sum().to(devices[0]);
      }
      // The oracle: the same function of the whole batch, differentiated.
      Tensor weight = torch::empty({5, 4}, torch::kFloat64);
      int64_t start = 0;
      i = 0;
      for (const int64_t size : dealt(5 - dim, devices.size())) {
        weight.slice(dim, start, start + size).fill_(++i);
        start += size;
      }
      const Tensor x = batch.detach().cpu();
      const Tensor first = torch::autograd::grad(
          {sum}, {batch}, {}, std::nullopt, /*create_graph=*/true)[0];
      CHECK(first.cpu().allclose(4 * weight * x.pow(3), 1e-10, 1e-12));
      const Tensor second =
          torch::autograd::grad({first.pow(2).sum()}, {batch})[0];
      CHECK(second.cpu().allclose(
          2 * (4 * weight * x.pow(3)) * 12 * weight * x.pow(2), 1e-10, 1e-12));
    }
  }
}

TEST_CASE("the caller's own values stay as they are", "[scatter]") {
  const std::map<std::string, Tensors> inputs{{"a", {counted({4})}}};
  const auto parts = scatter(inputs, test::short_device_lists()[1]);
  CHECK(parts.size() == 3);
  CHECK(same(inputs.at("a")[0], counted({4})));
  const c10::IValue list = Tensors{counted({4})};
  CHECK(scatter(list, test::cpu(2))[1].toTensorVector()[0].size(0) == 2);
  CHECK(same(list.toTensorVector()[0], counted({4})));
}

TEST_CASE("float8 results keep their graph", "[gather]") {
  for (const auto dtype : {torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
    const Tensor leaf = counted({6, 2}).requires_grad_();
    auto parts = scatter(leaf, test::cpu(3));
    for (Tensor& part : parts) {
      part = part.to(dtype);
    }
    const Tensor joined = gather(parts, torch::kCPU);
    CHECK(joined.scalar_type() == dtype);
    REQUIRE(joined.requires_grad());
    joined.to(torch::kFloat).sum().backward();
    CHECK(same(leaf.grad(), torch::ones_like(leaf)));
    CHECK(same(joined.to(torch::kFloat), leaf.to(dtype).to(torch::kFloat)));
  }
}

TEST_CASE("a pinned batch arrives whole, without a race", "[scatter][sim]") {
  const Devices devices = test::sim(2);
  Tensor batch;
  try {
    batch = counted({1024, 64}).pin_memory();
  } catch (const c10::Error&) {
    WARN("there is no pinned memory");
    return;
  }
  CHECK(batch.is_pinned());
  CHECK(
      same(gather(scatter(batch, devices), torch::kCPU), counted({1024, 64})));
}

// Packed sequences.

namespace {

PackedSequence pack(const Tensor& steps, const Sizes& lengths, bool sorted) {
  return torch::nn::utils::rnn::pack_padded_sequence(
      steps, torch::tensor(lengths), /*batch_first=*/false, sorted);
}

/// The samples, each as long as it is.
Tensors samples_of(const PackedSequence& sequence) {
  const auto [steps, lengths] =
      torch::nn::utils::rnn::pad_packed_sequence(sequence);
  Tensors samples;
  for (int64_t i = 0; i < lengths.size(0); ++i) {
    samples.push_back(
        steps.select(1, i).narrow(0, 0, lengths[i].item<int64_t>()).cpu());
  }
  return samples;
}

bool same_samples(const PackedSequence& a, const PackedSequence& b) {
  const Tensors x = samples_of(a), y = samples_of(b);
  return std::equal(x.begin(), x.end(), y.begin(), y.end(), same);
}

}  // namespace

TEST_CASE("a packed sequence is split by sample and joined again",
          "[scatter][gather]") {
  for (const Devices& devices : test::device_lists()) {
    for (const bool sorted : {true, false}) {
      CAPTURE(test::name(devices), sorted);
      const Sizes lengths =
          sorted ? Sizes{4, 3, 3, 2, 1} : Sizes{2, 4, 1, 3, 3};
      const PackedSequence batch = pack(counted({4, 5, 2}), lengths, sorted);
      const auto parts = scatter(batch, devices);
      const Tensors samples = samples_of(batch);
      size_t sample = 0;
      REQUIRE(parts.size() == devices.size());
      for (size_t i = 0; i < parts.size(); ++i) {
        CHECK(parts[i].data().device() == devices[i]);
        CHECK(parts[i].sorted_indices().defined() == !sorted);
        for (const Tensor& own : samples_of(parts[i])) {
          CHECK(same(own, samples.at(sample++)));
        }
      }
      CHECK(sample == samples.size());
      for (const torch::Device& target :
           {devices.back(), torch::Device(torch::kCPU)}) {
        const PackedSequence back = gather(parts, target);
        CHECK(back.data().device() == target);
        CHECK(same_samples(back, batch));
        CHECK(same(back.data(), batch.data()));
        CHECK(same(back.batch_sizes(), batch.batch_sizes()));
        CHECK(same(back.sorted_indices(), batch.sorted_indices()));
      }
    }
  }
}

TEST_CASE("sorted packed sequences whose joint is not sorted are joined",
          "[gather]") {
  const PackedSequence a = pack(counted({3, 2}), {3, 1}, true);
  const PackedSequence b = pack(counted({4, 2}) + 100, {4, 2}, true);
  const PackedSequence both = gather(std::vector{a, b}, torch::kCPU);
  Tensors expected = samples_of(a);
  for (const Tensor& sample : samples_of(b)) {
    expected.push_back(sample);
  }
  const Tensors samples = samples_of(both);
  REQUIRE(samples.size() == 4);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(same(samples[i], expected[i]));
  }
}

TEST_CASE("a packed sequence beside other arguments counts its samples",
          "[scatter]") {
  const PackedSequence batch = pack(counted({4, 3}), {4, 2, 1}, true);
  CHECK(test::contains(
      scatter_error(std::make_tuple(batch, counted({4})), test::cpu(2)),
      "scatter: inputs[1] has 4 samples, but inputs[0] has 3; all"));
  const auto parts =
      scatter(std::make_tuple(batch, counted({3})), test::cpu(2));
  CHECK(samples_of(std::get<0>(parts[0])).size() == 2);
  const auto copies =
      scatter(std::make_tuple(batch, counted({6})), test::cpu(2),
              ScatterOptions().inputs({{0, copy()}}));
  CHECK(same_samples(std::get<0>(copies[1]), batch));
}

TEST_CASE("a packed sequence stays differentiable", "[scatter][gather]") {
  for (const Devices& devices : test::short_device_lists()) {
    const Tensor steps = counted({4, 5}).to(devices[0]).requires_grad_();
    const PackedSequence batch = pack(steps, {2, 4, 1, 3, 3}, false);
    const PackedSequence back = gather(scatter(batch, devices), devices[0]);
    const Tensor gradient = torch::autograd::grad(
        {back.data().pow(2).sum()}, {steps}, {}, /*retain_graph=*/true)[0];
    const Tensor expected =
        torch::autograd::grad({batch.data().pow(2).sum()}, {steps})[0];
    CHECK(same(gradient, expected));
  }
}

// Gather.

TEST_CASE("gather undoes scatter of nested inputs", "[gather]") {
  using Inputs = std::tuple<Tensor, std::map<std::string, Tensors>,
                            std::optional<Tensor>, std::string, c10::IValue>;
  for (const Devices& devices : test::device_lists()) {
    for (const int64_t samples : {1, 3, 5, 16}) {
      CAPTURE(test::name(devices), samples);
      const Inputs inputs{counted({samples, 2}),
                          {{"a", {counted({samples}), counted({samples, 1})}}},
                          std::nullopt,
                          "text",
                          c10::IValue(Tensors{counted({samples, 3})})};
      const Inputs back = gather(scatter(inputs, devices), torch::kCPU);
      CHECK(same(std::get<0>(back), std::get<0>(inputs)));
      CHECK(same(std::get<1>(back).at("a")[1], std::get<1>(inputs).at("a")[1]));
      CHECK_FALSE(std::get<2>(back).has_value());
      CHECK(std::get<3>(back) == "text");
      CHECK(same(std::get<4>(back).toTensorVector()[0], counted({samples, 3})));
    }
  }
}

TEST_CASE("the target may be any device, the CPU too", "[gather]") {
  for (const Devices& devices : test::device_lists()) {
    Devices targets = devices;
    targets.emplace_back(torch::kCPU);
    for (const torch::Device& target : targets) {
      CAPTURE(test::name(devices), target.str());
      const Tensor whole = gather(scatter(counted({7, 2}), devices), target);
      CHECK(whole.device() == target);
      CHECK(same(whole, counted({7, 2})));
    }
  }
}

TEST_CASE("zero-dimensional tensors become a vector for every dimension",
          "[gather]") {
  for (const Devices& devices : test::device_lists()) {
    for (const int64_t dim : {0, 1, -1, 5}) {
      CAPTURE(test::name(devices), dim);
      Tensors losses;
      for (size_t i = 0; i < devices.size(); ++i) {
        losses.push_back(torch::tensor(static_cast<double>(i)).to(devices[i]));
      }
      CHECK(same(gather(losses, torch::kCPU, dim),
                 torch::arange(static_cast<int64_t>(devices.size()),
                               losses[0].dtype().toScalarType())));
    }
  }
}

TEST_CASE("None in every replica stays None", "[gather]") {
  CHECK_FALSE(gather(Tensors{Tensor(), Tensor()}, torch::kCPU).defined());
  CHECK_FALSE(
      gather(std::vector<std::optional<Tensor>>(2), torch::kCPU).has_value());
  CHECK(gather(std::vector<c10::IValue>(2), torch::kCPU).isNone());
}

TEST_CASE("a tensor in some replicas and None in others is refused",
          "[gather]") {
  CHECK(gather_error(Tensors{counted({1}), Tensor()}) ==
        "gather: result is a tensor in replica 0 and None in replica 1" +
            kSame);
  CHECK(gather_error(std::vector<std::tuple<int, Tensor>>{
            {1, Tensor()}, {1, Tensor()}, {1, counted({1})}}) ==
        "gather: result[1] is None in replica 0, None in replica 1 and a "
        "tensor in replica 2" +
            kSame);
}

TEST_CASE("tensors that do not fit are refused", "[gather]") {
  CHECK(gather_error(Tensors{counted({1}), counted({1}).to(torch::kInt64)}) ==
        "gather: result is of dtype Double in replica 0 and of dtype Long in "
        "replica 1" +
            kSame);
  CHECK(gather_error(Tensors{counted({1}), counted({1, 1})}) ==
        "gather: result is of 1 dimensions in replica 0 and of 2 dimensions "
        "in replica 1" +
            kSame);
  CHECK(gather_error(Tensors{counted({1, 2}), counted({1, 3})}) ==
        "gather: result is of shape [*, 2] in replica 0 and of shape [*, 3] "
        "in replica 1" +
            kSame);
  CHECK(gather_error(Tensors{counted({1, 2}), counted({3, 2})}, -1) ==
        "gather: result is of shape [1, *] in replica 0 and of shape [3, *] "
        "in replica 1" +
            kSame);
  CHECK(gather_error(Tensors{counted({2}), counted({2})}, 1) ==
        "gather: result has shape [2], which cannot be joined along "
        "dimension 1");
  CHECK(gather_error(Tensors{torch::eye(2), torch::eye(2).to_sparse()}) ==
        "gather: result is of layout Strided in replica 0 and of layout "
        "Sparse in replica 1" +
            kSame);
}

TEST_CASE("containers that do not fit are refused with their path",
          "[gather]") {
  using Maps = std::vector<std::map<std::string, Tensors>>;
  CHECK(gather_error(Maps{{{"a", {}}}, {{"b", {}}}}) ==
        "gather: result is keys [\"a\"] in replica 0 and keys [\"b\"] in "
        "replica 1" +
            kSame);
  CHECK(gather_error(Maps{{{"a", {}}}, {{"a", {counted({1})}}}}) ==
        "gather: result[\"a\"] is of length 0 in replica 0 and of length 1 "
        "in replica 1" +
            kSame);
  CHECK(gather_error(std::vector<c10::IValue>{counted({1}), 3}) ==
        "gather: result is a tensor in replica 0 and Int in replica 1" + kSame);
}

TEST_CASE("equal plain values stay, different ones are a list in an IValue",
          "[gather]") {
  CHECK(gather(std::vector<int>{2, 2}, torch::kCPU) == 2);
  CHECK(gather_error(std::vector<int>{2, 3}) ==
        "gather: result is 2 in replica 0 and 3 in replica 1" + kSame);
  CHECK(gather(std::vector<c10::IValue>{2, 2}, torch::kCPU).toInt() == 2);
  CHECK(gather(std::vector<c10::IValue>{2, 3}, torch::kCPU).toIntVector() ==
        Sizes{2, 3});
}

TEST_CASE("output_dims joins each tensor along its own dimension", "[gather]") {
  using Output = std::tuple<Tensor, std::vector<Tensor>>;
  const auto make = [] {
    return Output{counted({2, 3}), {counted({2, 3}), counted({2, 3})}};
  };
  const Output each =
      gather(std::vector{make(), make()}, torch::kCPU, 0, {0, 1, -2});
  CHECK(std::get<0>(each).sizes() == Sizes{4, 3});
  CHECK(std::get<1>(each)[0].sizes() == Sizes{2, 6});
  CHECK(std::get<1>(each)[1].sizes() == Sizes{4, 3});
  // One for all; it goes before dim.
  const Output all = gather(std::vector{make(), make()}, torch::kCPU, 0, {1});
  CHECK(std::get<0>(all).sizes() == Sizes{2, 6});
  CHECK(std::get<1>(all)[1].sizes() == Sizes{2, 6});
}

TEST_CASE("output_dims of another number than the tensors is refused",
          "[gather]") {
  const std::vector<Tensors> outputs(
      2, {counted({2}), counted({2}), counted({2})});
  CHECK(gather_error(outputs, 0, {0, 0}) ==
        "gather: output_dims has 2 entries, but result[2] is tensor 3");
  CHECK(gather_error(outputs, 0, {0, 0, 0, 0}) ==
        "gather: output_dims has 4 entries, but result has 3 tensors");
}

TEST_CASE("layouts that cannot be joined are refused by their path",
          "[gather]") {
  const Tensor csr = torch::eye(3).to_sparse_csr();
  CHECK_THROWS_WITH(gather(std::vector<Tensors>{{csr}, {csr}}, torch::kCPU),
                    Catch::Contains("gather: result[0] has layout SparseCsr"));
}

TEST_CASE("a sparse result hands sparse gradients back", "[gather]") {
  const Tensor weights = counted({6, 4}) + 1;
  const Tensor mask = torch::arange(24).reshape({6, 4}) % 3 == 0;
  const auto gradient = [&](const Devices& devices, int64_t dim) {
    const Tensor dense = (counted({6, 4}) + 1).mul_(mask).requires_grad_();
    Tensors parts;
    for (const Tensor& part :
         scatter(dense, devices, ScatterOptions().dim(dim))) {
      parts.push_back(part.to_sparse());
    }
    const Tensor joined = gather(parts, torch::kCPU, dim);
    (joined.to_dense() * weights).sum().backward();
    return dense.grad();
  };
  for (const int64_t dim : {0, 1}) {
    const Tensor expected = gradient(test::cpu(1), dim);
    CHECK(same(expected, weights * mask));
    CHECK(same(gradient(test::cpu(2), dim), expected));
    CHECK(same(gradient(test::cpu(3), dim), expected));
  }
}

TEST_CASE("quantized results are joined where they mean the same", "[gather]") {
  const auto quantized = [](double scale) {
    return torch::quantize_per_tensor(torch::arange(4).to(torch::kFloat32),
                                      scale, /*zero_point=*/1, torch::kQUInt8);
  };
  const Tensor joined =
      gather(Tensors{quantized(0.5), quantized(0.5)}, torch::kCPU);
  CHECK(same(joined.dequantize(),
             torch::arange(4).repeat(2).to(torch::kFloat32)));
  CHECK(gather_error(Tensors{quantized(0.5), quantized(0.25)}) ==
        "gather: result is quantized with scale 0.5 and zero point 1 in "
        "replica 0 and quantized with scale 0.25 and zero point 1 in replica "
        "1, expected the same in every replica");
}

TEST_CASE("objects are joined where all replicas return the same one",
          "[gather]") {
  struct Object : torch::CustomClassHolder {};
  const auto object = [] {
    return IValue::make_capsule(c10::make_intrusive<Object>());
  };
  const IValue shared = object();
  CHECK(gather(std::vector<IValue>{shared, shared}, torch::kCPU).is(shared));
  CHECK(message_of<c10::ValueError>([&] {
          gather(std::vector<IValue>{object(), object()}, torch::kCPU);
        }) ==
        "gather: result is an object of its own (Capsule) in replica 0 and an "
        "object of its own (Capsule) in replica 1, expected the same in every "
        "replica");

  const auto type =
      c10::EnumType::create(c10::QualifiedName("__torch__.Color"),
                            c10::IntType::get(), {{"RED", 1}, {"BLUE", 2}},
                            std::make_shared<torch::jit::CompilationUnit>());
  const auto color = [&](const char* name, int64_t value) {
    return IValue(
        c10::make_intrusive<c10::ivalue::EnumHolder>(type, name, value));
  };
  CHECK(gather(std::vector<IValue>{color("RED", 1), color("RED", 1)},
               torch::kCPU) == color("RED", 1));
  CHECK(gather(std::vector<IValue>{color("RED", 1), color("BLUE", 2)},
               torch::kCPU)
            .toListRef()[1] == color("BLUE", 2));
}

TEST_CASE("what is quantized by channel is not joined", "[gather]") {
  const Tensor quantized =
      torch::quantize_per_channel(torch::ones({2, 2}), torch::ones({2}),
                                  torch::zeros({2}), /*axis=*/0, torch::kQInt8);
  CHECK(gather_error(Tensors{quantized, quantized}) ==
        "gather: result is quantized by channel, which cannot be joined");
}

TEST_CASE("a meta tensor is no batch", "[scatter]") {
  CHECK(scatter_error(torch::empty({4}, torch::kMeta), test::cpu(2)) ==
        "scatter: inputs is a meta tensor, expected one that holds values");
}

TEST_CASE("no values at all are refused", "[gather]") {
  CHECK(gather_error(Tensors{}) ==
        "gather: values is empty, expected one value at least");
}

TEST_CASE("a target that does not exist is refused", "[gather]") {
  CHECK(message_of<c10::ValueError>([] {
          gather(Tensors{counted({1})}, torch::Device("fpga:1"));
        }) == "gather: target is fpga:1, but there are no fpga devices");
}

TEST_CASE("one replica's tensors are joined with nothing", "[gather]") {
  const Tensor alone = counted({3, 2});
  CHECK(same(gather(Tensors{alone}, torch::kCPU), alone));
  CHECK(same(gather(Tensors{torch::tensor(2.0)}, torch::kCPU),
             torch::tensor({2.0})));
}

TEST_CASE("empty parts are joined", "[gather]") {
  const Tensor some = counted({2, 3});
  CHECK(same(
      gather(Tensors{torch::zeros({0, 3}, torch::kFloat64), some}, torch::kCPU),
      some));
  CHECK(gather(Tensors(2, torch::zeros({0, 3})), torch::kCPU).sizes() ==
        Sizes{0, 3});
}

TEST_CASE("gather is differentiable, twice", "[gather]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    Tensors parts;
    Tensors scalars;
    for (size_t i = 0; i < devices.size(); ++i) {
      const auto n = static_cast<double>(i + 1);
      parts.push_back((counted({2, 3}) * n).to(devices[i]).requires_grad_());
      scalars.push_back(
          torch::tensor(n, torch::kFloat64).to(devices[i]).requires_grad_());
    }
    for (const Tensors& leaves : {parts, scalars}) {
      const Tensor whole = gather(leaves, devices[0]);
      const auto first =
          torch::autograd::grad({whole.pow(3).sum()}, leaves, {}, std::nullopt,
                                /*create_graph=*/true);
      Tensor sum = torch::zeros({}, torch::kFloat64).to(devices[0]);
      for (size_t i = 0; i < leaves.size(); ++i) {
        CHECK(first[i].device() == devices[i]);
        CHECK(first[i].cpu().allclose(3 * leaves[i].detach().cpu().pow(2)));
        sum = sum + first[i].pow(2).sum().to(devices[0]);
      }
      const auto second = torch::autograd::grad({sum}, leaves);
      for (size_t i = 0; i < leaves.size(); ++i) {
        // d (3 x²)² / dx = 36 x³
        CHECK(second[i].cpu().allclose(36 * leaves[i].detach().cpu().pow(3)));
      }
    }
  }
}

TEST_CASE("a rule for an argument that is not there is refused",
          "[scatter][errors]") {
  const auto x = torch::ones({4, 2});
  CHECK(test::contains(
      message_of<c10::ValueError>([&] {
        scatter(x, test::cpu(2), ScatterOptions().inputs({{1, copy()}}));
      }),
      "scatter: inputs has a rule for argument 1, but there are 1"));
  CHECK(test::contains(message_of<c10::ValueError>([&] {
                         scatter(std::tuple(x, x), test::cpu(2),
                                 ScatterOptions().inputs({{-1, copy()}}));
                       }),
                       "argument -1, expected 0 or more"));
}
