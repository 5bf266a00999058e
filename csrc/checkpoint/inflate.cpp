#include "checkpoint/inflate.h"

#include <zlib.h>

#include <limits>

#include "checkpoint/problem.h"

namespace dataparallel::checkpoint {

std::string inflate(std::string_view packed, uint64_t size, uint64_t offset) {
  constexpr uint64_t kMost = std::numeric_limits<uInt>::max() - 1;
  if (packed.size() > kMost || size > kMost) {
    fail_at(offset, "a compressed entry of the zip file is too large");
  }
  // One byte more than there may be, to see that there are no more.
  std::string unpacked(size + 1, '\0');
  z_stream stream{};
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  stream.avail_in = static_cast<uInt>(packed.size());
  stream.next_out = reinterpret_cast<Bytef*>(unpacked.data());
  stream.avail_out = static_cast<uInt>(unpacked.size());
  constexpr int kWithoutHeader = -MAX_WBITS;
  if (inflateInit2(&stream, kWithoutHeader) != Z_OK) {
    fail_at(offset, "there is no memory to unpack an entry of the zip file");
  }
  const int state = ::inflate(&stream, Z_FINISH);
  inflateEnd(&stream);
  if (state != Z_STREAM_END || stream.total_out != size) {
    fail_at(offset,
            "an entry of the zip file: its compressed bytes are damaged");
  }
  unpacked.resize(size);
  return unpacked;
}

}  // namespace dataparallel::checkpoint
