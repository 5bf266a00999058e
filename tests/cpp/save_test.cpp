#include <dataparallel/checkpoint.h>
#include <dataparallel/save.h>
#include <dataparallel/simulated.h>
#include <dataparallel/state_dict.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <random>

#include "support/catch.h"
#include "support/python.h"
#include "support/temporary_folder.h"
#include "support/values.h"

namespace {

namespace dp = dataparallel;
using c10::IValue;
using test::contains;
using test::message_of;
using test::TemporaryFolder;
using Values = std::vector<IValue>;
using Entries = std::vector<std::pair<IValue, IValue>>;

c10::impl::GenericDict filled(c10::impl::GenericDict dict,
                              const Entries& entries) {
  for (const auto& [key, value] : entries) {
    dict.insert(key, value);
  }
  return dict;
}

c10::impl::GenericDict dict(const Entries& entries = {}) {
  return filled(dp::make_mapping("dict"), entries);
}

c10::impl::GenericDict ordered(const Entries& entries,
                               const Entries& attributes = {}) {
  return filled(dp::make_mapping("collections.OrderedDict", dict(attributes)),
                entries);
}

c10::impl::GenericList list(const Values& values) {
  c10::impl::GenericList result(c10::AnyType::get());
  for (const IValue& value : values) {
    result.push_back(value);
  }
  return result;
}

IValue tuple(Values values) {
  return c10::ivalue::Tuple::create(std::move(values));
}

IValue opaque(const std::string& name, Values args = {}, Values elements = {},
              IValue state = {}) {
  auto result = c10::make_intrusive<dp::Opaque>(name);
  result->args = std::move(args);
  result->elements = std::move(elements);
  result->state = std::move(state);
  return dp::from_opaque(std::move(result));
}

torch::Tensor count(int64_t n, torch::ScalarType dtype = torch::kFloat) {
  return torch::arange(n, torch::kFloat).to(dtype);
}

/// Checks, in Python, that `folder / "name.pt"` has the bytes of
/// `torch.save(value)` for each name and value of the dictionary `expected`
/// that `script` makes.
void check_against_python(const TemporaryFolder& folder,
                          const std::string& script,
                          const std::string& weights_only = "True") {
  const std::string check = R"(
import difflib, io, os, pickletools, sys, tempfile, zipfile, torch
folder = sys.argv[1]
assert expected.keys() == {name[:-3] for name in os.listdir(folder)}
for name, value in expected.items():
    path = os.path.join(folder, name + ".pt")
    with tempfile.TemporaryDirectory() as own:
        torch.save(value, os.path.join(own, name + ".pt"))
        theirs = open(os.path.join(own, name + ".pt"), "rb").read()
    ours = open(path, "rb").read()
    if ours != theirs:
        texts = []
        for content in (ours, theirs):
            file = zipfile.ZipFile(io.BytesIO(content))
            text = io.StringIO()
            for i in file.infolist():
                print(i.filename, i.file_size, i.header_offset, i.CRC, file=text)
            pickletools.dis(file.read(name + "/data.pkl"), text)
            texts.append(text.getvalue().splitlines())
        print(*list(difflib.unified_diff(*texts))[:60], sep="\n")
    assert ours == theirs, name
    assert zipfile.ZipFile(path).testzip() is None
    torch.load(path, weights_only=)" +
                            weights_only + R"()
)";
  CHECK_NOTHROW(test::python("import torch, collections\n" + script + check,
                             folder.path()));
}

/// A file, its name and its content before and after.
struct OldFile {
  explicit OldFile(const TemporaryFolder& folder) : path(folder / "old.pt") {
    test::write_file(path, "old content");
  }
  bool whole() const { return test::read_file(path) == "old content"; }
  std::string path;
};

}  // namespace

TEST_CASE("a name that is no constant of torch is not written",
          "[save][hostile]") {
  const TemporaryFolder folder;
  for (const std::string type : {"torch.dtype", "torch.layout",
                                 "torch.memory_format", "torch.qscheme"}) {
    // In a pickle, lines that run a program.
    for (const char* name :
         {"float32\n0cos\nsystem\n(S'true'\ntR0S'x'", "none"}) {
      CHECK(contains(message_of<c10::ValueError>([&] {
                       dp::save(opaque(type, {std::string(name)}),
                                folder / "x.pt");
                     }),
                     "is no " + type + " that there is"));
    }
  }
  CHECK_FALSE(std::filesystem::exists(folder / "x.pt"));
}

TEST_CASE("a file named of dots is read back", "[save]") {
  const TemporaryFolder folder;
  dp::save(dict({{"a", 1}}), folder / "...pt");
  CHECK(dp::load(folder / "...pt").toGenericDict().at("a").toInt() == 1);
}

