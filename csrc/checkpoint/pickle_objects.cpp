#include <ATen/ATen.h>

#include <algorithm>

#include "checkpoint/known.h"
#include "checkpoint/known_content.h"
#include "checkpoint/opcode.h"
#include "checkpoint/pickle_writer.h"
#include "checkpoint/text.h"

// The part of PickleWriter for Python's objects that IValue has no kind for.

namespace dataparallel::checkpoint {
namespace {

constexpr size_t kMostDigits = 4300;  // sys.get_int_max_str_digits()

/// Two's complement, the lowest byte first, as few as keep the sign; of a
/// number as `integer_text` gives it. Empty: it is none.
std::string integer_bytes(std::string_view text) {
  const bool negative = text.starts_with('-');
  text.remove_prefix(negative ? 1 : 0);
  const bool is_hex = text.starts_with("0x");
  text.remove_prefix(is_hex ? 2 : 0);
  if (text.empty() ||
      text.find_first_not_of(is_hex ? "0123456789abcdef" : "0123456789") !=
          std::string_view::npos) {
    return "";
  }
  std::string bytes;
  if (is_hex) {
    const auto digit = [&](size_t from_end) {
      return from_end >= text.size()
                 ? size_t{0}
                 : std::string_view("0123456789abcdef")
                       .find(text[text.size() - 1 - from_end]);
    };
    for (size_t i = 0; i < text.size(); i += 2) {
      bytes += static_cast<char>(digit(i) | digit(i + 1) << 4);
    }
  }
  for (const char c : is_hex ? std::string_view() : text) {
    unsigned carry = static_cast<unsigned>(c - '0');
    for (char& byte : bytes) {
      carry += 10u * static_cast<unsigned char>(byte);
      byte = static_cast<char>(carry);
      carry >>= 8;
    }
    if (carry != 0) {
      bytes += static_cast<char>(carry);
    }
  }
  bytes += '\0';  // for the sign
  if (negative) {
    unsigned carry = 1;
    for (char& byte : bytes) {
      carry += static_cast<unsigned char>(~byte);
      byte = static_cast<char>(carry);
      carry >>= 8;
    }
  }
  const auto is_spare = [&] {
    const size_t size = bytes.size();
    return size > 1 && bytes[size - 1] == (negative ? '\xff' : '\0') &&
           ((bytes[size - 2] & 0x80) != 0) == negative;
  };
  while (is_spare()) {
    bytes.pop_back();
  }
  return bytes;
}

}  // namespace

void PickleWriter::save_device(at::Device device) {
  global("torch", "device");
  const std::string type =
      c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  write_text(type);
  if (device.has_index()) {
    save_int(device.index());
  }
  end_tuple(device.has_index() ? 2 : 1);
  op(kReduce);
  memoize();
}

void PickleWriter::save_opaque(const c10::IValue& value) {
  const auto opaque = to_opaque(value);
  const std::string& type = opaque->class_name;
  const std::string problem = known_content_problem(*opaque);
  TORCH_CHECK_TYPE(problem.empty(), "save: the ", type, " at ", path(), " ",
                   problem);
  const auto text = [&]() -> const std::string& {
    TORCH_CHECK_TYPE(opaque->args.size() == 1 && opaque->args[0].isString(),
                     "save: the ", type, " at ", path(),
                     " does not hold one text");
    return opaque->args[0].toStringRef();
  };
  TORCH_CHECK_VALUE(!is_constant_class(type) || is_constant(type, text()),
                    "save: '", text(), "' at ", path(), " is no ", type,
                    " that there is");
  if (is_constant_class(type) && type != "torch.layout") {
    global("torch", text());
  } else if (type == "builtins.type") {
    global(text());
  } else if (type == "builtins.int") {
    save_large_int(text());
  } else if (type == "torch.layout") {
    save_layout(text());
  } else if (is_storage_class(type)) {
    save_storage_object(*opaque);
  } else if (type == "argparse.Namespace") {
    save_namespace(*opaque);
  } else if (type == "builtins.bytes") {
    save_bytes(text());
    memoize(opaque.get());
  } else if (type == "builtins.bytearray") {
    global("__builtin__", "bytearray");
    if (text().empty()) {
      op(kEmptyTuple);
    } else {
      save_bytes(text());
      memoize();
      end_tuple(1);
    }
    op(kReduce);
    memoize(opaque.get());
  } else if (type == "builtins.set" || type == "builtins.frozenset") {
    global(type);
    op(kEmptyList);
    memoize();
    save_list(opaque->elements);
    end_tuple(1);
    op(kReduce);
    memoize(opaque.get());
  } else if (type == "builtins.slice") {
    global(type);
    save_values(opaque->args);
    op(kReduce);
    memoize(opaque.get());
  } else if (type == "torch.Size") {
    global("torch", "Size");
    save_values(opaque->elements);
    end_tuple(1);
    op(kReduce);
    memoize(opaque.get());
  } else {
    save_opaque_mapping(*opaque);
  }
}

/// A tuple of them.
void PickleWriter::save_values(const std::vector<c10::IValue>& values) {
  begin_tuple(values.size());
  for (const c10::IValue& value : values) {
    save(value);
  }
  end_tuple(values.size());
}

void PickleWriter::save_large_int(const std::string& text) {
  TORCH_CHECK_VALUE(text.size() <= kMostDigits || text.find('x') <= 2,
                    "save: the int at ", path(), " has ", text.size(),
                    " digits, more than Python reads");
  const std::string bytes = integer_bytes(text);
  TORCH_CHECK_VALUE(!bytes.empty(), "save: the int at ", path(), " is '", text,
                    "', which is no number");
  if (bytes.size() <= sizeof(int64_t)) {
    uint64_t value = bytes.back() < 0 ? UINT64_MAX : 0;
    for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte) {
      value = value << 8 | static_cast<unsigned char>(*byte);
    }
    save_int(static_cast<int64_t>(value));
    return;
  }
  TORCH_CHECK_VALUE(bytes.size() <= INT32_MAX, "save: the int at ", path(),
                    " has more than 2 GiB");
  const bool is_short = bytes.size() <= 0xFF;
  op(is_short ? kLong1 : kLong4);
  number(bytes.size(), is_short ? 1 : 4);
  out_ += bytes;
}

