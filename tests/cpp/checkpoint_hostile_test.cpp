// Every file of tests/data/hostile is wrong in one way (make_hostile.py there
// says how): each ends in one error, whose text is part of the contract.
#include <dataparallel/checkpoint.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.h"

namespace {

using dataparallel::CheckpointError;
using dataparallel::LoadOptions;

std::string path_of(const std::string& name) {
  return std::string(TEST_DATA) + "/" + name;
}

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The text of the `CheckpointError` that `read` throws; "" for none.
template <class Read>
std::string error_of(Read&& read) {
  try {
    read();
  } catch (const CheckpointError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

std::set<std::string>& tested() {
  static std::set<std::string> names;
  return names;
}

bool is_tested(const char* name) {
  return tested().insert(name).second;
}

void check(const std::string& name, const std::string& message) {
  const std::string path = path_of("hostile/" + name);
  REQUIRE(std::filesystem::exists(path));
  const auto options = LoadOptions().map_location("cpu");
  const std::string mapped =
      error_of([&] { dataparallel::load(path, options); });
  CHECK_THAT(mapped, Catch::Contains(message));
  CHECK_THAT(mapped, Catch::Contains("load: " + path));
  // However the bytes come, the error is the same.
  const std::string read = error_of(
      [&] { dataparallel::load(path, LoadOptions(options).mmap(false)); });
  CHECK(read == mapped);
  const auto bytes = bytes_of(path);
  CHECK_THAT(error_of([&] { dataparallel::load(bytes, options); }),
             Catch::Contains(message));
  std::istringstream stream(std::string(bytes.begin(), bytes.end()));
  CHECK_THAT(error_of([&] { dataparallel::load(stream, options); }),
             Catch::Contains(message));
}

}  // namespace

// Also counts the files, so that none is forgotten.
#define HOSTILE(name, message)                                              \
  static const bool name##_is_tested = is_tested(#name);                    \
  TEST_CASE("hostile file " #name " is refused", "[checkpoint][hostile]") { \
    REQUIRE(name##_is_tested);                                              \
    check(#name, message);                                                  \
  }

HOSTILE(empty, "is empty")
HOSTILE(gradient_of_integers, "int64 is said to require gradients")
HOSTILE(gzip, "is a gzip file: unpack it first")
HOSTILE(html, "begins with \"<!DOCTYPE html><\"")
HOSTILE(legacy_count, "has 3 elements, but is said to have 4")
HOSTILE(legacy_huge, "more than are in the file")
HOSTILE(legacy_missing, "is not in the file")
HOSTILE(legacy_truncated, "ends early: storage")
HOSTILE(legacy_twice, "is there twice")
HOSTILE(legacy_unknown_key, "\"9\" is in the file, but not in its value")
HOSTILE(legacy_version, "another version than 1001")
HOSTILE(legacy_view, "a view of storage \"0\" lies outside it")
HOSTILE(lfs, "Git LFS pointer")
HOSTILE(nested_expanded, "sizes has more elements than its memory")
HOSTILE(nested_outside, "needs 5 bytes of its storage, which has 4")
HOSTILE(npy, "is a NumPy array (.npy), not a checkpoint")
HOSTILE(npz, "is a NumPy archive (.npz), not a checkpoint: read it with numpy")
HOSTILE(numpy_axes, "axes are no permutation of its dimensions")
HOSTILE(numpy_bytes, "has 8 bytes, which is not what its shape needs")
HOSTILE(numpy_overflow, "which is not what its shape needs")
HOSTILE(pickle_append_to_number, "elements are added to a value of type int")
HOSTILE(pickle_buffer, "a buffer that is not in the file")
HOSTILE(pickle_call_without_tuple,
        "calls a function with arguments of type int")
HOSTILE(pickle_copies, "asks for more memory")
HOSTILE(pickle_deep, "nested deeper than 1000 levels")
HOSTILE(pickle_far_memo, "did not give, number 2147483646")
HOSTILE(pickle_frame, "longer than what is left")
HOSTILE(pickle_long_bytes, "ends early: 9223372036854775807 bytes expected")
HOSTILE(pickle_long_path, "takes more values than there are, at ['x']['x']")
HOSTILE(pickle_long_text, "ends early: 4294967295 bytes")
HOSTILE(pickle_memo, "did not give, number 7")
HOSTILE(pickle_module_in_itself, "the module \"up.\" contains itself")
HOSTILE(pickle_number, "damaged number")
HOSTILE(pickle_odd_items, "a key without a value")
HOSTILE(pickle_persistent_number, "named by a value of type int")
HOSTILE(pickle_persistent_text, "an object outside it, \"storage\"")
HOSTILE(pickle_plain, "is a pickle that torch did not write")
HOSTILE(pickle_pop_below_mark, "takes more values than there are")
HOSTILE(pickle_protocol, "protocol 6, expected 5 at most")
HOSTILE(pickle_shared_modules, "more members than")
HOSTILE(pickle_state_of_number, "of type int has a state")
HOSTILE(pickle_text, "not UTF-8")
HOSTILE(pickle_underflow, "takes more values than there are")
HOSTILE(pickle_unknown_opcode, "unknown opcode 240")
HOSTILE(pickle_without_mark, "ends a list that it did not begin")
HOSTILE(pickle_without_stop, "ends early")
HOSTILE(quantizer_axis, "axis 7 is none of")
HOSTILE(quantizer_expanded, "scales has more elements than its memory")
HOSTILE(quantizer_scales, "not one for each of the 2 channels")
HOSTILE(quantizer_scheme, "unknown scheme per_tensor_symmetric")
HOSTILE(safetensors_deep, "beyond the deepest level at \"a\"")
HOSTILE(safetensors_dtype, "\"F5\", which torch does not have, at ['a']")
HOSTILE(safetensors_fraction, "a number with a fraction")
HOSTILE(safetensors_gap, "leave out 4 bytes")
HOSTILE(
    safetensors_huge_number,
    "the number 18446744073709551616 in data_offsets of \"a\", which is too")
HOSTILE(safetensors_huge_offset,
        "[0, 4611686018427387904] lie outside the file's 4 bytes of tensors")
HOSTILE(safetensors_huge_shape,
        "the number 9223372036854775808 in shape of \"a\", which is too large")
HOSTILE(safetensors_largest_offset,
        "[0, 18446744073709551615] lie outside the file's 4 bytes of tensors")
HOSTILE(safetensors_length, "header has 67108864 bytes, 2 left")
HOSTILE(safetensors_metadata_twice, "has \"__metadata__\" twice")
HOSTILE(safetensors_missing, "lacks dtype, shape or data_offsets of \"a\"")
HOSTILE(safetensors_negative, "a negative number at \"shape\"")
HOSTILE(safetensors_no_json, "is no JSON")
HOSTILE(safetensors_outside, "[0, 4] lie outside the file's 3 bytes")
HOSTILE(safetensors_overflow, "not what dtype and shape need")
HOSTILE(safetensors_overlap, "lie over another tensor's, at ['b']")
HOSTILE(safetensors_rest, "1 byte behind its last tensor")
HOSTILE(safetensors_reversed, "[4, 0] lie outside")
HOSTILE(safetensors_shape,
        "span 4 bytes, which is not what dtype and shape need")
HOSTILE(safetensors_twice, "has \"dtype\" of \"a\" twice")
HOSTILE(safetensors_twice_elsewhere, "leave out 4 bytes")
HOSTILE(safetensors_two_values, "is no JSON")
HOSTILE(safetensors_unknown_deep, "beyond the deepest level at \"x\"")
HOSTILE(safetensors_zero_byte, "has a zero byte")
HOSTILE(script_bomb, "unpacks to more than code can")
HOSTILE(script_damaged, "compressed bytes are damaged")
HOSTILE(script_no_module, "without a module")
HOSTILE(script_size, "compressed bytes are damaged")
HOSTILE(sparse_expanded, "index has more elements than its memory")
HOSTILE(sparse_index, "size is 3 but found index 3")
HOSTILE(sparse_layout, "unknown layout strided")
HOSTILE(sparse_rows, "is not satisfied")
HOSTILE(storage_huge, "impossible size")
HOSTILE(storage_negative, "impossible size")
HOSTILE(storage_other_size, "is said to have 36 bytes, but has 16")
HOSTILE(storage_too_long, "is said to have 20 bytes, but has 16")
HOSTILE(tar, "is a tar file")
HOSTILE(tensor_of_text, "storage is of type str")
HOSTILE(view_behind_storage, "needs 20 bytes of its storage, which has 16")
HOSTILE(view_negative_offset, "starts before its storage")
HOSTILE(view_negative_size, "negative size or stride")
HOSTILE(view_negative_stride, "negative size or stride")
HOSTILE(view_offset, "needs 20 bytes")
HOSTILE(view_offset_overflow, "is too large")
HOSTILE(view_overflow, "is too large")
HOSTILE(view_strides, "not as many strides as dimensions")
HOSTILE(zip64_outside, "64-bit zip directory lies outside")
HOSTILE(zip_byteorder, "byteorder is \"middle\"")
HOSTILE(zip_compressed_pickle, "\"a/data.pkl\" is compressed")
HOSTILE(
    zip_compressed_storage,
    "\"a/data/0\" is compressed, which torch.save never does: load the file "
    "with Python's torch.load and save it again")
HOSTILE(zip_directory_outside, "zip directory lies outside")
HOSTILE(zip_duplicate, "is there twice")
HOSTILE(zip_encrypted, "is encrypted")
HOSTILE(zip_long_storage, "is said to have 16 bytes, but has 20")
HOSTILE(zip_many_entries, "zip directory lies outside")
HOSTILE(zip_missing_storage, "is not in the file")
HOSTILE(zip_old_script, "TorchScript archive of torch 1.0 to 1.3")
HOSTILE(zip_outside, "lies outside the file's entries")
HOSTILE(zip_overlap, "lies over another one")
HOSTILE(zip_own_name, "disagree on its name")
HOSTILE(zip_own_size, "disagree on its size")
HOSTILE(zip_package, "torch.package archive")
HOSTILE(zip_parent_folder, "\"..\" in its name")
HOSTILE(zip_parent_folder_backslash, "\"..\" in its name")
HOSTILE(zip_short_storage, "is said to have 16 bytes, but has 12")
HOSTILE(zip_truncated, "it is truncated")
HOSTILE(zip_two_pickles, "has several data.pkl")
HOSTILE(zip_two_sizes, "has two sizes: 16 and 12")
HOSTILE(zip_without_pickle, "it has no data.pkl")

TEST_CASE("every hostile file has its test", "[checkpoint][hostile]") {
  std::set<std::string> there;
  for (const auto& entry :
       std::filesystem::directory_iterator(path_of("hostile"))) {
    there.insert(entry.path().filename().string());
  }
  CHECK(there == tested());
}

TEST_CASE("a folder and a missing file are refused", "[checkpoint][hostile]") {
  CHECK_THAT(error_of([] { dataparallel::load(path_of("hostile")); }),
             Catch::Contains("is a directory, expected a file"));
  CHECK_THAT(error_of([] { dataparallel::load(path_of("not there")); }),
             Catch::Contains("cannot be opened: No such file"));
}

TEST_CASE("the path in an error is given by its ends where it is long",
          "[checkpoint][hostile]") {
  try {
    dataparallel::load(path_of("hostile/pickle_long_path"));
    FAIL("loaded");
  } catch (const CheckpointError& error) {
    CHECK(error.key().size() <= 400);
    CHECK_THAT(error.key(), Catch::StartsWith("['x']['x']"));
    CHECK_THAT(error.key(), Catch::Contains("..."));
    CHECK_THAT(error.key(), Catch::EndsWith("['é']['last']"));
    CHECK_THAT(std::string(error.what_without_backtrace()),
               Catch::Contains(", at " + error.key() + ", byte "));
  }
}

TEST_CASE("a file cut off anywhere is an error", "[checkpoint][hostile]") {
  const auto* name = GENERATE("zip.pt", "legacy.pt", "python2.pt", "module.pt",
                              "script.pt", "model.safetensors");
  const auto bytes = bytes_of(path_of(std::string("checkpoints/") + name));
  REQUIRE(bytes.size() > 100);
  CHECK_NOTHROW(dataparallel::load(bytes));
  for (size_t size = 0; size < bytes.size(); ++size) {
    INFO(name << " cut off at " << size);
    CHECK_THROWS_AS(dataparallel::load(bytes.data(), size), CheckpointError);
  }
}

TEST_CASE("a file with a wrong bit loads or is an error",
          "[checkpoint][hostile]") {
  const auto* name = GENERATE("zip.pt", "legacy.pt", "python2.pt", "module.pt",
                              "script.pt", "model.safetensors");
  auto bytes = bytes_of(path_of(std::string("checkpoints/") + name));
  size_t refused = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const int bit : {0, 3, 7}) {
      INFO(name << ", bit " << bit << " of byte " << i);
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << bit));
      try {
        dataparallel::load(bytes, LoadOptions().map_location("cpu"));
      } catch (const CheckpointError&) {
        ++refused;
      } catch (const std::exception& error) {
        FAIL_CHECK("not a CheckpointError: " << error.what());
      }
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << bit));
    }
  }
  CHECK(refused > 100);
}

