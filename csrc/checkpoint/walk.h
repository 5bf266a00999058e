#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <utility>
#include <vector>

namespace dataparallel::checkpoint {

/// A value inside another one, and how one gets to it.
struct Child {
  enum class Step {
    kKey,        // of a mapping
    kIndex,      // of a list, a tuple, a set
    kItem,       // an opaque mapping's value, by `index`
    kItemKey,    // an opaque mapping's key, by `index`
    kArgument,   // of an opaque object
    kKeyword,    // of an opaque object, by `index`
    kState,      // of an opaque object
    kAttribute,  // of a mapping
  };
  Step step;
  c10::IValue key;  ///< of those that have one
  size_t index;     ///< of those that are counted
  c10::IValue value;
};

/// Gives a mapping other attributes (see python_values.h).
void set_attributes(c10::impl::GenericDict mapping,
                    const c10::impl::GenericDict& carried);

/// The items of a mapping as pairs.
std::vector<std::pair<c10::IValue, c10::IValue>> items_of(
    const c10::impl::GenericDict& dict);

/// Whether a value can hold others.
bool is_container(const c10::IValue& value);

/// What a container holds, in order; nothing for another value.
std::vector<Child> children(const c10::IValue& value);

/// Those of them that are containers or opaque objects.
std::vector<Child> container_children(const c10::IValue& value);

/// Puts another value in the place of a child of `container`.
void replace_child(const c10::IValue& container, const Child& child,
                   const c10::IValue& value);

/// As one would write it in Python: `['weight']`, `[3]`, `.state`.
std::string step_text(const Child& child);

/// A dictionary's key as Python prints it; long ones cut.
std::string key_text(const c10::IValue& key);

}  // namespace dataparallel::checkpoint
