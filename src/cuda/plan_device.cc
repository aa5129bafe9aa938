#include "core/plan_device.h"

#include "core/counts.h"
#include "cuda/driver.h"
#include "cuda/launch.h"

namespace halfbyte {

std::string target_of(Device device) { return cuda::context(device.index).target; }

void wait_for(Device device, void* stream) {
  if (device.kind != DeviceKind::cuda) return;
  const cuda::Scope scope(cuda::context(device.index));
  cuda::synchronize(stream);
}

QuantizeStatus read_counts(Device device, const void* workspace, void* stream) {
  const cuda::Scope scope(cuda::context(device.index));
  QuantizeCounts counts;
  cuda::copy(&counts, workspace, sizeof counts, stream);
  cuda::synchronize(stream);
  return status_of(counts);
}

}  // namespace halfbyte