TEST_CASE("tensors of every dtype are written as Python writes them",
          "[save]") {
  const TemporaryFolder folder;
  auto all = dict();
  for (const auto dtype : test::dtypes()) {
    all.insert(std::string(c10::getDtypeNames(dtype).first), count(2, dtype));
  }
  dp::save(all, folder / "dtypes.pt");
  check_against_python(folder, R"(
names = ("bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 "
         "bfloat16 float32 float64 complex32 complex64 complex128 float8_e5m2 "
         "float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu")
expected = {"dtypes": {
    name: torch.arange(2, dtype=torch.float).to(getattr(torch, name))
    for name in names.split()}}
)");
}

TEST_CASE("views and shared storages are written as Python writes them",
          "[save]") {
  const TemporaryFolder folder;
  const auto base = count(20);
  const auto grad = count(3).requires_grad_();
  const auto complex = torch::ones({2, 3}, torch::kComplexFloat);
  const auto other = complex.clone();
  dp::save(list({base, base, base.slice(0, 2, 10, 2), base.view({4, 5}).t(),
                 base.narrow(0, 1, 1).expand({3, 2, 1}), count(0),
                 torch::zeros({0, 3}), torch::tensor(2.5f), grad, grad * 2,
                 complex.conj(), torch::imag(other.conj()),
                 torch::_neg_view(complex.conj())}),
           folder / "views.pt");
  // Every length that the checksum treats in its own way.
  Values lengths;
  for (int64_t n = 0; n < 300; ++n) {
    lengths.push_back(count(n).to(torch::kUInt8));
  }
  dp::save(list(lengths), folder / "lengths.pt");
  check_against_python(folder, R"(
base = torch.arange(20, dtype=torch.float)
grad = torch.arange(3, dtype=torch.float).requires_grad_()
complex = torch.ones(2, 3, dtype=torch.complex64)
other = complex.clone()
expected = {"views": [
    base, base, base[2:10:2], base.view(4, 5).t(),
    base[1:2].expand(3, 2, 1), torch.arange(0, dtype=torch.float),
    torch.zeros(0, 3), torch.tensor(2.5), grad, grad * 2,
    complex.conj(), other.conj().imag, torch._neg_view(complex.conj())],
  "lengths": [torch.arange(n).to(torch.uint8) for n in range(300)]}
)");
}

TEST_CASE("sparse, quantized and meta tensors are written as Python's",
          "[save]") {
  const TemporaryFolder folder;
  const auto eye = torch::eye(4);
  const auto indices = torch::tensor({{0, 0}, {1, 1}});
  Values values = {eye.to_sparse(),
                   torch::sparse_coo_tensor(indices, count(2), {2, 3}),
                   eye.to_sparse_csr(),
                   eye.to_sparse_csc(),
                   eye.to_sparse_bsr({2, 2}),
                   eye.to_sparse_bsc({2, 2})};
  dp::save(list(values), folder / "sparse.pt");
  dp::save(list({torch::quantize_per_tensor(count(5), 0.5, 3, torch::kQUInt8),
                 torch::quantize_per_tensor(count(5), 0.5, 0, torch::kQInt32),
                 torch::quantize_per_channel(
                     count(6).view({2, 3}), torch::ones({2}, torch::kDouble),
                     torch::zeros({2}, torch::kLong), 0, torch::kQInt8)}),
           folder / "quantized.pt");
  dp::save(list({torch::ones({2, 3}, torch::kMeta).t()}), folder / "meta.pt");
  check_against_python(folder, R"(
eye = torch.eye(4)
count = lambda n: torch.arange(n, dtype=torch.float)
expected = {"sparse": [
    eye.to_sparse(),
    torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), count(2), (2, 3)),
    eye.to_sparse_csr(), eye.to_sparse_csc(), eye.to_sparse_bsr((2, 2)),
    eye.to_sparse_bsc((2, 2))],
  "quantized": [
    torch.quantize_per_tensor(count(5), 0.5, 3, torch.quint8),
    torch.quantize_per_tensor(count(5), 0.5, 0, torch.qint32),
    torch.quantize_per_channel(count(6).view(2, 3),
        torch.ones(2, dtype=torch.double), torch.zeros(2, dtype=torch.long),
        0, torch.qint8)],
  "meta": [torch.ones(2, 3, device="meta").t()]}
)");
}

