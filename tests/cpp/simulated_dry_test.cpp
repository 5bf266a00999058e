#include <dataparallel/data_parallel.h>
#include <dataparallel/simulated_clock.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <memory>

#include "support/catch.h"
#include "support/oracle.h"

namespace {

namespace sim = dataparallel::simulated;
using torch::Tensor;

constexpr int64_t kDevices = 32;
const torch::Device kFirst(c10::DeviceType::PrivateUse1, 0);  // sim:0

sim::Options options() {
  return sim::Options().devices(kDevices).hardware(
      {.device = sim::h200(), .peer_link = sim::nvlink_4()});
}

/// A dry run while it lives; what is in use at its end is a failure.
class Dry {
 public:
  explicit Dry(const sim::Options& with = options()) {
    sim::start(sim::Options(with).dry_run(true));
  }
  ~Dry() {
    try {
      sim::start(sim::Options().devices(kDevices));
    } catch (const c10::Error& error) {
      FAIL_CHECK(error.what_without_backtrace());
    }
  }
  Dry(const Dry&) = delete;
  Dry& operator=(const Dry&) = delete;
};

std::vector<torch::Device> devices(int64_t count) {
  sim::start(options());
  std::vector<torch::Device> list;
  for (int64_t i = 0; i < count; ++i) {
    list.emplace_back("sim:" + std::to_string(i));
  }
  return list;
}

int64_t resident_bytes() {
  int64_t pages = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

using Conv = torch::nn::Conv2dOptions;

/// What ResNet-50 is made of.
struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(int64_t in, int64_t width, int64_t stride) {
    const int64_t out = 4 * width;
    body->push_back(torch::nn::Conv2d(Conv(in, width, 1).bias(false)));
    body->push_back(torch::nn::BatchNorm2d(width));
    body->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(true)));
    body->push_back(torch::nn::Conv2d(
        Conv(width, width, 3).stride(stride).padding(1).bias(false)));
    body->push_back(torch::nn::BatchNorm2d(width));
    body->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(true)));
    body->push_back(torch::nn::Conv2d(Conv(width, out, 1).bias(false)));
    body->push_back(torch::nn::BatchNorm2d(out));
    register_module("body", body);
    if (stride != 1 || in != out) {
      shortcut->push_back(
          torch::nn::Conv2d(Conv(in, out, 1).stride(stride).bias(false)));
      shortcut->push_back(torch::nn::BatchNorm2d(out));
      register_module("shortcut", shortcut);
    }
  }
  Tensor forward(const Tensor& x) {
    return torch::relu(body->forward(x) +
                       (shortcut->is_empty() ? x : shortcut->forward(x)));
  }
  torch::nn::Sequential body;
  torch::nn::Sequential shortcut;
};
TORCH_MODULE(Bottleneck);

