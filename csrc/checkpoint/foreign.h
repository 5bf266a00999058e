#pragma once

#include "checkpoint/source.h"

namespace dataparallel::checkpoint {

/// Fails with one sentence that says what a file is that is no checkpoint, and
/// what to do with it.
[[noreturn]] void refuse_foreign(Source& source);

/// The format of torch before 0.1.10.
bool is_tar(Source& source);

bool starts_with(Source& source, std::string_view text);

}  // namespace dataparallel::checkpoint
