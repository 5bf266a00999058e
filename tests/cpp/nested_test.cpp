#include <dataparallel/nested.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "support/catch.h"
#include "support/values.h"

using dataparallel::LeafMerger;
using dataparallel::LeafVisitor;
using dataparallel::merge_nested;
using dataparallel::visit_leaves;
using test::message_of;
using test::same;
using torch::Tensor;
using torch::nn::utils::rnn::PackedSequence;

using Paths = std::vector<std::string>;

struct Batch {
  Tensor images;
  std::vector<Tensor> crops;
  std::string name;  // not named in tie: copied
};
template <>
struct dataparallel::nested_struct<Batch> {
  static auto tie(auto& batch) { return std::tie(batch.images, batch.crops); }
};

namespace {

Tensor number(double value) {
  return torch::tensor(value, torch::kFloat64);
}

PackedSequence packed(double start, bool sorted) {
  const std::vector<int64_t> lengths =
      sorted ? std::vector<int64_t>{3, 2} : std::vector<int64_t>{2, 3};
  return torch::nn::utils::rnn::pack_padded_sequence(
      start + torch::arange(6, torch::kFloat64).reshape({3, 2}),
      torch::tensor(lengths), /*batch_first=*/false,
      /*enforce_sorted=*/sorted);
}

/// Adds 100 to every leaf and notes its path.
class AddHundred : public LeafVisitor {
 public:
  void tensor(Tensor& tensor, const std::string& path) override {
    paths.push_back(path);
    if (tensor.defined()) {
      tensor = tensor + 100;
    }
  }
  void packed(PackedSequence& sequence, const std::string& path) override {
    paths.push_back("packed " + path);
    sequence =
        PackedSequence(sequence.data() + 100, sequence.batch_sizes(),
                       sequence.sorted_indices(), sequence.unsorted_indices());
  }
  Paths paths;
};

/// The paths of `value`'s leaves; 100 is added to each.
template <class T>
Paths walk(T& value) {
  AddHundred visitor;
  visit_leaves(value, "args", visitor);
  return visitor.paths;
}

/// Stacks tensors, so that the result shows who gave what in which order.
class Stack : public LeafMerger {
 public:
  explicit Stack(size_t values) {
    for (size_t i = 0; i < values; ++i) {
      replicas.push_back(static_cast<int64_t>(i));
    }
  }
  Tensor tensors(const std::vector<Tensor>& tensors,
                 const std::string& path) override {
    paths.push_back(path);
    for (const Tensor& tensor : tensors) {
      if (!tensor.defined()) {
        return {};
      }
    }
    return torch::stack(tensors);
  }
  PackedSequence packed(const std::vector<PackedSequence>& sequences,
                        const std::string& path) override {
    paths.push_back("packed " + path);
    Tensor data = sequences.front().data().clone();
    for (size_t i = 1; i < sequences.size(); ++i) {
      data += sequences[i].data();
    }
    return PackedSequence(data, sequences.front().batch_sizes(),
                          sequences.front().sorted_indices(),
                          sequences.front().unsorted_indices());
  }
  Paths paths;
};

template <class T>
T merge(const std::vector<T>& values) {
  Stack stack(values.size());
  return merge_nested(values, "result", stack);
}

template <class T>
Paths merged_paths(const std::vector<T>& values) {
  Stack stack(values.size());
  merge_nested(values, "result", stack);
  return stack.paths;
}

template <class T>
std::string merge_error(const std::vector<T>& values) {
  return message_of<c10::ValueError>([&] { merge(values); });
}

/// The stack of numbers.
bool is(const Tensor& tensor, const std::vector<double>& values) {
  return same(tensor, torch::tensor(values, torch::kFloat64));
}
bool is(const Tensor& tensor, double value) {
  return same(tensor, number(value));
}

const std::string kSame = ", expected the same in every replica";

}  // namespace

TEST_CASE("a tensor is one leaf, which the visitor may replace", "[nested]") {
  Tensor value = number(1);
  const Tensor before = value;
  CHECK(walk(value) == Paths{"args"});
  CHECK(is(value, 101));
  CHECK(is(before, 1));
}

TEST_CASE("an undefined tensor is a leaf", "[nested]") {
  Tensor value;
  CHECK(walk(value) == Paths{"args"});
  CHECK_FALSE(value.defined());
  CHECK_FALSE(merge<Tensor>({Tensor(), Tensor()}).defined());
}

