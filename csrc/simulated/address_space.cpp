#include "simulated/address_space.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace dataparallel::simulated {
namespace {

/// As CUDA's allocator, so that what is aligned there is aligned here.
constexpr size_t kAlignment = 512;
/// Asked of the system at once: a mapping for each tensor would meet its limit
/// on their number.
constexpr size_t kRegion = size_t{1} << 40;

std::mutex mutex;
char* next = nullptr;
size_t left = 0;

/// Released addresses by size: the sizes of a step are those of the step
/// before.
std::unordered_map<size_t, std::vector<void*>>& released() {
  static auto* all = new std::unordered_map<size_t, std::vector<void*>>;
  return *all;
}

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

void* reserve_addresses(size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  const size_t size = aligned(bytes);
  std::lock_guard lock(mutex);
  auto& same_size = released()[size];
  if (!same_size.empty()) {
    void* start = same_size.back();
    same_size.pop_back();
    return start;
  }
  if (left < size) {
    const size_t region = std::max(size, kRegion);
    void* start = mmap(nullptr, region, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "dry run: cannot reserve ", region,
                " bytes of address space: ", std::strerror(errno));
    next = static_cast<char*>(start);
    left = region;
  }
  void* start = next;
  next += size;
  left -= size;
  return start;
}

void release_addresses(void* start, size_t bytes) noexcept {
  if (start != nullptr) {
    std::lock_guard lock(mutex);
    released()[aligned(bytes)].push_back(start);
  }
}

}  // namespace dataparallel::simulated
