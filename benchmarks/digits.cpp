#include "digits.h"

#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <vector>

namespace demo {
namespace {

constexpr int64_t kSide = 8;
constexpr int64_t kPixels = kSide * kSide;
constexpr int64_t kRowBytes = kPixels + 1;
constexpr int64_t kMaxPixel = 16;
constexpr int64_t kMaxLabel = 9;
constexpr int64_t kHoldOutEvery = 5;

std::vector<char> read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "read_digits: cannot open ", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

Digits select(const Digits& digits, const torch::Tensor& mask) {
  return {.images = digits.images.index({mask}),
          .labels = digits.labels.index({mask})};
}

}  // namespace

Digits read_digits(const std::string& path) {
  auto bytes = read_bytes(path);
  const auto size_bytes = static_cast<int64_t>(bytes.size());
  TORCH_CHECK_VALUE(size_bytes > kRowBytes && size_bytes % kRowBytes == 0,
                    "read_digits: ", path, " has ", size_bytes,
                    " bytes, expected two or more rows of ", kRowBytes);

  const auto rows = torch::from_blob(
      bytes.data(), {size_bytes / kRowBytes, kRowBytes}, torch::kUInt8);
  const auto pixels = rows.narrow(/*dim=*/1, /*start=*/0, kPixels);
  const auto labels = rows.select(/*dim=*/1, /*index=*/kPixels);
  TORCH_CHECK_VALUE(pixels.max().item<int64_t>() <= kMaxPixel &&
                        labels.max().item<int64_t>() <= kMaxLabel,
                    "read_digits: ", path, " holds a pixel above ", kMaxPixel,
                    " or a label above ", kMaxLabel);
  return {.images = pixels.to(torch::kFloat)
                        .div(kMaxPixel)
                        .reshape({-1, 1, kSide, kSide}),
          .labels = labels.to(torch::kLong)};
}

DigitsSplit split_digits(const Digits& digits) {
  const auto held_out =
      torch::arange(digits.size()).remainder(kHoldOutEvery).eq(0);
  return {.train = select(digits, held_out.logical_not()),
          .held_out = select(digits, held_out)};
}

}  // namespace demo
