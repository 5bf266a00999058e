#include "detail/thread_state.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace dataparallel::detail {

AutocastState::AutocastState()
    : cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  size_t i = 0;
  for (const at::DeviceType type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    entries_[i++] = {at::autocast::is_autocast_enabled(type),
                     at::autocast::get_autocast_dtype(type)};
  }
}

void AutocastState::set() const {
  size_t i = 0;
  for (const at::DeviceType type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    const Entry& entry = entries_[i++];
    at::autocast::set_autocast_enabled(type, entry.enabled);
    at::autocast::set_autocast_dtype(type, entry.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

CallerState::CallerState(const std::vector<at::Device>& devices) {
  for (const at::Device& device : devices) {
    if (!device.is_cpu()) {
      streams_.push_back(
          c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
    }
  }
}

CallerStateGuard::CallerStateGuard(const CallerState& state, at::Device device)
    : local_(state.local_) {
  state.autocast_.set();
  // A user's own autocast guard inside forward must not be the outermost one:
  // leaving that clears the cache, which is the whole process's.
  at::autocast::increment_nesting();
  for (const c10::Stream& stream : state.streams_) {
    streams_before_.push_back(
        c10::impl::getDeviceGuardImpl(stream.device_type())
            ->exchangeStream(stream));
  }
  if (!device.is_cpu()) {
    device_.reset_device(device);
  }
}

CallerStateGuard::~CallerStateGuard() {
  for (auto stream = streams_before_.rbegin(); stream != streams_before_.rend();
       ++stream) {
    c10::impl::getDeviceGuardImpl(stream->device_type())
        ->exchangeStream(*stream);
  }
  at::autocast::decrement_nesting();
  autocast_before_.set();
}

}  // namespace dataparallel::detail
