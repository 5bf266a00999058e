#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/source.h"

namespace dataparallel::checkpoint {

/// A flag of an entry: its sizes come after its data.
inline constexpr uint16_t kSizesFollow = 0x0008;

struct ZipEntry {
  std::string_view name;
  uint64_t header = 0;  ///< where its local header lies
  uint64_t stored = 0;  ///< bytes in the file
  uint64_t size = 0;    ///< bytes when unpacked
  uint64_t data = 0;    ///< where the bytes lie, once `locate` was called
  uint16_t method = 0;  ///< 0: stored as they are
  uint16_t flags = 0;
};

/// The directory of a zip file, read from its end and checked: no name twice,
/// none with "..", no entry outside the file, none over another.
class ZipArchive {
 public:
  explicit ZipArchive(Source& source);

  const std::vector<ZipEntry>& entries() const { return entries_; }

  /// Null where there is none of that name.
  ZipEntry* find(std::string_view name);

  /// Finds out where the entry's bytes lie, after comparing its own header
  /// with the directory.
  const ZipEntry& locate(ZipEntry& entry);

  /// The same, and refuses an entry that is compressed.
  const ZipEntry& locate_stored(ZipEntry& entry);

  /// The unpacked bytes of a (small) entry.
  std::string text(ZipEntry& entry);

 private:
  void find_directory();
  void find_directory64(uint64_t end_record);
  void read_directory();
  void check_directory();

  Source& source_;
  uint64_t directory_offset_ = 0;
  uint64_t directory_size_ = 0;
  uint64_t count_ = 0;
  std::string directory_;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

}  // namespace dataparallel::checkpoint
