#include <dataparallel/data_parallel.h>
#include <dataparallel/python_values.h>
#include <dataparallel/state_dict.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/networks.h"
#include "support/python.h"
#include "support/values.h"
#include "support/warnings.h"

namespace {

namespace dp = dataparallel;
using dp::LoadStateDictError;
using dp::LoadStateDictOptions;
using dp::StateDict;
using test::contains;
using test::message_of;
using test::same;
using Keys = std::vector<std::string>;

/// All that is special about the names of torch's modules.
struct SpecialImpl : torch::nn::Module {
  SpecialImpl() {
    using namespace torch::nn;
    // Children first: a module's own tensors come before them all the same.
    convolution = register_module("convolution", Conv2d(2, 3, 2));
    register_module("norm", BatchNorm2d(3));
    register_module("plain_norm",
                    BatchNorm2d(BatchNorm2dOptions(3).affine(false)));
    register_module(
        "no_statistics",
        BatchNorm1d(BatchNorm1dOptions(3).track_running_stats(false)));
    register_module("instance", InstanceNorm1d(3));
    register_module(
        "lstm",
        LSTM(LSTMOptions(3, 4).num_layers(2).bidirectional(true).proj_size(2)));
    register_module("gru", GRU(GRUOptions(3, 4).bias(false)));
    register_module("attention", MultiheadAttention(4, 2));
    register_module("list", Sequential(Linear(2, 3), ReLU(),
                                       LayerNorm(LayerNormOptions({3}))));
    register_module("again", convolution);
    register_buffer("offset", torch::zeros({2}));
    register_parameter("scale", torch::ones({}));
    register_module("embedding", Embedding(5, 3));
  }
  torch::nn::Conv2d convolution{nullptr};
};
TORCH_MODULE(Special);

/// Two layers that share one weight, and a scalar.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(3, 3));
    second = register_module("second", Tied(first->weight));
    scale = register_parameter("scale", torch::ones({}));
  }
  struct TiedImpl : torch::nn::Module {
    explicit TiedImpl(const torch::Tensor& weight) {
      register_parameter("weight", weight);
    }
  };
  TORCH_MODULE(Tied);
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::tanh(first(x)).matmul(first->weight) * scale;
  }
  torch::nn::Linear first{nullptr};
  Tied second{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Net);

const char* const kOracle = R"(
import torch
from torch import nn

class Special(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.plain_norm = nn.BatchNorm2d(3, affine=False)
        self.no_statistics = nn.BatchNorm1d(3, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(3)
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2)
        self.gru = nn.GRU(3, 4, bias=False)
        self.attention = nn.MultiheadAttention(4, 2)
        self.list = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LayerNorm(3))
        self.again = self.convolution
        self.register_buffer("offset", torch.zeros(2))
        self.scale = nn.Parameter(torch.ones([]))
        self.embedding = nn.Embedding(5, 3)

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)

def error(name, module, state_dict, strict=True):
    print("==", name)
    try:
        module.load_state_dict(state_dict, strict)
    except RuntimeError as error:
        print(error)

def show(name, module):
    state_dict = module.state_dict()
    print("==", name)
    for key, value in state_dict.items():
        print(key, list(value.shape))
    for key, value in state_dict._metadata.items():
        print(repr(key), value)

show("bare", Special())
show("wrapped", nn.DataParallel(Special()))
one = torch.ones(1)
good = Mlp().state_dict()
error("empty", Mlp(), {})
error("special", Special(), {
    "x": one, "again.y": one, "norm.weight": torch.ones(2), "a.b": one,
    "_extra_state": one, "list.0.z.w": one, "scale": torch.ones(1, 1),
    "offset": 3, "norm._extra_state": one, "list.": one, "first": one})
error("not strict", Mlp(), {"first.weight": torch.ones(2, 3), "y": one}, False)
)";

const std::map<std::string, std::string>& oracle() {
  static const auto result = test::sections(test::python(kOracle));
  return result;
}

std::string show(const StateDict& dict) {
  std::ostringstream text;
  for (const auto& [key, value] : dict) {
    text << key << " [" << c10::Join(", ", value.toTensor().sizes()) << "]\n";
  }
  for (const auto& item : *dict.metadata()) {
    const auto local = item.value().toGenericDict();
    text << "'" << item.key().toStringRef()
         << "' {'version': " << local.at("version").toInt() << "}\n";
  }
  std::string result = text.str();
  result.pop_back();
  return result;
}