TEST_CASE("a packed sequence is one leaf", "[nested]") {
  for (const bool sorted : {true, false}) {
    CAPTURE(sorted);
    PackedSequence value = packed(0, sorted);
    const PackedSequence before = value;
    CHECK(walk(value) == Paths{"packed args"});
    CHECK(same(value.data(), before.data() + 100));
    CHECK(same(value.batch_sizes(), before.batch_sizes()));
    CHECK(value.sorted_indices().defined() == !sorted);
    CHECK(same(value.unsorted_indices(), before.unsorted_indices()));

    const PackedSequence both =
        merge<PackedSequence>({packed(0, sorted), packed(10, sorted)});
    CHECK(same(both.data(), packed(0, sorted).data() * 2 + 10));
  }
}

TEST_CASE("an optional is walked if it holds a value", "[nested]") {
  std::optional<Tensor> value = number(1);
  CHECK(walk(value) == Paths{"args"});
  CHECK(is(*value, 101));
  std::optional<Tensor> none;
  CHECK(walk(none).empty());
  CHECK_FALSE(none.has_value());
}

TEST_CASE("optionals of all replicas merge if all hold a value or none does",
          "[nested]") {
  using Optional = std::optional<Tensor>;
  CHECK(is(*merge<Optional>({number(1), number(2)}), {1, 2}));
  CHECK_FALSE(merge<Optional>({std::nullopt, std::nullopt}).has_value());
  CHECK(merge_error<Optional>({number(1), std::nullopt}) ==
        "gather: result is a value in replica 0 and None in replica 1" + kSame);
  CHECK(merge_error<Optional>({std::nullopt, std::nullopt, number(1)}) ==
        "gather: result is None in replica 0, None in replica 1 and a value "
        "in replica 2" +
            kSame);
}

TEST_CASE("a vector is walked by index", "[nested]") {
  std::vector<Tensor> value{number(1), number(2)};
  CHECK(walk(value) == Paths{"args[0]", "args[1]"});
  CHECK(is(value[0], 101));
  CHECK(is(value[1], 102));
  std::vector<Tensor> empty;
  CHECK(walk(empty).empty());
}

TEST_CASE("vectors merge entry by entry and must be equally long", "[nested]") {
  using Vector = std::vector<Tensor>;
  const auto both =
      merge<Vector>({{number(1), number(2)}, {number(3), number(4)}});
  REQUIRE(both.size() == 2);
  CHECK(is(both[0], {1, 3}));
  CHECK(is(both[1], {2, 4}));
  CHECK(merge<Vector>({{}, {}}).empty());
  CHECK(merge_error<Vector>({{number(1)}, {number(1), number(2)}}) ==
        "gather: result is of length 1 in replica 0 and of length 2 in "
        "replica 1" +
            kSame);
}

TEST_CASE("an array is walked and merged by index", "[nested]") {
  using Array = std::array<Tensor, 2>;
  Array value{number(1), number(2)};
  CHECK(walk(value) == Paths{"args[0]", "args[1]"});
  CHECK(is(value[1], 102));
  const auto both =
      merge<Array>({{number(1), number(2)}, {number(3), number(4)}});
  CHECK(is(both[0], {1, 3}));
  CHECK(is(both[1], {2, 4}));
  std::array<Tensor, 0> empty;
  CHECK(walk(empty).empty());
}

TEST_CASE("a pair and a tuple are walked and merged by index", "[nested]") {
  using Pair = std::pair<Tensor, int>;
  Pair pair{number(1), 7};
  CHECK(walk(pair) == Paths{"args[0]"});
  CHECK(is(pair.first, 101));
  CHECK(pair.second == 7);
  const Pair both = merge<Pair>({{number(1), 7}, {number(2), 7}});
  CHECK(is(both.first, {1, 2}));
  CHECK(both.second == 7);

  using Tuple = std::tuple<Tensor, std::string, Tensor>;
  Tuple tuple{number(1), "x", number(2)};
  CHECK(walk(tuple) == Paths{"args[0]", "args[2]"});
  CHECK(is(std::get<2>(tuple), 102));
  const Tuple three =
      merge<Tuple>({{number(1), "x", number(2)}, {number(3), "x", number(4)}});
  CHECK(is(std::get<0>(three), {1, 3}));
  CHECK(std::get<1>(three) == "x");
  CHECK(is(std::get<2>(three), {2, 4}));

  std::tuple<> empty;
  CHECK(walk(empty).empty());
  CHECK(merge<std::tuple<>>({{}, {}}) == std::tuple<>());
}

