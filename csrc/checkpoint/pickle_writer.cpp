#include "checkpoint/pickle_writer.h"

#include <ATen/ATen.h>

#include <bit>

#include "checkpoint/keys.h"
#include "checkpoint/known_content.h"
#include "checkpoint/opcode.h"
#include "checkpoint/text.h"
#include "checkpoint/walk.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

constexpr size_t kBatch = 1000;  // of items, as in Python
constexpr size_t kMostDepth = 1000;

const void* address(const c10::IValue& value) {
  return value.internalToPointer();
}

/// Python keeps one object for each character of Latin-1, and for "".
bool is_single_object(std::string_view text) {
  return text.size() <= 1 ||
         (text.size() == 2 && static_cast<unsigned char>(text[0]) <= 0xC3);
}

}  // namespace

void PickleWriter::write(const c10::IValue& value) {
  op(kProto);
  number(2, 1);
  save(value);
  op(kStop);
}

void PickleWriter::save(const c10::IValue& value) {
  TORCH_CHECK_VALUE(steps_.size() <= kMostDepth,
                    "save: the value is nested "
                    "more than ",
                    kMostDepth, " deep, at ", path());
  if (value.isNone()) {
    op(kNone);
  } else if (value.isBool()) {
    op(value.toBool() ? kNewTrue : kNewFalse);
  } else if (value.isInt()) {
    save_int(value.toInt());
  } else if (value.isDouble()) {
    save_double(value.toDouble());
  } else if (value.isString()) {
    save_text(value.toStringRef(), address(value));
  } else if (value.isTensor()) {
    save_tensor(value.toTensor());
  } else if (value.isDevice()) {
    save_device(value.toDevice());
  } else if (value.isComplexDouble()) {
    save_complex(value.toComplexDouble());
  } else if (value.isPtrType() && fetch(address(value))) {
    return;
  } else if (value.isGenericDict()) {
    save_mapping(value);
  } else if (value.isTuple()) {
    save_tuple(value);
  } else if (value.isList()) {
    op(kEmptyList);
    memoize(address(value));
    save_list(value.toListRef().vec());
  } else if (is_opaque(value)) {
    save_opaque(value);
  } else {
    TORCH_CHECK_TYPE(false, "save: ", path(), " is ",
                     detail::with_article(value.tagKind()),
                     ", which has no form in Python");
  }
}

void PickleWriter::save_child(const c10::IValue& value, Step step) {
  steps_.push_back(step);
  save(value);
  steps_.pop_back();
}

void PickleWriter::save_int(int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    op(kBinInt1);
    number(value, 1);
  } else if (value >= 0 && value <= 0xFFFF) {
    op(kBinInt2);
    number(value, 2);
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    op(kBinInt);
    number(static_cast<uint64_t>(value), 4);
  } else {
    // As few bytes as keep the sign.
    int bytes = 8;
    while (bytes > 1 &&
           (value << (8 * (9 - bytes)) >> (8 * (9 - bytes))) == value) {
      --bytes;
    }
    op(kLong1);
    number(bytes, 1);
    number(static_cast<uint64_t>(value), bytes);
  }
}

void PickleWriter::save_double(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  op(kBinFloat);
  for (int shift = 56; shift >= 0; shift -= 8) {
    out_ += static_cast<char>(bits >> shift);
  }
}

void PickleWriter::save_complex(c10::complex<double> value) {
  global("__builtin__", "complex");
  save_double(value.real());
  save_double(value.imag());
  end_tuple(2);
  op(kReduce);
  memoize();
}

void PickleWriter::save_text(const std::string& text, const void* object) {
  const bool is_constant = is_single_object(text);
  if (!is_constant && fetch(object)) {
    return;
  }
  TORCH_CHECK_VALUE(is_utf8(text), "save: the text at ", path(),
                    " is no UTF-8");
  TORCH_CHECK_VALUE(text.size() <= UINT32_MAX, "save: the text at ", path(),
                    " has more than 4 GiB");
  if (is_constant) {
    save_constant(text);
  } else {
    write_text(text, object);
  }
}

