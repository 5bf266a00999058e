// The example of README.md, line by line, on two CPU replicas.

#include <dataparallel/dataparallel.h>
#include <torch/torch.h>

#include "support/catch.h"

TEST_CASE("the README's example runs and its gradients are one module's",
          "[readme]") {
  torch::manual_seed(0);
  const auto images = torch::rand({5, 1, 8, 8});
  const auto labels = torch::randint(10, {5}, torch::kLong);

  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(64, 10));
  dataparallel::DataParallel<torch::nn::Sequential> model(
      net, dataparallel::DataParallelOptions().devices({"cpu", "cpu"}));
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.1);

  auto alone =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  const auto expected =
      torch::nn::functional::cross_entropy(alone->forward(images), labels);
  expected.backward();

  auto logits = model(images);
  auto loss = torch::nn::functional::cross_entropy(logits, labels);
  loss.backward();
  CHECK(torch::allclose(loss, expected));
  const auto gradients = net->parameters();
  REQUIRE(gradients.size() == alone->parameters().size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    CHECK(torch::allclose(gradients[i].grad(), alone->parameters()[i].grad()));
  }

  const auto before = net->parameters()[0].detach().clone();
  optimizer.step();
  CHECK_FALSE(torch::equal(net->parameters()[0], before));

  optimizer.zero_grad();
  const auto again = model->forward_backward(
      [](const auto& output, const auto& target) {
        return torch::nn::functional::cross_entropy(output, target);
      },
      images, labels);
  CHECK(again.item<double>() < expected.item<double>());
}