TEMPLATE_TEST_CASE("a map is walked by key", "[nested]",
                   (std::map<std::string, Tensor>),
                   (std::unordered_map<std::string, Tensor>)) {
  TestType value{{"a", number(1)}, {"b", number(2)}};
  const Paths paths = walk(value);
  CHECK(std::set<std::string>(paths.begin(), paths.end()) ==
        std::set<std::string>{"args[\"a\"]", "args[\"b\"]"});
  CHECK(is(value.at("a"), 101));
  CHECK(is(value.at("b"), 102));
  TestType empty;
  CHECK(walk(empty).empty());
}

TEMPLATE_TEST_CASE("maps merge key by key and must have the same keys",
                   "[nested]", (std::map<std::string, Tensor>),
                   (std::unordered_map<std::string, Tensor>)) {
  const auto both = merge<TestType>({{{"a", number(1)}, {"b", number(2)}},
                                     {{"b", number(4)}, {"a", number(3)}}});
  CHECK(both.size() == 2);
  CHECK(is(both.at("a"), {1, 3}));
  CHECK(is(both.at("b"), {2, 4}));
  CHECK(merge<TestType>({{}, {}}).empty());
  CHECK(merge_error<TestType>({{{"a", number(1)}}, {{"b", number(1)}}}) ==
        "gather: result is keys [\"a\"] in replica 0 and keys [\"b\"] in "
        "replica 1" +
            kSame);
  CHECK(merge_error<TestType>(
            {{{"a", number(1)}}, {{"b", number(1)}, {"a", number(1)}}}) ==
        "gather: result is keys [\"a\"] in replica 0 and keys [\"a\"] "
        "[\"b\"] in replica 1" +
            kSame);
}

TEST_CASE("map keys that are numbers show as such", "[nested]") {
  std::map<int, Tensor> value{{7, number(1)}};
  CHECK(walk(value) == Paths{"args[7]"});
}

TEST_CASE("maps whose keys cannot be shown must have the same keys too",
          "[nested]") {
  using Map = std::map<std::pair<int, int>, Tensor>;
  Map value{{{1, 2}, number(1)}};
  CHECK(walk(value) == Paths{"args[…]"});
  CHECK(
      is(merge<Map>({{{{1, 2}, number(1)}}, {{{1, 2}, number(2)}}}).at({1, 2}),
         {1, 2}));
  CHECK(merge_error<Map>({{{{1, 2}, number(1)}}, {{{1, 3}, number(2)}}}) ==
        "gather: result is keys […] in replica 0 and other keys […] in "
        "replica 1" +
            kSame);
}

TEST_CASE("an ordered dictionary keeps its order", "[nested]") {
  using Dict = torch::OrderedDict<std::string, Tensor>;
  const auto make = [](double b, double a) {
    Dict dict;
    dict.insert("b", number(b));
    dict.insert("a", number(a));
    return dict;
  };
  Dict value = make(1, 2);
  CHECK(walk(value) == Paths{"args[\"b\"]", "args[\"a\"]"});
  CHECK(is(value["b"], 101));
  CHECK(is(value["a"], 102));

  const Dict both = merge<Dict>({make(1, 2), make(3, 4)});
  CHECK(both.keys() == std::vector<std::string>{"b", "a"});
  CHECK(is(both["b"], {1, 3}));
  CHECK(is(both["a"], {2, 4}));
  Dict empty;
  CHECK(walk(empty).empty());
  CHECK(merge<Dict>({empty, empty}).is_empty());
  CHECK(merge_error<Dict>({make(1, 2), empty}) ==
        "gather: result is keys [\"b\"] [\"a\"] in replica 0 and keys in "
        "replica 1" +
            kSame);
}

TEST_CASE("a user's struct is walked as its tie says", "[nested]") {
  Batch value{number(1), {number(2), number(3)}, "train"};
  CHECK(walk(value) == Paths{"args[0]", "args[1][0]", "args[1][1]"});
  CHECK(is(value.images, 101));
  CHECK(is(value.crops[1], 103));
  CHECK(value.name == "train");

  const Batch both = merge<Batch>(
      {{number(1), {number(2)}, "first"}, {number(3), {number(4)}, "second"}});
  CHECK(is(both.images, {1, 3}));
  CHECK(is(both.crops.at(0), {2, 4}));
  CHECK(both.name == "first");
  CHECK(
      merge_error<Batch>({{number(1), {}, ""}, {number(1), {Tensor()}, ""}}) ==
      "gather: result[1] is of length 0 in replica 0 and of length 1 in "
      "replica 1" +
          kSame);
}

