#pragma once

#include <dataparallel/python_values.h>

#include <string>

namespace dataparallel::checkpoint {

/// Why an object of a class that the library knows cannot be what Python has
/// under that name: "holds a state, ..."; "": it can.
///
/// A file gives what it likes, and a program may build such objects itself;
/// what is written must be readable, and nothing of it be left out.
std::string known_content_problem(const Opaque& opaque);

}  // namespace dataparallel::checkpoint
