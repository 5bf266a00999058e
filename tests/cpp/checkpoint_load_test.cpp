#include <dataparallel/checkpoint.h>
#include <dataparallel/simulated.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/values.h"

using dataparallel::CheckpointError;
using dataparallel::find_state_dict;
using dataparallel::LoadOptions;
using dataparallel::make_mapping;
using dataparallel::tensor_at;
using test::message_of;
using torch::Tensor;

namespace {

namespace fs = std::filesystem;

std::string data(const std::string& name) {
  return std::string(TEST_DATA) + "/checkpoints/" + name;
}

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A file of its own for a test, removed at its end.
class TemporaryFile {
 public:
  TemporaryFile()
      : path_((fs::temp_directory_path() /
               ("checkpoint_load_test_" + std::to_string(::getpid()) + "_" +
                std::to_string(count_++)))
                  .string()) {}
  ~TemporaryFile() { fs::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  static inline int count_ = 0;
  std::string path_;
};

/// What make_checkpoints.py put into every file.
Tensor weight() {
  return torch::arange(6, torch::kFloat).view({2, 3});
}

c10::IValue cpu_load(const std::string& name) {
  return dataparallel::load(data(name), LoadOptions().map_location("cpu"));
}

std::vector<std::string> keys_of(const c10::IValue& mapping) {
  std::vector<std::string> keys;
  for (const auto& item : mapping.toGenericDict()) {
    keys.push_back(item.key().toStringRef());
  }
  return keys;
}

}  // namespace

TEST_CASE("a nested checkpoint has Python's values in Python's order",
          "[checkpoint][R01][load]") {
  const auto* name = GENERATE("zip.pt", "legacy.pt", "python2.pt", "cuda7.pt");
  const auto value = cpu_load(name);
  CHECK(keys_of(value) == std::vector<std::string>{"model", "optimizer",
                                                   "epoch", "best", "classes"});
  const auto root = value.toGenericDict();
  CHECK(root.at("epoch").toInt() == 3);
  CHECK(root.at("best").toDouble() == 0.5);
  CHECK(root.at("classes").toTupleRef().elements()[1].toStringRef() == "dog");

  const auto model = root.at("model").toGenericDict();
  CHECK(dataparallel::class_name(model) == "collections.OrderedDict");
  const auto metadata = dataparallel::attributes(model).at("_metadata");
  CHECK(metadata.toGenericDict().at("").toGenericDict().at("version").toInt() ==
        1);
  CHECK(torch::equal(tensor_at(value, {"model", "linear.weight"}), weight()));
  CHECK(dataparallel::opaque_entries(value).empty());
}

TEST_CASE("every format gives the same state_dict", "[checkpoint][R27][load]") {
  const auto* name = GENERATE("zip.pt", "legacy.pt", "python2.pt", "module.pt",
                              "script.pt", "model.safetensors");
  const auto state = find_state_dict(cpu_load(name));
  REQUIRE(state.size() == 3);
  CHECK(torch::equal(state.at("linear.weight"), weight()));
  CHECK(torch::equal(state.at("linear.bias"), torch::tensor({-1.f, 1.f})));
  CHECK(torch::equal(state.at("mean"), torch::zeros({2})));
  for (const auto& [key, value] : state) {
    CHECK_FALSE(value.toTensor().requires_grad());
  }
}

TEST_CASE("tensors that shared a storage share it after loading",
          "[checkpoint][load]") {
  const auto* name = GENERATE("zip.pt", "legacy.pt", "python2.pt");
  const bool mmap = GENERATE(true, false);
  const auto value = dataparallel::load(data(name), LoadOptions().mmap(mmap));
  const Tensor whole = tensor_at(value, {"model", "linear.weight"});
  const Tensor view = tensor_at(value, {"optimizer", "state", "0", "momentum"});
  CHECK(view.storage_offset() == 3);
  CHECK(whole.is_alias_of(view));
  view.fill_(7);
  CHECK(whole[1][0].item<float>() == 7);
  CHECK(whole[0][2].item<float>() == 2);
}

TEST_CASE("the tag of a device that is not there is an error that names it",
          "[checkpoint][R15][map_location]") {
  const auto message = message_of<CheckpointError>(
      [] { dataparallel::load(data("unknown_device.pt")); });
  CHECK_THAT(message, Catch::Contains("tagged \"warp:1\""));
  CHECK_THAT(message, Catch::Contains("devices: cpu"));
  CHECK_THAT(message, Catch::Contains("map_location(\"cpu\")"));
  CHECK_THAT(message, Catch::Contains("['model']"));
  if (torch::cuda::device_count() <= 7) {
    CHECK_THAT(message_of<CheckpointError>(
                   [] { dataparallel::load(data("cuda7.pt")); }),
               Catch::Contains("tagged \"cuda:7\""));
  }
}

TEST_CASE("map_location takes a device, a map and a function",
          "[checkpoint][map_location]") {
  dataparallel::simulated::start();
  const at::Device first("sim:0");
  const at::Device second("sim:1");
  const auto* name = GENERATE("cuda7.pt", "unknown_device.pt");
  const std::string tag = std::string(name) == "cuda7.pt" ? "cuda:7" : "warp:1";
  const auto device_of = [&](const LoadOptions& options) {
    const auto value = dataparallel::load(data(name), options);
    const Tensor tensor = tensor_at(value, {"model", "linear.weight"});
    CHECK(torch::equal(tensor.cpu(), weight()));
    const Tensor view =
        tensor_at(value, {"optimizer", "state", "0", "momentum"});
    CHECK(view.is_alias_of(tensor));
    return tensor.device();
  };
  CHECK(device_of(LoadOptions().map_location("cpu")) == at::kCPU);
  CHECK(device_of(LoadOptions().map_location(at::kCPU)) == at::kCPU);
  CHECK(device_of(LoadOptions().map_location(second)) == second);
  CHECK(device_of(LoadOptions().map_location(std::string("sim:1"))) == second);
  CHECK(device_of(LoadOptions().map_location({{tag, "sim:1"}})) == second);
  CHECK(device_of(LoadOptions().map_location(
            std::map<std::string, std::string>{{tag, "cpu"}})) == at::kCPU);
  std::vector<std::string> tags;
  CHECK(device_of(LoadOptions().map_location([&](const std::string& asked) {
          tags.push_back(asked);
          return std::optional<at::Device>(first);
        })) == first);
  CHECK(tags == std::vector<std::string>{tag});
}

TEST_CASE("a bare device type means the current device",
          "[checkpoint][map_location]") {
  dataparallel::simulated::start();
  const c10::DeviceGuard guard(at::Device("sim:1"));
  const auto value =
      dataparallel::load(data("zip.pt"), LoadOptions().map_location("sim"));
  CHECK(tensor_at(value, {"model", "mean"}).device() == at::Device("sim:1"));
}

TEST_CASE("one rule of map_location serves all formats",
          "[checkpoint][map_location]") {
  dataparallel::simulated::start();
  const auto* name = GENERATE("zip.pt", "legacy.pt", "python2.pt", "module.pt",
                              "script.pt", "model.safetensors");
  const auto state = find_state_dict(dataparallel::load(
      data(name), LoadOptions().map_location({{"cpu", "sim:2"}})));
  CHECK(state.at("linear.weight").device() == at::Device("sim:2"));
  CHECK(torch::equal(state.at("linear.weight").cpu(), weight()));
  const auto meta = find_state_dict(
      dataparallel::load(data(name), LoadOptions().map_location("meta")));
  CHECK(meta.at("linear.weight").is_meta());
  CHECK(meta.at("linear.weight").sizes() == weight().sizes());
}

TEST_CASE("a map_location that cannot be is an error",
          "[checkpoint][map_location]") {
  dataparallel::simulated::start();
  CHECK_THAT(message_of<CheckpointError>([] {
               dataparallel::load(data("zip.pt"),
                                  LoadOptions().map_location("sim:99"));
             }),
             Catch::Contains("tagged \"cpu\", which map_location maps to "
                             "sim:99"));
  CHECK_THAT(message_of<CheckpointError>([] {
               dataparallel::load(data("zip.pt"), LoadOptions().map_location(
                                                      at::Device("cuda:999")));
             }),
             Catch::Contains("which map_location maps to cuda:-25"));
  const auto keeps = LoadOptions().map_location(
      [](const std::string&) { return std::optional<at::Device>(); });
  const auto value = dataparallel::load(data("zip.pt"), keeps);
  CHECK(tensor_at(value, {"model", "mean"}).is_cpu());
}

TEST_CASE("a text that names no device is an error, not another device",
          "[checkpoint][map_location]") {
  using Devices = std::map<std::string, std::string>;
  const std::string text = GENERATE(
      "warp:1", "cuda:256", "cuda:128", "cuda:-1", "cuda:", "cuda:01",
      "cpu:256", "cuda:4294967296", "cuda:99999999999999999999", "cuda:1x", "");
  const std::string expected =
      "\"" + text + "\", expected a device as \"cpu\" or \"cuda:1\"";
  INFO(text);
  CHECK_THAT(message_of<c10::ValueError>(
                 [&] { LoadOptions().map_location(text.c_str()); }),
             Catch::Contains("LoadOptions: map_location is " + expected));
  CHECK_THAT(
      message_of<c10::ValueError>([&] { LoadOptions().map_location(text); }),
      Catch::Contains("map_location is " + expected));
  CHECK_THAT(message_of<c10::ValueError>([&] {
               LoadOptions().map_location(Devices{{"cuda:1", text}});
             }),
             Catch::Contains("map_location[\"cuda:1\"] is " + expected));
  if (text.substr(0, 1) == "c") {
    CHECK_THAT(message_of<c10::ValueError>([&] {
                 LoadOptions().map_location(Devices{{text, "cpu"}});
               }),
               Catch::Contains("has the tag \"" + text + "\", expected one"));
  }
}

TEST_CASE("a storage's tag that names no device is an error",
          "[checkpoint][map_location]") {
  dataparallel::simulated::start();
  const std::string tag = GENERATE("sim:256", "sim:999", "sim:-1", "cpu:256");
  INFO(tag);
  const auto legacy = bytes_of(data("cuda7.pt"));
  std::string file(legacy.begin(), legacy.end());
  const size_t at = file.find("cuda:7");
  file.replace(at, 6, tag);
  file[at - 4] = static_cast<char>(tag.size());
  CHECK_THAT(message_of<CheckpointError>(
                 [&] { dataparallel::load(file.data(), file.size()); }),
             Catch::Contains("tagged \"" + tag + "\", and that device is not"));
  CHECK_NOTHROW(dataparallel::load(file.data(), file.size(),
                                   LoadOptions().map_location("cpu")));
}

TEST_CASE("a file may be removed or replaced after loading",
          "[checkpoint][mmap]") {
  TemporaryFile file;
  fs::copy_file(data("zip.pt"), file.path());
  const auto value = dataparallel::load(file.path());
  SECTION("removed") {
    fs::remove(file.path());
  }
  SECTION("replaced") {
    TemporaryFile other;
    std::ofstream(other.path()) << std::string(5000, 'x');
    fs::rename(other.path(), file.path());
  }
  CHECK(torch::equal(tensor_at(value, {"model", "linear.weight"}), weight()));
}

TEST_CASE("writing to loaded tensors leaves the file alone",
          "[checkpoint][mmap]") {
  const auto before = bytes_of(data("zip.pt"));
  const auto value = dataparallel::load(data("zip.pt"));
  tensor_at(value, {"model", "linear.weight"}).fill_(5);
  CHECK(bytes_of(data("zip.pt")) == before);
  const auto again = dataparallel::load(data("zip.pt"));
  CHECK(torch::equal(tensor_at(again, {"model", "linear.weight"}), weight()));
}

TEST_CASE("without mmap nothing depends on the file", "[checkpoint][mmap]") {
  TemporaryFile file;
  fs::copy_file(data("zip.pt"), file.path());
  const auto value = dataparallel::load(file.path(), LoadOptions().mmap(false));
  std::ofstream(file.path(), std::ios::trunc) << "short";
  CHECK(torch::equal(tensor_at(value, {"model", "linear.weight"}), weight()));
}

TEST_CASE("streams are read from where they are", "[checkpoint][load]") {
  const auto bytes = bytes_of(data("zip.pt"));
  std::istringstream stream("before" + std::string(bytes.begin(), bytes.end()));
  stream.seekg(6);
  CHECK(torch::equal(
      tensor_at(dataparallel::load(stream), {"model", "linear.weight"}),
      weight()));
}

TEST_CASE("a stream that cannot seek is read to its end",
          "[checkpoint][load]") {
  class NoSeeking : public std::stringbuf {
   public:
    using std::stringbuf::stringbuf;
    pos_type seekoff(off_type, std::ios::seekdir, std::ios::openmode) override {
      return -1;
    }
    pos_type seekpos(pos_type, std::ios::openmode) override { return -1; }
  };
  const auto bytes = bytes_of(data("legacy.pt"));
  NoSeeking buffer(std::string(bytes.begin(), bytes.end()));
  std::istream stream(&buffer);
  CHECK(torch::equal(
      tensor_at(dataparallel::load(stream), {"model", "linear.weight"}),
      weight()));
}

TEST_CASE("an error carries file, key and offset", "[checkpoint][load]") {
  try {
    dataparallel::load(data("cuda7.pt"),
                       LoadOptions().map_location({{"cuda:7", "cuda:99"}}));
    FAIL("loaded");
  } catch (const CheckpointError& error) {
    CHECK(error.file() == data("cuda7.pt"));
    CHECK_THAT(error.key(), Catch::Contains("['model']['"));
    CHECK(error.offset().has_value());
  }
}

TEST_CASE("the caller's grad mode and inference mode stay",
          "[checkpoint][load]") {
  {
    const torch::NoGradGuard guard;
    dataparallel::load(data("zip.pt"));
    CHECK_FALSE(torch::GradMode::is_enabled());
  }
  CHECK(torch::GradMode::is_enabled());
  const c10::InferenceMode guard;
  const auto value = dataparallel::load(data("zip.pt"));
  CHECK(tensor_at(value, {"model", "mean"}).is_inference());
}

TEST_CASE("inspect reads no tensor and needs no device",
          "[checkpoint][inspect]") {
  const auto* name = GENERATE("cuda7.pt", "unknown_device.pt", "zip.pt");
  const auto info = dataparallel::inspect(data(name));
  CHECK(info.kind == (std::string(name) == "zip.pt" ? "zip" : "legacy"));
  REQUIRE(info.tensors.size() == 4);
  CHECK(info.tensors[1].key == "model.linear.weight");
  CHECK(info.tensors[1].shape == std::vector<int64_t>{2, 3});
  CHECK(info.tensors[1].nbytes == 24);
  CHECK(info.tensors[1].dtype == torch::kFloat);
  CHECK(info.tensors[1].device == (std::string(name) == "zip.pt" ? "cpu"
                                   : std::string(name) == "cuda7.pt"
                                       ? "cuda:7"
                                       : "warp:1"));
  CHECK(info.tensors[3].key == "optimizer.state.0.momentum");
  CHECK(info.unknown_classes.empty());
}

TEST_CASE("inspect knows every kind", "[checkpoint][inspect]") {
  CHECK(dataparallel::inspect(data("script.pt")).kind == "TorchScript");
  const auto safe = dataparallel::inspect(data("model.safetensors"));
  CHECK(safe.kind == "safetensors");
  CHECK(safe.metadata.at("format") == "pt");
  TemporaryFile file;
  torch::nn::Linear linear(3, 2);
  torch::save(linear, file.path());
  CHECK(dataparallel::inspect(file.path()).kind == "C++ archive");
  const auto module = dataparallel::inspect(data("module.pt"));
  CHECK(module.unknown_classes ==
        std::vector<std::string>{"__main__.Net",
                                 "torch.nn.modules.linear.Linear"});
}

TEST_CASE("archives that C++ wrote are read", "[checkpoint][load]") {
  TemporaryFile file;
  SECTION("of a module") {
    torch::nn::Sequential net(torch::nn::Linear(3, 2),
                              torch::nn::BatchNorm1d(2));
    torch::save(net, file.path());
    const auto state = find_state_dict(dataparallel::load(file.path()));
    CHECK(state.keys() ==
          std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias",
                                   "1.running_mean", "1.running_var",
                                   "1.num_batches_tracked"});
    for (const auto& parameter : net->named_parameters()) {
      CHECK(torch::equal(state.at(parameter.key()), parameter.value()));
    }
  }
  SECTION("of tensors") {
    torch::save(std::vector<Tensor>{torch::ones(2), weight()}, file.path());
    const auto value = dataparallel::load(file.path());
    CHECK(torch::equal(tensor_at(value, {"0"}), torch::ones(2)));
    CHECK(torch::equal(tensor_at(value, {"1"}), weight()));
  }
  SECTION("of an optimizer") {
    torch::nn::Linear net(3, 2);
    torch::optim::Adam adam(net->parameters(), 0.25);
    net->weight.mutable_grad() = torch::ones({2, 3});
    adam.step();
    torch::save(adam, file.path());
    const auto value = dataparallel::load(file.path());
    bool found = false;
    for (const auto& item : value.toGenericDict()) {
      const std::string& key = item.key().toStringRef();
      if (key.find("options.lr") != std::string::npos) {
        CHECK(item.value().toDouble() == 0.25);
        found = true;
      }
    }
    CHECK(found);
  }
}