TEST_CASE("containers in containers have paths as the user writes them",
          "[nested]") {
  using Value =
      std::tuple<std::vector<std::map<std::string, std::optional<Tensor>>>,
                 std::pair<int, std::array<Batch, 1>>>;
  const auto make = [](double x) {
    return Value{{{{"a", number(x)}, {"none", std::nullopt}}},
                 {7, {Batch{number(x + 1), {number(x + 2)}, ""}}}};
  };
  Value value = make(1);
  CHECK(walk(value) ==
        Paths{"args[0][0][\"a\"]", "args[1][1][0][0]", "args[1][1][0][1][0]"});
  CHECK(is(*std::get<0>(value)[0]["a"], 101));
  CHECK(is(std::get<1>(value).second[0].crops[0], 103));

  CHECK(merged_paths<Value>({make(1), make(2)}) ==
        Paths{"result[0][0][\"a\"]", "result[1][1][0][0]",
              "result[1][1][0][1][0]"});
  const Value both = merge<Value>({make(1), make(5)});
  CHECK(is(*std::get<0>(both)[0].at("a"), {1, 5}));
  CHECK(is(std::get<1>(both).second[0].images, {2, 6}));
  CHECK(is(std::get<1>(both).second[0].crops[0], {3, 7}));
}

TEST_CASE("types that hold tensors where nobody walks are told apart",
          "[nested]") {
  using dataparallel::detail::hides_tensors;
  struct Hidden {
    int number;
    std::string name;
    at::Tensor tensor;
  };
  struct Deep {
    std::vector<std::string> names;
    std::vector<Hidden> all;
  };
  struct Config {
    std::string name;
    std::vector<int64_t> sizes;
    std::map<std::string, double> rates;
    const at::Tensor* elsewhere;
  };
  static_assert(hides_tensors<Hidden>());
  static_assert(hides_tensors<Deep>());
  static_assert(hides_tensors<std::vector<Hidden>>());
  static_assert(hides_tensors<std::tuple<int, std::optional<Hidden>>>());
  static_assert(hides_tensors<std::map<std::string, Hidden>>());
  static_assert(hides_tensors<c10::List<at::Tensor>>());
  static_assert(hides_tensors<at::TensorList>());
  static_assert(hides_tensors<std::deque<at::Tensor>>());
  static_assert(hides_tensors<std::variant<int, at::Tensor>>());
  static_assert(hides_tensors<torch::data::Example<>>());
  static_assert(hides_tensors<c10::Dict<std::string, at::Tensor>>());
  static_assert(!hides_tensors<Config>());
  static_assert(!hides_tensors<std::deque<int>>());
  static_assert(!hides_tensors<std::string>());
  static_assert(!hides_tensors<std::function<at::Tensor(at::Tensor)>>());
  static_assert(!hides_tensors<std::reference_wrapper<const Hidden>>());
  static_assert(!hides_tensors<at::Tensor>());
  static_assert(!hides_tensors<std::vector<std::tuple<at::Tensor, int>>>());
  static_assert(!hides_tensors<c10::IValue>());
  SUCCEED();
}

TEST_CASE("plain values are left alone", "[nested]") {
  int number = 3;
  std::string text = "text";
  std::vector<int> numbers{1, 2};
  std::vector<bool> flags{true, false};
  std::set<int> others{4};
  CHECK(walk(number).empty());
  CHECK(walk(text).empty());
  CHECK(walk(numbers).empty());
  CHECK(walk(flags).empty());
  CHECK(walk(others).empty());
  CHECK(number == 3);
  CHECK(text == "text");
  CHECK(numbers == std::vector<int>{1, 2});
  CHECK(flags == std::vector<bool>{true, false});
}

