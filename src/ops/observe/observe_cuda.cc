#include "ops/observe/observe_cuda.h"

#include "core/checks.h"
#include "core/counts.h"

namespace halfbyte {

struct ObserveCuda {
  ObserveProblem problem;
  const cuda::Context* context = nullptr;
  std::string name;
  int64_t workspace_bytes = 0;
};

std::shared_ptr<const ObserveCuda> select_observe_cuda(const ObserveProblem&, int64_t) {
  HALFBYTE_FAIL(usage, "observe: not on CUDA devices yet");
}
const std::string& kernel_name(const ObserveCuda& cuda) { return cuda.name; }
const std::string& target(const ObserveCuda& cuda) { return cuda.context->target; }
int64_t workspace_bytes(const ObserveCuda& cuda) { return cuda.workspace_bytes; }
void run_observe_cuda(const ObserveCuda&, const ObserveTensors&, void*, void*) {}

QuantizeStatus status_observe_cuda(const ObserveCuda& selected, const void* workspace, void* stream) {
  const cuda::Scope scope(*selected.context);
  QuantizeCounts counts;
  cuda::copy(&counts, workspace, sizeof(counts), stream);
  cuda::synchronize(stream);
  return status_of(counts);
}

void wait_observe(Device device, void* stream) {
  if (device.kind != DeviceKind::cuda) return;
  const cuda::Scope scope(cuda::context(device.index));
  cuda::synchronize(stream);
}

}  // namespace halfbyte
