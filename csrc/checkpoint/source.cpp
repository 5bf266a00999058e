#include "checkpoint/source.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "checkpoint/problem.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

std::string system_text(int error) {
  return std::strerror(error);
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (value_ >= 0) {
      ::close(value_);
    }
  }
  int get() const { return value_; }

 private:
  int value_;
};

/// Reads up to `count` bytes, fewer only at the file's end.
uint64_t read_fully(int descriptor, uint64_t offset, uint64_t count,
                    char* out) {
  uint64_t done = 0;
  while (done < count) {
    const uint64_t step = std::min<uint64_t>(count - done, 1 << 30);
    const ssize_t got = ::pread(descriptor, out + done, step,
                                static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail("cannot be read: " + system_text(errno));
    }
    if (got == 0) {
      break;
    }
    done += static_cast<uint64_t>(got);
  }
  return done;
}

/// A private mapping, alive until its last tensor is gone.
class Mapping {
 public:
  Mapping(char* bytes, uint64_t size) : bytes_(bytes), size_(size) {}
  char* bytes() const { return bytes_; }

  void retain() { owners_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (owners_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      ::munmap(bytes_, size_);
      delete this;
    }
  }

 private:
  ~Mapping() = default;

  char* bytes_;
  uint64_t size_;
  std::atomic<int64_t> owners_{1};
};

class MappedFile : public Source {
 public:
  MappedFile(char* bytes, uint64_t size) : mapping_(new Mapping(bytes, size)) {
    size_ = size;
  }
  ~MappedFile() override { mapping_->release(); }

  const char* data() const override { return mapping_->bytes(); }

  void read(uint64_t offset, uint64_t count, void* out) override {
    std::memcpy(out, mapping_->bytes() + offset, count);
  }

  c10::DataPtr share(uint64_t offset) override {
    mapping_->retain();
    return c10::DataPtr(
        mapping_->bytes() + offset, mapping_,
        [](void* mapping) { static_cast<Mapping*>(mapping)->release(); },
        c10::Device(c10::kCPU));
  }

  void forget(uint64_t offset, uint64_t count) override {
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint64_t begin = (offset + page - 1) / page * page;
    const uint64_t end = (offset + count) / page * page;
    if (begin < end) {
      ::madvise(mapping_->bytes() + begin, end - begin, MADV_DONTNEED);
    }
  }

 private:
  Mapping* mapping_;
};

class PlainFile : public Source {
 public:
  explicit PlainFile(int descriptor) : descriptor_(descriptor) {}
  void set_size(uint64_t size) { size_ = size; }

  void read(uint64_t offset, uint64_t count, void* out) override {
    if (read_fully(descriptor_.get(), offset, count, static_cast<char*>(out)) !=
        count) {
      fail("became shorter while it was read");
    }
  }

 private:
  Descriptor descriptor_;
};

class Memory : public Source {
 public:
  Memory(const char* bytes, uint64_t size) : bytes_(bytes) { size_ = size; }
  explicit Memory(std::vector<char> owned)
      : owned_(std::move(owned)), bytes_(owned_.data()) {
    size_ = owned_.size();
  }

  const char* data() const override { return bytes_; }
  void read(uint64_t offset, uint64_t count, void* out) override {
    if (count > 0) {
      std::memcpy(out, bytes_ + offset, count);
    }
  }

 private:
  std::vector<char> owned_;
  const char* bytes_;
};

class Stream : public Source {
 public:
  Stream(std::istream& stream, uint64_t start, uint64_t size)
      : stream_(stream), start_(start) {
    size_ = size;
  }

  void read(uint64_t offset, uint64_t count, void* out) override {
    stream_.clear();
    stream_.seekg(static_cast<std::streamoff>(start_ + offset));
    stream_.read(static_cast<char*>(out), static_cast<std::streamsize>(count));
    if (static_cast<uint64_t>(stream_.gcount()) != count) {
      fail("the stream ended while it was read");
    }
  }

 private:
  std::istream& stream_;
  uint64_t start_;
};

/// Whether a checkpoint, or a file that the error shall name, may begin so.
bool may_be_one(std::string_view bytes) {
  using namespace std::string_view_literals;
  constexpr std::string_view kStarts[] = {
      "PK\x03\x04"sv, "PK\x05\x06"sv, "\x80\x01"sv,    "\x80\x02"sv,
      "\x80\x03"sv,   "\x80\x04"sv,   "\x80\x05"sv,    "L1195470371"sv,
      "\x1f\x8b"sv,   "BZh"sv,        "\xfd\x37zXZ"sv, "\x28\xb5\x2f\xfd"sv,
      "7z\xbc\xaf"sv, "Rar!"sv,       "\x89HDF"sv,     "\x93NUMPY"sv,
      "GGUF"sv,       "version "sv};
  constexpr size_t kTarAt = 257;
  constexpr size_t kSafetensorsAt = 8;  // behind the header's length
  return std::any_of(std::begin(kStarts), std::end(kStarts),
                     [&](std::string_view start) {
                       return bytes.starts_with(start);
                     }) ||
         std::string_view(" \t\r\n{").find(bytes[kSafetensorsAt]) !=
             std::string_view::npos ||
         bytes.substr(kTarAt, 5) == "ustar";
}