TEST_CASE("equal plain values merge to that value", "[nested]") {
  CHECK(merge<int>({3, 3, 3}) == 3);
  CHECK(merge<double>({0.5, 0.5}) == 0.5);
  CHECK(merge<bool>({true, true}) == true);
  CHECK(merge<bool>({false, false, false}) == false);
  CHECK(merge<std::string>({"a", "a"}) == "a");
  CHECK(merge<std::vector<int>>({{1, 2}, {1, 2}}) == std::vector<int>{1, 2});
  CHECK(merge<std::vector<bool>>({{true, false}, {true, false}}) ==
        std::vector<bool>{true, false});
  CHECK(merge<std::set<int>>({{1}, {1}}) == std::set<int>{1});
}

TEST_CASE("plain values that are not a number in every replica are equal",
          "[nested]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(std::isnan(merge<double>({nan, nan})));
  CHECK(merge<c10::IValue>({c10::IValue(nan), c10::IValue(nan)}).isDouble());
}

TEST_CASE("plain values that differ are refused where the type holds one",
          "[nested]") {
  CHECK(merge_error<int>({3, 4}) ==
        "gather: result is 3 in replica 0 and 4 in replica 1" + kSame);
  CHECK(merge_error<double>({1e-9, 2e-9}) ==
        "gather: result is 1e-09 in replica 0 and 2e-09 in replica 1" + kSame);
  CHECK(merge_error<double>({0.1, 0.1 + 0.2, 2}) ==
        "gather: result is 0.1 in replica 0, 0.30000000000000004 in replica 1 "
        "and 2 in replica 2" +
            kSame);
  CHECK(merge_error<float>({0.1f, 0.2f}) ==
        "gather: result is 0.1 in replica 0 and 0.2 in replica 1" + kSame);
  CHECK(merge_error<std::string>({"a", "b", "a"}) ==
        "gather: result is \"a\" in replica 0, \"b\" in replica 1 and \"a\" "
        "in replica 2" +
            kSame);
  CHECK(merge_error<std::vector<int>>({{1, 2}, {1, 3}}) ==
        "gather: result[1] is 2 in replica 0 and 3 in replica 1" + kSame);
  CHECK(
      merge_error<std::tuple<Tensor, int>>({{number(1), 1}, {number(1), 2}}) ==
      "gather: result[1] is 1 in replica 0 and 2 in replica 1" + kSame);
  CHECK(test::contains(merge_error<std::vector<bool>>({{true}, {false}}),
                       "gather: result is a different value in replica 0"));
}

TEST_CASE("messages name the replicas that the values come from", "[nested]") {
  Stack stack(2);
  stack.replicas = {0, 3};
  CHECK(message_of<c10::ValueError>([&] {
          merge_nested<int>({1, 2}, "result[1]", stack);
        }) == "gather: result[1] is 1 in replica 0 and 2 in replica 3" + kSame);
}

TEST_CASE("one replica's value merges with nothing", "[nested]") {
  const auto one = merge<std::tuple<Tensor, int>>({{number(1), 2}});
  CHECK(is(std::get<0>(one), std::vector<double>{1}));
  CHECK(std::get<1>(one) == 2);
}

// c10::IValue

namespace {

using c10::IValue;

template <class T>
IValue list_of(const std::vector<T>& values) {
  c10::List<T> list;
  for (const T& value : values) {
    list.push_back(value);
  }
  return list;
}

template <class Key>
IValue dict_of(const std::vector<std::pair<Key, Tensor>>& items) {
  c10::Dict<Key, Tensor> dict;
  for (const auto& [key, value] : items) {
    dict.insert(key, value);
  }
  return dict;
}

IValue any_list(const std::vector<IValue>& values) {
  auto list = c10::impl::GenericList(c10::AnyType::get());
  for (const IValue& value : values) {
    list.push_back(value);
  }
  return list;
}

IValue named_tuple(double x, double y) {
  static const auto type = c10::TupleType::createNamed(
      c10::QualifiedName("Point"), std::vector<std::string>{"x", "y"},
      std::vector<c10::TypePtr>{c10::TensorType::get(),
                                c10::TensorType::get()});
  return c10::ivalue::Tuple::createNamed({number(x), number(y)}, type);
}

}  // namespace

TEST_CASE("an IValue's tensor is a leaf", "[nested]") {
  IValue value = number(1);
  const IValue before = value;
  CHECK(walk(value) == Paths{"args"});
  CHECK(is(value.toTensor(), 101));
  CHECK(is(before.toTensor(), 1));
  CHECK(is(merge<IValue>({number(1), number(2)}).toTensor(), {1, 2}));
  IValue undefined = Tensor();
  CHECK(walk(undefined) == Paths{"args"});
  CHECK_FALSE(undefined.toTensor().defined());
}

