#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "command_line/compare_tensors.h"
#include "command_line/key_digest.h"

namespace dataparallel::command_line {

struct Difference {
  /// Where: names joined by dots, other keys and indices in brackets; "" for
  /// the whole.
  std::string key;
  /// What lies there, for a person to read; "" for nothing.
  std::string a;
  std::string b;
  /// In what they differ: "type", "key", "order", "value", or those of
  /// TensorDifference.
  std::vector<std::string> properties;
  TensorDifference tensor;
};

/// Compares what two checkpoints hold, container by container.
class Comparison {
 public:
  /// `values_only`: not the classes of mappings and sequences, what mappings
  /// carry beside their items, the order of an OrderedDict, requires_grad.
  /// `progress` is called with the number of values compared.
  Comparison(bool values_only, std::function<void(uint64_t)> progress)
      : values_only_(values_only), progress_(std::move(progress)) {}

  void compare(const c10::IValue& a, const c10::IValue& b) {
    compare("", a, b);
  }

  /// In A's order.
  const std::vector<Difference>& differences() const { return differences_; }
  /// How many values that hold no others were compared.
  uint64_t compared() const { return compared_; }

 private:
  using Items = std::vector<std::pair<c10::IValue, c10::IValue>>;

  void compare(const std::string& key, const c10::IValue& a,
               const c10::IValue& b);
  void compare_tensor_values(const std::string& key, const c10::IValue& a,
                             const c10::IValue& b);
  void compare_mappings(const std::string& key, const c10::IValue& a,
                        const c10::IValue& b);
  void compare_sequences(const std::string& key, const c10::IValue& a,
                         const c10::IValue& b);
  void compare_objects(const std::string& key, const c10::IValue& a,
                       const c10::IValue& b);
  /// Returns whether the keys that are in both are in one order.
  bool compare_items(const std::string& key, const Items& a, const Items& b);
  void compare_elements(const std::string& key, c10::ArrayRef<c10::IValue> a,
                        c10::ArrayRef<c10::IValue> b);
  bool same_text(const c10::IValue& a, const c10::IValue& b);
  /// Of what holds no others.
  bool same_plain(const c10::IValue& a, const c10::IValue& b);
  void count();
  void note(const std::string& key, const c10::IValue* a, const c10::IValue* b,
            const std::string& property, TensorDifference tensor = {});

  KeyDigest digest_;
  bool values_only_;
  std::function<void(uint64_t)> progress_;
  std::vector<Difference> differences_;
  uint64_t compared_ = 0;
  // Pairs of containers that were compared, or are being: a file can refer to
  // one of them as often as it likes.
  std::set<std::pair<const void*, const void*>> seen_;
  /// Texts that were found to be the same, which may be as long.
  std::set<std::pair<const void*, const void*>> same_texts_;
};

/// About how many values that hold no others there are in `value`.
uint64_t count_values(const c10::IValue& value);

}  // namespace dataparallel::command_line
