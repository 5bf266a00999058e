#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/torch.h>

namespace test {

inline const c10::impl::DeviceGuardImplInterface& guard() {
  return *c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
}

/// Makes a new stream of a simulated device current, and puts the old one back.
class OnNewStream {
 public:
  explicit OnNewStream(torch::Device device)
      : stream(guard().getNewStream(device)),
        before_(guard().exchangeStream(stream)) {}
  ~OnNewStream() { guard().exchangeStream(before_); }
  OnNewStream(const OnNewStream&) = delete;
  OnNewStream& operator=(const OnNewStream&) = delete;
  c10::Stream stream;

 private:
  c10::Stream before_;
};

}  // namespace test
