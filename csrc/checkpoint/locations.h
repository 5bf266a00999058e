#pragma once

#include <dataparallel/checkpoint.h>

#include <string>
#include <unordered_map>

namespace dataparallel::checkpoint {

/// Where the storages of a file go: `map_location`, for every format.
class Locations {
 public:
  explicit Locations(LoadOptions::LocationFunction function)
      : function_(std::move(function)) {}

  /// The device for a storage with that tag. Fails where it is not there.
  at::Device device(const std::string& tag);

 private:
  at::Device find(const std::string& tag) const;

  LoadOptions::LocationFunction function_;
  std::unordered_map<std::string, at::Device> devices_;
};

}  // namespace dataparallel::checkpoint