TEST_CASE("find_state_dict takes the one there is, or asks",
          "[checkpoint][find_state_dict]") {
  const auto state = [](double number) {
    auto mapping = make_mapping("dict");
    mapping.insert("w", torch::tensor(number));
    return mapping;
  };
  const auto number = [](const dataparallel::StateDict& found) {
    return found.at("w").item<double>();
  };
  auto root = make_mapping("dict");

  SECTION("the value itself") {
    CHECK(number(find_state_dict(state(1))) == 1);
  }
  SECTION("whatever its name") {
    root.insert("epoch", 1);
    root.insert("weird", state(2));
    CHECK(number(find_state_dict(root)) == 2);
  }
  SECTION("two levels down") {
    auto inner = make_mapping("dict");
    inner.insert("state_dict", state(3));
    inner.insert("model_args", make_mapping("dict"));
    root.insert("model", inner);
    CHECK(number(find_state_dict(root)) == 3);
    CHECK(number(find_state_dict(root, "model.state_dict")) == 3);
    CHECK_THAT(
        message_of<CheckpointError>([&] { find_state_dict(root, "model.x"); }),
        Catch::Contains("'state_dict', 'model_args'"));
  }
  SECTION("not an optimizer's") {
    auto optimizer = make_mapping("dict");
    optimizer.insert("state", state(4));
    optimizer.insert("param_groups",
                     c10::impl::GenericList(c10::AnyType::get()));
    root.insert("optimizer", optimizer);
    root.insert("net", state(5));
    CHECK(number(find_state_dict(root)) == 5);
  }
  SECTION("the usual name before others") {
    root.insert("random", state(6));
    root.insert("model_state_dict", state(7));
    CHECK(number(find_state_dict(root)) == 7);
  }
  SECTION("not a generator's") {
    root.insert("rng_state", state(6));
    root.insert("model_state", state(7));
    CHECK(number(find_state_dict(root)) == 7);
  }
  SECTION("several: an error that lists them") {
    root.insert("generator", state(8));
    root.insert("discriminator", state(9));
    const auto message =
        message_of<CheckpointError>([&] { find_state_dict(root); });
    CHECK_THAT(message, Catch::Contains("2 state_dicts"));
    CHECK_THAT(message, Catch::Contains("\"generator\", \"discriminator\""));
    CHECK(number(find_state_dict(root, "discriminator")) == 9);
  }
  SECTION("a model and its average: an error, too") {
    root.insert("model", state(8));
    root.insert("ema", state(9));
    CHECK_THAT(message_of<CheckpointError>([&] { find_state_dict(root); }),
               Catch::Contains("\"model\", \"ema\""));
  }
  SECTION("a key with dots in it") {
    root.insert("a.b", state(10));
    CHECK(number(find_state_dict(root, "a.b")) == 10);
  }
  SECTION("keys that are no text, by what an error calls them") {
    root.insert(0, state(11));
    root.insert(0.5, state(12));
    root.insert("1", state(13));
    root.insert(1, state(14));
    CHECK_THAT(message_of<CheckpointError>([&] { find_state_dict(root); }),
               Catch::Contains("\"0\", \"0.5\", \"1\", \"1\""));
    CHECK(number(find_state_dict(root, "0")) == 11);
    CHECK(number(find_state_dict(root, "0.5")) == 12);
    CHECK(number(find_state_dict(root, "1")) == 13);
  }
  SECTION("of a module without tensors") {
    CHECK(find_state_dict(make_mapping("collections.OrderedDict")).empty());
    root.insert("", make_mapping("dict"));
    CHECK_THROWS_AS(find_state_dict(root), CheckpointError);
  }
  SECTION("a key that ends with a dot is another one") {
    root.insert("model", state(15));
    CHECK_THAT(
        message_of<CheckpointError>([&] { find_state_dict(root, "model."); }),
        Catch::Contains("there is no key \"model.\""));
    root.insert("model.", state(16));
    CHECK(number(find_state_dict(root, "model.")) == 16);
  }
  SECTION("none: an error with the keys") {
    root.insert("epoch", 1);
    CHECK_THAT(message_of<CheckpointError>([&] { find_state_dict(root); }),
               Catch::Contains("its keys: 'epoch'"));
    CHECK_THAT(message_of<CheckpointError>([&] { find_state_dict(3); }),
               Catch::Contains("the checkpoint, an int, has no mapping"));
    auto mixed = state(11);
    mixed.insert("layer",
                 dataparallel::from_opaque(
                     c10::make_intrusive<dataparallel::Opaque>("q.Q")));
    root.insert("net", mixed);
    CHECK_THAT(message_of<CheckpointError>([&] { find_state_dict(root); }),
               Catch::Contains("opaque objects: q.Q at ['net']['layer']"));
  }
}