TEST_CASE("numbers, text and containers are written as Python's", "[save]") {
  const TemporaryFolder folder;
  Values numbers;
  for (const int64_t n :
       {int64_t{0}, int64_t{1}, int64_t{-1}, int64_t{255}, int64_t{256},
        int64_t{65535}, int64_t{65536}, int64_t{INT32_MAX}, int64_t{INT32_MIN},
        int64_t{INT32_MAX} + 1, int64_t{INT32_MIN} - 1, int64_t{1} << 39,
        (int64_t{1} << 39) - 1, -(int64_t{1} << 39), -(int64_t{1} << 39) - 1,
        INT64_MAX, INT64_MIN}) {
    numbers.emplace_back(n);
  }
  dp::save(tuple({list(numbers), 0.5, -0.0, INFINITY, true, false, IValue(),
                  c10::complex<double>(1, -2), "text", "", "é", "日本語 𝄞",
                  torch::Device("cuda:1"), torch::Device("cpu")}),
           folder / "numbers.pt");
  const auto inner = list({int64_t{1}});
  const auto pair = tuple({int64_t{1}, "ab"});
  dp::save(list({inner, inner, list({}), tuple({}), tuple({inner}), pair, pair,
                 tuple({1.0, 2.0, 3.0}), tuple({1.0, 2.0, 3.0, 4.0}), dict(),
                 dict({{"one", int64_t{1}}}),
                 dict({{int64_t{2}, "a"}, {1.5, "b"}, {true, "c"}})}),
           folder / "containers.pt");
  Values many;
  Entries items;
  for (int64_t i = 0; i < 2001; ++i) {
    many.emplace_back(i);
    items.emplace_back(i, i);
  }
  dp::save(list({list(many), list(Values(many.begin(), many.begin() + 1000)),
                 dict(items), ordered(items),
                 ordered(Entries(items.begin(), items.begin() + 1000)),
                 ordered({{int64_t{1}, int64_t{2}}}), ordered({})}),
           folder / "long.pt");
  // Of more than 256 objects.
  Values texts;
  for (int64_t i = 0; i < 300; ++i) {
    texts.emplace_back("text " + std::to_string(i));
  }
  for (size_t i = 0; i < 300; ++i) {
    texts.push_back(texts[i]);
  }
  dp::save(list(texts), folder / "texts.pt");
  check_against_python(folder, R"(
inner = [1]
pair = (1, "ab")
many = list(range(2001))
texts = [f"text {i}" for i in range(300)]
expected = {
  "numbers": ([
    0, 1, -1, 255, 256, 65535, 65536, 2**31 - 1, -2**31, 2**31, -2**31 - 1,
    2**39, 2**39 - 1, -2**39, -2**39 - 1, 2**63 - 1, -2**63],
    0.5, -0.0, float("inf"), True, False, None, 1 - 2j, "text", "", "é",
    "日本語 𝄞", torch.device("cuda:1"), torch.device("cpu")),
  "containers": [
    inner, inner, [], (), (inner,), pair, pair, (1.0, 2.0, 3.0),
    (1.0, 2.0, 3.0, 4.0), {}, {"one": 1}, {2: "a", 1.5: "b", True: "c"}],
  "long": [
    many, many[:1000], {i: i for i in many},
    collections.OrderedDict((i, i) for i in many),
    collections.OrderedDict((i, i) for i in many[:1000]),
    collections.OrderedDict({1: 2}), collections.OrderedDict()],
  "texts": texts + texts}
)");
}

TEST_CASE("Python's own objects are written back as they were", "[save]") {
  const TemporaryFolder folder;
  const auto raw = [](const char* kind, std::string bytes) {
    return opaque(std::string("builtins.") + kind, {std::move(bytes)});
  };
  dp::save(
      list({opaque("builtins.set", {}, {int64_t{1}}),
            opaque("builtins.frozenset", {}, {int64_t{2}}),
            opaque("builtins.slice", {int64_t{1}, IValue(), int64_t{2}}),
            raw("bytes", "ab\xff"), raw("bytes", ""), raw("bytearray", "x\x80"),
            raw("bytearray", ""),
            opaque("torch.Size", {}, {int64_t{3}, int64_t{4}}),
            opaque("torch.dtype", {"bfloat16"}),
            opaque("torch.layout", {"strided"}),
            opaque("torch.qscheme", {"per_tensor_affine"}),
            opaque("argparse.Namespace", {}, {}, dict({{"rate", 0.5}})),
            filled(dp::make_mapping("collections.Counter"),
                   {{"aa", int64_t{2}}}),
            filled(dp::make_mapping(
                       "collections.defaultdict",
                       dict({{"default_factory",
                              opaque("builtins.type", {"builtins.list"})}})),
                   {{"kk", list({})}})}),
      folder / "objects.pt");
  check_against_python(folder, R"(
import argparse
expected = {"objects": [
    {1}, frozenset([2]), slice(1, None, 2), b"ab\xff", b"", bytearray(b"x\x80"),
    bytearray(), torch.Size([3, 4]), torch.bfloat16, torch.strided,
    torch.per_tensor_affine, argparse.Namespace(rate=0.5),
    collections.Counter(aa=2), collections.defaultdict(list, {"kk": []})]}
)",
                       /*weights_only=*/"False");
}