StateDict copy_of(const StateDict& dict) {
  StateDict result;
  for (const auto& [key, value] : dict) {
    result.insert(key, value.toTensor().clone());
  }
  result.set_metadata(dict.metadata());
  return result;
}

bool equal(const StateDict& a, const StateDict& b) {
  if (a.keys() != b.keys()) {
    return false;
  }
  for (const auto& [key, value] : a) {
    if (!same(value.toTensor(), b.at(key))) {
      return false;
    }
  }
  return true;
}

StateDict with(const StateDict& dict, const std::string& key,
               const c10::IValue& changed) {
  StateDict result;
  for (const auto& [name, value] : dict) {
    result.insert(name, name == key ? changed : value);
  }
  if (!dict.contains(key)) {
    result.insert(key, changed);
  }
  result.set_metadata(dict.metadata());
  return result;
}

StateDict without(const StateDict& dict, const std::string& key) {
  StateDict result;
  for (const auto& [name, value] : dict) {
    if (name != key) {
      result.insert(name, value);
    }
  }
  result.set_metadata(dict.metadata());
  return result;
}

template <class Module>
std::string refusal(Module& module, const StateDict& dict,
                    const LoadStateDictOptions& options = {}) {
  const StateDict before = copy_of(dp::state_dict(module));
  const std::string text = message_of<LoadStateDictError>(
      [&] { dp::load_state_dict(module, dict, options); });
  CHECK(equal(before, dp::state_dict(module)));
  return text;
}

c10::impl::GenericDict metadata(
    const std::vector<std::pair<std::string, int64_t>>& versions) {
  c10::impl::GenericDict plain(c10::AnyType::get(), c10::AnyType::get());
  auto result = dp::make_mapping("collections.OrderedDict", plain);
  for (const auto& [path, version] : versions) {
    c10::impl::GenericDict local(c10::AnyType::get(), c10::AnyType::get());
    local.insert("version", version);
    result.insert(path, local);
  }
  return result;
}

Keys metadata_keys(const StateDict& dict) {
  Keys result;
  for (const auto& item : *dict.metadata()) {
    result.push_back(item.key().toStringRef());
  }
  return result;
}

}  // namespace

TEST_CASE("a state_dict has Python's names, order and metadata",
          "[state_dict]") {
  Special net;
  CHECK(show(dp::state_dict(net)) == oracle().at("bare"));
  CHECK(show(dp::add_prefix(dp::state_dict(*net))) == oracle().at("wrapped"));
}

TEST_CASE("the state_dict of a wrapped module has the wrapper's names",
          "[state_dict]") {
  test::ConvNet net;
  dp::DataParallel<test::ConvNet> model(
      net, dp::DataParallelOptions().devices({"cpu", "cpu"}));
  const StateDict wrapped = dp::state_dict(*model);
  CHECK(equal(wrapped, dp::add_prefix(dp::state_dict(*net))));
  CHECK(show(wrapped) == show(dp::add_prefix(dp::state_dict(net))));
  CHECK(equal(dp::strip_prefix(wrapped), dp::state_dict(*net)));
  CHECK(show(dp::strip_prefix(wrapped)) == show(dp::state_dict(*net)));
}

TEST_CASE("a state_dict shares the module's memory, detached", "[state_dict]") {
  test::Mlp net;
  const torch::Tensor weight = dp::state_dict(net).at("first.weight");
  CHECK(weight.data_ptr() == net->first->weight.data_ptr());
  CHECK_FALSE(weight.requires_grad());
  CHECK(contains(message_of<c10::IndexError>(
                     [&] { dp::state_dict(net).at("third.weight"); }),
                 "there is no 'third.weight' among the 4 names"));
  CHECK(contains(message_of<c10::TypeError>([] {
                   StateDict({{"a", int64_t{3}}}).at("a");
                 }),
                 "'a' is no tensor (Int)"));
  CHECK(contains(message_of<c10::ValueError>([] {
                   StateDict({{"a", int64_t{3}}}).insert("a", 4.0);
                 }),
                 "there is a 'a' already"));
}

