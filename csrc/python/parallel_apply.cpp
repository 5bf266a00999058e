#include "python/parallel_apply.h"

#include <sstream>

#include "detail/while_waiting.h"
#include "python/bindings.h"
#include "python/devices.h"

// Note [The interpreter lock]
//
// The calling thread gives the lock up for the whole call; each worker takes it
// to run Python, and torch's operators give it up while they compute. So
// replicas compute at once, and run Python in turns.
//
// The calling thread holds no lock while it waits, and Python handles signals
// in its main thread alone, when that runs Python. So it looks for them twenty
// times a second. After one whose handler raises (Ctrl-C), the replicas get a
// KeyboardInterrupt each, which Python delivers between two bytecodes.

namespace dataparallel::python {
namespace {

/// The exception that is set, as an object with its traceback.
py::object taken_error() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) {
    PyException_SetTraceback(value, traceback);
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return py::reinterpret_steal<py::object>(value);
}

[[noreturn]] void raise(const py::object& error) {
  PyErr_Restore(py::type::of(error).release().ptr(),
                py::object(error).release().ptr(),
                PyException_GetTraceback(error.ptr()));
  throw py::error_already_set();
}

void note(const py::object& error, int64_t replica, at::Device device) {
  std::ostringstream text;
  text << "replica " << replica << " on " << device;
  error.attr("add_note")(text.str());
}

bool in_main_thread() {
  const auto threading = py::module_::import("threading");
  return threading.attr("current_thread")().is(threading.attr("main_thread")());
}

/// What one call's replicas share; guarded by the interpreter lock.
struct Run {
  std::vector<py::object> results;
  std::vector<py::object> errors;
  std::vector<unsigned long> threads;  // 0: not running
  py::object interruption;

  void look_for_signals() {
    if (interruption || PyErr_CheckSignals() == 0) {
      return;
    }
    interruption = taken_error();
    for (const unsigned long thread : threads) {
      if (thread != 0) {
        PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
      }
    }
  }
};

py::object call(const py::handle& function, const py::handle& args,
                const py::handle& kwargs) {
  return py::reinterpret_steal<py::object>(
      PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()));
}

py::list apply_modules(const py::list& modules, const py::list& args,
                       const py::list& kwargs, const py::object& devices) {
  const auto checked =
      to_existing_devices("parallel_apply", "devices", devices);
  std::vector<int64_t> replicas(checked.size());
  for (size_t i = 0; i < replicas.size(); ++i) {
    replicas[i] = static_cast<int64_t>(i);
  }
  std::optional<detail::BorrowedTeam> team;
  {
    py::gil_scoped_release unlocked;
    team.emplace(checked);
  }
  return apply_in(*team->operator->(), replicas, [&](size_t i) {
    return call(modules[i], args[i], kwargs[i]);
  });
}

}  // namespace

py::list apply_in(WorkerTeam& team, const std::vector<int64_t>& replicas,
                  const std::function<py::object(size_t)>& body) {
  Run run;
  run.results.resize(replicas.size());
  run.errors.resize(replicas.size());
  run.threads.resize(replicas.size(), 0);
  std::vector<size_t> places(team.devices().size());
  for (size_t i = 0; i < replicas.size(); ++i) {
    places.at(replicas[i]) = i;
  }
  const auto work = [&](int64_t replica) {
    py::gil_scoped_acquire lock;
    const size_t i = places[replica];
    if (run.interruption) {
      return;
    }
    run.threads[i] = PyThread_get_thread_ident();
    try {
      run.results[i] = body(i);
      if (!run.results[i]) {
        run.errors[i] = taken_error();
      }
    } catch (py::error_already_set& error) {
      error.restore();
      run.errors[i] = taken_error();
    }
    run.threads[i] = 0;
  };
  const bool watch = replicas.size() > 1 && in_main_thread();
  {
    std::optional<detail::WhileWaiting> waiting;
    if (watch) {
      waiting.emplace([&run] {
        py::gil_scoped_acquire lock;
        run.look_for_signals();
      });
    }
    py::gil_scoped_release unlocked;
    team.run(replicas, work);
  }
  if (run.interruption) {
    raise(run.interruption);
  }
  for (size_t i = 0; i < replicas.size(); ++i) {
    if (run.errors[i]) {
      note(run.errors[i], replicas[i], team.devices()[replicas[i]]);
      raise(run.errors[i]);
    }
  }
  py::list results;
  for (const py::object& result : run.results) {
    results.append(result);
  }
  return results;
}

void bind_parallel_apply(py::module_& module) {
  module.def("parallel_apply", &apply_modules, py::arg("modules"),
             py::arg("args"), py::arg("kwargs"), py::arg("devices"));
  module.def("current_replica", &current_replica);
}

}  // namespace dataparallel::python