TEST_CASE("integers of any size are written as Python's", "[save]") {
  const TemporaryFolder folder;
  const auto number = [](const std::string& text) {
    return opaque("builtins.int", {text});
  };
  std::string hex = "0x1";
  hex.append(525, '0');
  dp::save(
      list({number("18446744073709551616"), number("9223372036854775808"),
            number("-9223372036854775809"),
            number("340282366920938463"
                   "463374607431768211455"),
            number("-340282366920938463463374607431768211456"), number("5"),
            number("-1"), number("-9223372036854775808"), number(hex),
            number("-" + hex), number("0xff" + std::string(524, '0'))}),
      folder / "integers.pt");
  check_against_python(folder, R"(
expected = {"integers": [
    2**64, 2**63, -2**63 - 1, 2**128 - 1, -2**128, 5, -1, -2**63, 2**2100,
    -2**2100, 255 * 2**2096]}
)",
                       /*weights_only=*/"False");
}

TEST_CASE("storages are written as Python's, and shared with tensors",
          "[save]") {
  const TemporaryFolder folder;
  const auto floats = count(3);
  const auto bytes = count(4, torch::kUInt8);
  const auto storage = opaque("torch.FloatStorage", {floats});
  const auto quantized =
      opaque("torch.QUInt8Storage", {count(4, torch::kUInt8)});
  const auto untyped = opaque("torch.storage.UntypedStorage", {bytes});
  dp::save(list({quantized, storage, floats, storage, untyped, untyped,
                 opaque("torch.LongStorage", {count(2, torch::kLong)})}),
           folder / "storages.pt");
  check_against_python(folder, R"(
floats = torch.arange(3.0)
untyped = torch.arange(4, dtype=torch.uint8).untyped_storage()
quantized = torch._make_per_tensor_quantized_tensor(
    torch.arange(4, dtype=torch.uint8), 1.0, 0)
expected = {"storages": [
    quantized.storage(), floats.storage(), floats, floats.storage(), untyped, untyped,
    torch.arange(2).storage()]}
)");
}

TEST_CASE("nested tensors are written as Python's", "[save]") {
  const TemporaryFolder folder;
  const auto nested = at::_nested_tensor_from_tensor_list(
      {torch::ones({2, 3}), torch::zeros({1, 3})});
  dp::save(list({nested, nested, nested.transpose(1, 2)}),
           folder / "nested.pt");
  check_against_python(folder, R"(
nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
expected = {"nested": [nested, nested, nested.transpose(1, 2)]}
)",
                       /*weights_only=*/"False");
}

TEST_CASE("a state_dict is written as Python's, with metadata and sharing",
          "[save]") {
  const TemporaryFolder folder;
  torch::nn::Sequential net(torch::nn::Conv2d(2, 3, 2),
                            torch::nn::BatchNorm2d(3), torch::nn::LSTM(3, 4),
                            torch::nn::Linear(4, 2));
  for (auto& parameter : net->parameters()) {
    parameter.data().fill_(0.25);
  }
  dp::save(dp::state_dict(net), folder / "net.pt");
  check_against_python(folder, R"(
from torch import nn
net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3),
                    nn.LSTM(3, 4), nn.Linear(4, 2))
for parameter in net.parameters():
    parameter.data.fill_(0.25)
expected = {"net": net.state_dict()}
)");
}

TEST_CASE("the state_dict of a module without tensors is found again",
          "[save]") {
  const TemporaryFolder folder;
  const torch::nn::ReLU relu;
  dp::save(dp::state_dict(*relu), folder / "relu.pt");
  CHECK(dp::find_state_dict(dp::load(folder / "relu.pt")).size() == 0);
}

TEST_CASE("tensors on other devices are written from there", "[save]") {
  dp::simulated::start(dp::simulated::Options().devices(2));
  const TemporaryFolder folder;
  const auto base = count(6).to(torch::Device("sim:1"));
  dp::save(list({base, base.slice(0, 2, 6, 2), count(0).to(base.device())}),
           folder / "device.pt");
  CHECK_NOTHROW(test::python(R"(
import sys, torch
base, view, empty = torch.load(sys.argv[1] + "/device.pt", map_location="cpu")
assert torch.equal(base, torch.arange(6, dtype=torch.float))
assert torch.equal(view, base[2::2]) and view.stride() == (2,)
assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
assert empty.numel() == 0
try:
    torch.load(sys.argv[1] + "/device.pt")
except RuntimeError as error:
    assert "sim:1" in str(error)
else:
    raise AssertionError
)",
                             folder.path()));
}

