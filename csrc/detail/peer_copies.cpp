#include "detail/peer_copies.h"

#include <ATen/ATen.h>

#include "detail/links.h"

namespace dataparallel::detail {

void PeerCopies::broadcast(const std::vector<at::Tensor>& flat) {
  for (size_t have = 1; have < flat.size(); have *= 2) {
    for (size_t i = 0; i < have && have + i < flat.size(); ++i) {
      copy_into(flat[have + i], flat[i]);
    }
  }
}

at::Tensor PeerCopies::reduce_add(std::vector<at::Tensor> flat) {
  for (size_t step = 1; step < flat.size(); step *= 2) {
    for (size_t i = 0; i + step < flat.size(); i += 2 * step) {
      const at::Tensor& sent = flat[i + step];
      if (sent.defined()) {
        const at::Tensor here = moved(sent, devices_[i]);
        flat[i] = flat[i].defined() ? flat[i].add_(here) : here;
        flat[i + step] = at::Tensor();
      }
    }
  }
  return flat.front();
}

}  // namespace dataparallel::detail
