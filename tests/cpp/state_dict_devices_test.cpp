#include <dataparallel/simulated.h>
#include <dataparallel/state_dict.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/values.h"

namespace {

namespace dp = dataparallel;
namespace simulated = dataparallel::simulated;
using test::contains;
using test::message_of;
using test::same;

// "sim" is a name once the devices are there.
const torch::Device kFirst(torch::kPrivateUse1, 0);
const torch::Device kSecond(torch::kPrivateUse1, 1);

/// Limits the devices' memory to what they use now and `bytes` more.
void leave_free(int64_t bytes) {
  const int64_t used = std::max(simulated::memory_allocated(kFirst),
                                simulated::memory_allocated(kSecond));
  simulated::start(simulated::Options().devices(2).memory_bytes(used + bytes));
}

/// A module of buffers on a device, which outlives no limit of another test.
struct Buffers : torch::nn::Module {
  explicit Buffers(const std::vector<torch::Tensor>& values) {
    simulated::start(simulated::Options().devices(2));
    for (size_t i = 0; i < values.size(); ++i) {
      register_buffer("b" + std::to_string(i), values[i].to(kFirst));
    }
  }
  ~Buffers() override { simulated::start(simulated::Options().devices(2)); }
};

std::vector<torch::Tensor> zeros(size_t n, const torch::Tensor& like) {
  std::vector<torch::Tensor> result;
  for (size_t i = 0; i < n; ++i) {
    result.push_back(torch::zeros_like(like));
  }
  return result;
}

dp::StateDict filled(size_t n, const torch::Tensor& value) {
  dp::StateDict dict;
  for (size_t i = 0; i < n; ++i) {
    dict.insert("b" + std::to_string(i), value.clone());
  }
  return dict;
}

bool all_are(const torch::nn::Module& module, const torch::Tensor& value) {
  for (const auto& [name, tensor] : dp::state_dict(module)) {
    if (!same(tensor.toTensor().cpu().to_dense(), value.to_dense())) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("a full device takes values of its dtypes and of others",
          "[state_dict]") {
  const auto like = torch::ones({100, 10});
  Buffers module(zeros(3, like));
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf}) {
    leave_free(8);
    simulated::reset_counters();
    dp::load_state_dict(module, filled(3, like.to(dtype)));
    CHECK(all_are(module, like));
    // Converted before they travel; four bytes are the trial of the dtypes.
    CHECK(simulated::bytes_copied(torch::kCPU, kFirst) == 3 * 4000 + 4);
    dp::load_state_dict(module, filled(3, torch::zeros_like(like)));
  }
}

TEST_CASE("values in another order than the module's go to the device",
          "[state_dict]") {
  const auto like = torch::arange(1000.f).view({100, 10});
  Buffers module(zeros(2, like.t().contiguous().t()));
  dp::load_state_dict(module, filled(2, like));
  CHECK(all_are(module, like));
  dp::load_state_dict(module, filled(2, like.t().contiguous().t().to(kSecond)));
  CHECK(all_are(module, like));
  dp::load_state_dict(module, filled(2, -like.to(kSecond).to(torch::kDouble)));
  CHECK(all_are(module, -like));
  CHECK(simulated::races().empty());
}

TEST_CASE("a device without memory to rearrange values in changes nothing",
          "[state_dict]") {
  const auto like = torch::ones({100, 10});
  std::vector<torch::Tensor> values = zeros(2, like);
  values[1] = torch::zeros({10, 100}).t();
  Buffers module(values);
  leave_free(3999);
  CHECK(contains(message_of<c10::OutOfMemoryError>(
                     [&] { dp::load_state_dict(module, filled(2, like)); }),
                 "Tried to allocate 4000 bytes"));
  CHECK(all_are(module, torch::zeros_like(like)));
  leave_free(4000);
  dp::load_state_dict(module, filled(2, like));
  CHECK(all_are(module, like));
}

TEST_CASE("a device whose memory ends between sparse tensors changes nothing",
          "[state_dict]") {
  // One in the place of one that holds nothing takes memory that stays taken:
  // 1000 indices and values each, 20,000 bytes.
  const auto like = torch::ones({1, 1000}).to_sparse();
  const auto empty = torch::zeros({1, 1000}).to_sparse();
  Buffers module({empty, empty});
  leave_free(30000);
  CHECK_THROWS_AS(dp::load_state_dict(module, filled(2, like)), c10::Error);
  CHECK(all_are(module, empty));
  leave_free(100000);
  dp::load_state_dict(module, filled(2, like));
  CHECK(all_are(module, like));
}
