#include "checkpoint/objects.h"

#include <utility>

#include "checkpoint/problem.h"
#include "checkpoint/text.h"

// The part of Objects that makes byte strings, and the texts of Python 2.
namespace dataparallel::checkpoint {

c10::IValue Objects::python2_string(std::string bytes) {
  if (is_utf8(bytes)) {
    return bytes;
  }
  c10::IValue text = latin1_to_utf8(bytes);
  const void* pointer = text.internalToPointer();
  latin1_.emplace(pointer, std::pair(text, std::move(bytes)));
  return text;
}

const std::string* Objects::bytes_of(const c10::IValue& value) {
  if (value.isString()) {
    const auto found = latin1_.find(value.internalToPointer());
    return found == latin1_.end() ? &value.toStringRef()
                                  : &found->second.second;
  }
  const Opaque* opaque = as_opaque(value);
  if (opaque != nullptr &&
      (opaque->class_name == "builtins.bytes" ||
       opaque->class_name == "builtins.bytearray") &&
      opaque->args.size() == 1 && opaque->args[0].isString()) {
    return &opaque->args[0].toStringRef();
  }
  return nullptr;
}

/// `bytes(content)` of a length, or of a list of numbers.
std::string Objects::counted_bytes(const c10::IValue& content) {
  std::string bytes;
  if (content.isInt() && content.toInt() >= 0) {
    heap_.spend(static_cast<uint64_t>(content.toInt()));
    bytes.resize(static_cast<size_t>(content.toInt()));
  } else if (content.isList()) {
    for (const c10::IValue& byte : content.toListRef()) {
      if (!byte.isInt() || byte.toInt() < 0 || byte.toInt() > 255) {
        fail("a byte string has an element that is no byte");
      }
      bytes += static_cast<char>(byte.toInt());
    }
    heap_.spend(bytes.size());
  } else {
    fail("a byte string is made of a value of type " +
         python_type_name(content));
  }
  return bytes;
}

c10::IValue Objects::bytes_object(const Reference& type, Arguments args) {
  const char* name = type.callable == Callable::kBytes ? "builtins.bytes"
                                                       : "builtins.bytearray";
  if (args.empty()) {
    return make_opaque(name, {std::string()});
  }
  const std::string* bytes = bytes_of(args[0]);
  if (bytes == nullptr) {
    return make_opaque(name, {counted_bytes(args[0])});
  }
  heap_.spend(bytes->size());
  if (args.size() == 2 && args[0].isString()) {  // (text, "latin-1")
    const auto encoded = utf8_to_latin1(args[0].toStringRef());
    if (!encoded) {
      fail("a byte string has a character beyond Latin-1");
    }
    return make_opaque(name, {*encoded});
  }
  return make_opaque(name, {*bytes});
}

c10::IValue Objects::encode(Arguments args) {
  if (args.size() != 2 || !args[0].isString() || !args[1].isString()) {
    return opaque_call("_codecs.encode", args);
  }
  heap_.spend(args[0].toStringRef().size());
  const std::string& encoding = args[1].toStringRef();
  if (encoding == "latin1" || encoding == "latin-1") {
    const auto encoded = utf8_to_latin1(args[0].toStringRef());
    if (!encoded) {
      fail("a byte string has a character beyond Latin-1");
    }
    return make_opaque("builtins.bytes", {*encoded});
  }
  if (encoding == "utf-8" || encoding == "utf8" || encoding == "ascii") {
    return make_opaque("builtins.bytes", {args[0]});
  }
  return opaque_call("_codecs.encode", args);
}

}  // namespace dataparallel::checkpoint
