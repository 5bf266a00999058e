#include "checkpoint/atomic_file.h"

#include <dataparallel/checkpoint.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>

namespace dataparallel::checkpoint {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 18;
// As much as the kernel is told to write back while more comes.
constexpr uint64_t kSendBytes = uint64_t{32} << 20;
constexpr size_t kMostBytesOfAName = 255;
constexpr mode_t kPermissions = 07777;

/// Follows symbolic links, the last one to a file that need not be there.
std::string resolve(const std::string& path) {
  std::filesystem::path result = path;
  std::error_code error;
  for (int links = 0;
       links < 40 && std::filesystem::is_symlink(
                         std::filesystem::symlink_status(result, error));
       ++links) {
    const auto target = std::filesystem::read_symlink(result, error);
    if (error) {
      break;
    }
    result = result.parent_path() / target;  // `target` alone, if absolute
  }
  return result.string();
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path)
    : given_(path), path_(resolve(path)) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    throw CheckpointError(std::string("save: path is ") +
                              (path.empty() ? "empty" : "a text with a 0") +
                              ", expected the name of a file",
                          path);
  }
  struct stat status;
  // As given: what /dev/stdout leads to may have no name.
  if (::stat(given_.c_str(), &status) != 0) {
    if (errno != ENOENT) {
      fail("cannot be written", errno);
    }
    open_temporary();
  } else if (S_ISREG(status.st_mode)) {
    open_temporary();
    take_permissions();
  } else {
    descriptor_ = ::open(given_.c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor_ < 0) {
      fail("cannot be written", errno);
    }
  }
  buffer_.reserve(kBufferBytes);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
  if (!temporary_.empty()) {
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::open_temporary() {
  std::random_device random;
  const size_t slash = path_.rfind('/');
  std::string name = path_.substr(slash == std::string::npos ? 0 : slash + 1);
  for (int attempt = 0; attempt < 100; ++attempt) {
    char suffix[16];
    std::snprintf(suffix, sizeof(suffix), ".%08x.tmp", random());
    name.resize(std::min(name.size(), kMostBytesOfAName - sizeof(suffix)));
    temporary_ =
        (slash == std::string::npos ? "" : path_.substr(0, slash + 1)) + "." +
        name + suffix;
    // The kernel applies the umask; asking for it would change it.
    descriptor_ = ::open(temporary_.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0 || errno != EEXIST) {
      break;
    }
  }
  if (descriptor_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail("cannot be written: no temporary file in its folder", error);
  }
}

void AtomicFile::take_permissions() {
  struct stat old;
  struct stat now;
  if (::stat(path_.c_str(), &old) != 0 || ::fstat(descriptor_, &now) != 0) {
    return;  // it has gone meanwhile
  }
  mode_t mode = old.st_mode & kPermissions;
  if ((old.st_uid != now.st_uid || old.st_gid != now.st_gid) &&
      ::fchown(descriptor_, old.st_uid, old.st_gid) != 0) {
    // Only root may. For others the file becomes theirs, as with an editor, and
    // must not run as them.
    mode &= ~static_cast<mode_t>(S_ISUID | S_ISGID);
  }
  if (::fchmod(descriptor_, mode) != 0) {
    fail("cannot give the new file the permissions of the old one", errno);
  }
}

void AtomicFile::write(const void* data, size_t size) {
  position_ += size;
  if (buffer_.size() + size > kBufferBytes) {
    flush();
  }
  const char* bytes = static_cast<const char*>(data);
  if (size >= kBufferBytes) {
    write_through(bytes, size);
  } else {
    buffer_.append(bytes, size);
  }
}

void AtomicFile::flush() {
  write_through(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void AtomicFile::write_through(const char* data, size_t size) {
  while (size > 0) {
    const ssize_t written =
        ::write(descriptor_, data, std::min<size_t>(size, kSendBytes));
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      fail("cannot be written", errno);
    }
    data += written;
    size -= static_cast<size_t>(written);
#ifdef __linux__
    // The disk works while the rest is made, so that `fsync` waits less. Only
    // advice: what it cannot do, `fsync` will.
    const auto end = static_cast<uint64_t>(
        std::max<off_t>(0, ::lseek(descriptor_, 0, SEEK_CUR)));
    if (end >= sent_ + kSendBytes) {
      ::sync_file_range(descriptor_, static_cast<off_t>(sent_),
                        static_cast<off_t>(end - sent_), SYNC_FILE_RANGE_WRITE);
      sent_ = end;
    }
#endif
  }
}

void AtomicFile::commit() {
  flush();
  // Devices and pipes have nothing to sync.
  if (::fsync(descriptor_) != 0 && !temporary_.empty()) {
    fail("cannot be written to the disk", errno);
  }
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) {
    fail("cannot be written", errno);
  }
  if (temporary_.empty()) {
    return;
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail("cannot be replaced", errno);
  }
  temporary_.clear();
  sync_folder();
}

void AtomicFile::sync_folder() const {
  const int folder =
      ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) {
    return;  // writable but not readable: the file is there all the same
  }
  // Some file systems cannot; they have no weaker promise to give.
  ::fsync(folder);
  ::close(folder);
}

void AtomicFile::fail(const std::string& what, int error) const {
  throw CheckpointError("save: " + given_ + " " + what + " (" +
                            std::generic_category().message(error) + ")",
                        given_);
}

}  // namespace dataparallel::checkpoint
