#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace demo {

/// Handwritten digits, on the CPU.
struct Digits {
  at::Tensor images;  ///< [N, 1, 8, 8] float, 0 (paper) to 1 (ink)
  at::Tensor labels;  ///< [N] int64, 0 to 9

  int64_t size() const { return labels.size(0); }
};

/// The digits that are learnt and those that measure what was learnt.
struct DigitsSplit {
  Digits train;
  Digits held_out;
};

/// Reads a file of two or more rows of 65 bytes: 64 pixels, 0 to 16, and a
/// label, 0 to 9
/// (`tests/data/README.md`).
///
/// Throws `c10::ValueError` if the file cannot be read or holds anything else.
Digits read_digits(const std::string& path);

/// Holds out every fifth row, from the first: the same ones on every run.
DigitsSplit split_digits(const Digits& digits);

}  // namespace demo