TEST_CASE("every holder of a module has a state_dict", "[state_dict]") {
  test::Mlp net;
  const StateDict expected = dp::state_dict(*net);
  CHECK(equal(dp::state_dict(net), expected));
  CHECK(equal(dp::state_dict(net.ptr()), expected));
  const torch::nn::AnyModule any(net);
  CHECK(equal(dp::state_dict(any), expected));
  const StateDict other = copy_of(dp::state_dict(test::Mlp()));
  dp::load_state_dict(any, other);
  CHECK(equal(dp::state_dict(net), other));
}

TEST_CASE("a TorchScript module has Python's names and order", "[state_dict]") {
  torch::jit::Module child("Child");
  child.register_buffer("count", torch::zeros({}, torch::kLong));
  child.register_parameter("weight", torch::ones({2}), false);
  torch::jit::Module script("Net");
  script.register_module("child", child);
  script.register_buffer("offset", torch::zeros({3}));
  script.register_parameter("scale", torch::ones({2, 2}), false);
  script.register_attribute("note", c10::StringType::get(), "text");
  const StateDict dict = dp::state_dict(script);
  CHECK(dict.keys() ==
        Keys({"scale", "offset", "child.weight", "child.count"}));
  CHECK(metadata_keys(dict) == Keys({"", "child"}));

  const StateDict other({{"scale", torch::zeros({2, 2})},
                         {"offset", torch::ones({3}, torch::kLong)},
                         {"child.weight", torch::zeros({2})},
                         {"child.count", torch::tensor(7)}});
  const auto result = dp::load_state_dict(script, other);
  CHECK(result.loaded_keys == dict.keys());
  CHECK(result.converted_keys == Keys({"offset"}));
  CHECK(same(script.attr("offset").toTensor(), torch::ones({3})));
  CHECK(child.attr("count").toTensor().item<int64_t>() == 7);
  CHECK(contains(refusal(script, without(other, "scale")),
                 "Error(s) in loading state_dict for Net:\n\tMissing"));

  const auto weight = torch::zeros({2}, torch::kDouble);
  dp::load_state_dict(script, with(other, "child.weight", weight),
                      LoadStateDictOptions().assign(true));
  CHECK(child.attr("weight").toTensor().data_ptr() == weight.data_ptr());
}

TEST_CASE("a wrapped TorchScript module is loaded, and its replicas follow",
          "[state_dict]") {
  torch::jit::Module script("Net");
  script.register_parameter("scale", torch::ones({2}), false);
  script.define("def forward(self, x):\n    return x * self.scale\n");
  dp::DataParallel<torch::jit::Module> model(
      script, dp::DataParallelOptions().devices({"cpu", "cpu"}));
  const torch::Tensor x = torch::rand({4, 2});
  CHECK(torch::equal(model(x).toTensor(), x));
  CHECK(dp::state_dict(*model).keys() == Keys({"module.scale"}));
  const auto two = torch::full({2}, 2.0f);
  dp::load_state_dict(model, {{"module.scale", two}});
  CHECK(torch::equal(model(x).toTensor(), 2 * x));
  CHECK(torch::equal(script.attr("scale").toTensor(), two));
  // A parameter that was replaced in the meantime is the one that is loaded.
  script.setattr("scale", torch::zeros({2}));
  dp::load_state_dict(model, {{"module.scale", two}});
  CHECK(torch::equal(script.attr("scale").toTensor(), two));
  CHECK(torch::equal(model(x).toTensor(), 2 * x));
}

TEST_CASE("what does not fit is refused in Python's words", "[state_dict]") {
  const torch::Tensor one = torch::ones({1});
  test::Mlp net;
  CHECK(refusal(*net, {}) == oracle().at("empty"));
  Special special;
  const StateDict odd({{"x", one},
                       {"again.y", one},
                       {"norm.weight", torch::ones({2})},
                       {"a.b", one},
                       {"_extra_state", one},
                       {"list.0.z.w", one},
                       {"scale", torch::ones({1, 1})},
                       {"offset", int64_t{3}},
                       {"norm._extra_state", one},
                       {"list.", one},
                       {"first", one}});
  CHECK(refusal(*special, odd) == oracle().at("special"));
  CHECK(refusal(*net, {{"first.weight", torch::ones({2, 3})}, {"y", one}},
                LoadStateDictOptions().strict(false)) ==
        oracle().at("not strict"));
}

