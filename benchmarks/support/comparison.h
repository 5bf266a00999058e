#pragma once

#include <functional>
#include <string>

#include "support/devices.h"

namespace bench {

/// One of our operations against what does the same without this library.
struct Comparison {
  /// Synchronized before each clock read.
  Devices devices;
  /// The competitor, in a few words.
  std::string against;
  /// The least ratio aimed at; 0: none.
  double aim = 0;
  std::function<void()> ours;
  std::function<void()> theirs;
};

/// Adds a benchmark that prints (time of the competitor) / (our time): above 1,
/// ours is faster.
///
/// `make` is called before the clock starts, and only if the benchmark is
/// chosen. The two sides take turns: a batch of calls of one (after an untimed
/// call), a batch of the other, the order changing from pair to pair. Each pair
/// gives one ratio; the median and the quartiles of these are the result, so
/// that what slows the machine for a while slows both sides.
void add(const std::string& name, std::function<Comparison()> make);

/// `main` of every benchmark program: Google Benchmark's options, the machine
/// and the versions first, then one line a comparison. `--benchmark_out=FILE`
/// writes JSON.
int run(int argc, char** argv);

}  // namespace bench
