// What all CUDA variants of `qgemm` share on the host.
#include "cuda/driver.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {

void wait_qgemm_cuda(Device device, void* stream) {
  const cuda::Scope scope(cuda::context(device.index));
  cuda::synchronize(stream);
}

}  // namespace halfbyte
