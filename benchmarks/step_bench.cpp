// A training step without the optimizer (zero_grad, forward, loss, backward) of
// two CPU replicas of one intra-op thread each: against two modules run by hand
// on two threads, and against one module with two intra-op threads.

#include <ATen/Parallel.h>
#include <dataparallel/data_parallel.h>

#include "support/by_hand.h"
#include "support/comparison.h"

namespace {

using bench::ConvNet;
using torch::Tensor;

constexpr int kIntraopThreads = 2;

struct Case {
  std::string name;
  int64_t parameters;
  int64_t channels;
  int64_t batch_size;
  int64_t image_size;
};

/// The network in training mode, and a batch for it.
struct Work {
  explicit Work(const Case& from)
      : net(bench::conv_net(from.parameters, from.channels, torch::kCPU)),
        images(torch::rand(
            {from.batch_size, 3, from.image_size, from.image_size})),
        labels(torch::randint(bench::ConvNetImpl::kClasses, {from.batch_size},
                              torch::kLong)) {}

  ConvNet net;
  Tensor images;
  Tensor labels;
};

Tensor cross_entropy(const Tensor& logits, const Tensor& labels) {
  return torch::nn::functional::cross_entropy(logits, labels);
}

/// Our side: two CPU replicas of `work.net`.
std::function<void()> replicas_step(const Work& work) {
  dataparallel::DataParallel<ConvNet> model(
      work.net, dataparallel::DataParallelOptions().devices(bench::cpu(2)));
  return [=]() mutable {
    model->zero_grad();
    model->forward_backward(cross_entropy, work.images, work.labels);
  };
}

void add_case(const Case& from) {
  bench::add("step/" + from.name + "/cpu,cpu/by_hand", [=] {
    at::set_num_threads(kIntraopThreads);
    const Work work(from);
    auto by_hand = std::make_shared<bench::ByHand>(work.net);
    return bench::Comparison{bench::cpu(2),
                             "two modules on two threads by hand",
                             /*aim=*/1 / 1.05, replicas_step(work),
                             [=] { by_hand->step(work.images, work.labels); }};
  });
  bench::add("step/" + from.name + "/cpu,cpu/one_module", [=] {
    at::set_num_threads(kIntraopThreads);
    const Work work(from);
    Work alone(from);
    return bench::Comparison{
        bench::cpu(2), "one module with two intra-op threads",
        /*aim=*/0.97, replicas_step(work), [=]() mutable {
          alone.net->zero_grad();
          cross_entropy(alone.net->forward(alone.images), alone.labels)
              .backward();
        }};
  });
}

}  // namespace

int main(int argc, char** argv) {
  add_case({"154_parameters_small", 154, /*channels=*/8, /*batch_size=*/16,
            /*image_size=*/8});
  add_case({"28_parameters_wide", 28, /*channels=*/64, /*batch_size=*/16,
            /*image_size=*/16});
  return bench::run(argc, argv);
}
