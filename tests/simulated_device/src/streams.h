// Streams: queues whose work is done by the host threads that wait for it, as late as is legal.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

namespace simulated {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;

struct StreamKey {
  c10::DeviceIndex device;
  c10::StreamId id;
  auto operator<=>(const StreamKey&) const = default;
};

// The first `ticket` tasks of a stream.
struct Point {
  StreamKey stream;
  uint64_t ticket = 0;
};

// Releases the GIL if this thread holds it: whoever does the work of a stream may need it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

// What a collective waits for in its stream: the processes that take part in it.
class Gate {
 public:
  void open() {
    std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

  void pass() {
    std::unique_lock lock(mutex_);
    is_wanted_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return is_open_; });
  }

  bool is_open() {
    std::lock_guard lock(mutex_);
    return is_open_;
  }

  // Returns once the device has come to it, or after some time.
  void wait_until_wanted(double seconds) {
    WithoutGil no_gil;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return is_wanted_ || is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false, is_wanted_ = false;
};

struct Task {
  std::function<void()> work;
  std::optional<Point> after = std::nullopt;  // of another stream: has to be reached before
  std::shared_ptr<Gate> gate = nullptr;       // has to be open before
  bool uses_memory = false;                   // its stream may use again what was freed before
};

enum class Progress {
  late,     // nothing is done before a host thread waits for it: a missing wait reads what was there before
  random,   // each call does a random part of what any stream has queued
  at_once,  // each call does what it queues: the oracle for the others
};

class Streams {
 public:
  Progress progress = Progress::late;

  void seed(uint64_t value) { random_.seed(value); }

  // Appends a task to a stream, and returns the point behind it.
  Point enqueue(StreamKey key, Task task) {
    std::optional<WithoutGil> no_gil;
    if (progress != Progress::late || key.id != 0) no_gil.emplace();
    std::unique_lock lock(mutex_);
    auto& stream = streams_[key];
    if (task.uses_memory) move_what_is_due();
    if (task.uses_memory && !stream.freed.empty()) {
      for (auto& one : std::exchange(stream.freed, {})) {
        stream.tasks.push_back(std::move(one));
        stream.queued++;
      }
      // A side stream may be ahead of others that still read the memory: the worst case.
      if (key.id != 0) approach(lock, {key, stream.queued});
    }
    stream.tasks.push_back(std::move(task));
    const Point point{key, ++stream.queued};
    if (progress == Progress::at_once) {
      approach(lock, point);
    } else if (progress == Progress::random && random_() % 2) {
      auto chosen = std::next(streams_.begin(), static_cast<int64_t>(random_() % streams_.size()));
      const auto left = chosen->second.queued - chosen->second.done;
      if (left) approach(lock, {chosen->first, chosen->second.done + 1 + random_() % left});
    }
    return point;
  }

  // Appends a task before the next one that uses memory: memory that was freed serves its stream again from then on.
  // While other streams have not reached some points, the task is put off, and no stream waits for it.
  void enqueue_before_use(StreamKey key, std::vector<Point> after, Task task) {
    std::lock_guard lock(mutex_);
    put_off_.push_back({key, std::move(after), std::move(task)});
  }

  Point end_of(StreamKey key) {
    std::lock_guard lock(mutex_);
    return {key, streams_[key].queued};
  }

  bool is_reached(const Point& point) {
    std::lock_guard lock(mutex_);
    return streams_[point.stream].done >= point.ticket;
  }

  // Does a stream's work up to a point, by this thread or by waiting for another one. Errors are kept.
  void work_to(const Point& point) {
    WithoutGil no_gil;
    std::unique_lock lock(mutex_);
    work_to(lock, point);
  }

  // As work_to, but ends before a collective that other processes have not begun.
  void approach(const Point& point) {
    WithoutGil no_gil;
    std::unique_lock lock(mutex_);
    approach(lock, point);
  }

  // As work_to, for a host thread that waits: raises the first error since the last wait.
  void wait_for(const Point& point) {
    waits_++;
    work_to(point);
    raise_kept();
  }

  void wait_for_device(c10::DeviceIndex device) {
    std::vector<Point> ends;
    {
      std::lock_guard lock(mutex_);
      for (auto& [key, stream] : streams_)
        if (key.device == device) ends.push_back({key, stream.queued});
    }
    for (const auto& end : ends) work_to(end);
    waits_++;
    raise_kept();
  }

  // The number of times that a host thread has waited.
  int64_t waits() const { return waits_; }

 private:
  struct Stream {
    std::deque<Task> tasks;
    std::vector<Task> freed;
    uint64_t queued = 0, done = 0;
    bool is_running = false;
  };
  struct PutOff {
    StreamKey stream;
    std::vector<Point> after;
    Task task;
  };

  void work_to(std::unique_lock<std::mutex>& lock, const Point& point) {
    auto& stream = streams_[point.stream];
    while (stream.done < point.ticket) {
      if (stream.is_running) {
        progressed_.wait(lock);
        continue;
      }
      auto task = std::move(stream.tasks.front());
      stream.tasks.pop_front();
      stream.is_running = true;
      if (task.after) work_to(lock, *task.after);
      lock.unlock();
      if (task.gate) task.gate->pass();
      try {
        if (task.work) task.work();
      } catch (...) {
        std::lock_guard relock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
      task = {};  // frees what it holds, without the lock
      lock.lock();
      stream.is_running = false;
      stream.done++;
      progressed_.notify_all();
    }
  }

  // A device that waits for other processes does not hold up the host.
  void approach(std::unique_lock<std::mutex>& lock, const Point& point) {
    auto ticket = point.ticket;
    while (may_block({point.stream, ticket})) ticket--;
    work_to(lock, {point.stream, ticket});
  }

  bool may_block(const Point& point) {
    auto& stream = streams_[point.stream];
    if (stream.done >= point.ticket) return false;
    if (stream.is_running) return true;
    for (size_t i = 0; i < point.ticket - stream.done; i++) {
      const auto& task = stream.tasks[i];
      if ((task.gate && !task.gate->is_open()) || (task.after && may_block(*task.after))) return true;
    }
    return false;
  }

  void move_what_is_due() {
    std::erase_if(put_off_, [this](PutOff& one) {
      for (const auto& point : one.after)
        if (streams_[point.stream].done < point.ticket) return false;
      streams_[one.stream].freed.push_back(std::move(one.task));
      return true;
    });
  }

  void raise_kept() {
    std::unique_lock lock(mutex_);
    if (auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  std::mutex mutex_;
  std::condition_variable progressed_;
  std::map<StreamKey, Stream> streams_;
  std::vector<PutOff> put_off_;
  std::exception_ptr error_;
  std::mt19937_64 random_;
  std::atomic<int64_t> waits_ = 0;
};

// Never destroyed: threads of torch use them up to the end of the process.
inline Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kMostDevices> current_streams{};

inline StreamKey current_stream(c10::DeviceIndex device) { return {device, current_streams.at(device)}; }

// Waits for all that this thread has queued in its current stream.
inline void wait_for_current(c10::DeviceIndex device) {
  streams().wait_for(streams().end_of(current_stream(device)));
}

}  // namespace simulated
