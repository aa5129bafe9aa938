// What quantize_linear, fake_quantize and learned_scale share: a problem with scales and zero points, its
// tensors, and what the backends do for all of them.
#pragma once

#include <memory>
#include <string>

#include "core/format.h"
#include "core/scratch.h"
#include "core/variant.h"
#include "grouped/grouping.h"
#include "grouped/linear_args.h"
#include "halfbyte/ops.hpp"

namespace halfbyte {

// Codes, zero points or the bits of a mask: how they lie in memory.
struct CodeStorage {
  DType dtype = DType::i8;  // i8, u8, i4, u4; zero points also i32, or learned: f32, f64
  // Packed: row-major, `cols` elements in a row of row_bytes.
  int64_t cols = 0, row_bytes = 0;
};

// A checked problem, without the addresses. All tensors are walked as [outer, axis, inner].
struct LinearProblem : Grouping {
  LinearOp op = LinearOp::quantize;
  DType dtype = DType::f32;  // of x, y, dy, dx
  bool contiguous = true;    // all tensors, so that their strides are axis * inner, inner, 1
  CodeStorage codes, zeros;
  bool has_zeros = false;
  // Zero points that are learned are rounded, and clamped to the range of the codes.
  bool learns_zeros() const { return has_zeros && is_floating(zeros.dtype); }
  // kind, asymmetric where there are zero points, q_min, q_max, scale_type; where computed rule, eps; book.
  formats::Codec codec;
  bool computed = false;
  bool computed_global_scale = false;  // of scales of e4m3: it is that of x
  bool fake = false;      // fake quantization, forward or backward; it may have a table (codec.kind)
  bool has_mask = false;  // forward writes it
  CodeStorage mask;       // packed, a bit an element
  // Computed: from the observer's state, which is updated first; `history` as formats::observed has it.
  bool observed = false;
  double history = -1;
  int num_threads = 0;
  Device device;
};

// The tensors of one run. x: read (dequantize: codes is read, y written; backward: x, dy read, y = dx
// written; fake_quantize: x read, y written, of which y may be x).
// Each op writes some of them; the others it is given to read.
template <class Data>
void* address_of(const BasicTensorView<Data>& view) {
  return const_cast<void*>(view.data);
}
struct LinearTensors {
  const void* x = nullptr;
  const void* dy = nullptr;
  void* codes = nullptr;          // dequantize reads them
  void* scale = nullptr;          // written where computed
  void* zero = nullptr;           // null: the zero points are 0
  float* global_scale = nullptr;  // of scales of e4m3; written where computed
  void* y = nullptr;
  void* mask = nullptr;
  ObserverPointers observer;
  Scratch* scratch = nullptr;                                    // CPU; null: all that is needed is allocated
  LinearStrides x_strides, dy_strides, code_strides, y_strides;  // code_strides: of whole bytes
};

// What scales are loaded with; 1 where there is none.
inline float global_scale_of(const LinearTensors& tensors) {
  return tensors.global_scale ? global_scale_or_nan(*tensors.global_scale) : 1;
}

// ---- CPU: returns when all is done. Each op has its own forward.
// Of Scratch, at most: minima and maxima of groups whose scales are computed.
inline int64_t linear_scratch_bytes(const LinearProblem& problem) {
  if (!problem.computed) return 0;
  const int64_t n = problem.num_scales;
  return 2 * (problem.dtype == DType::f64 ? Scratch::bytes_of<double>(n) : Scratch::bytes_of<float>(n));
}
QuantizeStatus linear_backward_cpu(const LinearProblem& problem, const LinearTensors& tensors);

// ---- CUDA, every LinearOp: kernels chosen and loaded for a problem.
struct LinearCuda;
// `alignment`: of the tensors, in bytes.
std::shared_ptr<const LinearCuda> select_linear_cuda(const LinearProblem& problem, int64_t alignment);
const std::string& kernel_name(const LinearCuda& cuda);  // of the last one, which writes the result
int64_t workspace_bytes(const LinearCuda& cuda);
// Enqueues on `stream`.
void run_linear_cuda(const LinearCuda& cuda, const LinearTensors& tensors, void* stream, void* workspace);

}  // namespace halfbyte