TEST_CASE("what holds itself is written once", "[save]") {
  const TemporaryFolder folder;
  const auto circle = list({int64_t{1}});
  circle.push_back(tuple({circle, int64_t{2}, int64_t{3}, int64_t{4}}));
  dp::save(tuple({circle}), folder / "circle.pt");
  circle.clear();  // else it would never be freed
  CHECK_NOTHROW(test::python(R"(
import sys, torch
(circle,) = torch.load(sys.argv[1] + "/circle.pt", weights_only=False)
assert circle[0] == 1 and circle[1][0] is circle and circle[1][3] == 4
)",
                             folder.path()));
}

TEST_CASE("objects of unknown classes are refused with their paths", "[save]") {
  const TemporaryFolder folder;
  const OldFile old(folder);
  const auto value =
      dict({{"rng", list({opaque("my.Generator")})}, {"x", count(2)}});
  const std::string text =
      message_of<c10::ValueError>([&] { dp::save(value, old.path); });
  CHECK(contains(text, "objects of unknown classes cannot be written"));
  CHECK(contains(text, "['rng'][0]: my.Generator"));
  CHECK(old.whole());
  CHECK(folder.files() == 1);
}

TEST_CASE("what has no form in a file is refused before anything is written",
          "[save]") {
  const TemporaryFolder folder;
  const OldFile old(folder);
  const auto refused = [&](const IValue& value) {
    const std::string text = message_of<c10::TypeError>([&] {
      dp::save(dict({{"a", list({value})}}), old.path);
    });
    CHECK(old.whole());
    return text;
  };
  CHECK(
      contains(refused(torch::Tensor()), "the tensor at ['a'][0] is undefin"));
  CHECK(contains(refused(at::make_generator<at::CPUGeneratorImpl>()),
                 "['a'][0] is a Generator, which has no form in Python"));
  CHECK(contains(refused(at::_efficientzerotensor({3})), "is a ZeroTensor"));
  CHECK(contains(refused(torch::ones({2, 2}).to_mkldnn()),
                 "the tensor at ['a'][0] has no memory of its own"));
  const auto value_error = [&](const IValue& value) {
    return message_of<c10::ValueError>([&] {
      dp::save(dict({{"a", list({value})}}), old.path);
    });
  };
  CHECK(contains(value_error("\xff\xfe\xfd"), "text at ['a'][0] is no UTF-8"));
  const auto both = count(2);
  CHECK(contains(value_error(tuple({both, both.view(torch::kInt)})),
                 "['a'][0][1] shares the memory of another tensor or storage "
                 "of another dtype (IntStorage and FloatStorage)"));
  CHECK(contains(value_error(tuple({both, opaque("torch.storage.UntypedStorage",
                                                 {both.view(torch::kUInt8)})})),
                 "another dtype (UntypedStorage and FloatStorage)"));
  CHECK(contains(
      value_error(opaque("torch.FloatStorage", {count(6).narrow(0, 1, 2)})),
      "the torch.FloatStorage at ['a'][0] is a part of a larger "
      "storage"));
  CHECK(
      contains(refused(opaque("torch.FloatStorage", {int64_t{3}})),
               "the torch.FloatStorage at ['a'][0] does not hold one tensor"));
  CHECK(contains(value_error(opaque("builtins.int", {"12x"})),
                 "the int at ['a'][0] is '12x', which is no number"));
  CHECK(contains(value_error(opaque("builtins.int", {std::string(5000, '1')})),
                 "has 5000 digits, more than Python reads"));
  auto deep = list({});
  for (int i = 0; i < 2000; ++i) {
    deep = list({deep});
  }
  CHECK(contains(value_error(deep), "nested more than 1000 deep"));
  CHECK(old.whole());
  CHECK(folder.files() == 1);
}

