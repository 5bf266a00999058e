// Gives the reader of checkpoints whatever bytes libFuzzer thinks of. Each
// must load or end in a CheckpointError; the sanitizers watch.
#include <dataparallel/checkpoint.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace {

using dataparallel::LoadOptions;

/// Reads every byte that a tensor says it has.
uint64_t touch(const at::Tensor& tensor) {
  uint64_t sum = 0;
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      !tensor.is_cpu() || tensor.is_nested() || tensor.numel() == 0 ||
      tensor.is_quantized()) {
    return sum;
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const auto* data = static_cast<const uint8_t*>(tensor.data_ptr());
  const size_t item = tensor.element_size();
  for (size_t i = 0; i < item; ++i) {
    sum += data[i] + data[static_cast<size_t>(last) * item + i];
  }
  return sum;
}

void use(const c10::IValue& value) {
  volatile size_t sink = dataparallel::opaque_entries(value).size();
  try {
    for (const auto& [name, tensor] : dataparallel::find_state_dict(value)) {
      if (tensor.isTensor()) {
        sink = sink + touch(tensor.toTensor());
      }
    }
  } catch (const dataparallel::CheckpointError&) {  // there is none
  }
}

void load(const uint8_t* data, size_t size, const char* device) {
  try {
    use(dataparallel::load(reinterpret_cast<const char*>(data), size,
                           LoadOptions().map_location(device)));
  } catch (const dataparallel::CheckpointError&) {
  } catch (const std::exception& error) {
    std::fprintf(stderr, "not a CheckpointError: %s\n", error.what());
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  load(data, size, "cpu");
  load(data, size, "meta");  // what inspect does
  return 0;
}
