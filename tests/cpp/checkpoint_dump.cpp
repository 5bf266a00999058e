// Prints what a checkpoint holds as JSON, for tests that compare it with what
// Python reads:
//
//   checkpoint_dump FILE BYTES [--map-location DEVICE] [--no-mmap]
//                   [--stream | --bytes] [--repeat N]
//   checkpoint_dump --inspect FILE
//
// BYTES becomes a file of the tensors' elements, each tensor contiguous; the
// JSON says which part is whose. An error goes to standard error, exit code 1.
#include <dataparallel/checkpoint.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

namespace {

using Json = nlohmann::ordered_json;
using dataparallel::Opaque;

class Dump {
 public:
  explicit Dump(const std::string& bytes_path)
      : bytes_(bytes_path, std::ios::binary) {}

  Json value(const c10::IValue& value) {
    if (value.isNone()) {
      return nullptr;
    }
    if (value.isBool()) {
      return value.toBool();
    }
    if (value.isInt()) {
      return value.toInt();
    }
    if (value.isDouble()) {
      return {{"float", std::to_string(value.toDouble())},
              {"bits", std::bit_cast<int64_t>(value.toDouble())}};
    }
    if (value.isComplexDouble()) {
      return {
          {"complex",
           {value.toComplexDouble().real(), value.toComplexDouble().imag()}}};
    }
    if (value.isString()) {
      return value.toStringRef();
    }
    if (value.isDevice()) {
      return {{"device", value.toDevice().str()}};
    }
    if (value.isTensor()) {
      return tensor(value.toTensor());
    }
    if (value.isList()) {
      return {{"list", values(value.toListRef())}};
    }
    if (value.isTuple()) {
      return {{"tuple", values(value.toTupleRef().elements())}};
    }
    if (value.isGenericDict()) {
      return mapping(value.toGenericDict());
    }
    return opaque(*dataparallel::to_opaque(value));
  }

 private:
  Json values(c10::ArrayRef<c10::IValue> elements) {
    Json list = Json::array();
    for (const c10::IValue& element : elements) {
      list.push_back(value(element));
    }
    return list;
  }

  template <class Items>
  Json items(const Items& pairs) {
    Json list = Json::array();
    for (const auto& [key, element] : pairs) {
      Json item = Json::array();
      item.push_back(value(key));
      item.push_back(value(element));
      list.push_back(item);
    }
    return list;
  }

  Json mapping(const c10::impl::GenericDict& dict) {
    std::vector<std::pair<c10::IValue, c10::IValue>> pairs;
    for (const auto& item : dict) {
      pairs.emplace_back(item.key(), item.value());
    }
    Json result = {{"mapping", dataparallel::class_name(dict)},
                   {"items", items(pairs)}};
    const auto carried = dataparallel::attributes(dict);
    if (!carried.empty()) {
      result["attributes"] = mapping(carried);
    }
    return result;
  }

  Json opaque(const Opaque& object) {
    Json result = {{"opaque", object.class_name}, {"known", object.known()}};
    if (object.class_name == "builtins.bytes" ||
        object.class_name == "builtins.bytearray") {
      Json codes = Json::array();
      for (const char c : object.args[0].toStringRef()) {
        codes.push_back(static_cast<unsigned char>(c));
      }
      result["bytes"] = codes;
      return result;
    }
    result["args"] = values(object.args);
    result["kwargs"] = items(object.kwargs);
    result["state"] = value(object.state);
    result["items"] = items(object.items);
    result["elements"] = values(object.elements);
    return result;
  }

  Json tensor(const at::Tensor& tensor) {
    Json result = {{"tensor", c10::toString(tensor.scalar_type())},
                   {"device", tensor.device().str()},
                   {"requires_grad", tensor.requires_grad()}};
    const torch::NoGradGuard no_grad;
    if (tensor.is_nested()) {
      result["nested"] = values(parts(tensor.unbind()));
      return result;
    }
    result["shape"] = tensor.sizes().vec();
    if (tensor.layout() == at::kSparse) {
      result["coalesced"] = tensor.is_coalesced();
      result["parts"] = values({tensor._indices(), tensor._values()});
      return result;
    }
    if (tensor.layout() != at::kStrided) {
      const bool rows = tensor.layout() == at::kSparseCsr ||
                        tensor.layout() == at::kSparseBsr;
      result["parts"] = rows ? values({tensor.crow_indices(),
                                       tensor.col_indices(), tensor.values()})
                             : values({tensor.ccol_indices(),
                                       tensor.row_indices(), tensor.values()});
      return result;
    }
    result["stride"] = tensor.strides().vec();
    result["offset"] = tensor.storage_offset();
    result["conj"] = tensor.is_conj();
    result["neg"] = tensor.is_neg();
    const auto known = storages_.emplace(
        tensor.storage().unsafeGetStorageImpl(), storages_.size());
    result["storage"] = known.first->second;
    if (tensor.is_meta()) {
      return result;
    }
    at::Tensor plain = tensor.detach();
    if (tensor.is_quantized()) {
      if (tensor.qscheme() == at::kPerTensorAffine) {
        result["quantizer"] = {tensor.q_scale(), tensor.q_zero_point()};
      } else {
        result["quantizer"] = values({tensor.q_per_channel_scales(),
                                      tensor.q_per_channel_zero_points(),
                                      tensor.q_per_channel_axis()});
      }
    } else {
      plain = plain.resolve_conj().resolve_neg().cpu();
    }
    write(plain, result);
    return result;
  }