void PickleWriter::save_constant(const std::string& text) {
  const auto [at, is_new] = constants_.emplace(text, memo_size_);
  if (is_new) {
    write_text(text);
  } else {
    get(at->second);
  }
}

void PickleWriter::write_text(std::string_view text, const void* object) {
  op(kBinUnicode);
  number(text.size(), 4);
  out_ += text;
  memoize(object);
}

void PickleWriter::save_list(const std::vector<c10::IValue>& elements) {
  const size_t size = elements.size();
  if (size == 1) {
    save_child(elements[0], {nullptr, 0});
    op(kAppend);
    return;
  }
  for (size_t i = 0; i < size;) {
    op(kMark);
    for (const size_t end = std::min(size, i + kBatch); i < end; ++i) {
      save_child(elements[i], {nullptr, i});
    }
    op(kAppends);
  }
}

void PickleWriter::save_tuple(const c10::IValue& tuple) {
  const auto& elements = tuple.toTupleRef().elements();
  const size_t size = elements.size();
  begin_tuple(size);
  for (size_t i = 0; i < size; ++i) {
    save_child(elements[i], {nullptr, i});
  }
  // A list inside may have held this tuple, and written it.
  if (size > 0 && objects_.count(address(tuple)) != 0) {
    for (size_t i = 0; size <= 3 && i < size; ++i) {
      op(kPop);
    }
    if (size > 3) {
      op(kPopMark);
    }
    fetch(address(tuple));
    return;
  }
  end_tuple(size, address(tuple));
}

void PickleWriter::save_mapping(const c10::IValue& value) {
  const auto dict = value.toGenericDict();
  const std::string type = class_name(dict);
  const auto extra = attributes(dict);
  kept_.emplace_back(extra);
  check_attributes(type, extra);
  Items items;
  items.reserve(dict.size());
  for (const auto& item : dict) {
    items.emplace_back(item.key(), item.value());
  }
  check_keys(items);
  if (type == "dict") {
    op(kEmptyDict);
    memoize(address(value));
    save_items(items, /*exact=*/true);
    return;
  }
  global(type);
  if (type == "collections.Counter") {
    op(kEmptyDict);
    memoize();
    save_items(items, /*exact=*/true);
    end_tuple(1);
    op(kReduce);
    memoize(address(value));
    return;
  }
  const auto factory = extra.find("default_factory");
  if (factory != extra.end() && !factory->value().isNone()) {
    save(factory->value());
    end_tuple(1);
  } else {
    op(kEmptyTuple);
  }
  op(kReduce);
  memoize(address(value));
  save_items(items, /*exact=*/false);
  if (type == "collections.OrderedDict" && !extra.empty()) {
    op(kEmptyDict);
    memoize();
    Items state;
    for (const auto& item : extra) {
      state.emplace_back(item.key(), item.value());
    }
    save_items(state, /*exact=*/true);
    op(kBuild);
  }
}

/// What a mapping of that class can carry beside its items.
void PickleWriter::check_attributes(const std::string& type,
                                    const c10::impl::GenericDict& attributes) {
  for (const auto& item : attributes) {
    const std::string& name = item.key().toStringRef();
    TORCH_CHECK_TYPE(
        type == "collections.OrderedDict" ||
            (type == "collections.defaultdict" && name == "default_factory"),
        "save: the ", type, " at ", path(), " carries '", name,
        "', which has no form in Python");
    TORCH_CHECK_TYPE(
        type != "collections.defaultdict" || is_factory(item.value()),
        "save: the ", type, " at ", path(), " has ",
        detail::with_article(python_type_name(item.value())),
        " as its default_factory, expected a class");
  }
}

