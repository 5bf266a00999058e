#include "checkpoint/zip_writer.h"

#include <c10/util/hash.h>
#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <unordered_set>

#include "checkpoint/zip.h"

namespace dataparallel::checkpoint {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint64_t kMost32 = 0xFFFFFFFF;
constexpr uint64_t kMost16 = 0xFFFF;
constexpr uint16_t kZip64 = 0x0001;    // an extra field: sizes of 64 bits
constexpr uint16_t kPadding = 0x4246;  // an extra field of torch's, "FB"
constexpr uint16_t kUtf8 = 0x0800;
constexpr uint16_t kVersion64 = 45;  // of the zip format, with 64 bits
constexpr uint16_t kMadeOnUnix = 0x031E;
constexpr size_t kLocalHeaderBytes = 30;
constexpr size_t kPieceBytes = size_t{1} << 20;  // stays in the cache

/// Little-endian numbers one after another.
class Bytes {
 public:
  Bytes& u16(uint64_t value) { return number(value, 2); }
  Bytes& u32(uint64_t value) { return number(value, 4); }
  Bytes& u64(uint64_t value) { return number(value, 8); }
  Bytes& text(std::string_view value) {
    text_ += value;
    return *this;
  }
  const std::string& str() const { return text_; }
  size_t size() const { return text_.size(); }

 private:
  Bytes& number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) {
      text_ += static_cast<char>(value >> (8 * i));
    }
    return *this;
  }
  std::string text_;
};

uint64_t flags(uint64_t size) {
  return size == 0 ? kUtf8 : kUtf8 | kSizesFollow;
}

uint64_t at_most_32(uint64_t value) {
  return std::min(value, kMost32);
}

/// The values that do not fit into 32 bits, in their fixed order.
std::string zip64_extra(uint64_t size, uint64_t compressed_size,
                        uint64_t offset) {
  Bytes numbers;
  if (size >= kMost32) {
    numbers.u64(size).u64(compressed_size);
  }
  if (offset >= kMost32) {
    numbers.u64(offset);
  }
  Bytes extra;
  if (numbers.size() > 0) {
    extra.u16(kZip64).u16(numbers.size()).text(numbers.str());
  }
  return extra.str();
}

}  // namespace

ZipWriter::ZipWriter(AtomicFile& file, std::string root)
    : file_(file), root_(std::move(root)) {}

void ZipWriter::add(const std::string& name, std::string_view text) {
  add(name, text.data(), text.size());
}

void ZipWriter::add(const std::string& name, const void* data, uint64_t size) {
  Entry entry{root_ + "/" + name, size, file_.position(), 0};
  const std::string extra64 = zip64_extra(
      size, /*compressed_size, as torch has it here:*/ 0, entry.offset);
  const uint64_t unaligned =
      entry.offset + kLocalHeaderBytes + entry.name.size() + extra64.size() + 4;
  const uint64_t padding = (kAlignment - unaligned % kAlignment) % kAlignment;
  Bytes header;
  header.text("PK\3\4")
      .u16(0)  // the format's version, which torch leaves out
      .u16(flags(size))
      .u16(0)  // stored
      .u32(0)  // no time
      .u32(0)  // the checksum and both sizes follow the data
      .u32(0)
      .u32(0)
      .u16(entry.name.size())
      .u16(extra64.size() + 4 + padding)
      .text(entry.name)
      .text(extra64)
      .u16(kPadding)
      .u16(padding)
      .text(std::string(padding, 'Z'));
  file_.write(header.str().data(), header.size());
  const auto* bytes = static_cast<const char*>(data);
  for (uint64_t done = 0; done < size;) {
    const size_t piece = std::min<uint64_t>(size - done, kPieceBytes);
    entry.crc = static_cast<uint32_t>(crc32_z(
        entry.crc, reinterpret_cast<const Bytef*>(bytes + done), piece));
    file_.write(bytes + done, piece);
    done += piece;
  }
  if (size > 0) {
    Bytes descriptor;
    descriptor.text("PK\7\10").u32(entry.crc);
    if (extra64.empty()) {
      descriptor.u32(size).u32(size);
    } else {
      descriptor.u64(size).u64(size);
    }
    file_.write(descriptor.str().data(), descriptor.size());
    combined_crc_ = c10::hash_combine(combined_crc_, entry.crc);
  }
  names_.push_back(name);
  entries_.push_back(std::move(entry));
}

void ZipWriter::finish() {
  add("version", "3\n");
  add(".data/serialization_id", serialization_id());
  write_directory();
}

/// torch's own: tells files apart by the names and contents of their records.
std::string ZipWriter::serialization_id() const {
  // In the order of such a set, which is what torch keeps the names in.
  std::unordered_set<std::string> names;
  for (const std::string& name : names_) {
    names.insert(name);
  }
  uint64_t combined = 0;
  for (const std::string& name : names) {
    combined = c10::hash_combine(combined, c10::hash<std::string>{}(name));
  }
  char text[41];
  std::snprintf(text, sizeof(text), "%020llu%020llu",
                static_cast<unsigned long long>(combined),
                static_cast<unsigned long long>(combined_crc_));
  return text;
}

void ZipWriter::write_directory() {
  const uint64_t start = file_.position();
  for (const Entry& entry : entries_) {
    const std::string extra = zip64_extra(entry.size, entry.size, entry.offset);
    Bytes header;
    header.text("PK\1\2")
        .u16(0)
        .u16(0)
        .u16(flags(entry.size))
        .u16(0)
        .u32(0)
        .u32(entry.crc)
        .u32(at_most_32(entry.size))
        .u32(at_most_32(entry.size))
        .u16(entry.name.size())
        .u16(extra.size())
        .u16(0)  // no comment
        .u16(0)  // on this disk
        .u16(0)  // no attributes
        .u32(0)
        .u32(at_most_32(entry.offset))
        .text(entry.name)
        .text(extra);
    file_.write(header.str().data(), header.size());
  }
  const uint64_t end = file_.position();
  const uint64_t count = entries_.size();
  Bytes tail;
  tail.text("PK\6\6")
      .u64(44)  // of this record, from here
      .u16(kMadeOnUnix)
      .u16(kVersion64)
      .u32(0)
      .u32(0)
      .u64(count)
      .u64(count)
      .u64(end - start)
      .u64(start);
  tail.text("PK\6\7").u32(0).u64(end).u32(1);
  tail.text("PK\5\6")
      .u16(0)
      .u16(0)
      .u16(std::min(count, kMost16))
      .u16(std::min(count, kMost16))
      .u32(at_most_32(end - start))
      .u32(at_most_32(start))
      .u16(0);
  file_.write(tail.str().data(), tail.size());
}

}  // namespace dataparallel::checkpoint
