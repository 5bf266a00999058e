// The main job: trains a small network on real digits with DataParallel,
// saves the wrapped weights and reads them back into the bare network.

#include <dataparallel/dataparallel.h>
#include <fmt/core.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "device_list.h"
#include "digit_net.h"
#include "digits.h"
#include "progress.h"
#include "simulated_report.h"
#include "train_arguments.h"

namespace demo {
namespace {

using Model = dataparallel::DataParallel<DigitNet>;

constexpr int kSuccess = 0;
constexpr int kFailure = 1;
constexpr int kUsage = 2;

/// One sentence on standard error. Unlike fmt's print it never throws.
void complain(const char* text) {
  std::fprintf(stderr, "train: %s\n", text);
}

/// A file name for this run alone; the file goes with the object.
class TemporaryFile {
 public:
  TemporaryFile()
      : path_(std::filesystem::temp_directory_path() / "digits-XXXXXX") {
    const int descriptor = mkstemp(path_.data());
    TORCH_CHECK(descriptor >= 0, "train: cannot make a file like ", path_);
    close(descriptor);
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Means over the samples seen since it was made.
class RunningMeans {
 public:
  void add(int64_t samples, double loss, int64_t correct) {
    samples_ += samples;
    loss_sum_ += loss * static_cast<double>(samples);
    correct_ += correct;
  }

  std::string text() const {
    const std::chrono::duration<double> elapsed =
        std::chrono::steady_clock::now() - start_;
    const auto samples = static_cast<double>(samples_);
    return fmt::format("loss {:.4f}  accuracy {:5.1f} %  {:5.0f} samples/s",
                       loss_sum_ / samples,
                       100 * static_cast<double>(correct_) / samples,
                       samples / elapsed.count());
  }

 private:
  std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
  int64_t samples_ = 0;
  int64_t correct_ = 0;
  double loss_sum_ = 0;
};

int64_t count_correct(const torch::Tensor& logits,
                      const torch::Tensor& labels) {
  return logits.argmax(/*dim=*/1).eq(labels).sum().item<int64_t>();
}

/// Trains epoch by epoch; the learning rate falls in a straight line to 0.
class Trainer {
 public:
  Trainer(Model model, Digits digits, const TrainArguments& arguments)
      : model_(std::move(model)),
        digits_(std::move(digits)),
        arguments_(arguments),
        optimizer_(model_->parameters(), arguments.learning_rate) {}

  void train() {
    model_->train();
    // The first step tells which device was given what.
    model_->module()->announce_forward(true);
    for (int64_t epoch = 1; epoch <= arguments_.epochs; ++epoch) {
      train_epoch(epoch);
    }
  }

 private:
  void train_epoch(int64_t epoch) {
    const auto order = torch::randperm(digits_.size());
    const auto batches = order.split(arguments_.batch_size);
    const auto steps = static_cast<int64_t>(batches.size());
    ProgressBar progress(fmt::format("epoch {:2}/{}", epoch, arguments_.epochs),
                         steps);
    RunningMeans means;
    for (int64_t step = 0; step < steps; ++step) {
      const auto done = static_cast<double>((epoch - 1) * steps + step);
      const auto total = static_cast<double>(arguments_.epochs * steps);
      set_learning_rate(arguments_.learning_rate * (1 - done / total));
      train_step(batches[step], means);
      progress.update(step + 1, means.text());
    }
    progress.finish(means.text());
  }

  void train_step(const torch::Tensor& rows, RunningMeans& means) {
    std::atomic<int64_t> correct = 0;  // the replicas call loss_fn at once
    const auto loss_fn = [&correct](const torch::Tensor& logits,
                                    const torch::Tensor& labels) {
      correct += count_correct(logits.detach(), labels);
      return torch::nn::functional::cross_entropy(logits, labels);
    };
    optimizer_.zero_grad();
    const auto loss = model_->forward_backward(
        loss_fn, digits_.images.index({rows}), digits_.labels.index({rows}));
    optimizer_.step();
    model_->module()->announce_forward(false);
    means.add(rows.size(0), loss.item<double>(), correct);
  }

  void set_learning_rate(double learning_rate) {
    for (auto& group : optimizer_.param_groups()) {
      group.options().set_lr(learning_rate);
    }
  }

  Model model_;
  Digits digits_;
  const TrainArguments& arguments_;
  torch::optim::Adam optimizer_;
};

/// How many of the digits `module`, wrapped or bare, gets right.
template <class ModuleHolder>
int64_t evaluate(ModuleHolder& module, const Digits& digits) {
  const torch::NoGradGuard no_grad;
  module->eval();
  const torch::Tensor logits = module(digits.images);
  return count_correct(logits.cpu(), digits.labels);
}

/// The accuracy of a new network, on the CPU, with the weights saved from the
/// wrapped one, in whose state_dict every name begins with "module.".
int64_t evaluate_reloaded(const Model& model, const Digits& digits,
                          const std::string& path) {
  dataparallel::save(dataparallel::state_dict(*model), path);
  const auto weights =
      dataparallel::load(path, dataparallel::LoadOptions().map_location("cpu"));
  DigitNet bare;
  dataparallel::load_state_dict(
      *bare,
      dataparallel::strip_prefix(dataparallel::find_state_dict(weights)));
  return evaluate(bare, digits);
}

void print_accuracy(const char* what, int64_t correct, const Digits& digits) {
  fmt::print(
      "{}: {:.2f} % ({} of {})\n", what,
      100.0 * static_cast<double>(correct) / static_cast<double>(digits.size()),
      correct, digits.size());
}

int run(const TrainArguments& arguments) {
  const auto devices = arguments.devices_set ? parse_devices(arguments.devices)
                                             : dataparallel::default_devices();
  const auto digits = split_digits(read_digits(arguments.data));
  // Full precision everywhere: the CPU is to give the same answers.
  at::globalContext().setAllowTF32CuDNN(false);
  torch::manual_seed(arguments.seed);
  std::optional<TemporaryFile> temporary;
  if (arguments.save_path.empty()) {
    temporary.emplace();
  }

  DigitNet net;
  net->to(devices.front());
  Model model(net, dataparallel::DataParallelOptions().devices(devices));
  fmt::print("Devices: {}\n", device_names(devices));
  fmt::print("Digits: {} to train, {} held out\n", digits.train.size(),
             digits.held_out.size());
  std::fflush(stdout);

  Trainer(model, digits.train, arguments).train();

  const auto wrapped = evaluate(model, digits.held_out);
  print_accuracy("Held-out accuracy, wrapped", wrapped, digits.held_out);
  const auto bare =
      evaluate_reloaded(model, digits.held_out,
                        temporary ? temporary->path() : arguments.save_path);
  print_accuracy("Held-out accuracy, reloaded without the wrapper", bare,
                 digits.held_out);
  if (!arguments.save_path.empty()) {
    fmt::print("Saved: {}\n", arguments.save_path);
  }
  const bool raceless = report_simulated(devices);
  if (bare != wrapped) {
    complain("the reloaded network's accuracy differs");
  }
  return raceless && bare == wrapped ? kSuccess : kFailure;
}

}  // namespace
}  // namespace demo

int main(int argc, char** argv) {
  demo::TrainArguments arguments;
  if (const auto status = demo::parse_arguments(argc, argv, arguments)) {
    return *status;
  }
  try {
    const int status = demo::run(arguments);
    TORCH_CHECK(std::fflush(stdout) == 0 && std::ferror(stdout) == 0,
                "the output cannot be written");
    return status;
  } catch (const c10::ValueError& error) {  // a bad list, file or wish
    demo::complain(error.what_without_backtrace());
    return demo::kUsage;
  } catch (const c10::Error& error) {
    demo::complain(error.what_without_backtrace());
  } catch (const std::exception& error) {
    demo::complain(error.what());
  }
  return demo::kFailure;
}
