#include "support/comparison.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <benchmark/benchmark.h>
#include <time.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace bench {
namespace {

constexpr int64_t kPairs = 31;
constexpr double kBatchSeconds = 0.01;

/// Per call: on the wall, and of all threads of this process.
struct Seconds {
  double wall;
  double cpu;
};

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

/// One side of a comparison, in batches long enough for the clock.
class Side {
 public:
  Side(const std::function<void()>& call, const Devices& devices)
      : call_(call), devices_(devices) {
    call_();
    calls_ = static_cast<int64_t>(std::ceil(kBatchSeconds / batch().wall));
  }

  /// The means of one batch of calls.
  Seconds batch() {
    call_();
    synchronize(devices_);
    const auto start = std::chrono::steady_clock::now();
    const double cpu_start = cpu_seconds();
    for (int64_t i = 0; i < calls_; ++i) {
      call_();
    }
    synchronize(devices_);
    const double cpu = cpu_seconds() - cpu_start;
    const std::chrono::duration<double> wall =
        std::chrono::steady_clock::now() - start;
    const auto calls = static_cast<double>(calls_);
    return {wall.count() / calls, cpu / calls};
  }

 private:
  const std::function<void()>& call_;
  const Devices& devices_;
  int64_t calls_ = 1;
};

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(
      std::lround(share * static_cast<double>(values.size() - 1)))];
}

void count(benchmark::State& state, const std::string& name,
           const std::vector<double>& ratios) {
  state.counters[name] = quantile(ratios, 0.5);
  state.counters[name + "_quartile_1"] = quantile(ratios, 0.25);
  state.counters[name + "_quartile_3"] = quantile(ratios, 0.75);
}

void measure(benchmark::State& state, const Comparison& comparison) {
  Side ours(comparison.ours, comparison.devices);
  Side theirs(comparison.theirs, comparison.devices);
  std::vector<double> our_seconds;
  std::vector<double> their_seconds;
  std::vector<double> ratios;
  std::vector<double> cpu_ratios;
  bool ours_first = true;
  for (auto _ : state) {
    Seconds first = (ours_first ? ours : theirs).batch();
    Seconds second = (ours_first ? theirs : ours).batch();
    if (!ours_first) {
      std::swap(first, second);
    }
    ours_first = !ours_first;
    our_seconds.push_back(first.wall);
    their_seconds.push_back(second.wall);
    ratios.push_back(second.wall / first.wall);
    cpu_ratios.push_back(second.cpu / first.cpu);
    state.SetIterationTime(first.wall);
  }
  state.SetLabel(comparison.against);
  state.counters["ours_seconds"] = quantile(our_seconds, 0.5);
  state.counters["theirs_seconds"] = quantile(their_seconds, 0.5);
  count(state, "ratio", ratios);
  count(state, "cpu_ratio", cpu_ratios);
  state.counters["aim"] = comparison.aim;
}

/// Google Benchmark's own context, then two lines a comparison.
class RatioReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override {
    PrintBasicContext(&std::cout, context);
    std::cout << "ratio: the competitor's time / our time, above 1 ours is "
                 "faster; median [quartiles] of "
              << kPairs
              << " pairs of batches that take turns\n"
                 "cpu ratio: the same of the processor time of all threads, "
                 "for machines that others use too\n"
              << std::flush;
    return true;
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) {
        continue;  // Google Benchmark's own means and deviations
      }
      const std::string& name = run.run_name.function_name;
      if (run.error_occurred) {
        std::printf("%s: %s\n", name.c_str(), run.error_message.c_str());
        continue;
      }
      const auto value = [&](const std::string& counter) {
        return run.counters.at(counter).value;
      };
      const auto ratio = [&](const std::string& counter) {
        char text[64];
        std::snprintf(text, sizeof(text), "%.3g [%.3g .. %.3g]", value(counter),
                      value(counter + "_quartile_1"),
                      value(counter + "_quartile_3"));
        return std::string(text);
      };
      std::printf("%s\n  %.1f us; %s %.1f us\n  ratio %s, cpu ratio %s",
                  name.c_str(), 1e6 * value("ours_seconds"),
                  run.report_label.c_str(), 1e6 * value("theirs_seconds"),
                  ratio("ratio").c_str(), ratio("cpu_ratio").c_str());
      if (value("aim") > 0) {
        std::printf(", aim %.3g: %s", value("aim"),
                    value("ratio") >= value("aim") ? "met" : "missed");
      }
      std::printf("\n");
    }
    std::fflush(stdout);
  }
};

}  // namespace

void add(const std::string& name, std::function<Comparison()> make) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [make](benchmark::State& state) {
                                 try {
                                   measure(state, make());
                                 } catch (const std::exception& error) {
                                   state.SkipWithError(error.what());
                                 }
                               })
      ->Iterations(kPairs)
      ->UseManualTime();
}

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::AddCustomContext("torch", TORCH_VERSION);
  benchmark::AddCustomContext("processor", at::get_cpu_capability());
  benchmark::AddCustomContext("intra-op threads",
                              std::to_string(at::get_num_threads()));
  RatioReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmark::Shutdown();
  return 0;
}

}  // namespace bench
