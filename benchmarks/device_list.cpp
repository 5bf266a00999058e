#include "device_list.h"

#include <dataparallel/simulated.h>
#include <fmt/core.h>
#include <torch/cuda.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace demo {
namespace {

constexpr int kMaxSimulated = 64;

/// One entry of the list. Not yet a `c10::Device`: that of a simulated device
/// exists only after the start.
struct DeviceName {
  std::string type;
  std::optional<int> index;
};

DeviceName parse_name(const std::string& text) {
  const auto colon = text.find(':');
  DeviceName name{.type = text.substr(0, colon), .index = std::nullopt};
  if (colon != std::string::npos) {
    int index = -1;
    const auto* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + colon + 1, end, index);
    TORCH_CHECK_VALUE(
        parsed.ec == std::errc() && parsed.ptr == end && index >= 0,
        "--devices: '", text, "' is not a device, expected a number after ",
        name.type, ":");
    name.index = index;
  }
  return name;
}

void check_name(const DeviceName& name, const std::string& text) {
  if (name.type == "cpu") {
    TORCH_CHECK_VALUE(name.index.value_or(0) == 0, "--devices: got ", text,
                      ", but there is one CPU device, cpu");
  } else if (name.type == "cuda") {
    const auto count = static_cast<int>(torch::cuda::device_count());
    TORCH_CHECK_VALUE(name.index.value_or(0) < count, "--devices: got ", text,
                      ", but there are ", count, " CUDA devices");
  } else if (name.type == "sim") {
    TORCH_CHECK_VALUE(name.index.has_value(),
                      "--devices: got sim, expected a number with it: sim:0");
    TORCH_CHECK_VALUE(*name.index < kMaxSimulated, "--devices: got ", text,
                      ", expected sim:0 to sim:", kMaxSimulated - 1);
  } else {
    TORCH_CHECK_VALUE(false, "--devices: got '", text,
                      "', expected cpu, cuda, cuda:N or sim:N");
  }
}

std::vector<DeviceName> parse_names(const std::string& list) {
  TORCH_CHECK_VALUE(!list.empty(),
                    "--devices: the list is empty, expected cpu,cpu or alike");
  std::vector<DeviceName> names;
  for (size_t begin = 0; begin <= list.size();) {
    const auto end = std::min(list.find(',', begin), list.size());
    const auto text = list.substr(begin, end - begin);
    names.push_back(parse_name(text));
    check_name(names.back(), text);
    begin = end + 1;
  }
  return names;
}

void start_simulated(const std::vector<DeviceName>& names) {
  int count = 0;
  for (const auto& name : names) {
    if (name.type == "sim") {
      count = std::max(count, *name.index + 1);
    }
  }
  if (count > 0) {
    namespace simulated = dataparallel::simulated;
    simulated::start(simulated::Options().devices(count));
  }
}

}  // namespace

std::vector<c10::Device> parse_devices(const std::string& list) {
  const auto names = parse_names(list);
  start_simulated(names);
  std::vector<c10::Device> devices;
  for (const auto& [type, index] : names) {
    if (type == "cpu") {
      devices.emplace_back(c10::kCPU);
    } else if (index) {
      devices.emplace_back(fmt::format("{}:{}", type, *index));
    } else {  // cuda without a number
      const auto count = static_cast<int>(torch::cuda::device_count());
      for (int i = 0; i < count; ++i) {
        devices.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(i));
      }
    }
  }
  return devices;
}

std::string device_names(const std::vector<c10::Device>& devices) {
  std::string names;
  for (const auto& device : devices) {
    names += (names.empty() ? "" : ", ") + device.str();
  }
  return names;
}

}  // namespace demo
