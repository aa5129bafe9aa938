// Sums that blocks share: where tiles of y alone would not fill the device, some blocks sum up parts of what
// is summed, and leave them in the workspace to the kernel qgemm_sum.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/sum_args.h"

namespace halfbyte {

// What sums are, and what bias and y are added in: f32 and f32, or f64 after f32 or f64, rounded once.
struct QgemmSumTypes {
  DType sum = DType::f32, total = DType::f32;
};

class QgemmSum {
 public:
  QgemmSum() = default;  // nothing is left
  // In the current context, which is `context`. `parts`: at least 1.
  QgemmSum(const cuda::Context& context, const QgemmProblem& problem, int64_t parts, QgemmSumTypes types);

  int64_t workspace_bytes() const;
  int64_t parts() const { return args_.parts; }
  int64_t stride() const { return args_.stride; }  // of a row of a part
  // After the kernel that leaves the parts in `workspace`; nothing where none are left.
  void run(const QgemmTensors& tensors, void* stream, void* workspace) const;

 private:
  cuda::CUfunction function_ = nullptr;      // null: nothing is left
  cuda::CUfunction routing_grad_ = nullptr;  // null: no gradient of routing weights
  cuda::Grid grid_;
  bool early_ = false;
  int64_t num_bytes_ = 0;
  QgemmSumArgs args_{};  // but for addresses
};

// Its row of the table of kernels.
std::vector<cuda::Kernel> qgemm_sum_kernels();

}  // namespace halfbyte
