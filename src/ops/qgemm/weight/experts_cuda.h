// What CUDA variants that take the weights of experts share on the host.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/expert_rows_args.h"

namespace halfbyte {

// But for addresses, which place_experts() adds.
ExpertsArgs experts_args(const QgemmProblem& problem);
void place_experts(ExpertsArgs& args, const QgemmTensors& tensors);

// Rows that a weight is likely to meet: what tiles are chosen by. Those of experts are a half more than if
// all had as many, as some have more than others.
int64_t rows_of_weight(const QgemmProblem& problem);
// Tiles of `tile` rows that there are likely to be, where experts are chosen by chance; 1 where there are no
// experts.
double likely_expert_tiles(const QgemmProblem& problem, int64_t tile);
// Tiles of `tile` rows, at most.
int64_t tiles_of_rows(const QgemmProblem& problem, int64_t tile);

// Why the variants of sm_90, which list tiles and copy x in the order of experts, do not take the problem;
// empty if they do.
std::string refuse_sm90_experts(const QgemmProblem& problem);

// Whether kernels that can, of so many rows, are to find tiles and rows of x by themselves. qgemm_expert_rows
// before them takes as long as the weights of some experts; but with four rows an expert, gathered anew for
// each tile, that takes longer.
bool finds_expert_rows(const QgemmProblem& problem, int64_t most_rows);

// The key of their kernels.
KernelKey experts_key();

// In the workspace, sums that blocks of a product give each other, and flags, which are zeros when it begins.
struct QgemmGivenSums {
  int64_t num_bytes = 0, num_flags = 0;
};

// The kernel qgemm_expert_rows, before that of a product whose blocks have several tiles.
class QgemmExpertRows {
 public:
  QgemmExpertRows() = default;  // not needed
  // In the current context, which is `context`. Rows of x are whole chunks of 16 bytes. `tile`: rows;
  // `most_width`: tiles of an expert that are gone through together; `copies_x`: where its rows lie in
  // another order than that of experts.
  QgemmExpertRows(const cuda::Context& context, const QgemmProblem& problem, int64_t tile, int64_t most_width,
                  bool copies_x, QgemmGivenSums given);

  bool is_used() const { return function_ != nullptr; }
  int64_t workspace_bytes() const { return num_bytes_; }
  // `sums`: f32 [parts][m][stride], where the product leaves them; null: it stores y.
  void run(const QgemmTensors& tensors, void* workspace, void* sums, int64_t parts, int64_t stride,
           void* stream) const;
  // What the product is given: the list, x in the order of experts or, where it is not copied, the numbers of
  // its rows, and memory for given sums.
  void place(QgemmTensors& tensors, void* workspace) const;

 private:
  cuda::CUfunction function_ = nullptr;
  cuda::Grid grid_;
  bool finds_rows_ = false;
  int64_t list_bytes_ = 0, rows_bytes_ = 0, flag_bytes_ = 0;  // one behind the other, then given sums
  int64_t num_bytes_ = 0;
  QgemmExpertRowsArgs args_{};  // but for addresses
};

// Its row of the table of kernels.
std::vector<cuda::Kernel> qgemm_expert_rows_kernels();

}  // namespace halfbyte
