#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dataparallel::checkpoint {

/// A file being written that takes its name only when it is complete.
///
/// It lies under a temporary name in the folder of its name (of the file that a
/// symbolic link points to), with the permissions of the file there or, if
/// there is none, of the umask. Without `commit` it is removed.
/// What is no regular file, a device or a pipe, is written as it is.
///
/// Throws `CheckpointError`. Not thread-safe.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size);
  /// How many bytes have been written.
  uint64_t position() const { return position_; }
  /// Makes it the file of that name, and both lasting.
  void commit();

 private:
  void open_temporary();
  void take_permissions();
  void flush();
  void write_through(const char* data, size_t size);
  void sync_folder() const;
  [[noreturn]] void fail(const std::string& what, int error) const;

  std::string given_;      // as the caller named it
  std::string path_;       // what that leads to
  std::string temporary_;  // empty: `path_` itself is written, or it is done
  std::string buffer_;
  int descriptor_ = -1;
  uint64_t position_ = 0;
  uint64_t sent_ = 0;  // to the disk, so far
};

}  // namespace dataparallel::checkpoint
