// Measurements: operations beside what memory and arithmetic of the device give in the same process
// (docs/benchmarks.md; products: docs/qgemm.md).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfbyte/qgemm.hpp"

namespace halfbyte {

struct BenchOptions {
  bool quick = false;   // fewer repetitions
  int num_threads = 0;  // CPU: 0: all
};

// ---- Operations that are bound by memory

// What can be measured: "quantize", "observe", ...; `what` in a sentence.
struct BenchOp {
  std::string name, what;
};
HALFBYTE_API std::vector<BenchOp> bench_ops();

// Which of their problems: those that all lists allow; an empty one allows all.
struct BenchSelection {
  std::vector<std::string> ops, formats, dtypes;
  std::string filter;  // in the text "op problem"
};

// Beside a problem: what does the same without arithmetic.
struct BenchCeiling {
  std::string
      name;  // "move": reads and writes as much; "read": reads as much; "copy": as much in all, half each
  double us = 0;  // of the fastest of several ways
};

// Times are microseconds of a run, of many that follow each other on other memory; NaN: not measured.
struct BenchRow {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

  std::string op, problem;
  std::string failure;  // why it was not measured; empty if it was
  Sku sku;
  int64_t read_bytes = 0, write_bytes = 0;
  double median_us = kNone, spread = kNone;  // the distance of the quartiles, of the median
  std::vector<BenchCeiling> ceilings;        // the first counts
  double target = 0;                         // the least share of it that is meant to be reached; 0: none
  // CUDA: whether all bytes of two runs are those of the CPU; none: not compared, as it would take too long.
  std::optional<bool> correct;
  double share(const BenchCeiling& ceiling) const { return ceiling.us / median_us; }
};

// "op problem" of all that is selected. Error(usage) naming a word that nothing has.
HALFBYTE_API std::vector<std::string> bench_problems(DeviceKind device, const BenchSelection& selection);
// Measures one after the other; `progress` gets each row when it is there and returns false to stop:
// Error(cancelled). On CUDA memory rotates over three sets of buffers, which together are several times the
// second-level cache; on the CPU sets are beyond the caches alone.
HALFBYTE_API void bench(Device device, const BenchSelection& selection, const BenchOptions& options,
                        const std::function<bool(const BenchRow&)>& progress);

// ---- What goes with them

// How long the host takes to make a plan, for each of some kernels: the first time in this process (its
// kernel is compiled, or loaded where it is in the cache on disk), and again; and to enqueue a run. CUDA
// only. The same rows: `median_us` is of the second, and the only ceiling, "first", is the first.
HALFBYTE_API void bench_latency(Device device, const std::function<bool(const BenchRow&)>& progress);
// The rates of bare reads, moves and copies; CUDA: between host and device, too. Rows as above: op "memory".
HALFBYTE_API void bench_memory(Device device, const BenchOptions& options,
                               const std::function<bool(const BenchRow&)>& progress);
// quantize_checkpoint of `directory`/model, which is made and removed: 2 GiB in 4 shards, for each format.
// The time is that of the run, without sync and verification; the ceiling, "read", that of reading the files
// by blocks.
HALFBYTE_API void bench_checkpoint(Device device, const std::string& directory,
                                   const std::vector<std::string>& formats, const BenchOptions& options,
                                   const std::function<bool(const BenchRow&)>& progress);

// ---- Products with quantized weights

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
  double plain_spread = kNone;     // the distance of the quartiles, of plain_us
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

using QgemmBenchOptions = BenchOptions;

// Measures one case after the other; `progress` gets each row when it is there and returns false to stop:
// Error(cancelled). Weights are random, and rotate: on CUDA, as x, y and workspaces do, over five times the
// second-level cache; on the CPU over 1.2 GB. Cases of one weight should follow each other, and of one dtype
// among these. Error(usage) for bad cases; a case that no variant takes is a row with a problem.
HALFBYTE_API void bench_qgemm(Device device, std::span<const QgemmBenchCase> cases,
                              const QgemmBenchOptions& options,
                              const std::function<bool(const QgemmBenchRow&)>& progress);

}  // namespace halfbyte
