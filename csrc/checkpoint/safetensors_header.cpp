#include "checkpoint/safetensors_header.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "checkpoint/problem.h"

namespace dataparallel::checkpoint {
namespace {

using Json = nlohmann::json;

/// Takes the header piece by piece, so that nothing is built that the format
/// does not have, and a name given twice is seen.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  SafetensorsHeader take() {
    if (depth_ != 0 || !done_) {
      fail("the safetensors header ends early");
    }
    return std::move(header_);
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t) override {
    return unexpected("a negative number");
  }
  bool number_float(number_float_t, const string_t&) override {
    return unexpected("a number with a fraction");
  }
  bool binary(binary_t&) override { return unexpected("bytes"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) {
      return unexpected("a number");
    }
    constexpr uint64_t kMost = uint64_t{1} << 62;
    if (value > kMost) {
      fail("the safetensors header has the number " + std::to_string(value) +
           ", which is too large");
    }
    numbers_.push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && !in_array_ && in_metadata_) {
      header_.metadata[key_] = value;
    } else if (depth_ == 2 && !in_array_ && key_ == "dtype") {
      header_.entries.back().dtype = value;
      given_.insert(key_);
    } else {
      return unexpected("a text");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (++depth_ > 2 || in_array_) {
      return unexpected("an object");
    }
    if (depth_ == 2) {
      in_metadata_ = key_ == "__metadata__";
      given_.clear();
      if (!in_metadata_) {
        header_.entries.emplace_back();
        header_.entries.back().name = key_;
      }
    }
    return true;
  }

  bool key(string_t& value) override {
    key_ = value;
    const bool is_new =
        depth_ == 1 ? names_.insert(value).second : keys_.insert(value).second;
    if (!is_new) {
      fail("the safetensors header has \"" + value + "\" twice");
    }
    return true;
  }

  bool end_object() override {
    if (depth_ == 2) {
      keys_.clear();
      if (!in_metadata_ && given_.size() != 3) {
        fail("the safetensors header lacks dtype, shape or data_offsets of \"" +
             header_.entries.back().name + "\"");
      }
      in_metadata_ = false;
    }
    done_ = --depth_ == 0;
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_array_ || in_metadata_) {
      return unexpected("a list");
    }
    in_array_ = true;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    in_array_ = false;
    SafetensorsEntry& entry = header_.entries.back();
    if (key_ == "shape") {
      entry.shape.assign(numbers_.begin(), numbers_.end());
    } else if (key_ == "data_offsets" && numbers_.size() == 2) {
      entry.begin = numbers_[0];
      entry.end = numbers_[1];
    } else {
      return unexpected("a list");
    }
    given_.insert(key_);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    constexpr uint64_t kLengthBytes = 8;
    fail_at(kLengthBytes + position, "the safetensors header is no JSON");
  }

 private:
  [[noreturn]] bool unexpected(const char* what) const {
    fail("the safetensors header has " + std::string(what) + " at \"" + key_ +
         "\", where it can have none");
  }

  SafetensorsHeader header_;
  int depth_ = 0;
  bool in_array_ = false;
  bool in_metadata_ = false;
  bool done_ = false;
  std::string key_;
  std::vector<uint64_t> numbers_;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> keys_;
  std::unordered_set<std::string> given_;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json) {
  HeaderReader reader;
  Json::sax_parse(json, &reader);
  return reader.take();
}

}  // namespace dataparallel::checkpoint
