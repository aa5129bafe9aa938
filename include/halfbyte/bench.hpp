// Measurements on a CUDA device: products with quantized weights, beside what its memory and dense products
// give in the same process (docs/qgemm.md).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>

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

// Times are microseconds of a product, of many that follow each other on cold weights; NaN: not measured.
struct QgemmBenchRow {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

  QgemmBenchCase test;
  std::string problem;  // why something was not measured; empty if all was
  Sku sku;              // of the plan; empty if there is none
  int64_t weight_bytes = 0;
  double plain_us = kNone;         // each kernel starts when the one before it has ended
  double chained_us = kNone;       // QgemmDescriptor::early_start
  double read_us = kNone;          // of the fastest of several kernels that only read the packed weight
  double read_chained_us = kNone;  // of the same kernel, chained
  double cublas_us = kNone;        // of the dense product, the weight in the dtype of x
  double lora_us = kNone;       // of two thin dense products by cuBLAS and the product, which adds to theirs
  double cublas_flops = kNone;  // a second, of a large dense product
  double floor_us = kNone;      // the longer of read_us and the product at cublas_flops
  // Of y of both plans, over some rows: the norm of the difference from qgemm_simt with sums in f64, by that
  // of y. NaN where y is.
  double error = kNone;
  double error_limit = 0;  // for the rounding of dtype
  bool correct() const { return error <= error_limit; }
};

// Measures one case after the other; `progress` gets each row when it is there and returns false to stop:
// Error(cancelled). Weights are random, and rotate, as x, y and workspaces do, over memory that is five times
// the second-level cache. Cases of one weight should follow each other, and of one dtype among these.
// `quick`: fewer repetitions. Error(usage) for the CPU and bad cases; a case that no variant takes is a row
// with a problem.
HALFBYTE_API void bench_qgemm(Device device, std::span<const QgemmBenchCase> cases, bool quick,
                              const std::function<bool(const QgemmBenchRow&)>& progress);

}  // namespace halfbyte
