// Splitting and joining a batch against the plain `chunk` and `cat` that a
// program would write for its own arguments.

#include <ATen/Parallel.h>
#include <dataparallel/scatter_gather.h>

#include "support/comparison.h"

namespace {

using torch::Tensor;

/// Images and, by name, a mask and a length for each.
using Batch = std::tuple<Tensor, std::map<std::string, Tensor>>;

Batch make_batch(torch::Device device) {
  return {torch::rand({64, 3, 32, 32}, device),
          {{"mask", torch::ones({64, 32, 32}, device)},
           {"lengths", torch::ones({64}, device)}}};
}

std::vector<Tensor> chunk(const Tensor& tensor, const bench::Devices& devices) {
  auto parts = tensor.chunk(static_cast<int64_t>(devices.size()));
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = parts[i].to(devices[i], /*non_blocking=*/true);
  }
  return parts;
}

std::vector<Batch> chunk(const Batch& batch, const bench::Devices& devices) {
  std::vector<Batch> parts(devices.size());
  const auto images = chunk(std::get<0>(batch), devices);
  for (size_t i = 0; i < parts.size(); ++i) {
    std::get<0>(parts[i]) = images[i];
  }
  for (const auto& [key, value] : std::get<1>(batch)) {
    const auto values = chunk(value, devices);
    for (size_t i = 0; i < parts.size(); ++i) {
      std::get<1>(parts[i])[key] = values[i];
    }
  }
  return parts;
}

Tensor cat(std::vector<Tensor> parts, torch::Device target) {
  for (Tensor& part : parts) {
    part = part.to(target, /*non_blocking=*/true);
  }
  return torch::cat(parts);
}

Batch cat(const std::vector<Batch>& parts, torch::Device target) {
  std::vector<Tensor> images;
  std::map<std::string, std::vector<Tensor>> by_key;
  for (const auto& [part_images, named] : parts) {
    images.push_back(part_images);
    for (const auto& [key, value] : named) {
      by_key[key].push_back(value);
    }
  }
  Batch batch{cat(std::move(images), target), {}};
  for (auto& [key, values] : by_key) {
    std::get<1>(batch)[key] = cat(std::move(values), target);
  }
  return batch;
}

template <class T>
void add_pair(const std::string& what, T (*make)(torch::Device),
              const bench::Devices& devices) {
  const std::string on = what + "/" + bench::text(devices);
  bench::add("scatter/" + on, [=] {
    const T value = make(devices.front());
    return bench::Comparison{devices, "chunk", /*aim=*/0,
                             [=] { dataparallel::scatter(value, devices); },
                             [=] { chunk(value, devices); }};
  });
  bench::add("gather/" + on, [=] {
    const auto parts = dataparallel::scatter(make(devices.front()), devices);
    const torch::Device target = devices.front();
    return bench::Comparison{devices, "cat", /*aim=*/0,
                             [=] { dataparallel::gather(parts, target); },
                             [=] { cat(parts, target); }};
  });
}

Tensor make_images(torch::Device device) {
  return std::get<0>(make_batch(device));
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const auto& devices : {bench::cpu(2), bench::sim(2)}) {
    add_pair("one_tensor", make_images, devices);
    add_pair("tuple_and_map", make_batch, devices);
  }
  return bench::run(argc, argv);
}
