#include "python/scatter_gather.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "python/bindings.h"
#include "python/devices.h"
#include "python/nested.h"

namespace dataparallel::python {
namespace {

using Rule = InputRule;

/// One argument of a call.
struct Argument {
  py::object value;
  std::string path;
  Rule rule;
};

Rule rule_of(const Rules& rules, const py::object& key) {
  return rules.inputs.contains(key) ? rules.inputs[key].cast<Rule>()
                                    : split(rules.dim);
}

bool is_sequence(const py::object& value) {
  return PyList_Check(value.ptr()) || PyTuple_Check(value.ptr());
}

std::string type_name(const py::object& value) {
  return py::type::handle_of(value).attr("__name__").cast<std::string>();
}

void measure(const Argument& argument, detail::BatchSize& batch) {
  batch.rule = argument.rule;
  if (argument.rule.kind == Rule::Kind::kSplit) {
    look(argument.value, argument.path, batch);
  } else if (argument.rule.kind == Rule::Kind::kSplitBySample &&
             !argument.value.is_none()) {
    if (!is_sequence(argument.value)) {
      batch.not_a_list(argument.path, type_name(argument.value));
    }
    batch.list(static_cast<int64_t>(py::len(argument.value)), argument.path);
  }
}

py::object take(const Argument& argument, detail::TakeChunk& chunk) {
  chunk.rule = argument.rule;
  py::object value = argument.value;
  if (argument.rule.kind == Rule::Kind::kSplitBySample && !chunk.whole &&
      !value.is_none()) {
    const auto start = static_cast<Py_ssize_t>(chunk.chunk.start);
    value = py::reinterpret_steal<py::object>(PySequence_GetSlice(
        value.ptr(), start, start + static_cast<Py_ssize_t>(chunk.chunk.size)));
    if (!value) {
      throw py::error_already_set();
    }
  }
  return visit(value, argument.path, chunk);
}

std::vector<detail::Chunk> chunks_of(std::optional<int64_t> samples,
                                     const std::vector<at::Device>& devices,
                                     const std::vector<double>& shares,
                                     bool each_device) {
  if (samples.has_value() || !each_device) {
    return detail::make_chunks(samples, devices, shares);
  }
  std::vector<detail::Chunk> chunks;
  for (size_t i = 0; i < devices.size(); ++i) {
    chunks.push_back({static_cast<int64_t>(i), devices[i], 0, 0});
  }
  return chunks;
}

bool shares_device(const detail::Chunk& chunk,
                   const std::vector<detail::Chunk>& chunks) {
  return std::count_if(chunks.begin(), chunks.end(),
                       [&](const detail::Chunk& other) {
                         return other.device == chunk.device;
                       }) > 1;
}

/// `scatter` of one value: a list of its parts.
py::list scatter_value(const py::object& inputs, const py::object& devices,
                       int64_t dim) {
  const auto checked = to_existing_devices("scatter", "target_gpus", devices);
  const Argument argument{inputs, "inputs", split(dim)};
  detail::BatchSize batch("scatter");
  measure(argument, batch);
  const auto chunks = chunks_of(batch.samples, checked, {}, true);
  py::list parts;
  for (const detail::Chunk& chunk : chunks) {
    detail::TakeChunk take_chunk(
        chunk, !batch.samples.has_value() || chunks.size() == 1);
    parts.append(take(argument, take_chunk));
  }
  return parts;
}

py::tuple scatter_kwargs(const py::tuple& inputs, const py::dict& kwargs,
                         const py::object& devices, int64_t dim) {
  Rules rules;
  rules.dim = dim;
  const Parts parts =
      scatter_call("scatter", inputs, kwargs,
                   to_existing_devices("scatter", "target_gpus", devices),
                   rules, /*each_device=*/true, /*for_replicas=*/false);
  return py::make_tuple(py::tuple(parts.args), py::tuple(parts.kwargs));
}

py::object gather_values(const py::object& outputs, const py::object& target,
                         int64_t dim) {
  TORCH_CHECK_TYPE(is_sequence(outputs), "gather: outputs is ",
                   py::repr(outputs).cast<std::string>(),
                   ", expected a list with one value a replica");
  std::vector<py::object> values;
  std::vector<int64_t> replicas;
  for (const auto& output : outputs) {
    replicas.push_back(static_cast<int64_t>(values.size()));
    values.push_back(py::reinterpret_borrow<py::object>(output));
  }
  TORCH_CHECK_VALUE(!values.empty(),
                    "gather: outputs is empty, expected one value at least");
  return join(values, replicas,
              to_existing_device("gather", "target_device", target), {dim},
              /*whole=*/false);
}

std::string describe_rule(const Rule& rule) {
  switch (rule.kind) {
    case Rule::Kind::kCopy:
      return "copy()";
    case Rule::Kind::kSplitBySample:
      return "split_by_sample()";
    default:
      return "split(" + std::to_string(rule.dim) + ")";
  }
}

}  // namespace

Parts scatter_call(const std::string& function, const py::tuple& args,
                   const py::dict& kwargs,
                   const std::vector<at::Device>& devices, const Rules& rules,
                   bool each_device, bool for_replicas) {
  std::vector<Argument> arguments;
  for (size_t i = 0; i < args.size(); ++i) {
    arguments.push_back({args[i], detail::index_path("inputs", i),
                         rule_of(rules, py::int_(i))});
  }
  for (const auto& [key, value] : kwargs) {
    const auto name = py::reinterpret_borrow<py::object>(key);
    arguments.push_back({py::reinterpret_borrow<py::object>(value),
                         name.cast<std::string>(), rule_of(rules, name)});
  }
  detail::BatchSize batch(function);
  for (const Argument& argument : arguments) {
    measure(argument, batch);
  }
  Parts parts;
  parts.samples = batch.samples;
  parts.chunks =
      chunks_of(batch.samples, devices, rules.chunk_shares, each_device);
  for (const detail::Chunk& chunk : parts.chunks) {
    detail::TakeChunk take_chunk(
        chunk, !batch.samples.has_value() || parts.chunks.size() == 1);
    take_chunk.apart = for_replicas && at::GradMode::is_enabled() &&
                       shares_device(chunk, parts.chunks);
    py::tuple some(args.size());
    py::dict named;
    for (size_t i = 0; i < arguments.size(); ++i) {
      py::object part = take(arguments[i], take_chunk);
      if (i < args.size()) {
        some[i] = std::move(part);
      } else {
        named[arguments[i].path.c_str()] = std::move(part);
      }
    }
    parts.args.append(some);
    parts.kwargs.append(named);
  }
  return parts;
}

py::object join(const std::vector<py::object>& outputs,
                const std::vector<int64_t>& replicas, at::Device target,
                std::vector<int64_t> dims, bool whole) {
  if (whole) {
    detail::MoveTo move(target);
    return visit(outputs.front(), "result", move);
  }
  detail::Join join(target, std::move(dims));
  join.replicas = replicas;
  py::object result = merge(outputs, "result", join);
  join.finish("result");
  return result;
}

void bind_scatter_gather(py::module_& module) {
  py::class_<Rule>(module, "InputRule",
                   "How one argument reaches the replicas; made by `split`, "
                   "`copy` and `split_by_sample`.")
      .def("__eq__", [](const Rule& a, const Rule& b) { return a == b; })
      .def("__hash__",
           [](const Rule& rule) {
             return py::hash(py::str(describe_rule(rule)));
           })
      .def("__repr__", &describe_rule)
      .def(py::pickle(
          [](const Rule& rule) {
            return py::make_tuple(static_cast<int>(rule.kind), rule.dim);
          },
          [](const py::tuple& state) {
            return Rule{static_cast<Rule::Kind>(state[0].cast<int>()),
                        state[1].cast<int64_t>()};
          }));
  module.def("split", &split, py::arg("dim"));
  module.def("copy", &copy);
  module.def("split_by_sample", &split_by_sample);
  module.def("scatter", &scatter_value, py::arg("inputs"), py::arg("devices"),
             py::arg("dim"));
  module.def("scatter_kwargs", &scatter_kwargs, py::arg("inputs"),
             py::arg("kwargs"), py::arg("devices"), py::arg("dim"));
  module.def("gather", &gather_values, py::arg("outputs"), py::arg("target"),
             py::arg("dim"));
}

}  // namespace dataparallel::python
