// A program of its own: it starts the simulated devices too late.

#include <dataparallel/simulated.h>
#include <torch/torch.h>

#include "support/catch.h"

TEST_CASE("starting after the first backward is refused with the reason",
          "[simulated]") {
  torch::ones({1}).requires_grad_().sum().backward();
  // Again: a start that failed stays failed.
  for (int attempt = 0; attempt < 2; ++attempt) {
    CHECK_THROWS_WITH(
        dataparallel::simulated::start(),
        Catch::Contains("must be started before the process's first backward"));
  }
}
