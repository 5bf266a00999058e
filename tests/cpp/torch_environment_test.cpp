#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "support/catch.h"

namespace {

namespace fs = std::filesystem;

/// The files mapped into this process whose name begins with `prefix`.
std::set<fs::path> mapped_files(const std::string& prefix) {
  std::set<fs::path> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto start = line.find('/');
    if (start == std::string::npos) continue;
    const fs::path file = line.substr(start);
    if (file.filename().string().starts_with(prefix)) files.insert(file);
  }
  return files;
}

}  // namespace

TEST_CASE("a program that links the library has torch's own CUDA libraries",
          "[environment]") {
  REQUIRE(torch::ones({2}).sum().item<float>() == 2);
  const auto torch_files = mapped_files("libtorch.so");
  REQUIRE(torch_files.size() == 1);
  // <environment>/torch/lib/libtorch.so, and beside it <environment>/nvidia/.
  const auto environment =
      torch_files.begin()->parent_path().parent_path().parent_path();

  const std::string name =
      GENERATE("libnccl.so", "libcudart.so", "libcupti.so");
  INFO(name << " in the environment " << environment);
  const auto files = mapped_files(name);
  CHECK(files.size() <= 1);
  for (const auto& file : files) {
    INFO("loaded: " << file);
    CHECK(file.string().starts_with(environment.string() + "/"));
  }
}
