#include "checkpoint/state_collector.h"

#include <ATen/Functions.h>
#include <dataparallel/python_values.h>

#include "checkpoint/dropped.h"
#include "checkpoint/problem.h"

namespace dataparallel::checkpoint {

StateCollector::StateCollector(uint64_t& budget_bytes)
    : budget_bytes_(budget_bytes),
      result_(make_mapping("collections.OrderedDict")) {}

void StateCollector::add_tensor(const std::string& name,
                                const at::Tensor& tensor) {
  if (tensor.defined()) {
    const at::Tensor detached = tensor.detach();
    drop_attributes(detached);  // which detach() does not keep in Python either
    add(name, detached);
  }
}

void StateCollector::add(const std::string& name, const c10::IValue& value) {
  spend(name);
  result_.insert_or_assign(name, value);
}

void StateCollector::spend(const std::string& name) {
  constexpr uint64_t kEntryBytes = 400;
  const uint64_t bytes = kEntryBytes + name.size();
  if (bytes > budget_bytes_) {
    fail("a module has more members than a file of its size can need");
  }
  budget_bytes_ -= bytes;
}

}  // namespace dataparallel::checkpoint
