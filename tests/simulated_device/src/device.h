// What torch asks of a device: the current one and its streams, events, generators, hooks.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>

namespace simulated {

inline c10::DeviceIndex device_count = 1;

inline c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

inline StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Event {
  std::optional<Point> point;  // none before it is recorded
  std::shared_ptr<double> milliseconds = std::make_shared<double>(0);
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kSim; }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(c10::Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, ++made_); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, ++made_); }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream(index_of(device)).id);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_streams.at(next.device_index()) = next.id();
    return before;
  }

  // Each question brings what is asked for nearer, or a host that asks until the answer is yes would wait for ever.
  bool queryStream(const c10::Stream& stream) const override { return query(streams().end_of(key_of(stream))); }
  bool queryEvent(void* event) const override {
    const auto point = event ? as_event(event).point : std::nullopt;
    return !point || query(*point);
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    streams().wait_for(streams().end_of(key_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    streams().wait_for_device(device < 0 ? current_device : device);
  }
  void synchronizeEvent(void* event) const override {
    if (event && as_event(event).point) streams().wait_for(*as_event(event).point);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto milliseconds = as_event(*event).milliseconds = std::make_shared<double>(0);
    as_event(*event).point = streams().enqueue(key_of(stream), {[milliseconds] {
                                                 const auto now = std::chrono::steady_clock::now().time_since_epoch();
                                                 *milliseconds = std::chrono::duration<double, std::milli>(now).count();
                                               }});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && as_event(event).point) streams().enqueue(key_of(stream), {nullptr, as_event(event).point});
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return *as_event(end).milliseconds - *as_event(start).milliseconds;
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_memory().recordStream(memory, stream);
  }

 private:
  static Event& as_event(void* event) { return *static_cast<Event*>(event); }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kSim, index_of(device)}, id);
  }
  static bool query(const Point& point) {
    const bool reached = streams().is_reached(point);
    streams().approach(point);
    return reached;
  }

  static inline std::atomic<c10::StreamId> made_ = 0;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws the numbers that the CPU's draws. Queued work draws when it is done: what changes the state waits for it.
class Generator final : public at::CPUGeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device) {
    device_ = {kSim, device};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

  void set_current_seed(uint64_t seed) override {
    streams().wait_for_device(device_.index());
    CPUGeneratorImpl::set_current_seed(seed);
  }
  void set_state(const c10::TensorImpl& state) override {
    streams().wait_for_device(device_.index());
    CPUGeneratorImpl::set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    streams().wait_for_device(device_.index());
    return CPUGeneratorImpl::get_state();
  }

  // For queued work: calls a function while the CPU's default generator has this one's state.
  template <class Function>
  void lend(Function function) {
    static std::mutex one_at_a_time;
    std::lock_guard lock(one_at_a_time);
    auto cpu = at::detail::getDefaultCPUGenerator();
    const auto before = cpu.get_state();
    const auto own = CPUGeneratorImpl::get_state();
    cpu.set_state(at::Tensor(own));
    try {
      function();
    } catch (...) {
      cpu.set_state(before);
      throw;
    }
    CPUGeneratorImpl::set_state(*cpu.get_state().unsafeGetTensorImpl());
    cpu.set_state(before);
  }
};

inline const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMostDevices; i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device < 0 ? current_device : device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  bool isPinnedPtr(const void* memory) const override { return pinned_memory().contains(memory); }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto resized = device_memory().allocate(bytes);
    void *to = resized.get(), *from = impl->mutable_data();
    if (const auto kept = std::min(bytes, storage.nbytes()))
      streams().enqueue(current_stream(current_device), {[to, from, kept] {
                          Access access;
                          std::memcpy(to, from, kept);
                        },
                        std::nullopt, nullptr, true});
    impl->set_data_ptr(std::move(resized));
    impl->set_nbytes(bytes);
  }
};

}  // namespace simulated
