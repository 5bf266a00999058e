#include "checkpoint/locations.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dataparallel/devices.h>

#include "checkpoint/problem.h"
#include "detail/device_name.h"

namespace dataparallel {
namespace {

/// "cuda:256" is the tag of no storage; "warp:1" may be, elsewhere.
bool can_be_tag(const std::string& tag) {
  return detail::parse_device(tag).has_value() ||
         !detail::parse_device(tag.substr(0, tag.find(':'))).has_value();
}

at::Device to_device(const std::string& argument, const std::string& text) {
  const auto device = detail::parse_device(text);
  TORCH_CHECK_VALUE(device.has_value(), "LoadOptions: ", argument, " is \"",
                    text, "\", expected a device as \"cpu\" or \"cuda:1\"",
                    can_be_tag(text)
                        ? std::string()
                        : ", its index " +
                              std::to_string(detail::kMostDeviceIndex) +
                              " at most");
  return *device;
}

}  // namespace

LoadOptions& LoadOptions::map_all_to(const std::string& device) {
  return map_location(to_device("map_location", device));
}

LoadOptions& LoadOptions::map_location(
    const std::map<std::string, std::string>& devices) {
  std::map<std::string, at::Device> targets;
  for (const auto& [tag, device] : devices) {
    TORCH_CHECK_VALUE(can_be_tag(tag), "LoadOptions: map_location has the tag ",
                      "\"", tag, "\", expected one as \"cpu\" or \"cuda:1\", ",
                      "its index ", detail::kMostDeviceIndex, " at most");
    targets.emplace(tag, to_device("map_location[\"" + tag + "\"]", device));
  }
  return map_location(LocationFunction(
      [targets](const std::string& tag) -> std::optional<at::Device> {
        const auto found = targets.find(tag);
        return found == targets.end() ? std::nullopt
                                      : std::optional(found->second);
      }));
}

LoadOptions& LoadOptions::map_location(LocationFunction function) {
  map_location_ = std::move(function);
  return *this;
}

namespace checkpoint {

namespace {

/// "cpu, cuda:0, cuda:1"
std::string devices_here() {
  std::string text = "cpu";
  for (int8_t i = 0; i < at::COMPILE_TIME_MAX_DEVICE_TYPES; ++i) {
    const auto type = static_cast<at::DeviceType>(i);
    if (type == at::kCPU || type == at::kMeta ||
        !c10::impl::hasDeviceGuardImpl(type)) {
      continue;
    }
    const int count = c10::impl::getDeviceGuardImpl(type)->deviceCount();
    for (int index = 0; index < count; ++index) {
      text += ", " + at::Device(type, static_cast<int8_t>(index)).str();
    }
  }
  return text;
}

bool is_there(at::Device device) {
  if (device.is_cpu() || device.is_meta()) {
    return true;
  }
  if (!c10::impl::hasDeviceGuardImpl(device.type())) {
    return false;
  }
  const int count = c10::impl::getDeviceGuardImpl(device.type())->deviceCount();
  return device.has_index() ? device.index() >= 0 && device.index() < count
                            : count > 0;
}

}  // namespace

at::Device Locations::device(const std::string& tag) {
  const auto found = devices_.find(tag);
  if (found != devices_.end()) {
    return found->second;
  }
  const at::Device device = find(tag);
  devices_.emplace(tag, device);
  return device;
}

at::Device Locations::find(const std::string& tag) const {
  const std::optional<at::Device> given =
      function_ ? function_(tag) : std::nullopt;
  const std::optional<at::Device> device =
      given ? given : detail::parse_device(tag);
  if (!device || !is_there(*device)) {
    fail("a storage is tagged \"" + tag + "\"" +
         (given ? ", which map_location maps to " + given->str() : "") +
         ", and that device is not there (devices: " + devices_here() + "); " +
         (given ? "give" : "pass") +
         " map_location a device that is, as "
         "LoadOptions().map_location(\"cpu\")");
  }
  if (device->is_cpu() || device->is_meta()) {
    return at::Device(device->type());
  }
  return check_device("load", "map_location", *device);
}

}  // namespace checkpoint
}  // namespace dataparallel
