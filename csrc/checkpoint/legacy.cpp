#include <unordered_map>

#include "checkpoint/archive.h"
#include "checkpoint/arguments.h"
#include "checkpoint/pickle.h"
#include "checkpoint/problem.h"
#include "detail/wording.h"

// The format of torch.save before 1.6: pickles one after another (a magic
// number, a version, some facts of the machine, the value, the keys of the
// storages), then for each key the number of elements and the elements.
//
// The value comes before the storages, so it is run twice: first on no device,
// to learn what the storages are; then, when it is known where they lie, as
// for any other format.
namespace dataparallel::checkpoint {
namespace {

constexpr const char* kMagic = "119547037146038801333356";
constexpr int64_t kVersion = 1001;

/// A pickle that holds plain values only.
c10::IValue read_plain(Cursor& cursor) {
  Heap heap(cursor.remaining());
  Objects objects(heap, nullptr);
  return PickleMachine(cursor, objects).run();
}

bool is_magic(const c10::IValue& value) {
  const Opaque* opaque = as_opaque(value);
  return opaque != nullptr && opaque->class_name == "builtins.int" &&
         opaque->args[0].isString() && opaque->args[0].toStringRef() == kMagic;
}

using Claims = std::unordered_map<std::string, StorageClaim>;
using Places = std::unordered_map<std::string, StoredBytes>;

/// Runs the value on the meta device and returns what it says of storages.
Claims read_claims(Source& source, Cursor& cursor) {
  Claims claims;
  uint64_t left = source.size();
  Locations nowhere([](const std::string&) { return at::Device(at::kMeta); });
  Storages storages(
      source, nowhere,
      [&](const StorageClaim& claim) {
        if (claim.nbytes > left) {
          fail("storage \"" + claim.key + "\" is said to have " +
               detail::count_text(claim.nbytes, "byte") +
               ", more than are in the file");
        }
        left -= claim.nbytes;
        claims.emplace(claim.key, claim);
        return StoredBytes{0, claim.nbytes};
      },
      /*big_endian=*/false);
  Heap heap(budget_for(source));
  Objects objects(heap, &storages);
  PickleMachine(cursor, objects).run();
  return claims;
}

Places find_places(const Claims& claims, Cursor& cursor) {
  const c10::IValue keys = read_plain(cursor);
  Places places;
  for (const c10::IValue& element : to_elements(keys, "the storages' keys")) {
    const std::string key = element.isString() ? element.toStringRef()
                            : element.isInt()  ? std::to_string(element.toInt())
                                               : "";
    const auto claim = claims.find(key);
    if (claim == claims.end()) {
      fail_at(cursor.offset(),
              "storage \"" + key + "\" is in the file, but not in its value");
    }
    const uint64_t at = cursor.offset();
    const uint64_t count = cursor.number(8);
    const uint64_t item =
        c10::elementSize(claim->second.dtype.value_or(at::kByte));
    if (count != claim->second.nbytes / item) {
      fail_at(at, "storage \"" + key + "\" has " +
                      detail::count_text(count, "element") +
                      ", but is said to have " +
                      std::to_string(claim->second.nbytes / item));
    }
    const StoredBytes bytes{cursor.offset(), claim->second.nbytes};
    if (bytes.nbytes > cursor.remaining()) {
      fail_at(at, "ends early: storage \"" + key + "\" has " +
                      detail::count_text(bytes.nbytes, "byte") + ", " +
                      std::to_string(cursor.remaining()) + " left");
    }
    cursor.skip(bytes.nbytes);
    if (!places.emplace(key, bytes).second) {
      fail_at(at, "storage \"" + key + "\" is there twice");
    }
  }
  return places;
}

}  // namespace

bool is_legacy(Source& source) {
  try {
    Cursor cursor(source, 0, std::min<uint64_t>(source.size(), 64));
    return is_magic(read_plain(cursor));
  } catch (const Problem&) {
    return false;
  }
}

Contents read_legacy(Source& source, Locations& locations) {
  Cursor cursor(source, 0, source.size());
  read_plain(cursor);  // the magic number
  const c10::IValue version = read_plain(cursor);
  if (!version.isInt() || version.toInt() != kVersion) {
    fail_at(cursor.offset(), "has another version than " +
                                 std::to_string(kVersion) +
                                 " of torch's legacy format");
  }
  read_plain(cursor);  // the writer's machine: everything is little-endian
  const uint64_t start = cursor.offset();
  const Claims claims = read_claims(source, cursor);
  const uint64_t end = cursor.offset();
  const Places places = find_places(claims, cursor);

  Storages storages(
      source, locations,
      [&places](const StorageClaim& claim) {
        const auto found = places.find(claim.key);
        if (found == places.end()) {
          fail("storage \"" + claim.key + "\" is not in the file");
        }
        return found->second;
      },
      /*big_endian=*/false);
  Cursor again(source, start, end);
  Contents contents = read_pickled(source, again, storages);
  contents.kind = "legacy";
  return contents;
}

}  // namespace dataparallel::checkpoint