TEST_CASE("asking for what is no tensor is an error with path and class",
          "[checkpoint][R29][python_values]") {
  auto root = make_mapping("dict");
  root.insert("rng", dataparallel::from_opaque(
                         c10::make_intrusive<dataparallel::Opaque>("my.Rng")));
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(weight());
  root.insert("list", list);
  CHECK(torch::equal(tensor_at(root, {"list", "0"}), weight()));
  CHECK_THAT(message_of<c10::TypeError>([&] { tensor_at(root, {"rng"}); }),
             Catch::Contains("['rng'] is an opaque object of class my.Rng"));
  CHECK_THAT(message_of<c10::TypeError>([&] { tensor_at(root, {"list"}); }),
             Catch::Contains("['list'] is a list"));
  CHECK_THAT(message_of<c10::ValueError>([&] { tensor_at(root, {"x"}); }),
             Catch::Contains("there is no ['x']"));
  const auto entries = dataparallel::opaque_entries(root);
  REQUIRE(entries.size() == 1);
  CHECK(entries[0].path == "['rng']");
  CHECK(entries[0].class_name == "my.Rng");
}

TEST_CASE("a mapping keeps its class and attributes through a copy",
          "[checkpoint][python_values]") {
  auto carried = make_mapping("dict");
  carried.insert("_metadata", 5);
  auto mapping = make_mapping("collections.OrderedDict", carried);
  mapping.insert("a", 1);
  const auto copy = mapping.copy();
  CHECK(dataparallel::class_name(copy) == "collections.OrderedDict");
  CHECK(dataparallel::attributes(copy).at("_metadata").toInt() == 5);
  CHECK(dataparallel::class_name(make_mapping("dict")) == "dict");
  CHECK_THAT(message_of<c10::ValueError>([] { make_mapping("list"); }),
             Catch::Contains("class_name is list"));
  CHECK_THAT(
      message_of<c10::ValueError>([&] { make_mapping("dict", carried); }),
      Catch::Contains("which can have none"));
}