/// Protocol 2 has no bytes: they are text, encoded when it is read.
void PickleWriter::save_bytes(const std::string& bytes) {
  if (bytes.empty()) {
    global("__builtin__", "bytes");
    op(kEmptyTuple);
  } else {
    global("_codecs", "encode");
    save_text(latin1_to_utf8(bytes), nullptr);
    save_constant("latin1");
    end_tuple(2);
  }
  op(kReduce);
}

void PickleWriter::save_namespace(const Opaque& opaque) {
  global(opaque.class_name);
  op(kEmptyTuple);
  op(kNewObj);
  memoize(&opaque);
  if (!opaque.state.isNone()) {
    save(opaque.state);
    op(kBuild);
  }
}

/// A mapping with keys that `c10::Dict` cannot hold.
void PickleWriter::save_opaque_mapping(const Opaque& opaque) {
  const std::string& type = opaque.class_name;
  if (type == "builtins.dict") {
    op(kEmptyDict);
    memoize(&opaque);
    save_items(opaque.items, /*exact=*/true);
    return;
  }
  TORCH_CHECK_TYPE(type == "collections.OrderedDict" ||
                       type == "collections.defaultdict" ||
                       type == "collections.Counter",
                   "save: there is no way to write the ", type, " at ", path());
  global(type);
  if (type == "collections.Counter") {
    op(kEmptyDict);
    memoize();
    save_items(opaque.items, /*exact=*/true);
    end_tuple(1);
    op(kReduce);
    memoize(&opaque);
    return;
  }
  save_values(opaque.args);
  op(kReduce);
  memoize(&opaque);
  save_items(opaque.items, /*exact=*/false);
  if (!opaque.state.isNone()) {
    save(opaque.state);
    op(kBuild);
  }
}

}  // namespace dataparallel::checkpoint
