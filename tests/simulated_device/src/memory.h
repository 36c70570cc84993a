// Memory: the device's, which the host may not touch, and pinned memory of the host.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <bit>
#include <cstring>
#include <set>

namespace simulated {

constexpr int kPoison = 0xff;  // NaN, or -1: in new memory and in memory that has been freed

// The addresses of the device's memory. They can be used only while an Access exists.
class Arena {
 public:
  Arena() {
    void* mapped = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "the simulated device could not reserve its addresses: ", std::strerror(errno));
    begin_ = static_cast<char*>(mapped);
  }

  // Returns a block of at least this size; nullptr if there is no place.
  char* take(size_t bytes) {
    const size_t rounded = std::bit_ceil(std::max<size_t>(bytes, 64));
    std::lock_guard lock(mutex_);
    auto& free = free_[rounded];
    if (!free.empty()) {
      char* block = free.back();
      free.pop_back();
      return block;
    }
    if (used_ + rounded > kBytes) return nullptr;
    return begin_ + std::exchange(used_, used_ + rounded);
  }

  void give_back(char* block, size_t bytes) {
    std::lock_guard lock(mutex_);
    free_[std::bit_ceil(std::max<size_t>(bytes, 64))].push_back(block);
  }

  void open() {
    std::lock_guard lock(mutex_);
    if (accesses_++ == 0) mprotect(begin_, kBytes, PROT_READ | PROT_WRITE);
  }

  void close() {
    std::lock_guard lock(mutex_);
    if (--accesses_ == 0) mprotect(begin_, kBytes, PROT_NONE);
  }

 private:
  static constexpr size_t kBytes = size_t{16} << 30;
  char* begin_;
  size_t used_ = 0;
  int accesses_ = 0;
  std::map<size_t, std::vector<char*>> free_;
  std::mutex mutex_;
};

inline Arena& arena() {
  static auto* only = new Arena;
  return *only;
}

// For the tasks of streams.
struct Access {
  Access() { arena().open(); }
  ~Access() { arena().close(); }
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device;
    const c10::Device place(kSim, device);
    if (bytes == 0) return {nullptr, nullptr, &release, place};
    std::lock_guard lock(mutex_);
    auto& use = uses_.at(device);
    char* address = use.now + static_cast<int64_t>(bytes) <= limit_ ? arena().take(bytes) : nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError, address, "sim out of memory. Tried to allocate ", bytes, " bytes. Device ", int{device},
        " has ", limit_, " bytes, of which ", use.now, " are allocated.");
    {
      Access access;
      std::memset(address, kPoison, bytes);
    }
    blocks_[address] = {bytes, current_stream(device), {}};
    use.now += static_cast<int64_t>(bytes);
    use.peak = std::max(use.peak, use.now);
    return {address, address, &release, place};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    streams().wait_for_device(current_device);
    Access access;
    std::memcpy(to, from, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    std::lock_guard lock(mutex_);
    auto block = blocks_.find(static_cast<char*>(memory.get()));
    if (block != blocks_.end() && block->second.stream.id != stream.id()) block->second.used_on.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = uses_.at(device).now;
      (*bytes)[0].peak = uses_.at(device).peak;
    }
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    uses_.at(device).peak = uses_.at(device).now;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return {limit_ - uses_.at(device).now, limit_};
  }

  void set_limit(int64_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

 private:
  struct Block {
    size_t bytes;
    StreamKey stream;                 // where it was allocated
    std::set<c10::StreamId> used_on;  // streams that record_stream named
  };
  struct Use {
    int64_t now = 0, peak = 0;
  };

  static void release(void* memory);

  // Poisons a block when its stream may use it again, after the work of streams that record_stream named.
  void free(char* address) {
    Block block;
    {
      std::lock_guard lock(mutex_);
      auto found = blocks_.find(address);
      if (found == blocks_.end()) return;
      block = std::move(found->second);
      blocks_.erase(found);
      uses_.at(block.stream.device).now -= static_cast<int64_t>(block.bytes);
    }
    std::vector<Point> others;
    for (auto id : block.used_on) others.push_back(streams().end_of({block.stream.device, id}));
    streams().enqueue_before_use(block.stream, std::move(others), {[address, bytes = block.bytes] {
                                   {
                                     Access access;
                                     std::memset(address, kPoison, bytes);
                                   }
                                   arena().give_back(address, bytes);
                                 }});
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  std::array<Use, kMostDevices> uses_;
  int64_t limit_ = int64_t{1} << 33;
};

inline DeviceMemory& device_memory() {
  static auto* only = new DeviceMemory;
  return *only;
}

inline void DeviceMemory::release(void* memory) {
  if (memory) device_memory().free(static_cast<char*>(memory));
}

// Pinned memory. The tasks that use a block keep its tensor, and with it the block.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* address = static_cast<char*>(std::aligned_alloc(64, (bytes / 64 + 1) * 64));
    TORCH_CHECK(address, "no memory to pin");
    std::memset(address, kPoison, bytes);
    std::lock_guard lock(mutex_);
    blocks_[address] = bytes;
    return {address, address, &release, at::Device(at::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool contains(const void* memory) {
    auto* address = static_cast<const char*>(memory);
    std::lock_guard lock(mutex_);
    auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return false;
    const auto& [start, bytes] = *std::prev(after);
    return address < start + std::max<size_t>(bytes, 1);
  }

 private:
  static void release(void* memory);

  std::mutex mutex_;
  std::map<const char*, size_t> blocks_;
};

inline PinnedMemory& pinned_memory() {
  static auto* only = new PinnedMemory;
  return *only;
}

inline void PinnedMemory::release(void* memory) {
  auto& pinned = pinned_memory();
  {
    std::lock_guard lock(pinned.mutex_);
    pinned.blocks_.erase(static_cast<char*>(memory));
  }
  std::free(memory);
}

}  // namespace simulated
