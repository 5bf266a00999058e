#include <c10/core/CPUAllocator.h>
#include <dataparallel/data_parallel.h>
#include <torch/torch.h>

#include <atomic>

#include "support/catch.h"
#include "support/networks.h"

// Memory is level from step to step, and freed when the wrapper is. Measured
// by a CPU allocator that counts what it has handed out.

namespace {

namespace dp = dataparallel;
using test::Mlp;

class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) {}
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{base_->allocate(bytes), bytes};
    live_bytes += static_cast<int64_t>(bytes);
    return {block->data.get(), block, &free, c10::Device(c10::kCPU)};
  }
  void copy_data(void* target, const void* source,
                 std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  inline static std::atomic<int64_t> live_bytes = 0;

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
  };
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    live_bytes -= static_cast<int64_t>(block->bytes);
    delete block;
  }
  c10::Allocator* base_;
};

/// Counts from here on; never taken back, since tensors may outlive it.
void count_memory() {
  static CountingAllocator counting(c10::GetCPUAllocator());
  c10::SetCPUAllocator(&counting, /*priority=*/1);
}

torch::Tensor mean_square(const torch::Tensor& y, const torch::Tensor&) {
  return y.pow(2).mean();
}

}  // namespace

TEST_CASE("memory is level over 200 steps and freed with the wrapper",
          "[data_parallel][memory]") {
  count_memory();
  REQUIRE(c10::GetCPUAllocator() != nullptr);
  const int64_t before = CountingAllocator::live_bytes;
  const std::vector<torch::Device> devices(3, torch::kCPU);
  {
    auto net = test::make<Mlp>(torch::kCPU);
    const int64_t one = CountingAllocator::live_bytes - before;
    REQUIRE(one > 0);
    dp::DataParallel<Mlp> model(net,
                                dp::DataParallelOptions().devices(devices));
    // Replicas on the module's own device share its parameters.
    CHECK(CountingAllocator::live_bytes - before < 2 * one);
    torch::optim::Adam optimizer(model->parameters());
    const auto x = torch::randn({6, 4}, torch::kDouble);
    int64_t after_first = 0;
    for (int step = 0; step < 200; ++step) {
      optimizer.zero_grad();
      model(x).pow(2).mean().backward();
      model->loss(mean_square, x, x).backward();
      model->forward_backward(mean_square, x, x);
      optimizer.step();
      if (step == 4) {
        after_first = CountingAllocator::live_bytes;
      }
    }
    CHECK(CountingAllocator::live_bytes == after_first);
  }
  CHECK(CountingAllocator::live_bytes == before);
}
