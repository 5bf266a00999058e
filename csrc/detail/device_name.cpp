#include "detail/device_name.h"

#include <c10/util/Exception.h>

#include <charconv>

namespace dataparallel::detail {

std::optional<c10::Device> parse_device(const std::string& text) {
  if (const size_t colon = text.find(':'); colon != std::string::npos) {
    int index = 0;
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + colon + 1, end, index);
    if (parsed.ec != std::errc() || parsed.ptr != end ||
        index > kMostDeviceIndex) {
      return std::nullopt;
    }
  }
  try {
    return c10::Device(text);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace dataparallel::detail
