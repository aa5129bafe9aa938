// x in the workspace, as a kernel of a product loads it: the kernel qgemm_stage_x, before that kernel.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/stage_x_args.h"

namespace halfbyte {

// Rows of x are whole chunks of 16 bytes, aligned to them.
bool has_aligned_x(const QgemmProblem& problem);

class QgemmStageX {
 public:
  QgemmStageX() = default;  // x is loaded from where it lies
  // In the current context, which is `context`. `parts`: 3 for those of f32, else 1.
  QgemmStageX(const cuda::Context& context, const QgemmProblem& problem, int parts);

  bool is_used() const { return function_ != nullptr; }
  int64_t stride() const { return args_.stride; }  // elements, of a row; a part has m rows
  int64_t workspace_bytes() const { return num_bytes_; }
  // To `to`, which is aligned to 16 bytes.
  void run(const void* x, void* to, bool early, void* stream) const;

 private:
  cuda::CUfunction function_ = nullptr;
  cuda::Grid grid_;
  int64_t num_bytes_ = 0;
  QgemmStageXArgs args_{};  // but for addresses
};

// Its row of the table of kernels.
std::vector<cuda::Kernel> qgemm_stage_x_kernels();

}  // namespace halfbyte
