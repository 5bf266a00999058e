#include "train_arguments.h"

#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <system_error>

namespace demo {
namespace {

constexpr int64_t kMaxCount = 1'000'000;
constexpr uint64_t kMaxSeed = std::numeric_limits<int64_t>::max();
// Adam's first steps are some times as long, and must fit a float.
constexpr double kMaxRate = 1e30;

std::string check_rate(const std::string& text) {
  double rate = 0;
  const bool good =
      CLI::detail::lexical_cast(text, rate) && rate > 0 && rate <= kMaxRate;
  return good ? ""
              : fmt::format("got '{}', expected a number above 0, {} at most",
                            text, kMaxRate);
}

/// Finds before the first epoch what would go wrong after the last.
std::string check_save_path(const std::string& text) {
  namespace fs = std::filesystem;
  if (text.empty()) {
    return "got '', expected the path of a file";
  }
  const auto cannot = [&](const std::string& why) {
    return fmt::format("'{}' cannot be written: {}", text, why);
  };
  std::error_code error;
  const auto path = fs::weakly_canonical(fs::absolute(text, error), error);
  const auto type = fs::status(path, error).type();
  if (type == fs::file_type::none) {
    return cannot(error.message());
  }
  const auto folder = path.parent_path();
  if (type == fs::file_type::directory || !fs::is_directory(folder, error)) {
    return fmt::format("'{}' is not a file in a folder", text);
  }
  if (type != fs::file_type::not_found && type != fs::file_type::regular) {
    return fmt::format("'{}' is a device or a pipe, expected a file", text);
  }
  // Permissions do not tell: root passes them, a read-only file system has
  // them too.
  std::string probe = folder / ".train-XXXXXX";
  const int descriptor = mkstemp(probe.data());
  if (descriptor < 0) {
    return cannot(std::generic_category().message(errno));
  }
  close(descriptor);
  std::remove(probe.c_str());
  return "";
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
      ->check(CLI::Validator(check_save_path, "FILE"));

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 2;
  }
  arguments.devices_set = devices->count() > 0;
  return std::nullopt;
}

}  // namespace demo
