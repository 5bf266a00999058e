#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/atomic_file.h"

namespace dataparallel::checkpoint {

/// The zip files of `torch.save`: nothing compressed, the data of each record
/// aligned, sizes and checksums after the data and in the directory at the end.
class ZipWriter {
 public:
  /// `root`: the folder that all records lie in.
  ZipWriter(AtomicFile& file, std::string root);

  void add(const std::string& name, const void* data, uint64_t size);
  void add(const std::string& name, std::string_view text);
  /// Writes the records that end a file of torch's, and the directory.
  void finish();

 private:
  struct Entry {
    std::string name;
    uint64_t size;
    uint64_t offset;
    uint32_t crc;
  };

  std::string serialization_id() const;
  void write_directory();

  AtomicFile& file_;
  std::string root_;
  std::vector<Entry> entries_;
  std::vector<std::string> names_;  // without the root
  uint64_t combined_crc_ = 0;
};

}  // namespace dataparallel::checkpoint