/// To the end; of what can be no checkpoint, which may have no end, the start.
template <class ReadSome>
std::unique_ptr<Source> read_all(ReadSome&& read_some) {
  std::vector<char> bytes;
  constexpr size_t kStart = 512;
  constexpr size_t kStep = 1 << 20;
  size_t used = 0;
  while (true) {
    bytes.resize(used + std::max(kStep, used / 2));
    const size_t got = read_some(used, bytes.size() - used, &bytes[used]);
    used += got;
    if (got == 0 || (used >= kStart && !may_be_one({bytes.data(), kStart}))) {
      break;
    }
  }
  bytes.resize(used);
  return std::make_unique<Memory>(std::move(bytes));
}

}  // namespace

std::unique_ptr<Source> open_file(const std::string& path, bool mmap) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    fail("cannot be opened: " + system_text(errno));
  }
  auto file = std::make_unique<PlainFile>(descriptor);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) {
    fail("cannot be opened: " + system_text(errno));
  }
  if (S_ISDIR(status.st_mode)) {
    fail("is a directory, expected a file");
  }
  if (!S_ISREG(status.st_mode)) {
    return read_all([descriptor](size_t, size_t count, char* out) {
      ssize_t got = -1;
      do {
        got = ::read(descriptor, out, count);
      } while (got < 0 && errno == EINTR);
      if (got < 0) {
        fail("cannot be read: " + system_text(errno));
      }
      return static_cast<size_t>(got);
    });
  }
  const auto size = static_cast<uint64_t>(status.st_size);
  if (mmap && size > 0) {
    void* bytes = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
    if (bytes != MAP_FAILED) {
      return std::make_unique<MappedFile>(static_cast<char*>(bytes), size);
    }
  }
  file->set_size(size);
  return file;
}

std::unique_ptr<Source> open_memory(const char* bytes, size_t size) {
  return std::make_unique<Memory>(bytes, size);
}

std::unique_ptr<Source> open_stream(std::istream& stream) {
  if (!stream.good()) {
    fail("the stream cannot be read");
  }
  const std::streamoff start = stream.tellg();
  if (start >= 0) {
    stream.seekg(0, std::ios::end);
    const std::streamoff end = stream.tellg();
    if (stream.good() && end >= start) {
      return std::make_unique<Stream>(stream, static_cast<uint64_t>(start),
                                      static_cast<uint64_t>(end - start));
    }
  }
  stream.clear();
  return read_all([&stream](size_t, size_t count, char* out) {
    stream.read(out, static_cast<std::streamsize>(count));
    if (stream.bad()) {
      fail("the stream cannot be read");
    }
    return static_cast<size_t>(stream.gcount());
  });
}

Cursor::Cursor(Source& source, uint64_t offset, uint64_t end)
    : source_(source), offset_(offset), end_(end) {
  memory_ = reinterpret_cast<const unsigned char*>(source.data());
  if (memory_ != nullptr) {
    length_ = source.size();
  }
}

const unsigned char* Cursor::refill(uint64_t count) {
  constexpr uint64_t kWindow = 1 << 16;
  const uint64_t length = std::min(std::max(count, kWindow), remaining());
  buffer_.resize(length);
  source_.read(offset_, length, buffer_.data());
  memory_ = buffer_.data();
  start_ = offset_;
  length_ = length;
  return memory_;
}

const unsigned char* Cursor::take(uint64_t count) {
  if (count > remaining()) {
    fail_at(offset_, "ends early: " + detail::count_text(count, "byte") +
                         " expected, " + std::to_string(remaining()) + " left");
  }
  const unsigned char* bytes =
      offset_ >= start_ && offset_ - start_ + count <= length_
          ? memory_ + (offset_ - start_)
          : refill(count);
  offset_ += count;
  return bytes;
}

uint64_t Cursor::number(int bytes) {
  return little_endian(take(static_cast<uint64_t>(bytes)), bytes);
}

std::string_view Cursor::line() {
  // Lines are short: names, and numbers of the oldest protocols.
  for (uint64_t length = std::min<uint64_t>(256, remaining());;
       length = std::min(length * 4, remaining())) {
    const unsigned char* bytes = take(length);
    offset_ -= length;
    const auto* end = static_cast<const unsigned char*>(
        length == 0 ? nullptr : std::memchr(bytes, '\n', length));
    if (end != nullptr) {
      const auto size = static_cast<uint64_t>(end - bytes);
      offset_ += size + 1;
      return {reinterpret_cast<const char*>(bytes), size};
    }
    if (length == remaining()) {
      fail_at(offset_, "ends early: a line without its end");
    }
  }
}

uint64_t little_endian(const unsigned char* data, int bytes) {
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) {
    value = value << 8 | data[i];
  }
  return value;
}

}  // namespace dataparallel::checkpoint
