#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace demo {

/// What `train` is told on its command line.
struct TrainArguments {
  std::string
      devices;  ///< as `parse_devices` reads them; only if `devices_set`
  bool devices_set = false;
  int64_t epochs = 10;
  int64_t batch_size = 32;  ///< of all replicas together
  double learning_rate = 3e-3;
  uint64_t seed = 1;
  std::string data;       ///< file of digits
  std::string save_path;  ///< empty: a temporary file
};

/// Reads the command line. A bad one is refused on standard error, in one
/// sentence.
///
/// Returns nothing if the program shall run, else its exit status: 0 after
/// `--help`, 2 after a refusal.
std::optional<int> parse_arguments(int argc, char** argv,
                                   TrainArguments& arguments);

}  // namespace demo
