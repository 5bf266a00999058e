#include <ATen/ATen.h>
#include <dataparallel/save.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/atomic_file.h"
#include "checkpoint/view.h"
#include "detail/wording.h"

namespace dataparallel {
namespace {

constexpr size_t kHeaderAlignment = 8;

/// A dtype of the format, in the order by which the reference writer (the
/// crate `safetensors`) sorts: later ones come first in the file.
struct Dtype {
  at::ScalarType dtype;
  const char* name;
};

constexpr Dtype kDtypes[] = {
    {at::kBool, "BOOL"},
    {at::kFloat4_e2m1fn_x2, "F4"},
    {at::kByte, "U8"},
    {at::kChar, "I8"},
    {at::kFloat8_e5m2, "F8_E5M2"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e8m0fnu, "F8_E8M0"},
    {at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
    {at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
    {at::kShort, "I16"},
    {at::kUInt16, "U16"},
    {at::kHalf, "F16"},
    {at::kBFloat16, "BF16"},
    {at::kInt, "I32"},
    {at::kUInt32, "U32"},
    {at::kFloat, "F32"},
    {at::kComplexFloat, "C64"},
    {at::kDouble, "F64"},
    {at::kLong, "I64"},
    {at::kUInt64, "U64"},
};

struct Item {
  std::string name;
  at::Tensor tensor;
  size_t dtype;  // its place in kDtypes
};

size_t find_dtype(const std::string& name, const at::Tensor& tensor) {
  const auto found = std::find_if(
      std::begin(kDtypes), std::end(kDtypes),
      [&](const Dtype& entry) { return entry.dtype == tensor.scalar_type(); });
  TORCH_CHECK_TYPE(found != std::end(kDtypes), "save_safetensors: '", name,
                   "' is ", c10::getDtypeNames(tensor.scalar_type()).first,
                   ", a dtype that the format does not have");
  return static_cast<size_t>(found - std::begin(kDtypes));
}

std::vector<Item> items_of(const StateDict& state_dict) {
  std::vector<Item> items;
  for (const auto& [name, value] : state_dict) {
    TORCH_CHECK_TYPE(value.isTensor() && value.toTensor().defined(),
                     "save_safetensors: '", name, "' is no tensor (",
                     value.tagKind(), "), and the format holds nothing else");
    const at::Tensor tensor = value.toTensor().detach();
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided && tensor.has_storage() &&
                         !tensor.is_meta() && !tensor.is_nested() &&
                         !tensor._is_zerotensor(),
                     "save_safetensors: '", name, "' is a ",
                     tensor.is_nested() ? "nested" : c10::str(tensor.layout()),
                     " tensor on ", tensor.device(),
                     ", expected a dense one with values");
    TORCH_CHECK_VALUE(checkpoint::lies_in_storage(tensor),
                      "save_safetensors: '", name,
                      "' goes beyond its storage, which has ",
                      detail::count_text(tensor.storage().nbytes(), "byte"));
    TORCH_CHECK_VALUE(name != "__metadata__",
                      "save_safetensors: '__metadata__' cannot be the name of "
                      "a tensor");
    items.push_back({name, tensor, find_dtype(name, tensor)});
  }
  return items;
}

/// Throws if two tensors have a byte in common.
void refuse_shared(const std::vector<Item>& items) {
  struct Range {
    const c10::StorageImpl* storage;
    int64_t begin;
    int64_t end;
    const Item* item;
  };
  std::vector<Range> ranges;
  for (const Item& item : items) {
    const at::Tensor& tensor = item.tensor;
    if (tensor.numel() == 0) {
      continue;
    }
    int64_t last = tensor.storage_offset();
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto bytes = static_cast<int64_t>(tensor.element_size());
    ranges.push_back({tensor.storage().unsafeGetStorageImpl(),
                      tensor.storage_offset() * bytes, (last + 1) * bytes,
                      &item});
  }
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
    return std::tie(a.storage, a.begin, a.end) <
           std::tie(b.storage, b.begin, b.end);
  });
  for (size_t i = 1; i < ranges.size(); ++i) {
    Range& before = ranges[i - 1];
    Range& range = ranges[i];
    TORCH_CHECK_VALUE(
        before.storage != range.storage || before.end <= range.begin,
        "save_safetensors: '", std::min(before.item->name, range.item->name),
        "' and '", std::max(before.item->name, range.item->name),
        "' share memory, which the format cannot say; copy_shared(true) writes "
        "a copy of each");
  }
}

/// With its quotes.
std::string json_text(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK_VALUE(false, "save_safetensors: the text '", text,
                      "' is no UTF-8");
  }
}

std::string header_of(const std::vector<Item>& items,
                      const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  const auto key = [&text](const std::string& name) {
    text += (text.back() == '{' ? "" : ",") + json_text(name) + ":";
  };
  if (!metadata.empty()) {
    key("__metadata__");
    text += "{";
    for (const auto& [name, value] : metadata) {
      key(name);
      text += json_text(value);
    }
    text += "}";
  }
  int64_t offset = 0;
  for (const Item& item : items) {
    const int64_t end = offset + static_cast<int64_t>(item.tensor.nbytes());
    key(item.name);
    std::vector<int64_t> shape = item.tensor.sizes().vec();
    if (item.tensor.scalar_type() == at::kFloat4_e2m1fn_x2 && !shape.empty()) {
      shape.back() *= 2;  // two numbers a byte, along the last dimension
    }
    text += std::string("{\"dtype\":\"") + kDtypes[item.dtype].name +
            "\",\"shape\":[" + c10::str(c10::Join(",", shape)) +
            "],\"data_offsets\":[" + std::to_string(offset) + "," +
            std::to_string(end) + "]}";
    offset = end;
  }
  text += "}";
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment *
                  kHeaderAlignment,
              ' ');
  return text;
}

}  // namespace

SaveSafetensorsOptions& SaveSafetensorsOptions::metadata(
    std::map<std::string, std::string> value) {
  metadata_ = std::move(value);
  return *this;
}
SaveSafetensorsOptions& SaveSafetensorsOptions::copy_shared(bool value) {
  copy_shared_ = value;
  return *this;
}

SaveSafetensorsOptions& SaveSafetensorsOptions::progress(SaveProgress value) {
  progress_ = std::move(value);
  return *this;
}

void save_safetensors(const StateDict& state_dict, const std::string& path,
                      const SaveSafetensorsOptions& options) {
  std::vector<Item> items = items_of(state_dict);
  if (!options.copy_shared()) {
    refuse_shared(items);
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  const std::string header = header_of(items, options.metadata());
  checkpoint::AtomicFile file(path);
  std::string size;
  for (int i = 0; i < 8; ++i) {
    size += static_cast<char>(uint64_t{header.size()} >> (8 * i));
  }
  file.write(size.data(), size.size());
  file.write(header.data(), header.size());
  uint64_t done = 0;
  uint64_t total = 0;
  for (const Item& item : items) {
    total += item.tensor.nbytes();
  }
  if (options.progress()) {
    options.progress()(done, total);
  }
  for (const Item& item : items) {
    const at::Tensor plain =
        item.tensor.cpu().resolve_conj().resolve_neg().contiguous();
    file.write(plain.const_data_ptr(), plain.nbytes());
    done += plain.nbytes();
    if (options.progress()) {
      options.progress()(done, total);
    }
  }
  file.commit();
}

}  // namespace dataparallel