TEST_CASE("an IValue's list is rebuilt with its own type", "[nested]") {
  const IValue given = list_of<Tensor>({number(1), number(2)});
  IValue value = given;
  CHECK(walk(value) == Paths{"args[0]", "args[1]"});
  REQUIRE(value.isTensorList());
  CHECK(is(value.toTensorVector()[1], 102));
  // The caller's own list is another one and stays.
  CHECK(is(given.toTensorVector()[1], 2));

  const IValue both = merge<IValue>({list_of<Tensor>({number(1), number(2)}),
                                     list_of<Tensor>({number(3), number(4)})});
  REQUIRE(both.isTensorList());
  CHECK(is(both.toTensorVector()[0], {1, 3}));
  CHECK(is(both.toTensorVector()[1], {2, 4}));
}

TEST_CASE("an IValue's typed lists of plain values stay typed", "[nested]") {
  const std::vector<IValue> lists{
      list_of<int64_t>({1, 2}),     list_of<double>({1.5}),
      list_of<bool>({true, false}), list_of<std::string>({"a"}),
      list_of<int64_t>({}),         list_of<Tensor>({})};
  for (const IValue& list : lists) {
    IValue value = list;
    CHECK(walk(value).empty());
    CHECK(*value.type() == *list.type());
    CHECK(value == list);
    const IValue both = merge<IValue>({list, list});
    CHECK(*both.type() == *list.type());
    CHECK(both == list);
  }
}

TEST_CASE("an IValue's dictionary is rebuilt with its own type and order",
          "[nested]") {
  const IValue given =
      dict_of<std::string>({{"b", number(1)}, {"a", number(2)}});
  IValue value = given;
  CHECK(walk(value) == Paths{"args[\"b\"]", "args[\"a\"]"});
  CHECK(*value.type() == *given.type());
  CHECK(is(value.toGenericDict().at("a").toTensor(), 102));
  CHECK(is(given.toGenericDict().at("a").toTensor(), 2));

  IValue numbered = dict_of<int64_t>({{7, number(1)}});
  CHECK(walk(numbered) == Paths{"args[7]"});
  IValue empty = dict_of<std::string>({});
  CHECK(walk(empty).empty());
  CHECK(*merge<IValue>({empty, empty}).type() == *empty.type());

  const IValue both = merge<IValue>(
      {given, dict_of<std::string>({{"a", number(4)}, {"b", number(3)}})});
  CHECK(*both.type() == *given.type());
  Paths keys;
  for (const auto& item : both.toGenericDict()) {
    keys.push_back(item.key().toStringRef());
  }
  CHECK(keys == Paths{"b", "a"});
  CHECK(is(both.toGenericDict().at("b").toTensor(), {1, 3}));
  CHECK(is(both.toGenericDict().at("a").toTensor(), {2, 4}));
}

TEST_CASE("an IValue's tuple is rebuilt, a named one with its names",
          "[nested]") {
  IValue plain = c10::ivalue::Tuple::create({number(1), IValue(7)});
  CHECK(walk(plain) == Paths{"args[0]"});
  CHECK(is(plain.toTupleRef().elements()[0].toTensor(), 101));
  CHECK(plain.toTupleRef().elements()[1].toInt() == 7);

  IValue named = named_tuple(1, 2);
  CHECK(walk(named) == Paths{"args[0]", "args[1]"});
  REQUIRE(named.type()->castRaw<c10::TupleType>()->schema() != nullptr);
  CHECK(named.type()->castRaw<c10::TupleType>()->name()->name() == "Point");
  CHECK(is(named.toTupleRef().elements()[1].toTensor(), 102));

  const IValue both = merge<IValue>({named_tuple(1, 2), named_tuple(3, 4)});
  REQUIRE(both.type()->castRaw<c10::TupleType>()->schema() != nullptr);
  CHECK(
      both.type()->castRaw<c10::TupleType>()->schema()->arguments()[1].name() ==
      "y");
  CHECK(is(both.toTupleRef().elements()[0].toTensor(), {1, 3}));
  CHECK(is(both.toTupleRef().elements()[1].toTensor(), {2, 4}));

  IValue empty = c10::ivalue::Tuple::create(std::vector<IValue>{});
  CHECK(walk(empty).empty());
  CHECK(merge<IValue>({empty, empty}).toTupleRef().elements().empty());
}