TEST_CASE("an error carries the keys, and nothing has changed",
          "[state_dict]") {
  test::Mlp net;
  const StateDict good = copy_of(dp::state_dict(test::Mlp()));
  const StateDict bad = with(
      with(without(good, "second.bias"), "second.weight", torch::ones({3, 6})),
      "other", torch::ones({}));
  refusal(*net, bad);
  try {
    dp::load_state_dict(net, bad);
    FAIL("it was loaded");
  } catch (const LoadStateDictError& error) {
    CHECK(error.keys().missing_keys == Keys({"second.bias"}));
    CHECK(error.keys().unexpected_keys == Keys({"other"}));
    CHECK(error.keys().mismatched_keys == Keys({"second.weight"}));
    CHECK(error.keys().loaded_keys.empty());
  }
}

TEST_CASE("values go into the tensors that are there", "[state_dict]") {
  test::Mlp net;
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  const void* memory = net->first->weight.data_ptr();
  const StateDict other = copy_of(dp::state_dict(test::Mlp()));
  const auto result = dp::load_state_dict(net, other);
  CHECK(result.loaded_keys == other.keys());
  CHECK(result.missing_keys.empty());
  CHECK(result.unexpected_keys.empty());
  CHECK(result.converted_keys.empty());
  CHECK(equal(dp::state_dict(net), other));
  CHECK(net->first->weight.data_ptr() == memory);
  CHECK(net->first->weight.requires_grad());
  CHECK(net->first->weight.is_leaf());
  net(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  CHECK_FALSE(
      same(dp::state_dict(net).at("first.bias"), other.at("first.bias")));
}

TEST_CASE("dtypes are converted as Python's copy_ does, and listed",
          "[state_dict]") {
  torch::jit::Module script("Net");
  const std::vector<torch::ScalarType> into = {
      torch::kFloat32, torch::kFloat16, torch::kBFloat16, torch::kInt64,
      torch::kUInt8,   torch::kBool,    torch::kFloat64,  torch::kComplexFloat};
  StateDict dict;
  for (const auto dtype : into) {
    const std::string name = c10::toString(dtype);
    script.register_buffer(name, torch::zeros({3}, dtype));
    dict.insert(name, torch::tensor({0.5, 2.25, 70000.0}, torch::kDouble));
  }
  const auto result = dp::load_state_dict(script, dict);
  CHECK(result.converted_keys.size() == into.size() - 1);
  CHECK(result.loaded_keys == dict.keys());
  for (const auto dtype : into) {
    const std::string name = c10::toString(dtype);
    CHECK(same(script.attr(name).toTensor(),
               torch::zeros({3}, dtype).copy_(dict.at(name))));
  }
}

TEST_CASE("what copy_ cannot write is refused before anything is written",
          "[state_dict]") {
  test::Mlp net;
  const StateDict good = copy_of(dp::state_dict(test::Mlp()));
  CHECK(contains(
      refusal(*net, with(good, "second.bias",
                         torch::ones({3}, torch::kComplexFloat))),
      "While copying the parameter named \"second.bias\", whose dimensions in "
      "the model are torch.Size([3]) and whose dimensions in the checkpoint "
      "are torch.Size([3]), an exception occurred : the values are "
      "torch.complex64, and the model's torch.float32 would lose their "
      "imaginary parts."));
  CHECK(contains(
      refusal(*net, with(good, "second.bias", torch::ones({3}).to_sparse())),
      "an exception occurred : "));
  CHECK(contains(
      refusal(*net, with(good, "second.bias", torch::ones({3}, torch::kMeta))),
      "is on the meta device and has no values"));
  const auto nested = at::_nested_tensor_from_tensor_list({torch::ones({3})});
  CHECK(contains(refusal(*net, with(good, "second.bias", nested)),
                 "\"second.bias\", a nested tensor is in the state_dict, which "
                 "cannot be loaded"));
  CHECK(contains(refusal(*net, with(good, "second.bias", c10::IValue())),
                 "but received <class 'NoneType'>"));
  net->second->bias.set_data(torch::ones({1}).expand({3}));
  CHECK(contains(refusal(*net, good), "single memory location"));
  {
    const c10::InferenceMode inference;
    test::Mlp inferring;
    net = inferring;
  }
  const std::string text =
      message_of<LoadStateDictError>([&] { dp::load_state_dict(net, good); });
  CHECK(contains(text, "was made in inference mode"));
  const c10::InferenceMode inference;
  dp::load_state_dict(net, good);
  CHECK(equal(dp::state_dict(net), good));
}

TEST_CASE("a vector of one element fits a scalar, nothing else is broadcast",
          "[state_dict]") {
  Net net;
  const StateDict good = copy_of(dp::state_dict(net));
  dp::load_state_dict(net, with(good, "scale", torch::tensor({3.0f})));
  CHECK(net->scale.item<float>() == 3);
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{2}, {0}, {1, 1}}) {
    CHECK(contains(refusal(*net, with(good, "scale", torch::ones(shape))),
                   "size mismatch for scale"));
  }
  CHECK(contains(
      refusal(*net, with(good, "first.bias", torch::ones({}))),
      "size mismatch for first.bias: copying a param with shape torch.Size([]) "
      "from checkpoint, the shape in current model is torch.Size([3])."));
}

