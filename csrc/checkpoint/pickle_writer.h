#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <dataparallel/python_values.h>

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/opcode.h"

namespace dataparallel::checkpoint {

/// Writes a value as Python's pickler does for `torch.save` (protocol 2), byte
/// for byte where the values tell what was one object in Python.
class PickleWriter {
 public:
  /// The whole pickle. Throws `c10::TypeError` and `c10::ValueError`, with the
  /// path, for what has no form in Python or in a file.
  void write(const c10::IValue& value);

  const std::string& pickle() const { return out_; }
  /// Record `data/i` is to hold the i-th of these.
  const std::vector<c10::Storage>& storages() const { return storages_; }

 private:
  using Items = std::vector<std::pair<c10::IValue, c10::IValue>>;
  /// Where the writer is inside the value: a key, or an index where it is null.
  struct Step {
    const c10::IValue* key;
    size_t index;
  };

  void save(const c10::IValue& value);
  void save_child(const c10::IValue& value, Step step);
  void save_int(int64_t value);
  void save_double(double value);
  void save_complex(c10::complex<double> value);
  void save_text(const std::string& text, const void* object);
  /// A text that in Python is one object wherever it appears.
  void save_constant(const std::string& text);
  void write_text(std::string_view text, const void* object = nullptr);
  void save_list(const std::vector<c10::IValue>& elements);
  void save_tuple(const c10::IValue& tuple);
  void save_mapping(const c10::IValue& value);
  void check_attributes(const std::string& type,
                        const c10::impl::GenericDict& attributes);
  void check_keys(const Items& items);
  /// `exact`: a plain dict, whose last batch Python writes differently.
  void save_items(const Items& items, bool exact);

  void save_device(at::Device device);
  void save_opaque(const c10::IValue& value);
  void save_values(const std::vector<c10::IValue>& values);
  void save_large_int(const std::string& text);
  void save_bytes(const std::string& bytes);
  void save_namespace(const Opaque& opaque);
  void save_opaque_mapping(const Opaque& opaque);

  void save_tensor(const at::Tensor& tensor);
  void save_parameter(const at::Tensor& tensor);
  void save_strided(const at::Tensor& tensor);
  void save_meta(const at::Tensor& tensor);
  void save_sparse(const at::Tensor& tensor);
  void save_nested(const at::Tensor& tensor);
  void save_quantized(const at::Tensor& tensor);
  void save_quantizer(const at::Tensor& tensor);
  void save_part(at::Tensor tensor);
  void save_storage_object(const Opaque& opaque);
  /// Its elements are of that dtype; none: bytes.
  void save_storage(const c10::Storage& storage,
                    std::optional<at::ScalarType> dtype);
  void save_sizes(at::IntArrayRef sizes);
  void save_size_object(at::IntArrayRef sizes);
  void save_layout(const std::string& name);
  void save_empty_ordered_dict();

  void op(Opcode code) { out_ += static_cast<char>(code); }
  void number(uint64_t value, int bytes);
  void global(const char* module, const std::string& name);
  void global(const std::string& qualified_name);
  /// Ends a tuple of `size` elements that are on the stack.
  void end_tuple(size_t size, const void* object = nullptr);
  /// A mark, where a tuple of `size` elements begins with one.
  void begin_tuple(size_t size);
  /// Notes what lies on top of the stack, as `object` if that is not null.
  void memoize(const void* object = nullptr);
  /// Fetches `object` if it was written before.
  bool fetch(const void* object);
  void get(uint32_t index);
  std::string path() const;

  std::string out_;
  uint32_t memo_size_ = 0;
  std::unordered_map<const void*, uint32_t> objects_;
  std::unordered_map<std::string, uint32_t> globals_;
  std::unordered_map<std::string, uint32_t> constants_;
  std::unordered_map<std::string, uint32_t> layouts_;
  std::vector<c10::Storage> storages_;
  /// For each storage: its number, what it was written as, and its key's place.
  struct StorageEntry {
    size_t number;
    std::string type;
  };
  std::unordered_map<const c10::StorageImpl*, StorageEntry> storage_entries_;
  std::unordered_map<size_t, uint32_t> storage_keys_;
  std::vector<c10::IValue> kept_;  // so that no address is used twice
  std::vector<Step> steps_;
};

}  // namespace dataparallel::checkpoint
