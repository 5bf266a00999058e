#include <dataparallel/checkpoint.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command_line/commands.h"
#include "command_line/output.h"
#include "command_line/table.h"
#include "detail/wording.h"

namespace dataparallel::command_line {
namespace {

std::string dtype_text(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

nlohmann::ordered_json entries_json(const std::vector<OpaqueEntry>& entries) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const OpaqueEntry& entry : entries) {
    list.push_back({{"path", entry.path}, {"class", entry.class_name}});
  }
  return list;
}

void print_json(const std::string& file, const CheckpointInfo& info) {
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (const TensorInfo& tensor : info.tensors) {
    tensors.push_back({{"key", tensor.key},
                       {"dtype", dtype_text(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"device", tensor.device},
                       {"nbytes", tensor.nbytes},
                       {"requires_grad", tensor.requires_grad}});
  }
  const nlohmann::ordered_json all = {{"file", file},
                                      {"kind", info.kind},
                                      {"tensors", tensors},
                                      {"unknown_classes", info.unknown_classes},
                                      {"opaque", entries_json(info.opaque)},
                                      {"dropped", entries_json(info.dropped)},
                                      {"metadata", info.metadata}};
  print(json_text(all));
}

void print_table(const CheckpointInfo& info) {
  using Align = Table::Align;
  Table table(
      {Align::kLeft, Align::kLeft, Align::kLeft, Align::kLeft, Align::kRight});
  table.add({"KEY", "DTYPE", "SHAPE", "DEVICE", "SIZE"});
  int64_t bytes = 0;
  for (const TensorInfo& tensor : info.tensors) {
    bytes += tensor.nbytes;
    table.add({tensor.key, dtype_text(tensor.dtype), shape_text(tensor.shape),
               tensor.device, size_text(tensor.nbytes)});
  }
  if (!info.tensors.empty()) {
    table.print();
    print("\n");
  }
  print(fmt::format("{}, {}, {}\n", info.kind,
                    detail::count_text(info.tensors.size(), "tensor"),
                    size_text(bytes)));
  for (const auto& [name, value] : info.metadata) {
    print(printable("metadata " + name + ": " + value) + "\n");
  }
  for (const std::string& name : info.unknown_classes) {
    print(printable("unknown class " + name) + "\n");
  }
  for (const OpaqueEntry& entry : info.opaque) {
    print(printable("opaque " + entry.path + ": " + entry.class_name) + "\n");
  }
  for (const OpaqueEntry& entry : info.dropped) {
    print(printable("dropped " + entry.path + ": " + entry.class_name) + "\n");
  }
}

}  // namespace

int inspect_file(const InspectArguments& arguments) {
  const CheckpointInfo info = inspect(arguments.file);
  if (arguments.json) {
    print_json(arguments.file, info);
  } else {
    print_table(info);
  }
  return kSuccess;
}

}  // namespace dataparallel::command_line