TEST_CASE("where names share a tensor one of them is enough", "[state_dict]") {
  Net net;
  const StateDict good = copy_of(dp::state_dict(Net()));
  CHECK(good.keys() ==
        Keys({"scale", "first.weight", "first.bias", "second.weight"}));
  for (const char* name : {"first.weight", "second.weight"}) {
    const torch::Tensor value = torch::rand({3, 3});
    const char* other =
        name == std::string("first.weight") ? "second.weight" : "first.weight";
    const auto result =
        dp::load_state_dict(net, with(without(good, other), name, value));
    CHECK(result.missing_keys.empty());
    CHECK(result.loaded_keys.size() == 3);
    CHECK(same(net->first->weight.detach(), value));
  }
  CHECK(contains(
      refusal(*net, without(without(good, "first.weight"), "second.weight")),
      "Missing key(s) in state_dict: \"first.weight\", \"second.weight\". "));
}

TEST_CASE("names that share a tensor must agree", "[state_dict]") {
  Net net;
  const StateDict good = copy_of(dp::state_dict(Net()));
  const torch::Tensor other = torch::rand({3, 3});
  const StateDict bad = with(good, "second.weight", other);
  CHECK(contains(refusal(*net, bad),
                 "\"first.weight\" and \"second.weight\" are one tensor in the "
                 "model, but have different values"));
  test::Warnings warnings;
  dp::load_state_dict(net, bad, LoadStateDictOptions().strict(false));
  REQUIRE(warnings.texts.size() == 1);
  CHECK(contains(warnings.texts[0], "are one tensor in the model"));
  CHECK(same(net->first->weight.detach(), other));
  // Equal after conversion, and not a number in both: these agree.
  const torch::Tensor odd = good.at("first.weight").clone();
  odd[0][0] = NAN;
  dp::load_state_dict(net, with(with(good, "first.weight", odd),
                                "second.weight", odd.to(torch::kDouble)));
  CHECK(warnings.texts.size() == 1);
}

TEST_CASE("not strict, the lists tell what was left out", "[state_dict]") {
  test::Mlp net;
  const StateDict before = copy_of(dp::state_dict(net));
  const StateDict part({{"first.bias", torch::ones({5})},
                        {"first.weight", torch::ones({5, 4})},
                        {"head.weight", torch::ones({5, 4})}});
  const auto result =
      dp::load_state_dict(net, part, LoadStateDictOptions().strict(false));
  CHECK(result.missing_keys == Keys({"second.weight", "second.bias"}));
  CHECK(result.unexpected_keys == Keys({"head.weight"}));
  CHECK(result.loaded_keys == Keys({"first.weight", "first.bias"}));
  CHECK(same(net->first->bias.detach(), torch::ones({5})));
  CHECK(same(net->second->bias.detach(), before.at("second.bias")));
}

