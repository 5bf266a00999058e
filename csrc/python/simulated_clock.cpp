#include <dataparallel/simulated_clock.h>
#include <dataparallel/simulated_hardware.h>
#include <dataparallel/simulated_trace.h>

#include <memory>

#include "python/bindings.h"
#include "python/devices.h"

namespace dataparallel::python {
namespace {

using simulated::DeviceModel;
using simulated::Hardware;
using simulated::HostModel;
using simulated::LinkModel;

/// `Seconds(device)`, or of the copies from one device to another.
template <double (*Seconds)(c10::Device),
          double (*OfCopies)(c10::Device, c10::Device)>
void def_seconds(py::module_& module, const char* name) {
  module.def(
      name,
      [name](const py::object& device, const py::object& target) {
        const at::Device first = to_device(name, "device", device);
        return target.is_none()
                   ? Seconds(first)
                   : OfCopies(first, to_device(name, "target", target));
      },
      py::arg("device"), py::arg("target"));
}

/// Keeps what happens between enter and exit.
class TraceScope {
 public:
  void enter() { trace_ = std::make_unique<simulated::Trace>(); }
  void exit(const py::args&) { trace_.reset(); }
  void save(const std::string& path) const {
    TORCH_CHECK(trace_ != nullptr,
                "Trace.save: called outside its `with` block");
    py::gil_scoped_release unlocked;
    trace_->save(path);
  }

 private:
  std::unique_ptr<simulated::Trace> trace_;
};

void bind_models(py::module_& module) {
  py::class_<DeviceModel>(module, "DeviceModel",
                          "What a device takes for its work; 0: nothing.")
      .def(py::init<>())
      .def_readwrite("name", &DeviceModel::name)
      .def_readwrite("memory_bytes", &DeviceModel::memory_bytes)
      .def_readwrite("memory_bytes_per_second",
                     &DeviceModel::memory_bytes_per_second)
      .def_readwrite("fp64_flops_per_second",
                     &DeviceModel::fp64_flops_per_second)
      .def_readwrite("fp32_flops_per_second",
                     &DeviceModel::fp32_flops_per_second)
      .def_readwrite("tf32_flops_per_second",
                     &DeviceModel::tf32_flops_per_second)
      .def_readwrite("fp16_flops_per_second",
                     &DeviceModel::fp16_flops_per_second)
      .def_readwrite("bf16_flops_per_second",
                     &DeviceModel::bf16_flops_per_second)
      .def_readwrite("launch_latency_seconds",
                     &DeviceModel::launch_latency_seconds);
  py::class_<LinkModel>(module, "LinkModel",
                        "One direction of a link; both have it at once.")
      .def(py::init<>())
      .def_readwrite("name", &LinkModel::name)
      .def_readwrite("bytes_per_second", &LinkModel::bytes_per_second)
      .def_readwrite("latency_seconds", &LinkModel::latency_seconds);
  py::class_<HostModel>(module, "HostModel",
                        "The program's threads, and memory that is not pinned.")
      .def(py::init<>())
      .def_readwrite("kernel_launch_seconds", &HostModel::kernel_launch_seconds)
      .def_readwrite("copy_launch_seconds", &HostModel::copy_launch_seconds)
      .def_readwrite("pageable_bytes_per_second",
                     &HostModel::pageable_bytes_per_second);
  py::class_<Hardware>(module, "Hardware",
                       "A machine of equal devices. Without a peer_link copies "
                       "between devices take the host links of both.")
      .def(py::init([](const DeviceModel& device, const LinkModel& host_link,
                       const std::optional<LinkModel>& peer_link,
                       const HostModel& host) {
             return Hardware{device, host_link, peer_link, host};
           }),
           py::kw_only(), py::arg("device") = simulated::h200(),
           py::arg("host_link") = simulated::pcie_5_x16(),
           py::arg("peer_link") = py::none(),
           py::arg("host") = simulated::server_host())
      .def_readwrite("device", &Hardware::device)
      .def_readwrite("host_link", &Hardware::host_link)
      .def_readwrite("peer_link", &Hardware::peer_link)
      .def_readwrite("host", &Hardware::host);
  module.def("h200", &simulated::h200);
  module.def("a100", &simulated::a100);
  module.def("rtx_4090", &simulated::rtx_4090);
  module.def("nvlink_3", &simulated::nvlink_3);
  module.def("nvlink_4", &simulated::nvlink_4);
  module.def("pcie_4_x16", &simulated::pcie_4_x16);
  module.def("pcie_5_x16", &simulated::pcie_5_x16);
  module.def("server_host", &simulated::server_host);
}

}  // namespace

void bind_simulated_clock(py::module_& simulated_module) {
  bind_models(simulated_module);
  py::class_<TraceScope>(simulated_module, "Trace",
                         "A scope in which what happens by the simulated clock "
                         "is kept, for Perfetto; see `dataparallel.simulated`.")
      .def(py::init<>())
      .def("__enter__",
           [](const py::object& self) {
             self.cast<TraceScope&>().enter();
             return self;
           })
      .def("__exit__", &TraceScope::exit)
      .def("save", &TraceScope::save, py::arg("path"));
  simulated_module.def("now", &simulated::now);
  simulated_module.def("elapsed_seconds", &simulated::elapsed_seconds);
  def_seconds<&simulated::busy_seconds, &simulated::busy_seconds>(
      simulated_module, "busy_seconds");
  def_seconds<&simulated::idle_seconds, &simulated::idle_seconds>(
      simulated_module, "idle_seconds");
}

}  // namespace dataparallel::python
