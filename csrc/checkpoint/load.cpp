#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <dataparallel/checkpoint.h>

#include "checkpoint/archive.h"
#include "checkpoint/foreign.h"
#include "checkpoint/problem.h"
#include "checkpoint/source.h"
#include "detail/wording.h"

namespace dataparallel {
namespace checkpoint {

uint64_t budget_for(const Source& source) {
  constexpr uint64_t kAlways = 16 << 20;
  return kAlways + 8 * source.size();
}

Contents read_contents(Source& source, Locations& locations) {
  if (source.size() == 0) {
    fail("is empty");
  }
  if (starts_with(source, "PK\x03\x04") || starts_with(source, "PK\x05\x06")) {
    return read_zip(source, locations);
  }
  if (is_tar(source)) {
    fail(
        "is a tar file, the format of torch before 0.1.10: load it with "
        "Python's torch.load and save it again");
  }
  if (is_safetensors(source)) {
    return read_safetensors(source, locations);
  }
  if (is_legacy(source)) {
    return read_legacy(source, locations);
  }
  refuse_foreign(source);
}

}  // namespace checkpoint

namespace {

std::string message_of(const std::string& function, const std::string& file,
                       const checkpoint::Problem& problem) {
  std::string text = function + ": " + (file.empty() ? "the checkpoint" : file);
  // Names in a file may be as long as it is.
  constexpr size_t kLongestSentence = 1000;
  const std::string what = detail::shortened(problem.what(), kLongestSentence);
  // Some say what the file is, others what is wrong in it.
  bool is_sentence = false;
  for (const char* verb : {"is ", "has ", "ends ", "cannot ", "contains "}) {
    is_sentence = is_sentence || what.rfind(verb, 0) == 0;
  }
  text += (is_sentence ? " " : ": ") + what;
  if (!problem.key.empty()) {
    text += ", at " + detail::shortened(problem.key);
  }
  if (problem.offset) {
    text += ", byte " + std::to_string(*problem.offset);
  }
  return text;
}

/// Reads with `open`, and makes every error a `CheckpointError`.
template <class Open>
checkpoint::Contents read(const std::string& function, const std::string& file,
                          const LoadOptions::LocationFunction& map_location,
                          Open&& open) {
  const at::NoGradGuard no_grad;
  try {
    const std::unique_ptr<checkpoint::Source> source = open();
    checkpoint::Locations locations(map_location);
    return checkpoint::read_contents(*source, locations);
  } catch (const checkpoint::Problem& problem) {
    throw CheckpointError(message_of(function, file, problem), file,
                          detail::shortened(problem.key), problem.offset);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    const checkpoint::Problem problem(error.what_without_backtrace());
    throw CheckpointError(message_of(function, file, problem), file);
  } catch (const std::bad_alloc&) {
    const checkpoint::Problem problem("needs more memory than there is");
    throw CheckpointError(message_of(function, file, problem), file);
  } catch (const std::ios_base::failure& error) {
    const checkpoint::Problem problem(std::string("cannot be read: ") +
                                      error.what());
    throw CheckpointError(message_of(function, file, problem), file);
  }
}

}  // namespace

CheckpointError::CheckpointError(std::string message, std::string file,
                                 std::string key,
                                 std::optional<uint64_t> offset)
    : c10::Error(std::move(message)),
      file_(std::move(file)),
      key_(std::move(key)),
      offset_(offset) {}

c10::IValue load(const std::string& path, const LoadOptions& options) {
  return read("load", path, options.map_location(),
              [&] { return checkpoint::open_file(path, options.mmap()); })
      .value;
}

c10::IValue load(std::istream& stream, const LoadOptions& options) {
  return read("load", "", options.map_location(),
              [&] { return checkpoint::open_stream(stream); })
      .value;
}

c10::IValue load(const std::vector<char>& bytes, const LoadOptions& options) {
  return load(bytes.data(), bytes.size(), options);
}

c10::IValue load(const char* bytes, size_t size, const LoadOptions& options) {
  return read("load", "", options.map_location(),
              [&] { return checkpoint::open_memory(bytes, size); })
      .value;
}

CheckpointInfo inspect(const std::string& path) {
  const auto nowhere = [](const std::string&) { return at::Device(at::kMeta); };
  return checkpoint::describe(read("inspect", path, nowhere, [&] {
    return checkpoint::open_file(path, /*mmap=*/true);
  }));
}

}  // namespace dataparallel