struct ResNetImpl : torch::nn::Module {
  /// Bottlenecks in each stage.
  explicit ResNetImpl(const std::vector<int64_t>& blocks) {
    layers = torch::nn::Sequential(
        torch::nn::Conv2d(Conv(3, 64, 7).stride(2).padding(3).bias(false)),
        torch::nn::BatchNorm2d(64), torch::nn::ReLU(),
        torch::nn::MaxPool2d(
            torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
    int64_t in = 64;
    for (size_t stage = 0; stage < blocks.size(); ++stage) {
      const int64_t width = 64 << stage;
      for (int64_t i = 0; i < blocks[stage]; ++i) {
        layers->push_back(Bottleneck(in, width, stage > 0 && i == 0 ? 2 : 1));
        in = 4 * width;
      }
    }
    layers->push_back(torch::nn::AdaptiveAvgPool2d(1));
    layers->push_back(torch::nn::Flatten());
    layers->push_back(torch::nn::Linear(in, 1000));
    register_module("layers", layers);
  }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};
TORCH_MODULE(ResNet);

Tensor cross_entropy(const Tensor& y, const Tensor& labels) {
  return torch::nn::functional::cross_entropy(y, labels);
}

/// For replicas too: bottlenecks cannot clone themselves.
std::shared_ptr<ResNetImpl> resnet(const std::vector<int64_t>& blocks,
                                   torch::Device device) {
  auto net = std::make_shared<ResNetImpl>(blocks);
  net->to(device);
  return net;
}

}  // namespace

TEST_CASE("a dry run counts memory and does not take it", "[dry]") {
  devices(1);
  const Dry dry;
  const int64_t before = resident_bytes();
  const auto x = torch::empty({1 << 20, 1 << 12}, kFirst);  // 16 GiB
  const auto y = x.exp();
  const auto part = y.narrow(0, 10, 5).t();
  CHECK(y.sizes() == x.sizes());
  CHECK(part.sizes() == torch::IntArrayRef{1 << 12, 5});
  CHECK(part.data_ptr() > y.data_ptr());
  CHECK(part.data_ptr() != x.data_ptr());
  CHECK(sim::memory_allocated(kFirst) == int64_t{2} << 34);
  CHECK(resident_bytes() - before < 1 << 26);
}

TEST_CASE("a dry run is out of memory as a real one is", "[dry]") {
  devices(1);
  const Dry dry(options().memory_bytes(1 << 20));
  const auto x = torch::zeros({1 << 17}, kFirst);
  CHECK_THROWS_AS(x.repeat({2}), c10::OutOfMemoryError);
  CHECK_NOTHROW(x.exp());
}

TEST_CASE("values cannot be read in a dry run", "[dry]") {
  devices(1);
  const Dry dry;
  const auto x = torch::rand({4}, kFirst);
  CHECK_THROWS_WITH(x.sum().item<float>(), Catch::Contains("item: a dry run") &&
                                               Catch::Contains("dry_run"));
  CHECK_THROWS_WITH(x.cpu(), Catch::Contains("copy to the CPU: a dry run"));
  CHECK_THROWS_WITH(x.nonzero(), Catch::Contains("aten::nonzero: not in a dry "
                                                 "run"));
  CHECK_THROWS_AS(x.index({x > 0}), c10::NotImplementedError);
  CHECK_THROWS_AS(torch::equal(x, x), c10::Error);
  CHECK_THROWS_AS(at::_unique(x), c10::NotImplementedError);
  CHECK_NOTHROW(torch::ones({4}).to(kFirst).add_(x));
}

TEST_CASE("who touches the memory of a dry run crashes", "[dry]") {
  devices(1);
  const Dry dry;
  const auto x = torch::zeros({4}, kFirst);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    const volatile float read = *x.data_ptr<float>();
    _exit(read == 0 ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
}

TEST_CASE("what is in use when a dry run begins or ends is refused", "[dry]") {
  devices(1);
  {
    const auto real = torch::zeros({4}, kFirst);
    CHECK_THROWS_WITH(
        sim::start(options().dry_run(true)),
        Catch::Contains("dry_run is true, but 16 bytes of sim:0 are in use"));
    CHECK(real.sum().item<float>() == 0);
  }
  const Dry dry;
  const auto x = torch::zeros({4}, kFirst);
  CHECK_THROWS_WITH(sim::start(options()),
                    Catch::Contains("dry_run is false, but 16 bytes"));
  CHECK_NOTHROW(x.exp());
}

namespace {

/// The result and the gradients of a module, on any device.
std::vector<Tensor> run(const std::function<Tensor(const Tensor&)>& forward,
                        const Tensor& input) {
  Tensor x = input.detach();
  if (x.is_floating_point()) {
    x.requires_grad_();
  }
  const Tensor y = forward(x);
  y.sum().backward();
  return {y.detach(), x.grad()};  // the graph holds the parameters
}

template <class Module>
void check_shapes(const std::string& name, Module given, const Tensor& input) {
  auto owner = std::make_unique<Module>(std::move(given));
  Module& module = *owner;
  CAPTURE(name);
  const auto forward = [&](const Tensor& x) {
    if constexpr (requires { std::get<0>(module->forward(x)); }) {
      return std::get<0>(module->forward(x));
    } else {
      return module->forward(x);
    }
  };
  const auto expected = run(forward, input);
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : module->parameters()) {
    gradients.push_back(parameter.grad().clone());
  }
  const Dry dry;
  {
    module->zero_grad();
    module->to(kFirst);
    const auto got = run(forward, input.to(kFirst));
    for (size_t i = 0; i < got.size(); ++i) {
      CHECK(got[i].defined() == expected[i].defined());
      if (got[i].defined()) {
        CHECK(got[i].sizes() == expected[i].sizes());
        CHECK(got[i].dtype() == expected[i].dtype());
        CHECK(got[i].device() == kFirst);
      }
    }
    const auto parameters = module->parameters();
    REQUIRE(parameters.size() == gradients.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      CHECK(parameters[i].grad().sizes() == gradients[i].sizes());
    }
  }
  owner.reset();  // before the dry run ends
}

}  // namespace

TEST_CASE("layers have the shapes of the CPU in a dry run", "[dry]") {
  namespace nn = torch::nn;
  devices(1);
  const auto image = torch::rand({2, 4, 9, 7});
  const auto rows = torch::rand({3, 6});
  const auto steps = torch::rand({5, 3, 6});
  check_shapes("Linear", nn::Linear(6, 2), rows);
  check_shapes("Conv2d",
               nn::Conv2d(Conv(4, 6, 3).stride(2).padding(1).groups(2)), image);
  check_shapes("ConvTranspose2d",
               nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 6, 3)
                                       .stride(2)
                                       .padding(1)
                                       .output_padding(1)
                                       .groups(2)),
               image);
  check_shapes("BatchNorm2d", nn::BatchNorm2d(4), image);
  check_shapes("GroupNorm", nn::GroupNorm(2, 4), image);
  check_shapes("LayerNorm", nn::LayerNorm(nn::LayerNormOptions({6})), rows);
  check_shapes("MaxPool2d", nn::MaxPool2d(2), image);
  check_shapes("AvgPool2d", nn::AvgPool2d(2), image);
  check_shapes("AdaptiveAvgPool2d", nn::AdaptiveAvgPool2d(3), image);
  check_shapes("ReLU", nn::ReLU(), rows);
  const auto in_place = [] {
    return nn::Sequential(nn::Linear(6, 2), nn::ReLU(nn::ReLUOptions(true)));
  };
  check_shapes("ReLU in place", in_place(), rows);
  check_shapes("GELU", nn::GELU(), rows);
  check_shapes("Tanh", nn::Tanh(), rows);
  check_shapes("SiLU", nn::SiLU(), rows);
  check_shapes("Softmax", nn::Softmax(1), rows);
  check_shapes("LogSoftmax", nn::LogSoftmax(1), rows);
  check_shapes("Dropout", nn::Dropout(0.5), rows);
  check_shapes("Embedding", nn::Embedding(10, 3),
               torch::tensor({{1, 2}, {3, 4}}));
  check_shapes("LSTM", nn::LSTM(nn::LSTMOptions(6, 4).num_layers(2)), steps);
  check_shapes("GRU", nn::GRU(6, 4), steps);
}