/// In Python 1, True and 1.0 are one key.
void PickleWriter::check_keys(const Items& items) {
  KeyPositions positions;
  const auto key_at = [&](size_t i) -> const c10::IValue& {
    return items[i].first;
  };
  for (size_t i = 0; i < items.size(); ++i) {
    const c10::IValue& key = items[i].first;
    if (key.isString() || key.isTensor()) {
      continue;
    }
    TORCH_CHECK_VALUE(positions.find(items.size(), key_at, key) == i,
                      "save: the keys of the mapping at ", path(), " hold ",
                      key_text(key), " twice, as Python compares them");
  }
}

void PickleWriter::save_items(const Items& items, bool exact) {
  const size_t size = items.size();
  for (size_t i = 0; i < size;) {
    const size_t end = std::min(size, i + kBatch);
    const bool alone = exact ? size == 1 : end - i == 1;
    if (!alone) {
      op(kMark);
    }
    for (; i < end; ++i) {
      save_child(items[i].first, {&items[i].first, 0});
      save_child(items[i].second, {&items[i].first, 0});
    }
    op(alone ? kSetItem : kSetItems);
  }
}

void PickleWriter::number(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    out_ += static_cast<char>(value >> (8 * i));
  }
}

void PickleWriter::global(const char* module, const std::string& name) {
  // Two lines of the pickle: a third would be whatever it says.
  TORCH_CHECK_VALUE(name.find('\n') == std::string::npos, "save: '", name,
                    "' at ", path(), " is no name");
  const auto [at, is_new] =
      globals_.emplace(std::string(module) + "\n" + name + "\n", memo_size_);
  if (is_new) {
    op(kGlobal);
    out_ += at->first;
    memoize();
  } else {
    get(at->second);
  }
}

void PickleWriter::global(const std::string& qualified_name) {
  const size_t dot = qualified_name.rfind('.');
  std::string module =
      dot == std::string::npos ? "" : qualified_name.substr(0, dot);
  std::string name = dot == std::string::npos ? qualified_name
                                              : qualified_name.substr(dot + 1);
  TORCH_CHECK_VALUE(!module.empty() && !name.empty() &&
                        qualified_name.find('\n') == std::string::npos,
                    "save: '", qualified_name, "' at ", path(),
                    " is no name of a class in a module");
  // The names that protocol 2 has from Python 2.
  if (module == "builtins") {
    module = "__builtin__";
    name = name == "int" ? "long" : name == "str" ? "unicode" : name;
  }
  global(module.c_str(), name);
}

void PickleWriter::begin_tuple(size_t size) {
  if (size > 3) {
    op(kMark);
  }
}

void PickleWriter::end_tuple(size_t size, const void* object) {
  if (size == 0) {
    op(kEmptyTuple);
    return;
  }
  op(size <= 3 ? static_cast<Opcode>(kTuple1 + size - 1) : kTuple);
  memoize(object);
}

void PickleWriter::memoize(const void* object) {
  TORCH_CHECK_VALUE(memo_size_ != UINT32_MAX, "save: too many objects");
  if (object != nullptr) {
    objects_.emplace(object, memo_size_);
  }
  const bool is_short = memo_size_ <= 0xFF;
  op(is_short ? kBinPut : kLongBinPut);
  number(memo_size_, is_short ? 1 : 4);
  ++memo_size_;
}

bool PickleWriter::fetch(const void* object) {
  const auto found = objects_.find(object);
  if (object == nullptr || found == objects_.end()) {
    return false;
  }
  get(found->second);
  return true;
}

void PickleWriter::get(uint32_t index) {
  const bool is_short = index <= 0xFF;
  op(is_short ? kBinGet : kLongBinGet);
  number(index, is_short ? 1 : 4);
}

std::string PickleWriter::path() const {
  if (steps_.empty()) {
    return "the root";
  }
  std::string path;
  for (const Step& step : steps_) {
    path = detail::shortened(path + "[" +
                             (step.key == nullptr ? std::to_string(step.index)
                                                  : key_text(*step.key)) +
                             "]");
  }
  return path;
}

}  // namespace dataparallel::checkpoint
