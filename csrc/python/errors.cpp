#include <dataparallel/checkpoint.h>
#include <torch/csrc/Exceptions.h>

#include "python/bindings.h"

namespace dataparallel::python {
namespace {

// Kept for as long as the process lives, as Python's own exceptions are.
PyObject* checkpoint_error = nullptr;
PyObject* load_state_dict_error = nullptr;

PyObject* new_error(py::module_& module, const char* name, const char* doc) {
  PyObject* type =
      PyErr_NewExceptionWithDoc((std::string("dataparallel.") + name).c_str(),
                                doc, PyExc_RuntimeError, nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  module.attr(name) = py::handle(type);
  return type;
}

void set(const CheckpointError& error) {
  py::object value =
      py::handle(checkpoint_error)(error.what_without_backtrace());
  value.attr("file") = error.file();
  value.attr("key") = error.key();
  value.attr("offset") = error.offset();
  PyErr_SetObject(checkpoint_error, value.ptr());
}

void set(const LoadStateDictError& error) {
  py::object value =
      py::handle(load_state_dict_error)(error.what_without_backtrace());
  value.attr("keys") = py::cast(error.keys());
  PyErr_SetObject(load_state_dict_error, value.ptr());
}

void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const CheckpointError& e) {
    set(e);
  } catch (const LoadStateDictError& e) {
    set(e);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(error);
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  checkpoint_error =
      new_error(module, "CheckpointError",
                "Everything that is wrong with a checkpoint.\n\n"
                "Attributes:\n"
                "    file: The path as given; \"\" for a file object.\n"
                "    key: Where in the value, as \"['state_dict']['weight']\"; "
                "\"\" where "
                "it is not known.\n"
                "    offset: Where in the file, in bytes, or None.\n");
  load_state_dict_error = new_error(
      module, "LoadStateDictError",
      "A state_dict that does not fit its module; the text is torch's.\n\n"
      "Attributes:\n"
      "    keys: A LoadStateDictResult with the keys that made it fail.\n");
  py::register_local_exception_translator(translate);
}

}  // namespace dataparallel::python
