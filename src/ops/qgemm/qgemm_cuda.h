// The CUDA side of `qgemm`.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/simt/simt_args.h"
#include "ops/qgemm/sm90_large/sm90_large_args.h"
#include "ops/qgemm/sm90_transposed/sm90_transposed_args.h"
#include "ops/qgemm/sm90_wgmma/sm90_wgmma_args.h"

namespace halfbyte {

// The rows of the table of kernels (src/kernels): those of all variants, below.
std::vector<cuda::Kernel> qgemm_kernels();
std::vector<cuda::Kernel> qgemm_sm90_f32_kernels();
std::vector<cuda::Kernel> qgemm_cublas_kernels();
std::vector<cuda::Kernel> qgemm_simt_kernels();
std::vector<cuda::Kernel> qgemm_sm80_kernels();
std::vector<cuda::Kernel> qgemm_sm90_wgmma_kernels();
std::vector<cuda::Kernel> qgemm_sm90_mma_kernels();
std::vector<cuda::Kernel> qgemm_sm90_transposed_kernels();
std::vector<cuda::Kernel> qgemm_sm90_large_kernels();

// What these rows have in common: the keys of the weight (codec, group-size, double-quant) and of dtype, and
// the problem of their values: packed, forward, m = 1, n = k = 4096. Error(usage) where the values do not go
// together.
std::vector<KernelKey> qgemm_keys();
QgemmProblem qgemm_problem(const cuda::KernelValues& values);

// Of variant qgemm_sm90_f32.
cuda::KernelSpec sm90_f32_kernel(const QgemmProblem& problem);

// Of variant qgemm_simt. Few rows of x, forward: has_simt_rows. Else tiles of y, one of simt_tiles, and the
// sum of their parts.
std::span<const QgemmTile> simt_tiles(QgemmMath math);
bool has_simt_rows(const QgemmProblem& problem);
cuda::KernelSpec simt_rows_kernel(const QgemmProblem& problem);
cuda::KernelSpec simt_tiles_kernel(const QgemmProblem& problem, QgemmTile tile);
cuda::KernelSpec simt_sum_kernel(const QgemmProblem& problem);
// A weight as these kernels read it, but for its addresses; then these.
SimtWeight simt_weight(const QgemmProblem& problem);
void place_simt_weight(SimtWeight& weight, const QgemmProblem& problem, const QgemmTensors& tensors);

// Of variant qgemm_cublas: how it cuts y, and so the weight, into slices along the features, which are rows
// (forward) or columns (transposed) of the weight. All have `features` but for the last.
struct QgemmSlices {
  int64_t features = 0, count = 0;  // the last may have fewer
};
QgemmSlices qgemm_cublas_slices(const QgemmProblem& problem);
cuda::KernelSpec qgemm_cublas_decode_kernel(const QgemmProblem& problem);

// Of variant qgemm_sm80: rows of x in the tile of a block; the kernel, and that which adds up what its blocks
// left. Error(usage) where it does not take the problem.
int qgemm_sm80_tokens(const QgemmProblem& problem);
cuda::KernelSpec qgemm_sm80_kernel(const QgemmProblem& problem);
cuda::KernelSpec qgemm_sm80_sum_kernel(const QgemmProblem& problem);
// Of variant qgemm_sm90_wgmma: m rounded up; all that a tile needs, with as many stages as fit.
int sm90_wgmma_tokens(int64_t m);
QgemmSm90WgmmaTiling sm90_wgmma_tiling(const QgemmProblem& problem, int tokens, int strips, int cluster);
bool sm90_wgmma_takes(const QgemmProblem& problem, const QgemmSm90WgmmaTiling& tiling);
cuda::KernelSpec sm90_wgmma_kernel(const QgemmProblem& problem, const QgemmSm90WgmmaTiling& tiling);
// Error(usage) where the kernel does not take the problem.
cuda::KernelSpec qgemm_sm90_mma_kernel(const QgemmProblem& problem);

// Of variant qgemm_sm90_transposed: likewise.
std::string sm90_transposed_refuses(const formats::PackedLayout& weight);  // why; empty: it does not
int sm90_transposed_tokens(int64_t m);
QgemmSm90TransposedTiling sm90_transposed_tiling(const QgemmProblem& problem, int tokens, int units);
cuda::KernelSpec sm90_transposed_kernel(const QgemmProblem& problem, const QgemmSm90TransposedTiling& tiling);

// Of variant qgemm_sm90_large: all that a tile needs, with as many stages as fit.
QgemmSm90LargeTiling sm90_large_tiling(const QgemmProblem& problem, int tokens, int blocks, bool multicast);
bool sm90_large_takes(const QgemmProblem& problem, const QgemmSm90LargeTiling& tiling);
cuda::KernelSpec sm90_large_kernel(const QgemmProblem& problem, const QgemmSm90LargeTiling& tiling);

}  // namespace halfbyte
