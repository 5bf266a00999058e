#include "simulated/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "simulated/events.h"
#include "simulated/memory.h"
#include "simulated/race_detector.h"

namespace dataparallel::simulated {
namespace {

std::atomic<int64_t> made{0};
std::atomic<int64_t> next_stream{1};
thread_local c10::DeviceIndex thread_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> thread_streams{};

c10::Device device_at(c10::DeviceIndex index) {
  return {kDeviceType, index};
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(thread_device); }
  void setDevice(c10::Device device) const override {
    check_ordinal(device.index());
    thread_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    thread_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : thread_device;
    check_ordinal(index);
    return c10::Stream(c10::Stream::UNSAFE, device_at(index),
                       thread_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : thread_device;
    return c10::Stream(c10::Stream::DEFAULT, device_at(index));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    const auto index = device.has_index() ? device.index() : thread_device;
    check_ordinal(index);
    return c10::Stream(c10::Stream::UNSAFE, device_at(index), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device,
                                      bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto index = stream.device_index();
    const c10::Stream before = getStream(device_at(index));
    thread_streams[index] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(made.load());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    simulated::record(*static_cast<Event*>(*event), key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      simulated::block(*static_cast<Event*>(event), key_of(stream));
    }
  }
  void destroyEvent(void* event,
                    const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<Event*>(event));
    }
  }
  // Kernels have run when their launch returns; that they are over is known to
  // the program only after it has waited.
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  double elapsedTime(void* first, void* second,
                     const c10::DeviceIndex) const override {
    return milliseconds_between(*static_cast<Event*>(first),
                                *static_cast<Event*>(second));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data,
                             const c10::Stream& stream) const override {
    RaceDetector::get().used_on(data.get(), key_of(stream));
  }
};

/// A generator of a simulated device: the CPU's algorithm under another device.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(c10::DeviceIndex device, at::Generator drawing)
      : GeneratorImpl(device_at(device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawing_(std::move(drawing)) {}

  void set_current_seed(uint64_t seed) override {
    drawing_.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override { drawing_.set_offset(offset); }
  uint64_t get_offset() const override { return drawing_.get_offset(); }
  uint64_t current_seed() const override { return drawing_.current_seed(); }
  uint64_t seed() override { return drawing_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    drawing_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawing_.unsafeGetGeneratorImpl()->get_state();
  }
  const at::Generator& drawing() const { return drawing_; }

 private:
  Generator* clone_impl() const override {
    return new Generator(device().index(), drawing_.clone());
  }
  mutable at::Generator drawing_;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device,
                                       at::detail::createCPUGenerator());
}

std::vector<at::Generator>& default_generators() {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int64_t i = 0; i < kMaxDevices; ++i) {
      all->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    }
    return all;
  }();
  return *generators;
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return made > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(made.load());
  }
  c10::DeviceIndex getCurrentDevice() const override { return thread_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice(device_at(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_at(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? thread_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex device) const override {
    const auto index = device < 0 ? thread_device : device;
    check_ordinal(index);
    return default_generators()[index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? thread_device : device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t bytes) const override {
    c10::DataPtr data = allocate(bytes, storage.device().index());
    if (!is_dry()) {
      std::memcpy(data.get(), storage.data(),
                  std::min(bytes, storage.nbytes()));
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

c10::DeviceIndex current_device() {
  return thread_device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device),
                     thread_streams[device]);
}

int64_t devices_made() {
  return made;
}

void check_ordinal(int64_t device) {
  TORCH_CHECK(device >= 0 && device < made,
              "sim error: invalid device ordinal ", device, ", there are ",
              made.load(), " simulated devices");
}

int64_t checked_index(const char* function, c10::Device device) {
  TORCH_CHECK_VALUE(device.type() == kDeviceType && device.has_index() &&
                        device.index() < made,
                    function, ": device is ", device,
                    ", expected a simulated device, of which there are ",
                    made.load());
  return device.index();
}

void make_devices(int64_t count) {
  c10::register_privateuse1_backend("sim");
  c10::SetAllocator(kDeviceType, allocator());
  static const Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDeviceType)].store(
      &guard);
  made = count;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

at::Generator drawing_generator(c10::DeviceIndex device) {
  return drawing_generator(default_generators()[device]);
}

at::Generator drawing_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->drawing();
}

}  // namespace dataparallel::simulated