TEST_CASE("IValues in IValues are walked and merged to any depth", "[nested]") {
  const auto make = [](double x) {
    return IValue(c10::ivalue::Tuple::create(
        {any_list({number(x), IValue(), IValue("text")}),
         dict_of<std::string>({{"a", number(x + 1)}}), IValue(true)}));
  };
  IValue value = make(1);
  CHECK(walk(value) == Paths{"args[0][0]", "args[1][\"a\"]"});
  const IValue both = merge<IValue>({make(1), make(5)});
  const auto& elements = both.toTupleRef().elements();
  CHECK(is(elements[0].toListRef()[0].toTensor(), {1, 5}));
  CHECK(elements[0].toListRef()[1].isNone());
  CHECK(elements[0].toListRef()[2].toStringRef() == "text");
  CHECK(is(elements[1].toGenericDict().at("a").toTensor(), {2, 6}));
  CHECK(elements[2].toBool());
}

TEST_CASE("an IValue inside static containers is walked", "[nested]") {
  using Value = std::map<std::string, std::vector<IValue>>;
  Value value{{"k", {IValue(3), list_of<Tensor>({number(1)})}}};
  CHECK(walk(value) == Paths{"args[\"k\"][1][0]"});
}

TEST_CASE("plain values in IValues are left alone", "[nested]") {
  const std::vector<IValue> values{IValue(),
                                   IValue(3),
                                   IValue(0.5),
                                   IValue(true),
                                   IValue("text"),
                                   IValue(c10::complex<double>(1, 2)),
                                   IValue(torch::Device("cpu"))};
  for (const IValue& given : values) {
    CAPTURE(given.tagKind());
    IValue value = given;
    CHECK(walk(value).empty());
    CHECK(value == given);
    const IValue both = merge<IValue>({given, given});
    CHECK(both.tagKind() == given.tagKind());
    CHECK(both == given);
  }
}

TEST_CASE("plain values in IValues that differ become a list", "[nested]") {
  const IValue numbers = merge<IValue>({IValue(3), IValue(4), IValue(3)});
  REQUIRE(numbers.isIntList());
  CHECK(numbers.toIntVector() == std::vector<int64_t>{3, 4, 3});
  const IValue doubles = merge<IValue>({IValue(0.5), IValue(1.5)});
  CHECK(doubles.toDoubleVector() == std::vector<double>{0.5, 1.5});
  const IValue flags = merge<IValue>({IValue(true), IValue(false)});
  REQUIRE(flags.isBoolList());
  CHECK(flags.toListRef()[0].toBool());
  CHECK_FALSE(flags.toListRef()[1].toBool());
  const IValue texts = merge<IValue>({IValue("a"), IValue("b")});
  CHECK(texts.toListRef()[1].toStringRef() == "b");
  // An equal number of another type is another value, as its type shows.
  const IValue mixed = merge<IValue>({IValue(1), IValue(true)});
  REQUIRE(mixed.isList());
  CHECK(mixed.toListRef()[0].isInt());
  CHECK(mixed.toListRef()[1].isBool());
}

