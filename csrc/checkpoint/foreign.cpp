#include "checkpoint/foreign.h"

#include <algorithm>
#include <string>

#include "checkpoint/pickle.h"
#include "checkpoint/problem.h"

namespace dataparallel::checkpoint {
namespace {

using namespace std::string_view_literals;

struct Kind {
  std::string_view start;
  const char* sentence;
};

constexpr Kind kKinds[] = {
    {"\x1f\x8b"sv, "is a gzip file: unpack it first (gunzip)"},
    {"BZh"sv, "is a bzip2 file: unpack it first (bunzip2)"},
    {"\xfd"
     "7zXZ\0"sv,
     "is an xz file: unpack it first (unxz)"},
    {"\x28\xb5\x2f\xfd"sv, "is a Zstandard file: unpack it first (unzstd)"},
    {"7z\xbc\xaf\x27\x1c"sv, "is a 7-Zip file: unpack it first"},
    {"Rar!\x1a\x07"sv, "is a RAR file: unpack it first"},
    {"\x89HDF\r\n\x1a\n"sv,
     "is an HDF5 file, as Keras writes: convert it to safetensors first"},
    {"\x93NUMPY"sv,
     "is a NumPy array (.npy), not a checkpoint: read it with numpy.load, and "
     "save it with torch.save"},
    {"GGUF"sv, "is a GGUF file, which torch cannot read either"},
    {"version https://git-lfs"sv,
     "is a Git LFS pointer, not the file itself: fetch it with git lfs pull"},
};

/// What `pickle.dump` writes: a pickle alone, to the end of the file. One of
/// protocol 2 and later says so at its start, and may be damaged.
bool is_plain_pickle(Source& source) {
  try {
    Cursor cursor(source, 0, source.size());
    Heap heap(source.size());
    Objects objects(heap, nullptr);
    PickleMachine(cursor, objects).run();
    return cursor.remaining() == 0;
  } catch (const Problem&) {
    char start[2];
    source.read(0, std::min<uint64_t>(source.size(), 2), start);
    return start[0] == '\x80' && source.size() > 1 && start[1] >= 2 &&
           start[1] <= 5;
  }
}

/// The first bytes as a person can read them: "<html>", "\x89HDF".
std::string first_bytes(Source& source) {
  std::string bytes(std::min<uint64_t>(source.size(), 16), '\0');
  source.read(0, bytes.size(), bytes.data());
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F && c != '"' && c != '\\') {
      text += c;
    } else {
      text += "\\x";
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
  }
  return "\"" + text + "\"";
}

}  // namespace

bool starts_with(Source& source, std::string_view text) {
  if (source.size() < text.size()) {
    return false;
  }
  std::string bytes(text.size(), '\0');
  source.read(0, bytes.size(), bytes.data());
  return bytes == text;
}

bool is_tar(Source& source) {
  constexpr uint64_t kMagicAt = 257;
  char magic[5];
  if (source.size() < kMagicAt + sizeof(magic)) {
    return false;
  }
  source.read(kMagicAt, sizeof(magic), magic);
  return std::string_view(magic, sizeof(magic)) == "ustar";
}

void refuse_foreign(Source& source) {
  for (const Kind& kind : kKinds) {
    if (starts_with(source, kind.start)) {
      fail(kind.sentence);
    }
  }
  if (is_plain_pickle(source)) {
    fail(
        "is a pickle that torch did not write, which torch.load refuses too: "
        "read it with Python's pickle.load, and save it with torch.save");
  }
  fail("is no checkpoint: it begins with " + first_bytes(source) +
       ", which is neither a zip file, nor torch's legacy pickles, nor "
       "safetensors");
}

}  // namespace dataparallel::checkpoint
