#include "detail/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <unordered_map>

namespace dataparallel::detail {
namespace {

const c10::impl::DeviceGuardImplInterface& guard_of(c10::Device device) {
  return *c10::impl::getDeviceGuardImpl(device.type());
}

c10::Stream comm_stream(c10::Device device) {
  static std::mutex mutex;
  // Never destroyed: a backward may run while the process exits.
  static auto* streams = new std::unordered_map<c10::Device, c10::Stream>;
  std::lock_guard lock(mutex);
  const auto found = streams->find(device);
  if (found != streams->end()) {
    return found->second;
  }
  return streams
      ->emplace(device, guard_of(device).getStreamFromGlobalPool(
                            device, /*isHighPriority=*/true))
      .first->second;
}

void wait_for(c10::Stream waiting, c10::Stream before) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(waiting);
}

}  // namespace

std::vector<c10::Stream> current_streams(
    const std::vector<c10::Device>& devices) {
  std::vector<c10::Stream> current;
  for (const c10::Device& device : devices) {
    if (!device.is_cpu()) {
      current.push_back(guard_of(device).getStream(device));
    }
  }
  return current;
}

OnStreams::OnStreams(const std::vector<c10::Stream>& streams) {
  for (const c10::Stream& stream : streams) {
    before_.push_back(guard_of(stream.device()).exchangeStream(stream));
  }
}

OnStreams::~OnStreams() {
  // Backwards, since a device may be there twice.
  for (auto stream = before_.rbegin(); stream != before_.rend(); ++stream) {
    guard_of(stream->device()).exchangeStream(*stream);
  }
}

std::vector<c10::Stream> comm_streams(const std::vector<c10::Device>& devices) {
  std::vector<c10::Stream> streams;
  for (const c10::Device& device : devices) {
    if (!device.is_cpu()) {
      streams.push_back(comm_stream(device));
      wait_for(streams.back(), guard_of(device).getStream(device));
    }
  }
  return streams;
}

void wait_for_comm(c10::Device device) {
  if (!device.is_cpu()) {
    wait_for(guard_of(device).getStream(device), comm_stream(device));
  }
}

}  // namespace dataparallel::detail
