#include <algorithm>

#include "checkpoint/archive.h"
#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/view.h"
#include "detail/wording.h"

// The format: the header's length in 8 bytes, the header (JSON, padded with
// spaces), then the tensors' bytes, little-endian, one after another.
namespace dataparallel::checkpoint {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // the format's own limit

std::optional<at::ScalarType> safetensors_dtype(const std::string& name) {
  static const std::map<std::string, std::string> table = {
      {"BF16", "bfloat16"},
      {"BOOL", "bool"},
      {"C64", "complex64"},
      {"F16", "float16"},
      {"F32", "float32"},
      {"F4", "float4_e2m1fn_x2"},
      {"F64", "float64"},
      {"F8_E4M3", "float8_e4m3fn"},
      {"F8_E4M3FNUZ", "float8_e4m3fnuz"},
      {"F8_E5M2", "float8_e5m2"},
      {"F8_E5M2FNUZ", "float8_e5m2fnuz"},
      {"F8_E8M0", "float8_e8m0fnu"},
      {"I16", "int16"},
      {"I32", "int32"},
      {"I64", "int64"},
      {"I8", "int8"},
      {"U16", "uint16"},
      {"U32", "uint32"},
      {"U64", "uint64"},
      {"U8", "uint8"},
  };
  const auto found = table.find(name);
  return found == table.end() ? std::nullopt : dtype_from_name(found->second);
}

/// Fails unless the tensors fill `available` bytes without gap or overlap.
void check_layout(const SafetensorsHeader& header, uint64_t start,
                  uint64_t available) {
  std::vector<const SafetensorsEntry*> sorted;
  for (const SafetensorsEntry& entry : header.entries) {
    sorted.push_back(&entry);
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  uint64_t next = 0;
  for (const SafetensorsEntry* entry : sorted) {
    const auto bad = [&](const std::string& why) {
      Problem problem(why);
      problem.key = "['" + entry->name + "']";
      problem.offset = start + std::min(entry->begin, available);
      throw problem;
    };
    if (entry->end < entry->begin || entry->end > available) {
      bad("data_offsets [" + std::to_string(entry->begin) + ", " +
          std::to_string(entry->end) + "] lie outside the file's " +
          detail::count_text(available, "byte") + " of tensors");
    }
    if (entry->begin < next) {
      bad("data_offsets lie over another tensor's");
    }
    if (entry->begin > next) {
      bad("data_offsets leave out " +
          detail::count_text(entry->begin - next, "byte") + " before them");
    }
    next = entry->end;
  }
  if (next != available) {
    fail_at(start + next, "has " +
                              detail::count_text(available - next, "byte") +
                              " behind its last tensor");
  }
}

ViewOptions view_of_entry(const SafetensorsEntry& entry) {
  const auto dtype = safetensors_dtype(entry.dtype);
  if (!dtype) {
    fail("dtype is \"" + entry.dtype + "\", which torch does not have");
  }
  ViewOptions view{*dtype, 0, entry.shape,
                   std::vector<int64_t>(entry.shape.size(), 1)};
  if (entry.dtype == "F4") {  // two numbers a byte, along the last dimension
    if (view.sizes.empty() || view.sizes.back() % 2 != 0) {
      fail("the shape of a F4 tensor ends with an odd size");
    }
    view.sizes.back() /= 2;
  }
  int64_t nbytes = static_cast<int64_t>(c10::elementSize(*dtype));
  bool overflow = false;
  int64_t stride = 1;
  for (size_t i = view.sizes.size(); i-- > 0;) {
    view.strides[i] = stride;
    overflow |= __builtin_mul_overflow(
        stride, std::max<int64_t>(view.sizes[i], 1), &stride);
    overflow |= __builtin_mul_overflow(nbytes, view.sizes[i], &nbytes);
  }
  if (overflow || static_cast<uint64_t>(nbytes) != entry.end - entry.begin) {
    fail("data_offsets span " +
         detail::count_text(entry.end - entry.begin, "byte") +
         ", which is not what dtype and shape need");
  }
  return view;
}

}  // namespace

bool is_safetensors(Source& source) {
  if (source.size() < kLengthBytes + 2) {
    return false;
  }
  Cursor cursor(source, 0, source.size());
  const uint64_t length = cursor.number(kLengthBytes);
  if (length < 2 || length > kLongestHeader) {
    return false;
  }
  for (uint64_t i = 0; i < length && cursor.remaining() > 0; ++i) {
    const auto byte = static_cast<char>(cursor.byte());
    if (std::string_view(" \t\r\n").find(byte) == std::string_view::npos) {
      return byte == '{';
    }
  }
  return false;
}

Contents read_safetensors(Source& source, Locations& locations) {
  Cursor cursor(source, 0, source.size());
  const uint64_t length = cursor.number(kLengthBytes);
  if (length > cursor.remaining()) {
    fail_at(0, "ends early: the safetensors header has " +
                   std::to_string(length) + " bytes, " +
                   std::to_string(cursor.remaining()) + " left");
  }
  std::string json(length, '\0');
  source.read(kLengthBytes, length, json.data());
  SafetensorsHeader header = parse_safetensors_header(json);
  const uint64_t start = kLengthBytes + length;
  check_layout(header, start, source.size() - start);

  const SafetensorsEntry* current = nullptr;
  Storages storages(
      source, locations,
      [&](const StorageClaim&) {
        return StoredBytes{start + current->begin,
                           current->end - current->begin};
      },
      /*big_endian=*/false);
  auto value = make_mapping("dict");
  for (const SafetensorsEntry& entry : header.entries) {
    current = &entry;
    try {
      const ViewOptions view = view_of_entry(entry);
      const auto storage =
          storages.get({"torch.storage.UntypedStorage", view.dtype, entry.name,
                        "cpu", entry.end - entry.begin});
      value.insert(entry.name, view_of(*storage, view));
    } catch (Problem& problem) {
      problem.key = "['" + entry.name + "']";
      problem.offset = start + entry.begin;
      throw;
    }
  }
  Contents contents;
  contents.kind = "safetensors";
  contents.value = value;
  contents.tags = storages.tags();
  contents.metadata = std::move(header.metadata);
  return contents;
}

}  // namespace dataparallel::checkpoint
