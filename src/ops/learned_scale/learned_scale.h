// What the variants of `fake_quantize_learned_backward` share: gradients of scale and zero point beside dx.
#pragma once

#include "grouped/linear.h"
#include "ops/learned_scale/learned_scale_args.h"

namespace halfbyte {

// A checked problem, without the addresses; op is backward, all tensors are contiguous, scales given, and
// codec.kind may be table.
struct LsqProblem : LinearProblem {
  double gradient_scale = 1;
};

// The tensors of one run: x, dy, scale and zero are read, y = dx written, which may be dy.
struct LsqTensors : LinearTensors {
  void* dscale = nullptr;
  void* dzero = nullptr;
};

// ---- CPU: returns when all is done.
QuantizeStatus lsq_cpu(const LsqProblem& problem, const LsqTensors& tensors);
// Of Scratch, at most, where one thread runs.
int64_t lsq_scratch_bytes(const LsqProblem& problem);

// ---- CUDA: kernels chosen and loaded for a problem.
struct LsqCuda;
// `alignment`: of x and gradients, in bytes.
std::shared_ptr<const LsqCuda> select_lsq_cuda(const LsqProblem& problem, int64_t alignment);
const std::string& kernel_name(const LsqCuda& cuda);  // of the one that reads x
int64_t workspace_bytes(const LsqCuda& cuda);
// Enqueues on `stream`.
void run_lsq_cuda(const LsqCuda& cuda, const LsqTensors& tensors, void* stream, void* workspace);

}  // namespace halfbyte
