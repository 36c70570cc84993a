// The Python module of the simulated device. simulated_device.py makes torch.sim of it.
#include "operators.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

namespace simulated {

static bool is_forked = false;

static void start(int devices, const std::string& progress, uint64_t seed) {
  TORCH_CHECK(devices >= 1 && devices <= kMostDevices, "there can be 1 to ", kMostDevices, " devices, not ", devices);
  const std::map<std::string, Progress> all{
      {"late", Progress::late}, {"random", Progress::random}, {"at-once", Progress::at_once}};
  TORCH_CHECK(all.count(progress), "progress is late, random or at-once, not ", progress);
  device_count = static_cast<c10::DeviceIndex>(devices);
  streams().progress = all.at(progress);
  streams().seed(seed);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kSim, &device_memory());
  at::setHostAllocator(kSim, &pinned_memory());
  pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  pybind11::class_<Gate, std::shared_ptr<Gate>>(module, "Gate")
      .def(pybind11::init<>())
      .def("open", &Gate::open)
      .def("wait_until_wanted", &Gate::wait_until_wanted);
  pybind11::class_<Point>(module, "Point");
  module.def("start", &start);
  module.def("is_forked", [] { return is_forked; });
  module.def("device_count", [] { return int{device_count}; });
  module.def("current_device", [] { return int{current_device}; });
  module.def("set_device", [](int index) { current_device = static_cast<c10::DeviceIndex>(index); });
  module.def("set_memory_limit", [](int64_t bytes) { device_memory().set_limit(bytes); });
  module.def("host_waits", [] { return streams().waits(); });
  module.def("waiting_operators", [] { return waiting_operators; });
  module.def("default_generator", [](int index) {
    return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_initDefaultGenerator(default_generator(index)));
  });
  module.def("end_of", [](int device, c10::StreamId id) {
    return streams().end_of({static_cast<c10::DeviceIndex>(device), id});
  });
  // For a library's own thread: the errors of the work are for the script's.
  module.def("work_to", [](const Point& point) { streams().work_to(point); });
  // Has a stream wait until other processes have taken part in a collective.
  module.def("stream_waits", [](int device, c10::StreamId id, std::shared_ptr<Gate> gate) {
    streams().enqueue({static_cast<c10::DeviceIndex>(device), id}, {nullptr, std::nullopt, std::move(gate)});
  });
}