namespace {

/// A legacy file with the value that `pickle` describes.
std::string legacy_file(const std::string& pickle) {
  const auto legacy = bytes_of(path_of("checkpoints/legacy.pt"));
  const std::string whole(legacy.begin(), legacy.end());
  const size_t start = whole.find("}q", whole.find("type_sizes"));
  REQUIRE(start != std::string::npos);
  const size_t value = whole.find("\x80\x02", start);
  return whole.substr(0, value) + "\x80\x02" + pickle + "." + "\x80\x02]q\x01.";
}

std::string repeat(const std::string& text, size_t count) {
  std::string result;
  for (size_t i = 0; i < count; ++i) {
    result += text;
  }
  return result;
}

}  // namespace

TEST_CASE("what a file asks for by a few bytes is counted",
          "[checkpoint][hostile]") {
  const std::string zero(1, '\0');
  const std::string named = "c__main__\n" + std::string(1 << 20, 'x') + "\n";
  const std::string pickle = GENERATE_COPY(
      // Objects of a class with a long name.
      named + "q" + zero + "0" + repeat("h" + zero + ")R0", 200) + "N",
      // References of a list to itself.
      "]q" + zero + "(" + repeat("h" + zero, 200'000) + "e",
      // Tensors of a subclass with a long name.
      "ctorch._tensor\n_rebuild_from_type_v2\nq" + zero + "0" + named +
          "q\x01" + "0ctorch._utils\n_rebuild_meta_tensor_no_storage\nq\x02" +
          "0(ctorch\nint8\n))\x89tq\x03" + "0]" +
          repeat("h" + zero + "(h\x02h\x01h\x03NtRa", 200));
  const std::string text = legacy_file(pickle);
  CHECK_THAT(error_of([&] { dataparallel::load(text.data(), text.size()); }),
             Catch::Contains("asks for more memory"));
}

TEST_CASE("nesting deeper than any stack is an error, not a crash",
          "[checkpoint][hostile]") {
  // A list in a list, three million times, which is dropped before the end in
  // one case.
  const bool dropped = GENERATE(false, true);
  constexpr size_t kDepth = 3'000'000;
  const std::string text =
      legacy_file(std::string(kDepth, ']') + std::string(kDepth - 1, 'a') +
                  (dropped ? "0N" : ""));
  const std::string error =
      error_of([&] { dataparallel::load(text.data(), text.size()); });
  if (dropped) {
    CHECK(error.empty());
  } else {
    CHECK_THAT(error, Catch::Contains("nested deeper than 1000 levels"));
  }
}
