#include <ATen/core/grad_mode.h>

#include "python/bindings.h"
#include "python/devices.h"
#include "python/nested.h"
#include "python/parallel_apply.h"
#include "python/replicas.h"
#include "python/scatter_gather.h"

namespace dataparallel::python {
namespace {

py::tuple scatter_for_replicas(const py::tuple& args, const py::dict& kwargs,
                               const std::vector<at::Device>& devices,
                               int64_t dim, const py::dict& inputs,
                               const std::vector<double>& chunk_shares) {
  const Parts parts =
      scatter_call("DataParallel", args, kwargs, devices,
                   {dim, inputs, chunk_shares}, /*each_device=*/false,
                   /*for_replicas=*/true);
  py::list replicas;
  py::list sizes;
  for (const detail::Chunk& chunk : parts.chunks) {
    replicas.append(chunk.replica);
    sizes.append(chunk.size);
  }
  return py::make_tuple(parts.args, parts.kwargs, replicas, sizes,
                        parts.samples.value_or(0) == 0);
}

py::list replicate_once(const py::object& module, const py::object& devices,
                        bool detach) {
  const auto checked = to_existing_devices("replicate", "devices", devices);
  std::vector<int64_t> all(checked.size());
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<int64_t>(i);
  }
  return Replicas("replicate")
      .replicate(module, checked, all, /*itself=*/false, detach);
}

py::list apply_replicas(Replicas& self, const std::vector<at::Device>& devices,
                        const std::vector<int64_t>& used,
                        const py::list& modules, const py::tuple& args,
                        const py::tuple& kwargs) {
  return apply_in(self.team(devices), used, [&](size_t i) {
    return py::reinterpret_steal<py::object>(
        PyObject_Call(py::object(modules[i]).ptr(), py::object(args[i]).ptr(),
                      py::object(kwargs[i]).ptr()));
  });
}

/// After a forward: leads replica 0's gradients the way of the others'.
void finish_forward(Replicas& self, const py::object& output,
                    const py::object& args, const py::object& kwargs) {
  TensorsInside outputs;
  TensorsInside inputs;
  if (at::GradMode::is_enabled()) {
    look(output, "", outputs);
    look(args, "", inputs);
    look(kwargs, "", inputs);
  }
  py::gil_scoped_release unlocked;
  self.set().check_unwritten();
  if (at::GradMode::is_enabled()) {
    self.set().redirect(outputs.tensors, inputs.tensors);
  }
}

py::object first_tensor(const py::object& value) {
  TensorsInside inside;
  look(value, "", inside);
  return inside.tensors.empty() ? py::none() : py::cast(inside.tensors.front());
}

}  // namespace

void bind_data_parallel(py::module_& module) {
  py::class_<Replicas>(module, "Replicas",
                       "The kept replicas of one module. A copy has none yet.")
      .def(py::init<std::string>(), py::arg("function"))
      .def("__enter__",
           [](Replicas& self) { self.enter("DataParallel.forward"); })
      .def("__exit__", [](Replicas& self, const py::args&) { self.exit(); })
      .def("begin_accumulation", &Replicas::begin_accumulation)
      .def("end_accumulation", &Replicas::end_accumulation)
      .def("replicate", &Replicas::replicate, py::arg("module"),
           py::arg("devices"), py::arg("used"), py::arg("itself"),
           py::arg("detach"))
      .def("parallel_apply", &apply_replicas, py::arg("devices"),
           py::arg("used"), py::arg("modules"), py::arg("args"),
           py::arg("kwargs"))
      .def("finish_forward", &finish_forward, py::arg("output"),
           py::arg("args"), py::arg("kwargs"))
      .def(py::pickle([](const Replicas&) { return py::make_tuple(); },
                      [](const py::tuple&) {
                        return std::make_unique<Replicas>("DataParallel");
                      }));
  module.def("device_list", &to_existing_devices, py::arg("function"),
             py::arg("argument"), py::arg("values"));
  module.def("device_of", &to_existing_device, py::arg("function"),
             py::arg("argument"), py::arg("value"));
  module.def("check_shares", &detail::check_shares, py::arg("function"),
             py::arg("shares"), py::arg("devices"));
  module.def("first_tensor", &first_tensor, py::arg("value"));
  module.def("check_module_device", &check_module_device, py::arg("module"),
             py::arg("device"));
  module.def("scatter_for_replicas", &scatter_for_replicas, py::arg("args"),
             py::arg("kwargs"), py::arg("devices"), py::arg("dim"),
             py::arg("inputs"), py::arg("chunk_shares"));
  module.def("join", &join, py::arg("outputs"), py::arg("replicas"),
             py::arg("target"), py::arg("dims"), py::arg("whole"));
  module.def("replicate", &replicate_once, py::arg("module"),
             py::arg("devices"), py::arg("detach"));
}

}  // namespace dataparallel::python
