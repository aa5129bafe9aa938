// The kernels of variant qgemm_simt, listed.
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {

std::vector<cuda::Kernel> qgemm_simt_kernels() { return {}; }

}  // namespace halfbyte
