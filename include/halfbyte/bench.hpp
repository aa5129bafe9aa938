// Measurements: products with quantized weights, beside what memory and dense products of the device give in
// the same process (docs/qgemm.md).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "halfbyte/qgemm.hpp"

namespace halfbyte {

// The library of dense products, found at run time: HALFBYTE_CUBLAS, else where NVRTC is looked for too.
struct CublasInfo {
  std::string path;     // empty if not found
  std::string problem;  // why there is none
};
HALFBYTE_API CublasInfo cublas_info();

struct QgemmBenchCase {
  std::string shape;           // of the weight, a name: "4096x4096"
  QgemmDescriptor descriptor;  // packed, without bias, accumulate and math; early_start is not looked at
  int64_t lora = 0;            // rank of a low-rank adapter that is measured beside it; 0: none
};

// Multiply-adds that the CPU makes where nothing is loaded or stored, on all threads that are measured.
struct QgemmBenchRate {
  std::string name;  // "fma" of f32; for bf16, where the CPU has them, "bf16_dot" (AVX-512) and "amx_bf16"
  double flops = 0;  // a second: two each
};

// Times are microseconds of a product, of many that follow each other on cold weights; NaN: not measured.
struct QgemmBenchRow {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

  QgemmBenchCase test;
  std::string problem;  // why something was not measured; empty if all was
  Sku sku;              // of the plan; empty if there is none
  int64_t weight_bytes = 0;
  double plain_us = kNone;         // each starts when the one before it has ended
  double chained_us = kNone;       // CUDA: QgemmDescriptor::early_start
  double read_us = kNone;          // of the fastest of several ways to only read the packed weight
  double read_chained_us = kNone;  // CUDA: of the same, chained
  double cublas_us = kNone;        // CUDA: of the dense product, the weight in the dtype of x
  double lora_us = kNone;       // CUDA: of two thin products by cuBLAS and the product, which adds to theirs
  double cublas_flops = kNone;  // CUDA: a second, of a large dense product
  std::vector<QgemmBenchRate> rates;  // CPU
  double floor_us = kNone;  // the longer of read_us and the product at cublas_flops or the best of rates
  // Of y of both plans, over some rows: the norm of the difference from qgemm_simt or qgemm_ref with sums in
  // f64, by that of y. NaN where y is.
  double error = kNone;
  double error_limit = 0;  // for the rounding of dtype
  bool correct() const { return error <= error_limit; }
};

struct QgemmBenchOptions {
  bool quick = false;   // fewer repetitions
  int num_threads = 0;  // CPU: 0: all
};

// Measures one case after the other; `progress` gets each row when it is there and returns false to stop:
// Error(cancelled). Weights are random, and rotate: on CUDA, as x, y and workspaces do, over five times the
// second-level cache; on the CPU over 1.2 GB. Cases of one weight should follow each other, and of one dtype
// among these. Error(usage) for bad cases; a case that no variant takes is a row with a problem.
HALFBYTE_API void bench_qgemm(Device device, std::span<const QgemmBenchCase> cases,
                              const QgemmBenchOptions& options,
                              const std::function<bool(const QgemmBenchRow&)>& progress);

}  // namespace halfbyte
