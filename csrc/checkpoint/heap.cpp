#include "checkpoint/heap.h"

#include <algorithm>
#include <optional>
#include <string>

#include "checkpoint/known.h"
#include "checkpoint/problem.h"
#include "checkpoint/storages.h"
#include "checkpoint/walk.h"
#include "detail/wording.h"

namespace dataparallel::checkpoint {
namespace {

void empty(const c10::IValue& container) {
  if (container.isList()) {
    container.toList().clear();
  } else if (container.isGenericDict()) {
    container.toGenericDict().clear();
    container.toGenericDict().unsafeSetValueType(c10::AnyType::get());
  } else if (container.isTuple()) {
    container.toTuple()->setElements(std::vector<c10::IValue>());
  } else if (Opaque* opaque = as_opaque(container)) {
    opaque->args.clear();
    opaque->kwargs.clear();
    opaque->items.clear();
    opaque->elements.clear();
    opaque->state = c10::IValue();
  }
}

/// A container on the way from the root, and how far its children are done.
struct Visit {
  c10::IValue container;
  std::vector<Child> rest;
  size_t next = 0;
  size_t height = 1;
};

/// The path to `container`, which is one of those on the way; else to the
/// child that is looked at. Its two ends where it is long.
std::string path_of(const std::vector<Visit>& visits,
                    const c10::IValue& container = {}) {
  std::string path;
  for (const Visit& visit : visits) {
    if (visit.container.is(container)) {
      break;
    }
    path = detail::shortened(path + step_text(visit.rest[visit.next - 1]));
  }
  return path;
}

[[noreturn]] void fail_on_path(const std::vector<Visit>& visits,
                               const std::string& what) {
  Problem problem(what);
  problem.key = path_of(visits);
  throw problem;
}

}  // namespace

Heap::~Heap() {
  for (const c10::IValue& container : containers_) {
    if (given_out_.count(container.internalToPointer()) == 0) {
      empty(container);
    }
  }
}

void Heap::note(const c10::IValue& container) {
  if (containers_.empty() || !containers_.back().is(container)) {
    containers_.push_back(container);
  }
}

void Heap::forward(const c10::IValue& old, const c10::IValue& value) {
  forwards_[old.internalToPointer()] = {old, value};
}

c10::IValue Heap::resolve(c10::IValue value) const {
  while (!forwards_.empty() && holds_more(value)) {
    const auto found = forwards_.find(value.internalToPointer());
    if (found == forwards_.end()) {
      break;
    }
    value = found->second.second;
  }
  return value;
}

c10::IValue Heap::in_its_place(const c10::IValue& value) const {
  c10::IValue resolved = resolve(value);
  return substitute_ ? substitute_(resolved) : resolved;
}

void Heap::spend(uint64_t bytes) {
  if (bytes > budget_bytes_) {
    fail("asks for more memory than a file of its size can need");
  }
  budget_bytes_ -= bytes;
}

c10::IValue Heap::finish(c10::IValue root) {
  root = in_its_place(root);
  std::unordered_map<const void*, size_t> heights;  // 0: on the way
  std::unordered_map<const void*, std::optional<std::string>> paths;
  std::vector<Visit> visits;
  const auto enter = [&](const c10::IValue& container) {
    heights.emplace(container.internalToPointer(), 0);
    if (auto* storage = dynamic_cast<StorageRef*>(as_opaque(container))) {
      storage->complete();
    }
    visits.push_back({container, container_children(container)});
  };
  if (is_container(root)) {
    enter(root);
  }
  while (!visits.empty()) {
    Visit& visit = visits.back();
    if (visit.next == visit.rest.size()) {
      const size_t height = visit.height;
      heights[visit.container.internalToPointer()] = height;
      visits.pop_back();
      if (!visits.empty()) {
        visits.back().height = std::max(visits.back().height, height + 1);
      }
      continue;
    }
    const Child& child = visit.rest[visit.next++];
    c10::IValue value;
    try {
      value = in_its_place(child.value);
    } catch (const Problem& problem) {
      fail_on_path(visits, problem.what());
    }
    auto seen = is_container(value) ? heights.find(value.internalToPointer())
                                    : heights.end();
    if (seen != heights.end() && seen->second == 0) {
      auto& path = paths[value.internalToPointer()];
      if (!path) {
        path = path_of(visits, value);
      }
      spend(sizeof(Opaque) + sizeof(c10::IValue) + path->size());
      value = make_opaque("dataparallel.BackReference", {*path});
      seen = heights.end();
    }
    if (!value.is(child.value)) {
      replace_child(visit.container, child, value);
    }
    if (!is_container(value)) {
      continue;
    }
    const size_t height = seen == heights.end() ? 1 : seen->second;
    if (visits.size() + height > kMaxDepth) {
      fail_on_path(visits, "is nested deeper than " +
                               std::to_string(kMaxDepth) + " levels");
    }
    if (seen == heights.end()) {
      enter(value);
    } else {
      visit.height = std::max(visit.height, height + 1);
    }
  }
  for (const auto& [container, height] : heights) {
    given_out_.insert(container);
  }
  return root;
}

}  // namespace dataparallel::checkpoint
