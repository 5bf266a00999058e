#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace dataparallel::detail {

/// What makes two tensors one: their memory, and how they lie in it.
using Place = std::tuple<const void*, int64_t, std::vector<int64_t>,
                         std::vector<int64_t>, at::ScalarType>;

Place place_of(const at::Tensor& tensor);

/// Whether two tensors have the same values once they are of that dtype; not
/// a number equals itself, bit for bit.
bool same_values(const at::Tensor& a, const at::Tensor& b,
                 at::ScalarType dtype);

/// Whether values can be written into tensors.
class CopyTrial {
 public:
  /// Why `target.copy_(source)` would fail or lose something; empty if not.
  /// Where either is not plainly dense, `staged` gets the values as the target
  /// will have them.
  std::string obstacle(const at::Tensor& target, const at::Tensor& source,
                       at::Tensor& staged);

 private:
  /// Devices and dtypes that were tried.
  std::set<std::tuple<std::string, at::ScalarType, std::string, at::ScalarType>>
      kinds_;
};

/// Why `source` cannot take the target's place; empty if it can. `replaceable`:
/// nothing but the module's table holds the target.
std::string assign_obstacle(const at::Tensor& target, const at::Tensor& source,
                            bool replaceable);

}  // namespace dataparallel::detail