TEST_CASE("not strict, a dictionary that matches nowhere is refused",
          "[state_dict]") {
  test::Mlp net;
  const auto loose = LoadStateDictOptions().strict(false);
  CHECK(
      contains(refusal(*net, {{"x", torch::ones({1})}}, loose),
               "None of the model's 4 keys is among the state_dict's 1 key."));
  CHECK(contains(refusal(*net, {}, loose), "among the state_dict's 0 keys."));
  const StateDict wrapped =
      dp::add_prefix(copy_of(dp::state_dict(test::Mlp())));
  CHECK(contains(refusal(*net, wrapped, loose),
                 "With strip_prefix(state_dict, \"module.\") all 4 of the "
                 "model's 4 keys would be there."));
  dp::load_state_dict(torch::nn::ReLU(), wrapped, loose);
}

TEST_CASE("not strict, a prefix that keeps most from fitting is warned of",
          "[state_dict]") {
  test::Mlp net;
  const auto loose = LoadStateDictOptions().strict(false);
  const StateDict other = copy_of(dp::state_dict(test::Mlp()));
  test::Warnings warnings;
  StateDict prefixed({{"first.bias", torch::ones(5)}});
  for (const auto& [key, value] : without(other, "first.bias")) {
    prefixed.insert("net.a." + key, value);
  }
  dp::load_state_dict(net, prefixed, loose);
  REQUIRE(warnings.texts.size() == 1);
  CHECK(contains(warnings.texts[0],
                 "only 1 of the model's 4 keys are in the state_dict. With "
                 "strip_prefix(state_dict, \"net.a.\") all 4"));
  dp::load_state_dict(
      net,
      without(without(without(other, "first.bias"), "first.weight"),
              "second.bias"),
      loose);
  CHECK(warnings.texts.size() == 1);
}

TEST_CASE("the error of a strict load names the prefix that would help",
          "[state_dict]") {
  test::Mlp net;
  const StateDict good = copy_of(dp::state_dict(test::Mlp()));
  CHECK(contains(refusal(*net, dp::add_prefix(good)),
                 "\n\tWith strip_prefix(state_dict, \"module.\") all 4 of the "
                 "model's 4 keys would be there."));
  CHECK(contains(
      refusal(*net, without(dp::add_prefix(good, "a.b."), "a.b.first.bias")),
      "strip_prefix(state_dict, \"a.b.\") 3 of the model's 4 keys"));
  dp::DataParallel<test::Mlp> model(
      net, dp::DataParallelOptions().devices({"cpu", "cpu"}));
  CHECK(contains(refusal(*model, good),
                 "With add_prefix(state_dict, \"module.\") all 4 of the "
                 "model's 4 keys would be there."));
}

TEST_CASE("wrapped and bare modules load each other's, and replicas follow",
          "[state_dict]") {
  test::Mlp bare;
  test::Mlp inner;
  dp::DataParallel<test::Mlp> wrapped(
      inner, dp::DataParallelOptions().devices({"cpu", "cpu", "cpu"}));
  const torch::Tensor x = torch::rand({6, 4});
  wrapped(x);  // the replicas are there
  const auto agree = [&] {
    return torch::allclose(wrapped(x), bare(x), 1e-6, 1e-6);
  };
  const StateDict first = copy_of(dp::state_dict(test::Mlp()));
  dp::load_state_dict(*bare, first);
  CHECK_FALSE(agree());
  dp::load_state_dict(*wrapped, dp::add_prefix(dp::state_dict(*bare)));
  CHECK(agree());
  const StateDict second = copy_of(dp::add_prefix(dp::state_dict(test::Mlp())));
  dp::load_state_dict(wrapped, second);
  CHECK_FALSE(agree());
  dp::load_state_dict(*bare, dp::strip_prefix(dp::state_dict(*wrapped)));
  CHECK(agree());
  dp::load_state_dict(*bare, first);
  dp::load_state_dict(*wrapped->module(), dp::state_dict(bare));
  CHECK(agree());
  dp::load_state_dict(wrapped, second, LoadStateDictOptions().assign(true));
  CHECK_FALSE(agree());
  dp::load_state_dict(bare, dp::state_dict(inner));
  CHECK(agree());
}

