#include "checkpoint/archive.h"
#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/script.h"
#include "checkpoint/zip.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

/// The folder of data.pkl, with its slash; "" for the top.
std::string find_root(const ZipArchive& zip) {
  const std::string_view name = "data.pkl";
  std::vector<std::string> roots;
  bool is_package = false;
  bool is_old_script = false;
  bool is_numpy = false;
  bool is_export = false;
  for (const ZipEntry& entry : zip.entries()) {
    const size_t slash = entry.name.find('/');
    const std::string_view inside =
        slash == entry.name.npos ? entry.name : entry.name.substr(slash + 1);
    if (entry.name == name) {
      roots.emplace_back();
    } else if (inside == name) {
      roots.emplace_back(entry.name.substr(0, slash + 1));
    }
    is_package = is_package || inside == ".data/extern_modules";
    is_old_script = is_old_script || inside == "model.json";
    is_numpy = is_numpy || entry.name.ends_with(".npy");
    is_export = is_export || inside == "archive_format" ||
                inside == "serialized_exported_program.json";
  }
  if (roots.empty() && is_package) {
    fail(
        "is a torch.package archive, which holds code to be run: open it in "
        "Python with torch.package.PackageImporter, and save the state_dict");
  }
  if (roots.empty() && is_old_script) {
    fail(
        "is a TorchScript archive of torch 1.0 to 1.3: load it in Python and "
        "save the state_dict");
  }
  if (roots.empty() && is_export) {
    fail(
        "is a torch.export archive (.pt2): load it in Python with "
        "torch.export.load, and save the state_dict");
  }
  if (roots.empty() && is_numpy) {
    fail(
        "is a NumPy archive (.npz), not a checkpoint: read it with numpy.load, "
        "and save it with torch.save");
  }
  if (roots.empty()) {
    fail("is a zip file, but not torch's: it has no data.pkl");
  }
  if (roots.size() > 1) {
    fail("has several data.pkl: in \"" + roots[0] + "\" and \"" + roots[1] +
         "\"");
  }
  return roots[0];
}

bool is_big_endian(ZipArchive& zip, const std::string& root) {
  ZipEntry* entry = zip.find(root + "byteorder");
  if (entry == nullptr) {
    return false;
  }
  const std::string order = entry->size > 64 ? "" : zip.text(*entry);
  if (order != "little" && order != "big") {
    fail_at(entry->header,
            "byteorder is \"" + order + "\", expected \"little\" or \"big\"");
  }
  return order == "big";
}

}  // namespace

Contents read_zip(Source& source, Locations& locations) {
  ZipArchive zip(source);
  const std::string root = find_root(zip);
  const auto find = [&zip, &root](const StorageClaim& claim) {
    ZipEntry* entry = zip.find(root + "data/" + claim.key);
    if (entry == nullptr) {
      if (claim.nbytes == 0) {
        return StoredBytes{};
      }
      fail("storage \"" + claim.key + "\" is not in the file");
    }
    const ZipEntry& located = zip.locate_stored(*entry);
    // An entry is one storage, whole. Of one whose size is no multiple of its
    // elements' torch.save itself says only how many whole ones it has.
    const uint64_t item = c10::elementSize(claim.dtype.value_or(at::kByte));
    if (located.size < claim.nbytes || located.size - claim.nbytes >= item) {
      fail("storage \"" + claim.key + "\" is said to have " +
           detail::count_text(claim.nbytes, "byte") + ", but has " +
           std::to_string(located.size));
    }
    return StoredBytes{located.data, located.size};
  };
  Storages storages(source, locations, find, is_big_endian(zip, root));
  const ZipEntry& pickle = zip.locate_stored(*zip.find(root + "data.pkl"));
  Cursor cursor(source, pickle.data, pickle.data + pickle.size);
  Contents contents = read_pickled(source, cursor, storages);
  contents.kind = "zip";
  if (zip.find(root + "constants.pkl") != nullptr) {
    Script script(zip, root);
    contents.kind =
        script.is_archive(contents.value) ? "C++ archive" : "TorchScript";
    contents.value = script.state_dict(contents.value, budget_for(source));
  }
  return contents;
}

}  // namespace dataparallel::checkpoint