  static std::vector<c10::IValue> parts(const std::vector<at::Tensor>& list) {
    return {list.begin(), list.end()};
  }

  /// Element by element, so that every dtype can be written.
  void write(const at::Tensor& tensor, Json& result) {
    result["begin"] = position_;
    const size_t item = tensor.element_size();
    const auto* data = static_cast<const char*>(tensor.data_ptr());
    if (tensor.is_contiguous() && !tensor.is_quantized()) {
      put(data, tensor.numel() * item);
    } else if (!at::isQIntType(tensor.scalar_type()) ||
               tensor.scalar_type() == at::kQInt8 ||
               tensor.scalar_type() == at::kQUInt8 ||
               tensor.scalar_type() == at::kQInt32) {
      std::vector<int64_t> index(tensor.dim(), 0);
      for (int64_t i = 0; i < tensor.numel(); ++i) {
        int64_t at = 0;
        for (int64_t d = 0; d < tensor.dim(); ++d) {
          at += index[d] * tensor.stride(d);
        }
        put(data + at * item, item);
        for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
          if (++index[d] < tensor.size(d)) {
            break;
          }
          index[d] = 0;
        }
      }
    }
    result["end"] = position_;
  }

  void put(const char* data, size_t size) {
    bytes_.write(data, static_cast<std::streamsize>(size));
    position_ += size;
  }

  std::ofstream bytes_;
  size_t position_ = 0;
  std::map<const void*, size_t> storages_;
};

Json entries(const std::vector<dataparallel::OpaqueEntry>& list) {
  Json result = Json::array();
  for (const auto& entry : list) {
    result.push_back({entry.path, entry.class_name});
  }
  return result;
}

Json inspect(const std::string& path) {
  const auto info = dataparallel::inspect(path);
  Json tensors = Json::array();
  for (const auto& tensor : info.tensors) {
    tensors.push_back({{"key", tensor.key},
                       {"dtype", c10::toString(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"device", tensor.device},
                       {"nbytes", tensor.nbytes},
                       {"requires_grad", tensor.requires_grad}});
  }
  return {{"kind", info.kind},
          {"tensors", tensors},
          {"unknown_classes", info.unknown_classes},
          {"opaque", entries(info.opaque)},
          {"dropped", entries(info.dropped)},
          {"metadata", info.metadata}};
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.at(0) == "--inspect") {
    std::cout << inspect(arguments.at(1)) << "\n";
    return 0;
  }
  dataparallel::LoadOptions options;
  bool stream = false;
  bool bytes = false;
  for (size_t i = 2; i < arguments.size(); ++i) {
    if (arguments[i] == "--map-location") {
      options.map_location(arguments.at(++i));
    } else if (arguments[i] == "--no-mmap") {
      options.mmap(false);
    } else if (arguments[i] == "--stream") {
      stream = true;
    } else if (arguments[i] == "--bytes") {
      bytes = true;
    } else {
      throw std::invalid_argument("unknown argument " + arguments[i]);
    }
  }
  c10::IValue value;
  if (stream) {
    std::ifstream file(arguments[0], std::ios::binary);
    value = dataparallel::load(file, options);
  } else if (bytes) {
    std::ifstream file(arguments[0], std::ios::binary);
    const std::vector<char> content(std::istreambuf_iterator<char>(file), {});
    value = dataparallel::load(content, options);
  } else {
    value = dataparallel::load(arguments[0], options);
  }
  Json result = {{"value", Dump(arguments[1]).value(value)}};
  result["unknown"] = entries(dataparallel::opaque_entries(value));
  result["dropped"] = entries(dataparallel::dropped_entries(value));
  std::cout << result << "\n";
  return 0;
}

}  // namespace

int main(int argc, char* argv[]) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const dataparallel::CheckpointError& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "not a CheckpointError: " << error.what() << "\n";
    return 2;
  }
}