TEST_CASE("what Python's own objects cannot hold is refused", "[save]") {
  const TemporaryFolder folder;
  const auto refused = [&](const IValue& value) {
    return message_of<c10::TypeError>([&] {
      dp::save(dict({{"a", value}}), folder / "x.pt");
    });
  };
  const IValue one = int64_t{1};
  CHECK(
      contains(refused(opaque("builtins.set", {one})),
               "the builtins.set at ['a'] holds args, which no builtins.set"));
  CHECK(contains(refused(opaque("builtins.set", {}, {}, dict())),
                 "holds state, which no builtins.set has"));
  CHECK(contains(refused(opaque("builtins.bytes", {"x"}, {one})),
                 "holds elements, which no builtins.bytes has"));
  CHECK(contains(refused(opaque("builtins.slice", {one})),
                 "has 1 args, expected start, stop and step"));
  CHECK(contains(refused(opaque("torch.Size", {}, {one, 0.5})),
                 "the torch.Size at ['a'] holds a float, expected int"));
  CHECK(contains(refused(opaque("argparse.Namespace", {}, {}, list({}))),
                 "has a list as its state, expected a mapping from names"));
  CHECK(contains(
      refused(opaque("argparse.Namespace", {}, {}, dict({{one, one}}))),
      "has a dict as its state, expected a mapping from names"));
  CHECK(contains(refused(opaque("collections.defaultdict", {one, one})),
                 "has 2 args, expected its default_factory"));
  auto with_keywords = c10::make_intrusive<dp::Opaque>("torch.dtype");
  with_keywords->args = {"float32"};
  with_keywords->kwargs = {{"x", one}};
  CHECK(contains(refused(dp::from_opaque(with_keywords)),
                 "holds kwargs, which no torch.dtype has"));
  // What Python cannot make again when it reads the file.
  for (const IValue& unhashable :
       {IValue(list({})), IValue(dict()), tuple({one, list({})}),
        opaque("builtins.set"), opaque("builtins.bytearray", {"x"})}) {
    CHECK(contains(refused(opaque("builtins.set", {}, {one, unhashable})),
                   "which has no hash in Python"));
  }
  auto keyed = c10::make_intrusive<dp::Opaque>("builtins.dict");
  keyed->items = {{list({}), one}};
  CHECK(
      contains(refused(dp::from_opaque(keyed)), "holds a list, which has no"));
  const auto defaulting = [&](const char* name, const IValue& value) {
    return refused(
        dp::make_mapping("collections.defaultdict", dict({{name, value}})));
  };
  CHECK(contains(defaulting("default_factory", one),
                 "has an int as its default_factory"));
  CHECK(contains(defaulting("foo", one), "carries 'foo'"));
  CHECK(
      contains(refused(opaque("torch.FloatStorage", {count(2, torch::kLong)})),
               "holds a tensor of dtype int64, expected float32"));
  CHECK(contains(
      message_of<c10::ValueError>([&] {
        dp::save(dict({{"a", dict({{true, 1}, {1, 2}})}}), folder / "x.pt");
      }),
      "twice, as Python compares them"));
  CHECK(folder.files() == 0);
}

TEST_CASE("a tensor that goes beyond its storage is not written",
          "[save][hostile]") {
  const TemporaryFolder folder;
  auto shrunk = count(10);
  shrunk.storage().unsafeGetStorageImpl()->set_nbytes(8);
  auto freed = count(10);
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  freed.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr());
  for (const auto& tensor : {shrunk, freed}) {
    CHECK(contains(message_of<c10::ValueError>([&] {
                     dp::save(dict({{"a", tensor}}), folder / "x.pt");
                   }),
                   "the tensor at ['a'] goes beyond its storage"));
    dp::StateDict state;
    state.insert("a", tensor);
    CHECK(contains(message_of<c10::ValueError>([&] {
                     dp::save_safetensors(state, folder / "x.safetensors");
                   }),
                   "'a' goes beyond its storage"));
  }
  CHECK(folder.files() == 0);
}

// Not among the tests that always run: takes 9 GiB of disk and 5 of memory.
TEST_CASE("records beyond 4 GiB are written as Python's", "[.][large]") {
  const TemporaryFolder folder;
  const int64_t large = (int64_t{1} << 32) + 5;
  dp::save(list({torch::ones({large}, torch::kUInt8), count(3)}),
           folder / "large.pt");
  check_against_python(folder, R"(
expected = {"large": [
    torch.ones(2**32 + 5, dtype=torch.uint8), torch.arange(3.0)]}
)");
}

TEST_CASE("a file that is replaced keeps its permissions", "[save]") {
  const TemporaryFolder folder;
  const OldFile old(folder);
  const auto mode = [](const std::string& path) {
    struct stat status;
    REQUIRE(stat(path.c_str(), &status) == 0);
    return status.st_mode & 07777;
  };
  chmod(old.path.c_str(), 0640);
  dp::save(count(2), old.path);
  CHECK_FALSE(old.whole());
  CHECK(mode(old.path) == 0640);
  const mode_t mask = umask(027);
  dp::save(count(2), folder / "new.pt");
  umask(mask);
  CHECK(mode(folder / "new.pt") == 0640);
  CHECK(folder.files() == 2);
}

