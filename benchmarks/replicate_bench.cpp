// Bringing kept replicas up to date against making them anew on each forward,
// as LibTorch's `torch::nn::parallel::replicate` does.

#include <ATen/Parallel.h>
#include <dataparallel/replicate.h>
#include <torch/nn/parallel/data_parallel.h>

#include "support/comparison.h"
#include "support/networks.h"

namespace {

constexpr int64_t kChannels = 8;

void add_refresh(int64_t parameters, const bench::Devices& devices,
                 double aim) {
  bench::add(
      "refresh/" + std::to_string(parameters) + "_parameters/" +
          bench::text(devices),
      [=] {
        auto net = bench::conv_net(parameters, kChannels, devices.front());
        auto replicas =
            std::make_shared<dataparallel::Replicas<bench::ConvNet>>(net,
                                                                     devices);
        return bench::Comparison{
            devices, "torch::nn::parallel::replicate", aim,
            [replicas] { replicas->refresh(); },
            [net, devices] { torch::nn::parallel::replicate(net, devices); }};
      });
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const int64_t parameters : {154, 904}) {
    add_refresh(parameters, bench::cpu(2), /*aim=*/200);
    add_refresh(parameters, bench::sim(2), /*aim=*/50);
  }
  return bench::run(argc, argv);
}
