// Opening, reading and saving checkpoints, against torch and safetensors in
// Python. Each measurement has a process of its own, so that its peak of memory
// is its own too; the two sides take turns, and files are in the page cache.

#include <ATen/Version.h>
#include <dataparallel/dataparallel.h>
#include <fmt/format.h>
#include <time.h>
#include <torch/torch.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <vector>

namespace {

namespace dp = dataparallel;

constexpr int kRepeats = 3;  // as in checkpoint_bench.py
constexpr int64_t kPageBytes = 4096;

struct Measurement {
  double seconds;
  double cpu_seconds;
  double peak_bytes;
};

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

/// `field` of /proc/self/status, in bytes.
int64_t resident(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) {
      return std::stoll(line.substr(field.size() + 1)) * 1024;
    }
  }
  TORCH_CHECK(false, "checkpoint_bench: there is no ", field);
}

void touch(const dp::StateDict& dict) {
  for (const auto& [name, value] : dict) {
    value.toTensor()
        .flatten()
        .view(torch::kByte)
        .slice(0, 0, INT64_MAX, kPageBytes)
        .sum();
  }
}

dp::StateDict load(const std::string& path, bool mmap) {
  return dp::StateDict::from_ivalue(
      dp::load(path, dp::LoadOptions().mmap(mmap)));
}

/// One of our operations, in this process.
Measurement measure(const std::string& operation, const std::string& path) {
  std::function<void()> act;
  dp::StateDict dict;
  if (operation == "open") {
    act = [&] { load(path, /*mmap=*/true); };
  } else if (operation == "touch") {
    act = [&] { touch(load(path, /*mmap=*/true)); };
  } else if (operation == "read") {
    act = [&] { touch(load(path, /*mmap=*/false)); };
  } else {
    dict = load(path, /*mmap=*/false);
    touch(dict);
    act = [&] {
      if (path.ends_with(".safetensors")) {
        dp::save_safetensors(dict, path + ".copy");
      } else {
        dp::save(dict, path + ".copy");
      }
    };
  }
  std::ofstream("/proc/self/clear_refs") << "5" << std::flush;
  const int64_t before = resident("VmRSS:");
  double least = INFINITY;
  double least_cpu = INFINITY;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const double cpu_start = cpu_seconds();
    act();
    const std::chrono::duration<double> elapsed =
        std::chrono::steady_clock::now() - start;
    least = std::min(least, elapsed.count());
    least_cpu = std::min(least_cpu, cpu_seconds() - cpu_start);
  }
  return {least, least_cpu, static_cast<double>(resident("VmHWM:") - before)};
}