TEST_CASE("a symbolic link is followed and kept", "[save]") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "there");
  std::filesystem::create_symlink("there/target.pt", folder / "link.pt");
  std::filesystem::create_symlink("link.pt", folder / "second.pt");
  dp::save(count(2), folder / "second.pt");  // the target is made
  dp::save(count(3), folder / "link.pt");    // and replaced
  CHECK(std::filesystem::is_symlink(folder / "link.pt"));
  CHECK(std::filesystem::is_symlink(folder / "second.pt"));
  CHECK(std::filesystem::is_regular_file(folder / "there/target.pt"));
  CHECK(folder.files() == 3);
}

TEST_CASE("a name that cannot be written is one error", "[save]") {
  const TemporaryFolder folder;
  const auto error = [&](const std::string& path) {
    return message_of<dp::CheckpointError>([&] { dp::save(count(2), path); });
  };
  CHECK(contains(error(folder / "no/such/folder.pt"),
                 "no/such/folder.pt cannot be written"));
  CHECK(contains(error(folder.path()), "Is a directory"));
  CHECK(contains(error(""), "path is empty, expected the name of a file"));
  CHECK(contains(error(std::string("a\0b", 3)), "path is a text with a 0"));
  CHECK(contains(error("/dev/full"), "No space left on device"));
  dp::save(count(2), "/dev/null");
  CHECK(std::filesystem::is_character_file("/dev/null"));
  const std::string longest(250, 'n');
  dp::save(count(2), folder / longest);
  CHECK(folder.files() == 1);
}

TEST_CASE("a full disk leaves the old file and nothing beside it", "[save]") {
  const TemporaryFolder folder;
  const OldFile old(folder);
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t most : {0, 1000, 100000, 3000000}) {
    rlimit limit = before;
    limit.rlim_cur = most;
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto text = [&] {
      return message_of<dp::CheckpointError>(
          [&] { dp::save(count(1 << 20), old.path); });
    }();
    setrlimit(RLIMIT_FSIZE, &before);
    CHECK(contains(text, "old.pt cannot be written (File too large)"));
    CHECK(old.whole());
    CHECK(folder.files() == 1);
  }
  std::signal(SIGXFSZ, handler);
}

TEST_CASE("progress is told, and may end the writing", "[save]") {
  const TemporaryFolder folder;
  const OldFile old(folder);
  std::vector<std::pair<uint64_t, uint64_t>> told;
  const auto note = [&](uint64_t done, uint64_t total) {
    told.emplace_back(done, total);
  };
  dp::save(list({count(2), count(3)}), folder / "a.pt", note);
  dp::save_safetensors({{"a", count(2)}, {"b", count(3)}},
                       folder / "a.safetensors",
                       dp::SaveSafetensorsOptions().progress(note));
  CHECK(told == std::vector<std::pair<uint64_t, uint64_t>>(
                    {{0, 20}, {8, 20}, {20, 20}, {0, 20}, {8, 20}, {20, 20}}));
  CHECK_THROWS_AS(
      dp::save(count(2), old.path,
               [](uint64_t, uint64_t) { throw std::runtime_error("no more"); }),
      std::runtime_error);
  CHECK(old.whole());
  CHECK(folder.files() == 3);
}

TEST_CASE("a kill at any moment leaves one of the whole files", "[save]") {
  const TemporaryFolder folder;
  const std::string path = folder / "model.pt";
  std::map<char, IValue> values;
  std::map<char, std::string> whole;
  for (const char which : {'a', 'b'}) {
    values[which] = list({count(1 << 18), std::string(3, which)});
    dp::save(values[which], path);
    whole[which] = test::read_file(path);
  }
  const auto inode = [&] {
    struct stat status;
    REQUIRE(stat(path.c_str(), &status) == 0);
    return status.st_ino;
  };
  std::mt19937 random(7);
  int replaced = 0;
  for (int round = 0; round < 40; ++round) {
    const auto before = inode();
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      // Nothing here that needs the threads, which the child does not have.
      for (char which = 'a';; which = which == 'a' ? 'b' : 'a') {
        dp::save(values[which], path);
      }
    }
    usleep(random() % 40000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    replaced += inode() != before;
    const std::string now = test::read_file(path);
    CHECK((now == whole['a'] || now == whole['b']));
  }
  CHECK(replaced > 0);
  CHECK(replaced < 40);
}

