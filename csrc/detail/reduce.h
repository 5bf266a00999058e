#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dataparallel::detail {

/// The gradients of some parameters, `gradients[replica][parameter]`, each on
/// its replica's device or undefined, added up on `device` in replica order;
/// all undefined gives undefined. Dense, sparse and mixed.
///
/// With the grad mode on, plain differentiable additions. Else dense gradients
/// of another device travel together: one packing, one copy and one addition a
/// replica, whatever their number; and sums are made in the memory of gradients
/// that nobody else holds. Works on the current streams of the calling thread.
std::vector<at::Tensor> reduce_add(
    std::vector<std::vector<at::Tensor>> gradients, at::Device device);

/// `sum` + `gradient`, differentiable or not, as above; `sum` is given up.
at::Tensor plus(at::Tensor sum, const at::Tensor& gradient);

}  // namespace dataparallel::detail