TEST_CASE("attention, losses and optimizers run in a dry run", "[dry]") {
  devices(1);
  const Dry dry;
  namespace nn = torch::nn;
  nn::Linear net(6, 4);
  net->to(kFirst);
  const auto step = [&](auto& optimizer) {
    optimizer.zero_grad();
    const auto y = net(torch::rand({3, 6}, kFirst));
    const auto target = torch::rand({3, 4}, kFirst);
    CHECK(at::scaled_dot_product_attention(torch::rand({2, 3, 4}, kFirst),
                                           torch::rand({2, 5, 4}, kFirst),
                                           torch::rand({2, 5, 6}, kFirst))
              .sizes() == torch::IntArrayRef{2, 3, 6});
    (torch::mse_loss(y, target) + torch::l1_loss(y, target) +
     torch::smooth_l1_loss(y, target) + torch::huber_loss(y, target) +
     cross_entropy(
         y,
         torch::zeros({3}, torch::TensorOptions(torch::kLong).device(kFirst))) +
     torch::binary_cross_entropy_with_logits(y, target))
        .backward();
    optimizer.step();
  };
  torch::optim::SGD sgd(net->parameters(),
                        torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::Adam adam(net->parameters());
  torch::optim::AdamW adamw(net->parameters());
  for (int i = 0; i < 2; ++i) {
    CHECK_NOTHROW(step(sgd));
    CHECK_NOTHROW(step(adam));
    CHECK_NOTHROW(step(adamw));
  }
}

TEST_CASE("a dry run has the counters and the clock of a real one", "[dry]") {
  const auto list = devices(3);
  using Numbers = std::vector<double>;
  const auto measure = [&](bool dry) {
    Numbers numbers;
    sim::start(options().dry_run(dry));
    {
      const std::vector<int64_t> blocks{1, 1};
      dataparallel::DataParallel<ResNet> model(
          ResNet(resnet(blocks, list[0])), test::on(list),
          [&](torch::Device device) { return ResNet(resnet(blocks, device)); });
      const auto x = torch::zeros({6, 3, 32, 32}, list[0]);
      const auto labels =
          torch::zeros({6}, torch::TensorOptions(torch::kLong).device(list[0]));
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      const auto read = [&] {
        for (const auto& device : list) {
          numbers.push_back(static_cast<double>(sim::kernels_launched(device)));
          numbers.push_back(sim::busy_seconds(device));
          numbers.push_back(
              static_cast<double>(sim::bytes_copied(list[0], device)));
          numbers.push_back(
              static_cast<double>(sim::bytes_copied(device, list[0])));
          numbers.push_back(static_cast<double>(sim::memory_allocated(device)));
        }
      };
      for (int i = 0; i < 2; ++i) {
        sim::reset_counters();
        optimizer.zero_grad();
        model->forward_backward(cross_entropy, x, labels);
        optimizer.step();
      }
      numbers.push_back(sim::elapsed_seconds());
      read();
      cross_entropy(model(x), labels).backward();
      read();
    }
    return numbers;
  };
  const Numbers real = measure(false);
  const Numbers dry = measure(true);
  sim::start(options());
  CHECK(real == dry);
}

TEST_CASE("ResNet-50 at a real batch on 32 devices is a matter of seconds",
          "[dry]") {
  const auto list = devices(kDevices);
  const Dry dry;
  const std::vector<int64_t> blocks{3, 4, 6, 3};
  dataparallel::DataParallel<ResNet> model(
      ResNet(resnet(blocks, list[0])), test::on(list),
      [&](torch::Device device) { return ResNet(resnet(blocks, device)); });
  const auto x = torch::zeros({kDevices * 128, 3, 224, 224}, list[0]);
  const auto labels = torch::zeros(
      {kDevices * 128}, torch::TensorOptions(torch::kLong).device(list[0]));
  const bool in_replicas = GENERATE(true, false);
  sim::reset_counters();
  const auto start = std::chrono::steady_clock::now();
  if (in_replicas) {
    model->forward_backward(cross_entropy, x, labels);
  } else {
    cross_entropy(model(x), labels).backward();
  }
  const std::chrono::duration<double> real =
      std::chrono::steady_clock::now() - start;
  CAPTURE(in_replicas, sim::elapsed_seconds(), real.count());
  // 128 images of 3 x 4.1 GFLOP forward and backward, at TF32's peak, and more
  // for the memory.
  CHECK(sim::busy_seconds(list[1]) > 128 * 3 * 2 * 4.0e9 / 494.7e12);
  CHECK(sim::busy_seconds(list[1]) < 0.2);
  CHECK(sim::peak_memory(list[1]) > 10'000'000'000);
  CHECK(sim::peak_memory(list[1]) < 30'000'000'000);
  CHECK(real.count() < 120);
}
