#include "checkpoint/zip.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/inflate.h"
#include "checkpoint/problem.h"

// The layout is that of PKWARE's APPNOTE.TXT, sections 4.3.7 to 4.3.16 and
// 4.5.3 (sizes of 64 bits).
namespace dataparallel::checkpoint {
namespace {

constexpr uint64_t kLocalSize = 30;
constexpr uint64_t kCentralSize = 46;
constexpr uint64_t kEndSize = 22;
constexpr uint64_t kEnd64Size = 56;
constexpr uint64_t kLocator64Size = 20;
constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr uint32_t kCentralSignature = 0x02014b50;
constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kEnd64Signature = 0x06064b50;
constexpr uint32_t kLocator64Signature = 0x07064b50;
constexpr uint32_t kIn64 = 0xFFFFFFFF;
constexpr uint16_t kEncrypted = 1;

/// Numbers at fixed places of a record.
class Record {
 public:
  explicit Record(const void* bytes)
      : bytes_(static_cast<const unsigned char*>(bytes)) {}
  uint16_t u16(int at) const {
    return static_cast<uint16_t>(little_endian(bytes_ + at, 2));
  }
  uint32_t u32(int at) const {
    return static_cast<uint32_t>(little_endian(bytes_ + at, 4));
  }
  uint64_t u64(int at) const { return little_endian(bytes_ + at, 8); }