TEST_CASE("safetensors files are the reference writer's", "[save]") {
  const TemporaryFolder folder;
  dp::StateDict dict;
  for (const auto dtype : test::dtypes()) {
    const std::string name(c10::getDtypeNames(dtype).first);
    if (name != "complex32" && name != "complex128" &&
        name.find("fnuz") == std::string::npos) {
      dict.insert(name, count(3, dtype));
    }
  }
  dict.insert("b.weight", count(6).view({2, 3}).t());
  dict.insert("a.weight", torch::tensor(1.5f));
  dict.insert("empty \"quoted\"\n\\é", torch::zeros({0, 4}));
  dict.insert("conj", torch::ones({2}, torch::kComplexFloat).conj());
  dp::save_safetensors(dict, folder / "plain.safetensors");
  dp::save_safetensors(
      dict, folder / "metadata.safetensors",
      dp::SaveSafetensorsOptions().metadata({{"format", "pt"}}));
  dp::save_safetensors({}, folder / "empty.safetensors");
  CHECK_NOTHROW(test::python(R"(
import json, struct, sys, torch
order = ("BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 C64 "
         "F64 I64 U64").split()
names = dict(zip(order, (
    "bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu int16 uint16 "
    "float16 bfloat16 int32 uint32 float32 complex64 float64 int64 uint64"
    ).split()))
count = lambda n: torch.arange(n, dtype=torch.float)
tensors = {name: count(3).to(getattr(torch, name)) for name in names.values()}
tensors["b.weight"] = count(6).view(2, 3).t().contiguous()
tensors["a.weight"] = torch.tensor(1.5)
tensors['empty "quoted"\n\\é'] = torch.zeros(0, 4)
tensors["conj"] = torch.ones(2, dtype=torch.complex64).conj().resolve_conj()

def reference(tensors, metadata):
    short = {value: key for key, value in names.items()}
    kind = lambda tensor: short[str(tensor.dtype)[6:]]
    items = sorted(tensors.items(), key=lambda item: (
        -order.index(kind(item[1])), item[0].encode()))
    header = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in items:
        raw = bytes(tensor.flatten().view(torch.uint8).tolist())
        header[name] = {"dtype": kind(tensor), "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    text = text.encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data

try:
    from safetensors.torch import save
except ImportError:
    save = reference
for name, value, metadata in [("plain", tensors, None), ("empty", {}, None),
                              ("metadata", tensors, {"format": "pt"})]:
    ours = open(f"{sys.argv[1]}/{name}.safetensors", "rb").read()
    theirs = reference(value, metadata)
    if ours != theirs:
        print(ours, theirs, sep="\n")
    assert ours == theirs, name
    assert ours == save(value, metadata), name
)",
                             folder.path()));
}

TEST_CASE("what safetensors cannot express is refused", "[save]") {
  const TemporaryFolder folder;
  const std::string path = folder / "x.safetensors";
  const auto base = count(6);
  const auto type_error = [&](const IValue& value) {
    return message_of<c10::TypeError>([&] {
      dp::save_safetensors({{"a", value}}, path);
    });
  };
  CHECK(contains(type_error(1.5), "'a' is no tensor (Double)"));
  CHECK(contains(type_error(torch::Tensor()), "'a' is no tensor"));
  CHECK(contains(type_error(torch::eye(2).to_sparse()),
                 "'a' is a Sparse tensor on cpu, expected a dense one"));
  CHECK(contains(type_error(at::_nested_tensor_from_tensor_list({base})),
                 "'a' is a nested tensor on cpu, expected a dense one"));
  CHECK(contains(type_error(count(2, torch::kComplexDouble)),
                 "'a' is complex128, a dtype that the format does not have"));
  const auto refused = [&](const dp::StateDict& dict) {
    return message_of<c10::ValueError>(
        [&] { dp::save_safetensors(dict, path); });
  };
  CHECK(contains(refused({{"__metadata__", base}}), "cannot be the name"));
  for (const dp::StateDict& dict :
       {dp::StateDict({{"b", base}, {"a", base}}),
        dp::StateDict(
            {{"a", base.narrow(0, 0, 4)}, {"b", base.narrow(0, 3, 3)}}),
        dp::StateDict(
            {{"a", base}, {"c", count(2)}, {"b", base.view({2, 3})}})}) {
    CHECK(
        contains(refused(dict), "save_safetensors: 'a' and 'b' share memory"));
  }
  CHECK(folder.files() == 0);
  dp::save_safetensors(
      {{"a", base.narrow(0, 0, 3)}, {"b", base.narrow(0, 3, 3)}}, path);
  dp::save_safetensors({{"a", base}, {"b", base}}, path,
                       dp::SaveSafetensorsOptions().copy_shared(true));
  CHECK(
      std::filesystem::file_size(path) ==
      8 +
          8 * ((2 * std::string(
                        R"("a":{"dtype":"F32","shape":[6],"data_offsets":[24,48]},)")
                        .size() +
                1 + 7) /
               8) +
          48);
}
