// What the variants of `affine_init`, `affine_qdq` and `affine_qdq_backward` share.
#pragma once

#include <memory>
#include <string>

#include "core/format.h"
#include "core/scratch.h"
#include "halfbyte/affine_qdq.hpp"
#include "ops/affine_qdq/affine_qdq_args.h"

namespace halfbyte {

// A checked problem, without the addresses.
struct AffineProblem {
  AffineShape shape{};  // group_size is at most cols, unless that is 0
  int code_bits = 4;    // as stored: 8 where codes are not packed
  DType dtype = DType::f32;
  formats::Codec codec;  // affine, of `bits` and the levels
  bool half_away = false, refit = false, adam = false;
  int num_threads = 0;
  Device device;
  int64_t alignment = 1;

  int64_t num_groups() const { return shape.rows * shape.groups_per_row; }
};

// Of a checked descriptor; threads, device and alignment are left to the caller.
AffineProblem make_affine_problem(const AffineQdqDescriptor& descriptor);

// The tensors of one run.
struct AffineInitTensors {
  const void* w = nullptr;
  uint8_t* codes = nullptr;
  void* scales = nullptr;
  void* biases = nullptr;
};

// ---- CPU: returns when all is done.
QuantizeStatus affine_init_cpu(const AffineProblem& problem, const AffineInitTensors& tensors,
                               Scratch& scratch);
// What it takes of it where one thread runs.
int64_t affine_init_scratch_bytes(const AffineProblem& problem);
void affine_backward_cpu(const AffineProblem& problem, const AffineBackwardArgs& args);
// SIMD kernel, dispatched at run time: groups [begin, end) of a row.
void affine_backward_span_cpu(const AffineProblem& problem, const AffineBackwardArgs& args, int64_t row,
                              int64_t begin, int64_t end);

// ---- CUDA: the kernel chosen and loaded for a problem.
struct AffineCuda;
std::shared_ptr<const AffineCuda> select_affine_init_cuda(const AffineProblem& problem);
std::shared_ptr<const AffineCuda> select_affine_backward_cuda(const AffineProblem& problem);
const std::string& kernel_name(const AffineCuda& cuda);
// Enqueues on `stream`.
void run_affine_init_cuda(const AffineCuda& cuda, const AffineInitTensors& tensors, void* stream,
                          void* workspace);
void run_affine_backward_cuda(const AffineCuda& cuda, const AffineBackwardArgs& args, void* stream);

}  // namespace halfbyte
