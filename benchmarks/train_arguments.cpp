#include "train_arguments.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>

namespace demo {
namespace {

constexpr int64_t kMaxCount = 1'000'000;
constexpr uint64_t kMaxSeed = std::numeric_limits<int64_t>::max();

std::string check_rate(const std::string& text) {
  double rate = 0;
  const bool good =
      CLI::detail::lexical_cast(text, rate) && std::isfinite(rate) && rate > 0;
  return good ? "" : fmt::format("got '{}', expected a number above 0", text);
}

std::string check_writable_place(const std::string& text) {
  const auto folder = std::filesystem::absolute(text).parent_path();
  const bool good = !text.empty() && std::filesystem::is_directory(folder) &&
                    !std::filesystem::is_directory(text);
  return good ? "" : fmt::format("'{}' is not a file in a folder", text);
}

}  // namespace

std::optional<int> parse_arguments(int argc, char** argv,
                                   TrainArguments& arguments) {
  arguments.data = DATAPARALLEL_DATA_DIR "/digits.u8";
  CLI::App app(
      "Trains a small network on handwritten digits, on several devices with "
      "DataParallel.",
      "train");
  const auto* devices = app.add_option(
      "--devices", arguments.devices,
      "comma separated list: cpu, cuda (every CUDA device), cuda:N, sim:N "
      "(simulated); the same one twice is allowed [default: every device]");
  app.add_option("--epochs", arguments.epochs, "passes over the digits")
      ->check(CLI::Range(int64_t{1}, kMaxCount))
      ->capture_default_str();
  app.add_option("--batch-size", arguments.batch_size,
                 "samples a step, all replicas together")
      ->check(CLI::Range(int64_t{1}, kMaxCount))
      ->capture_default_str();
  app.add_option("--learning-rate", arguments.learning_rate,
                 "Adam's at the first step; it falls to 0 by the last")
      ->check(CLI::Validator(check_rate, "> 0"))
      ->capture_default_str();
  app.add_option("--seed", arguments.seed, "weights, order and dropout")
      ->check(CLI::Range(uint64_t{0}, kMaxSeed))
      ->capture_default_str();
  app.add_option("--data", arguments.data, "file of digits")
      ->check(CLI::ExistingFile)
      ->capture_default_str();
  app.add_option("--save", arguments.save_path,
                 "keep the state_dict here [default: a temporary file]")
      ->check(CLI::Validator(check_writable_place, "FILE"));

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "train: {}\n", error.what());
    return 2;
  }
  arguments.devices_set = devices->count() > 0;
  return std::nullopt;
}

}  // namespace demo
