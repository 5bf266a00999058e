#include "detail/communicator.h"

#include <sstream>

#include "detail/links.h"
#include "detail/peer_copies.h"

namespace dataparallel::detail {

std::shared_ptr<Communicator> make_communicator(
    const std::string& function, const std::vector<at::Device>& devices,
    Transport transport) {
  const bool nccl = nccl_serves(devices);
  if (transport == Transport::kNccl && !nccl && devices.size() > 1) {
    std::ostringstream list;
    for (const at::Device& device : devices) {
      list << " " << device;
    }
    TORCH_CHECK_VALUE(false, function, ": transport is kNccl, but devices are",
                      list.str(),
                      ", expected CUDA devices, each once, and a library that "
                      "was built with CUDA");
  }
  if (nccl && (transport == Transport::kNccl ||
               (transport == Transport::kAutomatic && check_links(devices)))) {
    return make_nccl(devices);
  }
  return std::make_shared<PeerCopies>(devices);
}

}  // namespace dataparallel::detail
