// What the files of `qgemm` share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/variant.h"
#include "formats/codec.h"
#include "formats/packed.h"
#include "formats/weight_view.h"
#include "halfbyte/qgemm_grouped.hpp"

namespace halfbyte {

namespace cuda {
struct Kernel;
}

// Of a product with the weights of several experts (halfbyte/qgemm_grouped.hpp). Rows of a problem, of which
// it has m, are then slots, or those of the matrices of all experts.
struct QgemmExperts {
  int64_t num = 0;  // 0: one weight, which all rows meet
  ExpertRows rows = ExpertRows::offsets;
  int64_t rows_per_expert = 0;  // masked
  int64_t rows_of_x = 0;
  int64_t slots_per_x = 1, slots_per_y = 1;  // rows that share a row of x, and that are summed in one of y
  bool routing_weights = false, routing_gradient = false;
  bool swiglu = false;  // two columns of the product make one of y
};

// A checked descriptor, as variants see it. There is something to write: m and out_cols() are at least 1.
// in_cols(), what is summed, may be 0 for a variant that takes_empty_sums: y is then the bias, 0 or as it
// was.
struct QgemmProblem {
  Device device;
  int num_threads = 0;
  bool transposed = false;
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::bf16;
  formats::Codec codec;  // without what only matters to encoding
  bool double_quant = false;
  int64_t group = 0;  // columns that share a scale; k where a row, or the whole matrix, has one
  bool packed = true;
  formats::PackedLayout weight;  // of a packed weight, and of what a view is packed to: one scale for all is
                                 // in each row
  formats::WeightViewLayout view;  // of a view
  bool bias = false, accumulate = false;
  bool f32_sums = false;  // the CPU: y is f32, without bias, for others to finish
  QgemmExperts experts;
  QgemmMath math = QgemmMath::automatic;
  bool early_start = false;
  int64_t alignment = 16;
  QgemmTile tile;

  int64_t rows_of_x() const { return experts.num > 0 ? experts.rows_of_x : m; }
  int64_t in_cols() const { return transposed ? n : k; }   // columns of x: what is summed
  int64_t out_cols() const { return transposed ? k : n; }  // columns of the product
  int64_t y_cols() const { return experts.swiglu ? n / 2 : out_cols(); }
  bool is_empty() const { return m == 0 || out_cols() == 0; }  // a problem that no variant is given
};

struct QgemmTensors {
  const void* x = nullptr;
  const void* weight = nullptr;                                                         // packed
  const void *codes = nullptr, *scales = nullptr, *zeros = nullptr, *biases = nullptr;  // else
  const float *absmax = nullptr, *map = nullptr, *offset = nullptr, *global_scale = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  // Of experts. weight: of the first, the others behind it.
  const int32_t *offsets = nullptr, *slots = nullptr;
  const float* routing_weights = nullptr;
  const void* forward_x = nullptr;
  float* routing_grad = nullptr;
  const void* expert_tiles = nullptr;  // the list of qgemm_expert_rows, on CUDA
  const int32_t* rows_of_x = nullptr;  // likewise, where it lists them, too
  uint32_t* given_flags = nullptr;     // zeros that it made; of sums that blocks give each other
  float* given_sums = nullptr;
};

// What a variant has made for a problem: chosen, compiled, ready to run.
class QgemmKernel {
 public:
  virtual ~QgemmKernel() = default;
  virtual std::string name() const = 0;     // of the kernel, as kernels are listed
  virtual std::string backend() const = 0;  // "cuda sm_90a"
  virtual PrecisionGuarantee guarantee() const = 0;
  virtual int64_t workspace_bytes() const { return 0; }
  virtual void run(const QgemmTensors& tensors, void* stream, void* workspace) const = 0;
};

// A way to compute products: X.refuse says why it cannot take a problem, X.run makes the kernel of one.
struct QgemmVariant : Variant<QgemmProblem, std::shared_ptr<const QgemmKernel>> {
  // On CUDA: its rows of the table of kernels (src/kernels).
  std::vector<cuda::Kernel> (*kernels)() = nullptr;
  // It takes problems that have nothing to sum, too: in_cols() is 0.
  bool takes_empty_sums = false;
  // On CUDA: it takes the weights of experts, too.
  bool takes_experts = false;
  bool takes_int8 = false;  // QgemmMath::int8, too
};

// All, in the order in which they are tried for the problem.
std::vector<const QgemmVariant*> qgemm_variants(const QgemmProblem& problem);

QgemmProblem make_qgemm_problem(Device device, const QgemmDescriptor& descriptor, int num_threads);
QgemmProblem make_qgemm_problem(Device device, const QgemmGroupedDescriptor& descriptor, int num_threads);
// A product with one weight for `m` rows of a product of experts, on the CPU.
QgemmProblem product_of_expert(const QgemmProblem& problem, int64_t m, int num_threads);
// The variant of this name, or the first that does not refuse, and the problem that it takes: the one that is
// given, or the same with the packed form of its view. Throws Error(device) with the reasons.
struct QgemmChosen {
  const QgemmVariant& variant;
  QgemmProblem problem;
};
QgemmChosen choose_qgemm(const QgemmProblem& problem, const std::string& name);
// All variants, those of the device first, and why they do not take it.
std::vector<QgemmChoice> explain_problem(const QgemmProblem& problem);

// A product of experts on the CPU: one after the other, by the variant of this name, or the first that takes
// so many rows. Throws as choose_qgemm.
std::shared_ptr<const QgemmKernel> make_experts_cpu(const QgemmProblem& problem, const std::string& variant,
                                                    int num_threads);

// Those of the table in qgemm.cc. A folder each.
extern const QgemmVariant kQgemmSm90Mma;         // forward, m <= 8: mma.sync, x in registers
extern const QgemmVariant kQgemmSm90Wgmma;       // forward, m <= 64: wgmma, weights from registers
extern const QgemmVariant kQgemmSm90Transposed;  // transposed, m <= 64: the same along n
extern const QgemmVariant kQgemmSm90Large;       // both directions, m > 16: the same, with persistent blocks
extern const QgemmVariant kQgemmSm90F32;         // forward, m <= 4, f32: CUDA cores
extern const QgemmVariant kQgemmSm90F32Transposed;  // transposed, m <= 2, f32: the same along n
extern const QgemmVariant kQgemmSm90Split;          // both directions, f32: parts of bf16, wgmma
extern const QgemmVariant kQgemmCublas;             // m > 64: slices of the weight decoded, then cuBLASLt
extern const QgemmVariant kQgemmSm80;               // mma.sync, cp.async: any shape
extern const QgemmVariant kQgemmSimt;               // any device, shape and layout
extern const QgemmVariant kQgemmInt8;               // the CPU: packed, QgemmMath::int8
extern const QgemmVariant kQgemmAmx;                // the CPU: bf16 on tiles of AMX
extern const QgemmVariant kQgemmAvx512;             // the CPU: bf16, vdpbf16ps
extern const QgemmVariant kQgemmSimd;               // the CPU: packed, f32 arithmetic on vectors
extern const QgemmVariant kQgemmRef;                // the CPU: any shape and layout

}  // namespace halfbyte
