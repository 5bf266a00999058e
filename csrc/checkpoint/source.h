#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <istream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dataparallel::checkpoint {

/// The bytes of a checkpoint, wherever they lie.
///
/// Not safe for use by several threads at once.
class Source {
 public:
  virtual ~Source() = default;
  uint64_t size() const { return size_; }

  /// Copies the bytes [offset, offset + count), which must be inside.
  virtual void read(uint64_t offset, uint64_t count, void* out) = 0;

  /// All bytes where they are in memory as they are, else null. Valid while
  /// the source lives.
  virtual const char* data() const { return nullptr; }

  /// Memory of a tensor that outlives the source without a copy, or null
  /// where there is none such.
  virtual c10::DataPtr share(uint64_t /*offset*/) { return {}; }

  /// The bytes are not needed again.
  virtual void forget(uint64_t /*offset*/, uint64_t /*count*/) {}

 protected:
  uint64_t size_ = 0;
};

/// A file, mapped privately where it can be mapped; else it is read.
std::unique_ptr<Source> open_file(const std::string& path, bool mmap);
/// Memory that the caller keeps until the source is gone.
std::unique_ptr<Source> open_memory(const char* bytes, size_t size);
std::unique_ptr<Source> open_stream(std::istream& stream);

/// Reads the bytes of a source from an offset on, in order.
class Cursor {
 public:
  /// Sees the bytes [offset, end) of `source`, which must be inside.
  Cursor(Source& source, uint64_t offset, uint64_t end);

  uint64_t offset() const { return offset_; }
  uint64_t remaining() const { return end_ - offset_; }

  /// The next `count` bytes, valid until the next call; too few: fails.
  const unsigned char* take(uint64_t count);
  unsigned char byte() { return *take(1); }
  /// Leaves out bytes that are there (see `remaining`).
  void skip(uint64_t count) { offset_ += count; }
  /// Little-endian, of `bytes` bytes (8 at most).
  uint64_t number(int bytes);
  /// Up to and without the next newline, which is skipped.
  std::string_view line();

 private:
  const unsigned char* refill(uint64_t count);

  Source& source_;
  uint64_t offset_;
  uint64_t end_;
  /// Bytes in memory: those from `start_` to `start_ + length_` of the source.
  const unsigned char* memory_ = nullptr;
  uint64_t start_ = 0;
  uint64_t length_ = 0;
  std::vector<unsigned char> buffer_;
};

/// Little-endian, from `bytes` bytes at `data`.
uint64_t little_endian(const unsigned char* data, int bytes);

}  // namespace dataparallel::checkpoint
