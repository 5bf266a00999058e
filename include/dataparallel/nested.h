#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <dataparallel/export.h>
#include <torch/data/example.h>
#include <torch/nn/utils/rnn.h>
#include <torch/ordered_dict.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <map>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace dataparallel {

/// The one customization point: how the library walks a struct of yours.
///
/// Specialise it with a static `tie` that returns references to the members
/// that hold tensors (or anything nested); the members that are not named are
/// copied as they are. The struct must be copyable.
///
///     struct Batch { at::Tensor images; std::vector<at::Tensor> crops; };
///     template <>
///     struct dataparallel::nested_struct<Batch> {
///       static auto tie(auto& b) { return std::tie(b.images, b.crops); }
///     };
template <class T>
struct nested_struct;

/// What is done at each leaf of a nested value; see `visit_leaves`.
class DATAPARALLEL_EXPORT LeafVisitor {
 public:
  virtual ~LeafVisitor() = default;
  /// `path` names the leaf as the user would write it: `args[0]["mask"][2]`.
  virtual void tensor(at::Tensor& tensor, const std::string& path) = 0;
  virtual void packed(torch::nn::utils::rnn::PackedSequence& sequence,
                      const std::string& path) = 0;
};

/// What is done when values of several replicas become one; see
/// `merge_nested`. `replicas` are the numbers of the replicas that the entries
/// come from, for messages.
class DATAPARALLEL_EXPORT LeafMerger {
 public:
  virtual ~LeafMerger() = default;
  virtual at::Tensor tensors(const std::vector<at::Tensor>& tensors,
                             const std::string& path) = 0;
  virtual torch::nn::utils::rnn::PackedSequence packed(
      const std::vector<torch::nn::utils::rnn::PackedSequence>& sequences,
      const std::string& path) = 0;
  /// Throws the error "`path` is `descriptions[i]` in replica i": the values
  /// do not have one shape.
  [[noreturn]] void differ(const std::string& path,
                           const std::vector<std::string>& descriptions) const;

  std::vector<int64_t> replicas;
};

/// `visit_leaves` and `merge_nested` of a `c10::IValue`: tensors, lists,
/// dictionaries and tuples of any depth keep their static types.
DATAPARALLEL_EXPORT void visit_ivalue(c10::IValue& value,
                                      const std::string& path,
                                      LeafVisitor& visitor);
DATAPARALLEL_EXPORT c10::IValue merge_ivalues(
    const std::vector<c10::IValue>& values, const std::string& path,
    LeafMerger& merger);