/// What `command` prints; none if that is "none".
std::optional<Measurement> run(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  TORCH_CHECK(pipe != nullptr, "checkpoint_bench: cannot run ", command);
  char text[256] = "";
  const bool got = fgets(text, sizeof(text), pipe) != nullptr;
  TORCH_CHECK(pclose(pipe) == 0 && got, "checkpoint_bench: ", command,
              " failed");
  Measurement result;
  if (std::sscanf(text, "%lf %lf %lf", &result.seconds, &result.cpu_seconds,
                  &result.peak_bytes) != 3) {
    return std::nullopt;
  }
  return result;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Competition {
  std::string what;
  std::string ours;  // our operation
  std::string file;
  std::string theirs;  // an operation of checkpoint_bench.py
  std::string competitor;
};

void compete(const std::string& program, const Competition& competition,
             int rounds) {
  const auto command = [&](const std::string& start,
                           const std::string& operation) {
    return fmt::format("{} {} '{}'", start, operation, competition.file);
  };
  std::vector<double> ours, theirs, ratios, cpu_ratios, our_peaks, their_peaks;
  for (int round = 0; round < rounds; ++round) {
    const auto own =
        run(command(fmt::format("'{}' --worker", program), competition.ours));
    const auto other =
        run(command(fmt::format("'{}' -W ignore '{}'", DATAPARALLEL_PYTHON,
                                DATAPARALLEL_BENCH_SCRIPT),
                    competition.theirs));
    std::filesystem::remove(competition.file + ".copy");
    if (!other.has_value()) {
      fmt::print("{:<34} {} is not installed\n", competition.what,
                 competition.competitor);
      return;
    }
    ours.push_back(own->seconds);
    our_peaks.push_back(own->peak_bytes);
    theirs.push_back(other->seconds);
    their_peaks.push_back(other->peak_bytes);
    ratios.push_back(other->seconds / own->seconds);
    cpu_ratios.push_back(other->cpu_seconds / own->cpu_seconds);
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  fmt::print(
      "{:<34} {:9.2f} ms {:7.0f} MiB   {:<26} {:9.2f} ms {:7.0f} MiB   ratio "
      "{:.2f} [{:.2f} .. {:.2f}]  cpu ratio {:.2f}\n",
      competition.what, 1e3 * median(ours), median(our_peaks) / (1 << 20),
      competition.competitor, 1e3 * median(theirs),
      median(their_peaks) / (1 << 20), median(ratios), *least, *most,
      median(cpu_ratios));
  std::fflush(stdout);
}

struct Size {
  std::string name;
  int64_t tensors;
  int64_t elements;  // of each
};

const std::vector<Size>& sizes() {
  static const std::vector<Size> result = {
      {"1 GiB in 256 tensors", 256, 1 << 20},
      {"50,000 tensors of 1 KiB", 50000, 256}};
  return result;
}

/// All of them, on the files `path` + ".pt" and + ".safetensors".
std::vector<Competition> competitions(const std::string& path) {
  const std::string pt = path + ".pt";
  const std::string st = path + ".safetensors";
  return {
      {"open", "open", pt, "torch_open", "torch.load(mmap=True)"},
      {"open safetensors", "open", st, "safetensors_open",
       "safetensors.load_file"},
      {"open, read every page", "touch", pt, "torch_touch",
       "torch.load(mmap=True)"},
      {"open safetensors, read every page", "touch", st, "safetensors_touch",
       "safetensors.load_file"},
      {"read into memory", "read", pt, "torch_read", "torch.load"},
      // load_file would only map the file.
      {"read safetensors into memory", "read", st, "safetensors_read",
       "safetensors.load"},
      {"save, synced", "save", pt, "torch_save", "torch.save"},
      {"save, synced", "save", pt, "torch_save_sync", "torch.save, fsync"},
      {"save_safetensors, synced", "save", st, "safetensors_save",
       "safetensors.save_file"},
      {"save_safetensors, synced", "save", st, "safetensors_save_sync",
       "safetensors, fsync"},
  };
}

void generate(const std::string& path, const Size& size) {
  dp::StateDict dict;
  for (int64_t i = 0; i < size.tensors; ++i) {
    dict.insert(fmt::format("layer.{}.weight", i),
                torch::rand({size.elements}));
  }
  dp::save(dict, path + ".pt");
  dp::save_safetensors(dict, path + ".safetensors");
}

/// Those whose size's and own names contain `filter`.
void compare_all(const std::string& program, const std::string& folder,
                 int rounds, const std::string& filter) {
  fmt::print(
      "torch {}; times: least of {}, then the median of {} rounds; memory: the "
      "most beyond what was there before\nratio: the competitor's time / ours, "
      "above 1 ours is faster; median [least .. most]\ncpu ratio: the same of "
      "the processor time, for machines that others use too\n",
      TORCH_VERSION, kRepeats, rounds);
  const std::string path = folder + "/bench";
  bool any = false;
  for (const Size& size : sizes()) {
    std::vector<Competition> chosen = competitions(path);
    std::erase_if(chosen, [&](const Competition& competition) {
      return (size.name + ": " + competition.what).find(filter) ==
             std::string::npos;
    });
    if (chosen.empty()) {
      continue;
    }
    any = true;
    generate(path, size);
    fmt::print("\n{}\n", size.name);
    for (const Competition& competition : chosen) {
      compete(program, competition, rounds);
    }
  }
  TORCH_CHECK_VALUE(any, "checkpoint_bench: --filter is '", filter,
                    "', which no measurement's name contains, as '",
                    sizes()[0].name, ": ", competitions(path)[0].what, "'");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Checkpoints against torch and safetensors in Python.",
               "checkpoint_bench");
  std::vector<std::string> worker;
  std::string folder = std::filesystem::temp_directory_path();
  int rounds = 5;
  app.add_option("--worker", worker, "measure OPERATION on FILE")->expected(2);
  app.add_option("--folder", folder, "where the files go, 2.2 GiB")
      ->capture_default_str();
  app.add_option("--rounds", rounds)->capture_default_str();
  std::string filter;
  app.add_option("--filter", filter,
                 "only what contains this, as '50,000 tensors of 1 KiB: save'");
  CLI11_PARSE(app, argc, argv);
  if (!worker.empty()) {
    const Measurement result = measure(worker[0], worker[1]);
    fmt::print("{} {} {}\n", result.seconds, result.cpu_seconds,
               result.peak_bytes);
    return 0;
  }
  folder += fmt::format("/checkpoint_bench-{}", getpid());
  std::filesystem::create_directory(folder);
  int status = 0;
  try {
    compare_all(std::filesystem::canonical("/proc/self/exe"), folder, rounds,
                filter);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "{}\n", error.what_without_backtrace());
    status = 1;
  }
  std::filesystem::remove_all(folder);
  return status;
}