TEST_CASE("a container whose entries become lists gets a type that holds them",
          "[nested]") {
  const IValue list =
      merge<IValue>({list_of<int64_t>({1, 2, 3}), list_of<int64_t>({1, 5, 3})});
  REQUIRE(list.toListRef().size() == 3);
  CHECK(list.toListRef()[0].toInt() == 1);
  CHECK(list.toListRef()[1].toIntVector() == std::vector<int64_t>{2, 5});
  CHECK(list.toListRef()[2].toInt() == 3);
  CHECK(*list.toList().elementType() == *c10::AnyType::get());

  const auto dict = [](int64_t a, int64_t b, int64_t c) {
    c10::Dict<std::string, int64_t> made;
    made.insert("a", a);
    made.insert("b", b);
    made.insert("c", c);
    return IValue(made);
  };
  const auto both =
      merge<IValue>({dict(1, 2, 3), dict(1, 5, 6)}).toGenericDict();
  CHECK(both.at("a").toInt() == 1);
  CHECK(both.at("b").toIntVector() == std::vector<int64_t>{2, 5});
  CHECK(both.at("c").toIntVector() == std::vector<int64_t>{3, 6});
  CHECK(*both.valueType() == *c10::AnyType::get());

  const auto tuple = [](int64_t a) {
    return IValue(c10::ivalue::Tuple::create({IValue(a), number(1)}));
  };
  const IValue pair = merge<IValue>({tuple(1), tuple(2)});
  CHECK(pair.toTupleRef().elements()[0].toIntVector() ==
        std::vector<int64_t>{1, 2});

  // A named tuple's declared types cannot hold a list: it loses its name.
  const auto type = c10::TupleType::createNamed(
      c10::QualifiedName("Counted"), std::vector<std::string>{"n"},
      std::vector<c10::TypePtr>{c10::IntType::get()});
  const auto named = [&](int64_t n) {
    return IValue(c10::ivalue::Tuple::createNamed({IValue(n)}, type));
  };
  CHECK(merge<IValue>({named(1), named(1)})
            .type()
            ->expectRef<c10::TupleType>()
            .schema() != nullptr);
  const IValue counted = merge<IValue>({named(1), named(2)});
  CHECK(counted.type()->expectRef<c10::TupleType>().schema() == nullptr);
  CHECK(counted.toTupleRef().elements()[0].toIntVector() ==
        std::vector<int64_t>{1, 2});
}

TEST_CASE("a list's type holds its entries when those of an entry changed",
          "[nested]") {
  const auto make = [](int64_t x) {
    c10::List<c10::List<int64_t>> outer;
    outer.push_back(c10::List<int64_t>({x}));
    return IValue(outer);
  };
  const IValue both = merge<IValue>({make(1), make(2)});
  const auto list = both.toList();
  CHECK(list.get(0).toListRef()[0].toIntVector() == std::vector<int64_t>{1, 2});
  CHECK(list.get(0).type()->isSubtypeOf(*list.elementType()));

  const auto dict = [](int64_t x) {
    c10::Dict<std::string, c10::List<int64_t>> made;
    made.insert("a", c10::List<int64_t>({x}));
    return IValue(made);
  };
  const auto dicts = merge<IValue>({dict(1), dict(2)}).toGenericDict();
  CHECK(dicts.at("a").type()->isSubtypeOf(*dicts.valueType()));
}

TEST_CASE("IValues of other shapes in other replicas are refused", "[nested]") {
  const IValue tensor = number(1);
  CHECK(merge_error<IValue>({tensor, IValue()}) ==
        "gather: result is a tensor in replica 0 and None in replica 1" +
            kSame);
  CHECK(merge_error<IValue>({tensor, IValue(3)}) ==
        "gather: result is a tensor in replica 0 and Int in replica 1" + kSame);
  CHECK(merge_error<IValue>({IValue(3), IValue()}) ==
        "gather: result is Int in replica 0 and None in replica 1" + kSame);
  CHECK(merge_error<IValue>({list_of<int64_t>({1}), list_of<int64_t>({})}) ==
        "gather: result is a list of length 1 in replica 0 and a list of "
        "length 0 in replica 1" +
            kSame);
  CHECK(merge_error<IValue>({c10::ivalue::Tuple::create({tensor}),
                             c10::ivalue::Tuple::create({tensor, tensor})}) ==
        "gather: result is a tuple of length 1 in replica 0 and a tuple of "
        "length 2 in replica 1" +
            kSame);
  CHECK(merge_error<IValue>({dict_of<std::string>({{"a", number(1)}}),
                             dict_of<std::string>({{"b", number(1)}})}) ==
        "gather: result is a dictionary with keys [\"a\"] in replica 0 and a "
        "dictionary with keys [\"b\"] in replica 1" +
            kSame);
  CHECK(merge_error<IValue>(
            {dict_of<std::string>({{"a", number(1)}}),
             dict_of<std::string>({{"a", number(1)}, {"b", number(1)}})}) ==
        "gather: result is a dictionary with keys [\"a\"] in replica 0 and a "
        "dictionary with keys [\"a\"] [\"b\"] in replica 1" +
            kSame);
  CHECK(merge_error<IValue>({dict_of<std::string>({}), IValue(3)}) ==
        "gather: result is a dictionary in replica 0 and Int in replica 1" +
            kSame);
  CHECK(merge_error<IValue>(
            {any_list({IValue(1), tensor}), any_list({IValue(1), IValue()})}) ==
        "gather: result[1] is a tensor in replica 0 and None in replica 1" +
            kSame);
}