namespace detail {

template <class T, template <class...> class Template>
inline constexpr bool is_specialization = false;
template <template <class...> class Template, class... Ts>
inline constexpr bool is_specialization<Template<Ts...>, Template> = true;

template <class T>
inline constexpr bool is_std_array = false;
template <class T, size_t N>
inline constexpr bool is_std_array<std::array<T, N>> = true;

template <class T>
concept Tuple =
    is_specialization<T, std::tuple> || is_specialization<T, std::pair>;
template <class T>
concept Sequence = (is_specialization<T, std::vector> ||
                    is_std_array<T>)&&!std::same_as<T, std::vector<bool>>;
template <class T>
concept Map =
    is_specialization<T, std::map> || is_specialization<T, std::unordered_map>;
template <class T>
concept OrderedMap = is_specialization<T, torch::OrderedDict>;
template <class T>
concept Optional = is_specialization<T, std::optional>;
template <class T>
concept Struct = requires(T& value) {
  nested_struct<T>::tie(value);
};
template <class T>
concept TensorLeaf = std::same_as<T, at::Tensor>;
template <class T>
concept PackedLeaf = std::same_as<T, torch::nn::utils::rnn::PackedSequence>;
template <class T>
concept Dynamic = std::same_as<T, c10::IValue>;

/// True for the types that are walked; everything else is plain.
template <class T>
concept Nested = TensorLeaf<T> || PackedLeaf<T> || Dynamic<T> || Tuple<T> ||
    Sequence<T> || Map<T> || OrderedMap<T> || Optional<T> || Struct<T>;

struct Anything {
  template <class T>
  operator T() const;
};
template <class T>
consteval bool holds_tensors();
struct WithTensors {
  template <class T>
  requires(holds_tensors<T>()) operator T() const;
};

/// Whether an aggregate's member number `sizeof...(Before)` holds tensors.
template <class T, class... Before>
consteval bool member_holds_tensors() {
  return requires {
    T{Before()..., WithTensors()};
  };
}

template <class T, class... Before>
consteval bool any_member_holds_tensors() {
  constexpr size_t kMembers = 16;  // looked at, no more
  if constexpr (member_holds_tensors<T, Before...>()) {
    return true;
  } else if constexpr (sizeof...(Before) + 1 < kMembers && requires {
                         T{Before()..., Anything()};
                       }) {
    return any_member_holds_tensors<T, Before..., Anything>();
  } else {
    return false;
  }
}

template <class T>
inline constexpr bool any_holds_tensors = false;
template <template <class...> class Template, class... Ts>
inline constexpr bool any_holds_tensors<Template<Ts...>> =
    (holds_tensors<std::remove_cvref_t<Ts>>() || ...);

/// Whether a `T` contains tensors, as far as its type shows: in containers,
/// variants and aggregates, but not behind pointers or in private members.
template <class T>
consteval bool holds_tensors() {
  if constexpr (TensorLeaf<T> || PackedLeaf<T> || Dynamic<T> || Struct<T>) {
    return true;
  } else if constexpr (Tuple<T> || Map<T> || OrderedMap<T> || Optional<T> ||
                       is_specialization<T, std::variant> ||
                       is_specialization<T, c10::List> ||
                       is_specialization<T, c10::Dict> ||
                       is_specialization<T, torch::data::Example>) {
    return any_holds_tensors<T>;
  } else if constexpr (std::ranges::range<T>) {
    using Value = std::ranges::range_value_t<T>;
    if constexpr (std::same_as<Value, T>) {  // a path is a range of paths
      return false;
    } else {
      return holds_tensors<std::remove_cvref_t<Value>>();
    }
  } else if constexpr (std::is_class_v<T> && std::is_aggregate_v<T>) {
    return any_member_holds_tensors<T>();
  } else {
    return false;
  }
}

template <class T>
inline constexpr bool any_hides_tensors = false;
template <class T>
consteval bool hides_tensors();
template <template <class...> class Template, class... Ts>
inline constexpr bool any_hides_tensors<Template<Ts...>> =
    (hides_tensors<std::remove_cvref_t<Ts>>() || ...);

/// Whether a `T` contains tensors where they are not walked, so that they would
/// go whole to every replica.
template <class T>
consteval bool hides_tensors() {
  if constexpr (TensorLeaf<T> || PackedLeaf<T> || Dynamic<T>) {
    return false;
  } else if constexpr (Tuple<T> || Map<T> || OrderedMap<T> || Optional<T>) {
    return any_hides_tensors<T>;
  } else if constexpr (Sequence<T>) {
    return hides_tensors<typename T::value_type>();
  } else if constexpr (Struct<T>) {
    return any_hides_tensors<decltype(nested_struct<T>::tie(
        std::declval<T&>()))>;
  } else {
    return holds_tensors<T>();
  }
}

/// A compile-time error for arguments whose tensors would not be split.
template <class T>
constexpr void refuse_hidden_tensors() {
  static_assert(
      !hides_tensors<T>(),
      "dataparallel: this argument holds tensors, but its type is not one that "
      "is walked, so they would go whole to every replica: give it a "
      "dataparallel::nested_struct, or pass it as std::cref(it) if it shall go "
      "whole to each");
}

inline std::string index_path(const std::string& path, size_t index) {
  return path + "[" + std::to_string(index) + "]";
}

template <class Key>
std::string key_path(const std::string& path, const Key& key) {
  if constexpr (std::convertible_to<Key, std::string>) {
    return path + "[\"" + std::string(key) + "\"]";
  } else if constexpr (std::is_arithmetic_v<Key>) {
    return path + "[" + std::to_string(key) + "]";
  } else {
    return path + "[…]";
  }
}

}  // namespace detail

