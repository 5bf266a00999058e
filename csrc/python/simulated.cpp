#include <ATen/Context.h>
#include <dataparallel/simulated.h>

#include <memory>

#include "python/bindings.h"
#include "python/devices.h"

namespace dataparallel::python {
namespace {

at::Device device_of(const char* function, const char* argument,
                     const py::object& value) {
  return to_device(function, argument, value);
}

void start(int64_t devices, std::optional<int64_t> memory_bytes,
           bool fail_on_race, bool dry_run,
           const std::optional<simulated::Hardware>& hardware) {
  simulated::Options options;
  options.devices(devices).fail_on_race(fail_on_race).dry_run(dry_run);
  if (memory_bytes.has_value()) {
    options.memory_bytes(*memory_bytes);
  }
  if (hardware.has_value()) {
    options.hardware(*hardware);
  }
  py::gil_scoped_release unlocked;
  simulated::start(options);
}

void manual_seed_all(uint64_t seed) {
  for (int64_t i = 0; i < simulated::device_count(); ++i) {
    at::Generator generator = at::globalContext().defaultGenerator(
        at::Device(at::kPrivateUse1, static_cast<at::DeviceIndex>(i)));
    std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

/// A scope in which copies between two devices arrive as zeros.
class CorruptScope {
 public:
  CorruptScope(const py::object& source, const py::object& target)
      : source_(device_of("corrupt_copies", "source", source)),
        target_(device_of("corrupt_copies", "target", target)) {}
  void enter() {
    scope_ = std::make_unique<simulated::CorruptCopies>(source_, target_);
  }
  void exit(const py::args&) { scope_.reset(); }

 private:
  at::Device source_;
  at::Device target_;
  std::unique_ptr<simulated::CorruptCopies> scope_;
};

/// A counter of one device.
template <int64_t (*Counter)(c10::Device)>
void def_counter(py::module_& module, const char* name) {
  module.def(
      name,
      [name](const py::object& device) {
        return Counter(device_of(name, "device", device));
      },
      py::arg("device"));
}

/// A counter of a pair of devices.
template <int64_t (*Counter)(c10::Device, c10::Device)>
void def_pair_counter(py::module_& module, const char* name) {
  module.def(
      name,
      [name](const py::object& source, const py::object& target) {
        return Counter(device_of(name, "source", source),
                       device_of(name, "target", target));
      },
      py::arg("source"), py::arg("target"));
}

}  // namespace

void bind_simulated(py::module_& parent) {
  py::module_ module = parent.def_submodule("simulated");
  using simulated::Race;
  py::class_<Race>(module, "Race",
                   "Two accesses to one memory that nothing orders.")
      .def_readonly("kind", &Race::kind)
      .def_readonly("operator_name", &Race::operator_name)
      .def_readonly("device", &Race::device)
      .def_readonly("stream", &Race::stream)
      .def_readonly("other_device", &Race::other_device)
      .def_readonly("other_stream", &Race::other_stream)
      .def("message", &Race::message)
      .def("__repr__",
           [](const Race& race) { return "<Race: " + race.message() + ">"; });
  py::class_<CorruptScope>(module, "CorruptCopies",
                           "A scope in which copies between two devices arrive "
                           "as zeros; see `corrupt_copies`.")
      .def(py::init<const py::object&, const py::object&>(), py::arg("source"),
           py::arg("target"))
      .def("__enter__", &CorruptScope::enter)
      .def("__exit__", &CorruptScope::exit);
  bind_simulated_clock(module);
  module.def("start", &start, py::arg("devices"), py::arg("memory_bytes"),
             py::arg("fail_on_race"), py::arg("dry_run"), py::arg("hardware"));
  module.def("manual_seed_all", &manual_seed_all, py::arg("seed"));
  module.def("device_count", &simulated::device_count);
  module.def("races", &simulated::races);
  module.def("clear_races", &simulated::clear_races);
  module.def("reset_counters", &simulated::reset_counters);
  def_counter<&simulated::memory_allocated>(module, "memory_allocated");
  def_counter<&simulated::peak_memory>(module, "peak_memory");
  def_counter<&simulated::kernels_launched>(module, "kernels_launched");
  def_pair_counter<&simulated::copies>(module, "copies");
  def_pair_counter<&simulated::bytes_copied>(module, "bytes_copied");
}

}  // namespace dataparallel::python
