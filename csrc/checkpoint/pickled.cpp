#include "checkpoint/archive.h"
#include "checkpoint/modules.h"
#include "checkpoint/pickle.h"

namespace dataparallel::checkpoint {

Contents read_pickled(Source& source, Cursor& cursor, Storages& storages) {
  Heap heap(budget_for(source));
  Modules modules(heap, budget_for(source));
  heap.substitute(
      [&modules](const c10::IValue& value) { return modules.replace(value); });
  Objects objects(heap, &storages);
  Contents contents;
  contents.value = PickleMachine(cursor, objects).run();
  contents.tags = storages.tags();
  contents.module_classes = modules.classes();
  return contents;
}

}  // namespace dataparallel::checkpoint