 private:
  const unsigned char* bytes_;
};

std::string quoted(std::string_view name) {
  return "\"" + std::string(name) + "\"";
}

bool has_parent_folder(std::string_view name) {
  size_t start = 0;
  while (start <= name.size()) {
    const size_t end = std::min(name.find_first_of("/\\", start), name.size());
    if (name.substr(start, end - start) == "..") {
      return true;
    }
    start = end + 1;
  }
  return false;
}

/// Takes the 64-bit sizes that a directory's record leaves to its extra field.
void read_sizes64(ZipEntry& entry, std::string_view extra, uint64_t offset) {
  uint64_t* const wanted[] = {&entry.size, &entry.stored, &entry.header};
  while (extra.size() >= 4) {
    const Record record(extra.data());
    const size_t size = record.u16(2);
    if (size + 4 > extra.size()) {
      break;
    }
    if (record.u16(0) == 1) {
      int at = 4;
      for (uint64_t* value : wanted) {
        if (*value != kIn64) {
          continue;
        }
        if (static_cast<size_t>(at) + 8 > size + 4) {
          fail_at(offset,
                  "entry " + quoted(entry.name) + " lacks its 64-bit sizes");
        }
        *value = record.u64(at);
        at += 8;
      }
      return;
    }
    extra.remove_prefix(size + 4);
  }
}

}  // namespace

ZipArchive::ZipArchive(Source& source) : source_(source) {
  find_directory();
  read_directory();
  check_directory();
}

void ZipArchive::find_directory() {
  const uint64_t size = source_.size();
  const uint64_t window = std::min<uint64_t>(size, kEndSize + 0x10000);
  std::string tail(window, '\0');
  source_.read(size - window, window, tail.data());
  // The last one, wherever its comment ends: bytes may follow, as Python's
  // zipfile and torch allow too.
  for (uint64_t back = kEndSize; back <= window; ++back) {
    const Record record(tail.data() + (window - back));
    if (record.u32(0) != kEndSignature || kEndSize + record.u16(20) > back) {
      continue;
    }
    count_ = record.u16(10);
    directory_size_ = record.u32(12);
    directory_offset_ = record.u32(16);
    if (count_ == 0xFFFF || directory_size_ == kIn64 ||
        directory_offset_ == kIn64) {
      find_directory64(size - back);
    }
    const uint64_t end = size - back;
    if (directory_size_ > end || directory_offset_ > end - directory_size_ ||
        count_ > directory_size_ / kCentralSize) {
      fail_at(end, "the zip directory lies outside the file");
    }
    return;
  }
  fail(
      "a zip file without its directory at the end: it is truncated, or more "
      "than 64 KiB follow");
}

void ZipArchive::find_directory64(uint64_t end_record) {
  unsigned char bytes[kEnd64Size];
  if (end_record < kLocator64Size) {
    return;
  }
  source_.read(end_record - kLocator64Size, kLocator64Size, bytes);
  if (Record(bytes).u32(0) != kLocator64Signature) {
    return;  // the plain numbers are meant
  }
  const uint64_t offset = Record(bytes).u64(8);
  if (source_.size() < kEnd64Size || offset > source_.size() - kEnd64Size) {
    fail_at(end_record - kLocator64Size,
            "the 64-bit zip directory lies outside the file");
  }
  source_.read(offset, kEnd64Size, bytes);
  const Record record(bytes);
  if (record.u32(0) != kEnd64Signature) {
    fail_at(offset, "the 64-bit zip directory is damaged");
  }
  count_ = record.u64(32);
  directory_size_ = record.u64(40);
  directory_offset_ = record.u64(48);
}

void ZipArchive::read_directory() {
  directory_.resize(directory_size_);
  source_.read(directory_offset_, directory_size_, directory_.data());
  entries_.reserve(count_);
  std::string_view rest = directory_;
  for (uint64_t i = 0; i < count_; ++i) {
    const uint64_t offset = directory_offset_ + directory_size_ - rest.size();
    const Record record(rest.data());
    if (rest.size() < kCentralSize || record.u32(0) != kCentralSignature) {
      fail_at(offset, "the zip directory is damaged");
    }
    const uint64_t name = record.u16(28);
    const uint64_t extra = record.u16(30);
    const uint64_t whole = kCentralSize + name + extra + record.u16(32);
    if (whole > rest.size()) {
      fail_at(offset, "the zip directory is damaged");
    }
    ZipEntry entry;
    entry.name = rest.substr(kCentralSize, name);
    entry.flags = record.u16(8);
    entry.method = record.u16(10);
    entry.stored = record.u32(20);
    entry.size = record.u32(24);
    entry.header = record.u32(42);
    read_sizes64(entry, rest.substr(kCentralSize + name, extra), offset);
    if (has_parent_folder(entry.name)) {
      fail_at(offset,
              "entry " + quoted(entry.name) + " has \"..\" in its name");
    }
    if (!by_name_.emplace(entry.name, entries_.size()).second) {
      fail_at(offset, "entry " + quoted(entry.name) + " is there twice");
    }
    entries_.push_back(entry);
    rest.remove_prefix(whole);
  }
}

void ZipArchive::check_directory() {
  std::vector<const ZipEntry*> sorted;
  sorted.reserve(entries_.size());
  for (const ZipEntry& entry : entries_) {
    sorted.push_back(&entry);
  }
  const auto before = [](const ZipEntry* a, const ZipEntry* b) {
    return a->header < b->header;
  };
  if (!std::is_sorted(sorted.begin(), sorted.end(), before)) {
    std::sort(sorted.begin(), sorted.end(), before);
  }
  uint64_t free = 0;
  for (const ZipEntry* entry : sorted) {
    const uint64_t head = kLocalSize + entry->name.size();
    if (entry->stored > directory_offset_ ||
        entry->header > directory_offset_ - entry->stored ||
        head > directory_offset_ - entry->stored - entry->header) {
      fail_at(entry->header, "entry " + quoted(entry->name) +
                                 " lies outside the file's entries");
    }
    if (entry->header < free) {
      fail_at(entry->header,
              "entry " + quoted(entry->name) + " lies over another one");
    }
    free = entry->header + head + entry->stored;
  }
}

ZipEntry* ZipArchive::find(std::string_view name) {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

const ZipEntry& ZipArchive::locate(ZipEntry& entry) {
  if (entry.data != 0) {
    return entry;
  }
  const uint64_t head = kLocalSize + entry.name.size();
  std::string bytes(head, '\0');
  source_.read(entry.header, head, bytes.data());
  const Record record(bytes.data());
  const auto lies = [&](const std::string& of) {
    fail_at(entry.header, "entry " + quoted(entry.name) +
                              " and the zip directory disagree on its " + of);
  };
  if (record.u32(0) != kLocalSignature || record.u16(26) != entry.name.size() ||
      std::string_view(bytes).substr(kLocalSize) != entry.name) {
    lies("name");
  }
  if (record.u16(8) != entry.method) {
    lies("compression");
  }
  if (((record.u16(6) | entry.flags) & kEncrypted) != 0) {
    fail_at(entry.header, "entry " + quoted(entry.name) + " is encrypted");
  }
  const bool later = (record.u16(6) & kSizesFollow) != 0;
  const auto differs = [&](uint32_t value, uint64_t expected) {
    return value != kIn64 && value != expected && !(later && value == 0);
  };
  if (differs(record.u32(18), entry.stored) ||
      differs(record.u32(22), entry.size)) {
    lies("size");
  }
  const uint64_t data = entry.header + head + record.u16(28);
  if (data > directory_offset_ - entry.stored) {
    fail_at(entry.header,
            "entry " + quoted(entry.name) + " lies outside the file's entries");
  }
  entry.data = data;
  return entry;
}

const ZipEntry& ZipArchive::locate_stored(ZipEntry& entry) {
  if (entry.method != 0) {
    fail_at(entry.header,
            "entry " + quoted(entry.name) +
                " is compressed, which torch.save never does: load the file "
                "with Python's torch.load and save it again, or unpack it and "
                "zip it without compression (zip -0)");
  }
  if (entry.stored != entry.size) {
    fail_at(entry.header, "entry " + quoted(entry.name) + " has two sizes: " +
                              std::to_string(entry.stored) + " and " +
                              std::to_string(entry.size));
  }
  return locate(entry);
}

std::string ZipArchive::text(ZipEntry& entry) {
  constexpr uint16_t kDeflated = 8;
  if (entry.method == kDeflated) {
    locate(entry);
    // Code packs to a tenth, not more.
    constexpr uint64_t kLeast = 64 << 10;
    if (entry.size > kLeast + 64 * entry.stored) {
      fail_at(entry.header,
              "entry " + quoted(entry.name) + " unpacks to more than code can");
    }
    std::string packed(entry.stored, '\0');
    source_.read(entry.data, entry.stored, packed.data());
    return inflate(packed, entry.size, entry.data);
  }
  locate_stored(entry);
  std::string bytes(entry.size, '\0');
  source_.read(entry.data, entry.size, bytes.data());
  return bytes;
}

}  // namespace dataparallel::checkpoint
