#include "checkpoint/safetensors_header.h"

#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "checkpoint/problem.h"

namespace dataparallel::checkpoint {
namespace {

using Json = nlohmann::json;

/// Takes the header piece by piece, so that nothing is built that the format
/// does not have. What it accepts is what the reference reader (serde_json)
/// accepts: of a tensor given twice the last one counts, and fields of tensors
/// that the format does not have are skipped. (Two forms that serde_json takes
/// by the way are refused: a tensor as a list of its fields, and a dtype as a
/// mapping.)
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  SafetensorsHeader take() {
    if (depth_ != 0 || !done_) {
      fail("the safetensors header ends early");
    }
    return std::move(header_);
  }

  bool null() override {
    return is_skipped() || (depth_ == 1 && in_metadata()) || unexpected("null");
  }
  bool boolean(bool) override {
    return is_skipped() || unexpected("a boolean");
  }
  bool number_integer(number_integer_t) override {
    return is_skipped() || unexpected("a negative number");
  }
  bool number_float(number_float_t, const string_t& text) override {
    if (!is_skipped() && text.find_first_of(".eE") == text.npos) {
      too_large(text);  // beyond 64 bits
    }
    return is_skipped() || unexpected("a number with a fraction");
  }
  bool binary(binary_t&) override { return unexpected("bytes"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (is_skipped()) {
      return true;
    }
    if (!in_list_) {
      return unexpected("a number");
    }
    constexpr uint64_t kMost = uint64_t{1} << 62;
    if (value > kMost && field_ == "shape") {
      too_large(std::to_string(value));
    }
    numbers_.push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (is_skipped()) {
      return true;
    }
    if (depth_ == 2 && in_metadata()) {
      header_.metadata[field_] = value;
    } else if (depth_ == 2 && field_ == "dtype") {
      entry().dtype = value;
    } else {
      return unexpected("a text");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (!is_skipped()) {
      if (depth_ == 1 && !in_metadata()) {
        start_tensor();
      } else if (depth_ > 1) {
        return unexpected("an object");
      }
    }
    return go_deeper();
  }

  bool key(string_t& value) override {
    if (depth_ == 1) {
      name_ = value;
      field_.clear();
      if (in_metadata() && std::exchange(has_metadata_, true)) {
        fail("the safetensors header has \"__metadata__\" twice");
      }
    } else if (depth_ == 2) {
      field_ = value;
      if (!in_metadata() && is_field() && !given_.insert(value).second) {
        fail("the safetensors header has \"" + value + "\" of \"" + name_ +
             "\" twice");
      }
    }
    return true;
  }

  bool end_object() override {
    done_ = --depth_ == 0;
    if (depth_ == 1 && !in_metadata() && given_.size() != 3) {
      fail("the safetensors header lacks dtype, shape or data_offsets of \"" +
           name_ + "\"");
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (!is_skipped()) {
      if (depth_ != 2 || in_metadata() || field_ == "dtype") {
        return unexpected("a list");
      }
      in_list_ = true;
      numbers_.clear();
    }
    return go_deeper();
  }

  bool end_array() override {
    --depth_;
    if (!std::exchange(in_list_, false)) {
      return true;
    }
    if (field_ == "shape") {
      entry().shape.assign(numbers_.begin(), numbers_.end());
    } else if (numbers_.size() == 2) {
      entry().begin = numbers_[0];
      entry().end = numbers_[1];
    } else {
      return unexpected("a list");
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    constexpr uint64_t kLengthBytes = 8;
    fail_at(kLengthBytes + position, "the safetensors header is no JSON");
  }

 private:
  bool in_metadata() const { return name_ == "__metadata__"; }
  bool is_field() const {
    return field_ == "dtype" || field_ == "shape" || field_ == "data_offsets";
  }
  /// Inside a field of a tensor that the format does not have.
  bool is_skipped() const {
    return depth_ >= 2 && !in_metadata() && !is_field();
  }

  bool go_deeper() {
    constexpr int kDeepest = 127;  // the reference reader's
    if (++depth_ > kDeepest) {
      return unexpected("a list or an object beyond the deepest level");
    }
    return true;
  }

  SafetensorsEntry& entry() { return header_.entries[places_.at(name_)]; }

  void start_tensor() {
    given_.clear();
    const auto [place, is_new] = places_.emplace(name_, header_.entries.size());
    if (is_new) {
      header_.entries.emplace_back();
    }
    entry() = SafetensorsEntry{};
    entry().name = name_;
  }

  [[noreturn]] bool unexpected(const char* what) const {
    fail("the safetensors header has " + std::string(what) + " at \"" +
         (field_.empty() ? name_ : field_) + "\", where it can have none");
  }

  [[noreturn]] void too_large(const std::string& number) const {
    fail("the safetensors header has the number " + number + " in " + field_ +
         " of \"" + name_ + "\", which is too large");
  }

  SafetensorsHeader header_;
  int depth_ = 0;
  bool in_list_ = false;  // the numbers of a shape or of data_offsets
  bool has_metadata_ = false;
  bool done_ = false;
  std::string name_;   // the key of the header
  std::string field_;  // the key in its value
  std::vector<uint64_t> numbers_;
  std::unordered_map<std::string, size_t> places_;
  std::unordered_set<std::string> given_;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json) {
  if (json.find('\0') != json.npos) {  // which the parser takes for the end
    fail("the safetensors header has a zero byte");
  }
  HeaderReader reader;
  Json::sax_parse(json, &reader);
  return reader.take();
}

}  // namespace dataparallel::checkpoint
