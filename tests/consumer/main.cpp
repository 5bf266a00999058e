#include <dataparallel/dataparallel.h>
#include <torch/torch.h>

// Succeeds if two replicas on the CPU give what the module itself gives.
int main() {
  torch::nn::Linear net(4, 2);
  dataparallel::DataParallel<torch::nn::Linear> model(
      net, dataparallel::DataParallelOptions().devices({"cpu", "cpu"}));
  const auto input = torch::ones({3, 4});
  return torch::allclose(model(input), net(input)) ? 0 : 1;
}
