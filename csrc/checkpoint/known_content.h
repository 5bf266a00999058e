#pragma once

#include <ATen/core/ivalue.h>
#include <dataparallel/python_values.h>

#include <string>

namespace dataparallel::checkpoint {

/// Why an object of a class that the library knows cannot be what Python has
/// under that name: "holds a state, ..."; "": it can.
///
/// A file gives what it likes, and a program may build such objects itself;
/// what is written must be readable, and nothing of it be left out.
std::string known_content_problem(const Opaque& opaque);

/// Whether a defaultdict may have it as its `default_factory`.
bool is_factory(const c10::IValue& value);

/// Whether Python has a hash for it, as keys and the elements of sets need.
bool is_hashable(const c10::IValue& value);

}  // namespace dataparallel::checkpoint
