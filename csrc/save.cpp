#include <ATen/ATen.h>
#include <dataparallel/checkpoint.h>
#include <dataparallel/save.h>

#include <algorithm>
#include <bit>

#include "checkpoint/host_bytes.h"
#include "checkpoint/pickle_writer.h"
#include "checkpoint/zip_writer.h"

namespace dataparallel {
namespace {

constexpr const char* kByteOrder =
    std::endian::native == std::endian::little ? "little" : "big";
constexpr size_t kMostPathsToShow = 20;

void refuse_unknown(const c10::IValue& value) {
  const std::vector<OpaqueEntry> unknown = opaque_entries(value);
  std::string text;
  for (size_t i = 0; i < std::min(unknown.size(), kMostPathsToShow); ++i) {
    text += "\n  " + unknown[i].path + ": " + unknown[i].class_name;
  }
  if (unknown.size() > kMostPathsToShow) {
    text += "\n  and " + std::to_string(unknown.size() - kMostPathsToShow) +
            " more";
  }
  TORCH_CHECK_VALUE(
      unknown.empty(),
      "save: objects of unknown classes cannot be written:", text);
}

/// The folder inside the file, which torch names after it.
std::string root_name(const std::string& path) {
  std::string name = path.substr(path.find_last_of("/\\") + 1);
  name = name.substr(0, name.rfind('.'));
  const bool ascii = std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x80;
  });
  return ascii && !name.empty() && name != "." && name != ".." ? name
                                                               : "archive";
}

}  // namespace

void save(const c10::IValue& value, const std::string& path,
          const SaveProgress& progress) {
  refuse_unknown(value);
  checkpoint::PickleWriter pickle;
  pickle.write(value);
  checkpoint::AtomicFile file(path);
  checkpoint::ZipWriter zip(file, root_name(path));
  zip.add("data.pkl", pickle.pickle());
  zip.add(".format_version", "1");
  zip.add(".storage_alignment", "64");
  zip.add("byteorder", kByteOrder);
  uint64_t done = 0;
  uint64_t total = 0;
  for (const c10::Storage& storage : pickle.storages()) {
    total += storage.nbytes();
  }
  if (progress) {
    progress(done, total);
  }
  for (size_t i = 0; i < pickle.storages().size(); ++i) {
    const checkpoint::HostBytes bytes(pickle.storages()[i]);
    zip.add("data/" + std::to_string(i), bytes.data(), bytes.size());
    done += bytes.size();
    if (progress) {
      progress(done, total);
    }
  }
  zip.finish();
  file.commit();
}

void save(const StateDict& state_dict, const std::string& path,
          const SaveProgress& progress) {
  save(state_dict.to_ivalue(), path, progress);
}

}  // namespace dataparallel