TEST_CASE("entries can be renamed, without collisions", "[state_dict]") {
  test::Mlp net;
  StateDict dict;
  const StateDict other = copy_of(dp::state_dict(test::Mlp()));
  for (const auto& [key, value] : other) {
    dict.insert("model/" + key, value);
  }
  const auto options = LoadStateDictOptions().rename(
      [](const std::string& key) { return key.substr(6); });
  CHECK(dp::load_state_dict(net, dict, options).loaded_keys == other.keys());
  CHECK(equal(dp::state_dict(net), other));
  const auto to_one = LoadStateDictOptions().rename(
      [](const std::string&) { return std::string("first.bias"); });
  CHECK(contains(message_of<c10::ValueError>(
                     [&] { dp::load_state_dict(net, dict, to_one); }),
                 "rename gives both 'model/first.weight' and "
                 "'model/first.bias' the name 'first.bias'"));
}

TEST_CASE("a module's own entries may change places", "[state_dict]") {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  const StateDict before = copy_of(dp::state_dict(net));
  dp::load_state_dict(net, dp::state_dict(net),
                      LoadStateDictOptions().rename([](std::string key) {
                        key[0] = key[0] == '0' ? '1' : '0';
                        return key;
                      }));
  CHECK(same(dp::state_dict(net).at("0.weight"), before.at("1.weight")));
  CHECK(same(dp::state_dict(net).at("1.weight"), before.at("0.weight")));
}

TEST_CASE("assigned tensors keep their memory and dtype", "[state_dict]") {
  Net net;
  net->first->bias.requires_grad_(false);
  net->scale.mutable_grad() = torch::ones({});
  const auto options = LoadStateDictOptions().assign(true);
  StateDict dict = copy_of(dp::state_dict(Net()));
  dict = with(dict, "scale", torch::tensor(2.5, torch::kDouble));
  const auto result =
      dp::load_state_dict(net, without(dict, "first.weight"), options);
  CHECK(result.converted_keys.empty());
  CHECK(net->scale.data_ptr() == dict.at("scale").data_ptr());
  CHECK(net->scale.dtype() == torch::kDouble);
  CHECK(net->scale.requires_grad());
  CHECK_FALSE(net->scale.grad().defined());
  CHECK_FALSE(net->first->bias.requires_grad());
  CHECK(net->first->weight.data_ptr() == dict.at("second.weight").data_ptr());
  CHECK(dp::state_dict(net).at("second.weight").data_ptr() ==
        net->first->weight.data_ptr());
  CHECK(
      contains(refusal(*net, with(dict, "scale", torch::ones({}, torch::kLong)),
                       options),
               "the parameter requires a gradient, and torch.int64 has none"));
  CHECK(contains(
      refusal(*net, with(dict, "first.bias", torch::ones(3).to_sparse()),
              options),
      "cannot take the place of a Strided one on cpu, which the module's own "
      "members hold"));
  // Nothing but the module's attribute holds it here: as in Python.
  torch::jit::Module script("Net");
  script.register_parameter("weight",
                            torch::ones({2, 2}, torch::requires_grad()), false);
  dp::load_state_dict(script, {{"weight", torch::eye(2).to_sparse()}}, options);
  CHECK(script.attr("weight").toTensor().is_sparse());
  CHECK(script.attr("weight").toTensor().requires_grad());
}

TEST_CASE("files older than batch norm's counter still fit", "[state_dict]") {
  test::ConvNet net;
  net->norm->num_batches_tracked.fill_(5);
  const std::string counter = "norm.num_batches_tracked";
  StateDict old = without(copy_of(dp::state_dict(test::ConvNet())), counter);
  CHECK(contains(refusal(*net, old),
                 "Missing key(s) in state_dict: \"" + counter + "\""));
  old.set_metadata(metadata({{"", 1}, {"norm", 1}}));
  dp::load_state_dict(net, old);
  old.set_metadata(std::nullopt);
  CHECK(dp::load_state_dict(net, old).missing_keys.empty());
  CHECK(net->norm->num_batches_tracked.item<int64_t>() == 5);
  // Renamed, the version is still found.
  const StateDict full = dp::add_prefix(
      without(copy_of(dp::state_dict(test::ConvNet())), counter), "m.");
  CHECK(contains(
      refusal(*net, full,
              LoadStateDictOptions().rename(
                  [](const std::string& key) { return key.substr(2); })),
      counter));
}