/// Calls `visitor` at each tensor and packed sequence inside `value`, which it
/// may replace. Walked: `Tensor`, `PackedSequence`, `c10::IValue`, `optional`,
/// `vector`, `array`, `pair`, `tuple`, `map`, `unordered_map`,
/// `torch::OrderedDict`, and structs with a `nested_struct`; everything else is
/// left alone. Order: the members' own; for an `unordered_map`, its iteration
/// order.
template <class T>
void visit_leaves(T& value, const std::string& path, LeafVisitor& visitor) {
  if constexpr (detail::TensorLeaf<T>) {
    visitor.tensor(value, path);
  } else if constexpr (detail::PackedLeaf<T>) {
    visitor.packed(value, path);
  } else if constexpr (detail::Dynamic<T>) {
    visit_ivalue(value, path, visitor);
  } else if constexpr (detail::Optional<T>) {
    if (value.has_value()) {
      visit_leaves(*value, path, visitor);
    }
  } else if constexpr (detail::Sequence<T>) {
    if constexpr (detail::Nested<typename T::value_type>) {
      for (size_t i = 0; i < value.size(); ++i) {
        visit_leaves(value[i], detail::index_path(path, i), visitor);
      }
    }
  } else if constexpr (detail::Map<T>) {
    for (auto& [key, mapped] : value) {
      visit_leaves(mapped, detail::key_path(path, key), visitor);
    }
  } else if constexpr (detail::OrderedMap<T>) {
    for (auto& item : value) {
      visit_leaves(item.value(), detail::key_path(path, item.key()), visitor);
    }
  } else if constexpr (detail::Tuple<T>) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (visit_leaves(std::get<I>(value), detail::index_path(path, I), visitor),
       ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (detail::Struct<T>) {
    auto members = nested_struct<T>::tie(value);
    [&]<size_t... I>(std::index_sequence<I...>) {
      (visit_leaves(std::get<I>(members), detail::index_path(path, I), visitor),
       ...);
    }
    (std::make_index_sequence<std::tuple_size_v<decltype(members)>>());
  }
}

namespace detail {

template <class T, class Describe>
void check_same(const std::vector<const T*>& values, const std::string& path,
                const LeafMerger& merger, Describe&& describe) {
  std::vector<std::string> descriptions;
  bool same = true;
  for (const T* value : values) {
    descriptions.push_back(describe(*value));
    same = same && descriptions.back() == descriptions.front();
  }
  if (!same) {
    merger.differ(path, descriptions);
  }
}

/// Equal, or not a number both.
template <class T>
bool same_plain(const T& a, const T& b) {
  if constexpr (std::floating_point<T>) {
    if (a != a && b != b) {
      return true;
    }
  }
  return a == b;
}

template <class T>
std::string describe_plain(const T& value) {
  if constexpr (std::convertible_to<T, std::string>) {
    return "\"" + std::string(value) + "\"";
  } else if constexpr (std::floating_point<T>) {
    // As many digits as tell it from every other number.
    std::array<char, 64> text;
    return {text.data(),
            std::to_chars(text.data(), text.data() + text.size(), value).ptr};
  } else if constexpr (std::is_arithmetic_v<T>) {
    return std::to_string(value);
  } else {
    return "a different value";
  }
}

template <class T>
std::vector<T> copies_of(const std::vector<const T*>& values) {
  std::vector<T> copies;
  copies.reserve(values.size());
  for (const T* value : values) {
    copies.push_back(*value);
  }
  return copies;
}

/// The values' `select(*value)` as pointers.
template <class T, class Select>
auto each(const std::vector<const T*>& values, Select&& select) {
  using Part = std::remove_cvref_t<decltype(select(*values.front()))>;
  std::vector<const Part*> parts;
  parts.reserve(values.size());
  for (const T* value : values) {
    parts.push_back(&select(*value));
  }
  return parts;
}

template <class T>
std::string describe_keys(const T& map) {
  std::vector<std::string> keys;
  for (const auto& item : map) {
    if constexpr (OrderedMap<T>) {
      keys.push_back(key_path("", item.key()));
    } else {
      keys.push_back(key_path("", item.first));
    }
  }
  if constexpr (is_specialization<T, std::unordered_map>) {
    std::sort(keys.begin(), keys.end());
  }
  std::string text = "keys";
  for (const std::string& key : keys) {
    text += " " + key;
  }
  return text;
}

template <class T>
void merge_into(T& result, const std::vector<const T*>& values,
                const std::string& path, LeafMerger& merger);

template <class T, class Members>
void merge_members(T& result, const std::vector<const T*>& values,
                   const std::string& path, LeafMerger& merger,
                   Members&& members) {
  using Parts = decltype(members(result));
  [&]<size_t... I>(std::index_sequence<I...>) {
    (
        [&] {
          auto& part = std::get<I>(members(result));
          using Part = std::remove_cvref_t<decltype(part)>;
          std::vector<const Part*> parts;
          for (const T* value : values) {
            parts.push_back(&std::get<I>(members(const_cast<T&>(*value))));
          }
          merge_into(part, parts, index_path(path, I), merger);
        }(),
        ...);
  }
  (std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<Parts>>>());
}

/// `result` starts as a copy of `*values[0]`.
template <class T>
void merge_into(T& result, const std::vector<const T*>& values,
                const std::string& path, LeafMerger& merger) {
  if constexpr (TensorLeaf<T>) {
    result = merger.tensors(copies_of(values), path);
  } else if constexpr (PackedLeaf<T>) {
    result = merger.packed(copies_of(values), path);
  } else if constexpr (Dynamic<T>) {
    result = merge_ivalues(copies_of(values), path, merger);
  } else if constexpr (Optional<T>) {
    check_same(values, path, merger, [](const T& value) {
      return std::string(value.has_value() ? "a value" : "None");
    });
    if (result.has_value()) {
      merge_into(*result,
                 each(
                     values, [](const T& v) -> auto& { return *v; }),
                 path, merger);
    }
  } else if constexpr (Sequence<T>) {
    check_same(values, path, merger, [](const T& value) {
      return "of length " + std::to_string(value.size());
    });
    for (size_t i = 0; i < result.size(); ++i) {
      merge_into(result[i],
                 each(
                     values, [i](const T& v) -> auto& { return v[i]; }),
                 index_path(path, i), merger);
    }
  } else if constexpr (Map<T>) {
    check_same(values, path, merger, [&result](const T& map) {
      bool same = map.size() == result.size();
      for (const auto& item : result) {
        same = same && map.contains(item.first);
      }
      const std::string keys = describe_keys<T>(map);
      // Keys that have no text may differ where their descriptions do not.
      return same || keys != describe_keys<T>(result) ? keys : "other " + keys;
    });
    for (auto& [key, mapped] : result) {
      const auto& k = key;
      merge_into(mapped,
                 each(
                     values, [&k](const T& v) -> auto& { return v.at(k); }),
                 key_path(path, key), merger);
    }
  } else if constexpr (OrderedMap<T>) {
    check_same(values, path, merger, describe_keys<T>);
    for (auto& item : result) {
      merge_into(
          item.value(),
          each(
              values, [&](const T& v) -> auto& { return v[item.key()]; }),
          key_path(path, item.key()), merger);
    }
  } else if constexpr (Tuple<T>) {
    merge_members(result, values, path, merger, [](T& v) -> T& { return v; });
  } else if constexpr (Struct<T>) {
    merge_members(result, values, path, merger,
                  [](T& v) { return nested_struct<T>::tie(v); });
  } else {
    static_assert(
        !hides_tensors<T>(),
        "dataparallel: this result holds tensors, but its type is not "
        "one that is walked, so all but the first replica's would be "
        "lost: give it a dataparallel::nested_struct");
    static_assert(std::equality_comparable<T>,
                  "gather: this type is neither nested nor comparable: give it "
                  "a dataparallel::nested_struct, or an operator== if it holds "
                  "no tensors");
    bool same = true;
    for (const T* value : values) {
      same = same && same_plain(*value, result);
    }
    if (!same) {
      std::vector<std::string> descriptions;
      for (const T* value : values) {
        descriptions.push_back(describe_plain(*value));
      }
      merger.differ(path, descriptions);
    }
  }
}

}  // namespace detail

/// One value of the replicas' `values` (one at least): leaves are joined by
/// `merger`, equal plain values stay. Different lengths, keys, types or plain
/// values: `c10::ValueError` with the path and the replicas. (Different plain
/// values become a list in an `IValue`, which can hold one.)
template <class T>
T merge_nested(const std::vector<T>& values, const std::string& path,
               LeafMerger& merger) {
  std::vector<const T*> pointers;
  for (size_t i = 0; i < values.size(); ++i) {
    if constexpr (std::same_as<T, bool>) {  // vector<bool> holds no bool
      static constexpr bool kBools[] = {false, true};
      pointers.push_back(&kBools[values[i]]);
    } else {
      pointers.push_back(&values[i]);
    }
  }
  T result = values.front();
  detail::merge_into(result, pointers, path, merger);
  return result;
}

}  // namespace dataparallel