TEST_CASE("what contains itself in the file is freed with the value",
          "[checkpoint][load]") {
  // cycles.pt: {"list": a list of itself and the tensor, "net": a module with
  // hooks that are its own methods}, of the same tensor.
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor(
      (c10::intrusive_ptr<c10::TensorImpl>()));
  {
    const auto value = cpu_load("cycles.pt");
    const auto entries = dataparallel::opaque_entries(value);
    REQUIRE(entries.size() == 1);
    CHECK(entries[0].path == "['list'][1]");
    CHECK(entries[0].class_name == "dataparallel.BackReference");
    CHECK(torch::equal(tensor_at(value, {"net", "weight"}), weight()));
    tensor = tensor_at(value, {"list", "0"}).getIntrusivePtr();
    CHECK(tensor.use_count() == 1);
  }
  CHECK(tensor.expired());
}

TEST_CASE("what tensors had in Python alone is listed",
          "[checkpoint][python_values]") {
  const auto value = cpu_load("attributes.pt");
  CHECK(torch::equal(tensor_at(value, {"weight"}), weight()));
  const auto entries = dataparallel::dropped_entries(value);
  REQUIRE(entries.size() == 4);
  CHECK(entries[0].path == "['weight'].note");
  CHECK(entries[0].class_name == "str");
  CHECK(entries[1].path == "['other']");
  CHECK(entries[1].class_name == "__main__.Subclass");
  CHECK(entries[2].path == "['other'].note");
  CHECK(entries[3].path == "['other'].owners");
  CHECK(entries[3].class_name == "list");
  CHECK(dataparallel::opaque_entries(value).empty());

  const auto info = dataparallel::inspect(data("attributes.pt"));
  CHECK(info.dropped.size() == 4);
  CHECK(info.unknown_classes == std::vector<std::string>{"__main__.Subclass"});
  CHECK(info.tensors[0].requires_grad);
}
