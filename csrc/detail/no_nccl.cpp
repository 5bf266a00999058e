#include <c10/util/Exception.h>

#include "detail/communicator.h"

// Of a build without CUDA; csrc/cuda/nccl.cpp is the other one.

namespace dataparallel::detail {

bool nccl_serves(const std::vector<at::Device>&) {
  return false;
}

std::shared_ptr<Communicator> make_nccl(std::vector<at::Device>) {
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace dataparallel::detail