TEST_CASE("one leading prefix is stripped, never one in the middle",
          "[state_dict]") {
  const auto value = torch::ones({});
  StateDict dict({{"module.encoder.module.weight", value},
                  {"submodule.weight", value},
                  {"modules.0.weight", value},
                  {"module.module.bias", value}});
  dict.set_metadata(metadata(
      {{"", 1}, {"module", 3}, {"module.encoder", 4}, {"submodule", 5}}));
  const StateDict stripped = dp::strip_prefix(dict);
  CHECK(stripped.keys() == Keys({"encoder.module.weight", "submodule.weight",
                                 "modules.0.weight", "module.bias"}));
  CHECK(metadata_keys(stripped) == Keys({"", "encoder", "submodule"}));
  CHECK(stripped.metadata()->at("").toGenericDict().at("version").toInt() == 3);
  CHECK(dict.keys().front() == "module.encoder.module.weight");
  CHECK(metadata_keys(dict).size() == 4);
  CHECK(dp::strip_prefix(dict, "").keys() == dict.keys());
  CHECK(metadata_keys(dp::strip_prefix(dict, "")) == metadata_keys(dict));
  CHECK(dp::strip_prefix(dict, "none.").keys() == dict.keys());
  CHECK(metadata_keys(dp::strip_prefix(dict, "none.")) == metadata_keys(dict));
}

TEST_CASE("a prefix of several parts comes and goes with its metadata",
          "[state_dict]") {
  StateDict dict = dp::state_dict(test::ConvNet());
  const StateDict added = dp::add_prefix(dict, "model.net.");
  CHECK(added.contains("model.net.norm.running_mean"));
  CHECK(metadata_keys(added) ==
        Keys({"", "model", "model.net", "model.net.convolution",
              "model.net.norm", "model.net.last"}));
  CHECK(show(dp::strip_prefix(added, "model.net.")) == show(dict));
  CHECK(dp::add_prefix(dict, "ema_").contains("ema_norm.bias"));
  CHECK(show(dp::strip_prefix(dp::add_prefix(dict, "ema_"), "ema_")) ==
        show(dict));
  dict.set_metadata(std::nullopt);
  CHECK_FALSE(dp::add_prefix(dict).metadata().has_value());
  CHECK_FALSE(dp::strip_prefix(dict).metadata().has_value());
}

TEST_CASE("names that would collide without their prefix are refused",
          "[state_dict]") {
  const auto value = torch::ones({});
  for (const StateDict& dict :
       {StateDict({{"module.a", value}, {"a", value}}),
        StateDict({{"a", value}, {"module.a", value}})}) {
    CHECK(contains(message_of<c10::ValueError>([&] { dp::strip_prefix(dict); }),
                   "strip_prefix: both 'a' and 'module.a' are there"));
  }
  CHECK(contains(message_of<c10::ValueError>([&] {
                   dp::strip_prefix({{"module.", value}});
                 }),
                 "'module.' is the prefix and nothing else"));
}

TEST_CASE("a state_dict becomes an OrderedDict and comes back",
          "[state_dict]") {
  const StateDict dict = dp::state_dict(test::ConvNet());
  const c10::IValue value = dict.to_ivalue();
  CHECK(dp::class_name(value.toGenericDict()) == "collections.OrderedDict");
  const StateDict back = StateDict::from_ivalue(value);
  CHECK(equal(back, dict));
  CHECK(show(back) == show(dict));
  CHECK(
      contains(message_of<c10::TypeError>([] { StateDict::from_ivalue(1.0); }),
               "expected a mapping of names to tensors, got Double"));
}

TEST_CASE("a null pointer is an error", "[state_dict][errors]") {
  const std::shared_ptr<torch::nn::LinearImpl> none;
  CHECK(test::message_of<c10::TypeError>([&] {
          dataparallel::state_dict(none);
        }) == "state_dict: module is a null pointer, expected a module");
  CHECK(test::message_of<c10::TypeError>([&] {
          dataparallel::load_state_dict(none, {});
        }) == "load_state_dict: module is a null pointer, expected a module");
}
