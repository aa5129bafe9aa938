// Measures operations and, in the same process, how fast the memory and the arithmetic of the device are
// (docs/benchmarks.md; products: docs/qgemm.md).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfbyte/qgemm_grouped.hpp"

namespace halfbyte {

struct BenchOptions {
  bool quick = false;   // fewer repetitions
  int num_threads = 0;  // CPU: 0: all
  // qgemm: only plain_us, read_us and cublas_us; y is not checked.
  bool times_only = false;
};

// ---- Operations that are bound by memory

// What can be measured: "quantize", "observe", ... `what` describes it in a sentence.
struct BenchOp {
  std::string name, what;
};
HALFBYTE_API std::vector<BenchOp> bench_ops();

// Which problems to measure: those that every list allows. An empty list allows all.
struct BenchSelection {
  std::vector<std::string> ops, formats, dtypes;
  std::string filter;  // in the text "op problem"
};

// What a problem is compared with: the same memory traffic without arithmetic.
struct BenchCeiling {
  std::string
      name;  // "move": reads and writes as much; "read": reads as much; "copy": as much in all, half each
  double us = 0;  // of the fastest of several ways
};

// Times are microseconds of one run, out of many in a row that each use other memory. NaN: not measured.
struct BenchRow {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

  std::string op, problem;
  std::string failure;  // why it was not measured; empty if it was
  Sku sku;
  int64_t read_bytes = 0, write_bytes = 0;
  double median_us = kNone, spread = kNone;  // spread: distance of the quartiles / median
  std::vector<BenchCeiling> ceilings;        // the first counts
  double target = 0;                         // the share of it that should be reached; 0: none
  // CUDA: whether all bytes of two runs equal those of the CPU. Unset: not compared, because it would take
  // too long.
  std::optional<bool> correct;
  double share(const BenchCeiling& ceiling) const { return ceiling.us / median_us; }
};

// The "op problem" text of each selected problem. Throws Error(usage), naming the word, for a word that no
// problem has.
HALFBYTE_API std::vector<std::string> bench_problems(DeviceKind device, const BenchSelection& selection);
// Measures the problems one after the other. `progress` gets each row when it is ready; return false to stop,
// with Error(cancelled). On CUDA, memory rotates over three sets of buffers, which together are several times
// as large as the second-level cache. On the CPU, each set is larger than the caches.
HALFBYTE_API void bench(Device device, const BenchSelection& selection, const BenchOptions& options,
                        const std::function<bool(const BenchRow&)>& progress);

// ---- What goes with them

// How long the host takes to make a plan, for several kernels: for the first plan in this process, which
// compiles the kernel or loads it from the cache on disk, and for later ones. Also how long it takes to
// enqueue a run. CUDA only. Rows as above: `median_us` is the time of later plans, and the only ceiling,
// "first", that of the first.
HALFBYTE_API void bench_latency(Device device, const std::function<bool(const BenchRow&)>& progress);
// The rates of bare reads, moves and copies; on CUDA also between host and device. Rows as above, with op
// "memory".
HALFBYTE_API void bench_memory(Device device, const BenchOptions& options,
                               const std::function<bool(const BenchRow&)>& progress);
// Runs quantize_checkpoint for each format on a checkpoint of 2 GiB in 4 shards, which it makes under
// `directory` and removes. The time is that of the run, without sync and verification. The ceiling, "read",
// is the time to read the files by blocks.
HALFBYTE_API void bench_checkpoint(Device device, const std::string& directory,
                                   const std::vector<std::string>& formats, const BenchOptions& options,
                                   const std::function<bool(const BenchRow&)>& progress);

// Layers of the size of llama-70b (nf4, groups of 64, bf16), each four products: q, k and v; o; gate and up;
// down. On the first device alone, and on the first 2, 4, 8, ... of them, cut colwise, rowwise, colwise and
// rowwise, by peer memory and by NCCL, for each m. What lies between the products in a model is left out.
// Each device replays a CUDA graph. Rows as above, with op "tensor_parallel": `median_us` is the time of a
// layer, the ceilings "one", that on one device, and "sum", the time of one of its two sums alone. CUDA only.
HALFBYTE_API void bench_tensor_parallel(std::span<const Device> devices, std::span<const int64_t> m,
                                        const BenchOptions& options,
                                        const std::function<bool(const BenchRow&)>& progress);

// ---- Products with quantized weights

// The library of dense products, found at run time: HALFBYTE_CUBLAS, or where NVRTC is looked for.
struct CublasInfo {
  std::string path;     // empty if not found
  std::string problem;  // why there is none
};
HALFBYTE_API CublasInfo cublas_info();

struct QgemmBenchCase {
  std::string shape;           // of the weight, a name: "4096x4096"
  QgemmDescriptor descriptor;  // packed, without bias and accumulate; early_start is ignored
  int64_t lora = 0;            // rank of a low-rank adapter to measure too; 0: none
};

// The rate of multiply-adds of the CPU, without loads and stores, on all threads that are measured.
struct QgemmBenchRate {
  std::string name;  // "fma" of f32; for bf16, where the CPU has them, "bf16_dot" (AVX-512) and "amx_bf16"
  double flops = 0;  // per second; a multiply-add is two
};

// Times are microseconds of one product, out of many in a row on cold weights. NaN: not measured.
struct QgemmBenchRow {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

  QgemmBenchCase test;
  std::string problem;  // why something was not measured; empty if everything was
  Sku sku;              // of the plan; empty if there is none
  int64_t weight_bytes = 0;
  double plain_us = kNone;         // each starts when the one before it has ended
  double plain_spread = kNone;     // distance of the quartiles / plain_us
  double chained_us = kNone;       // CUDA: QgemmDescriptor::early_start
  double read_us = kNone;          // only reading the packed weight, by the fastest of several ways
  double read_chained_us = kNone;  // CUDA: the same, chained
  double cublas_us = kNone;        // CUDA: the dense product, with the weight in the dtype of x
  double lora_us = kNone;          // CUDA: two thin products by cuBLAS, and the product, which adds to them
  double cublas_flops = kNone;     // CUDA: per second, of a large dense product
  std::vector<QgemmBenchRate> rates;  // CPU
  double floor_us = kNone;  // the longer of read_us and the time at cublas_flops or the best of rates
  // Error of y, for both plans, over up to 16 rows: the norm of its difference from qgemm_simt or qgemm_ref
  // with f64 sums, divided by the norm that as many rows of the latter have, of the mean of 16. NaN if y has
  // NaN.
  double error = kNone;
  double error_limit = 0;  // what the rounding of dtype and math allows
  bool correct() const { return error <= error_limit; }
};

using QgemmBenchOptions = BenchOptions;

// Measures one case after the other. `progress` gets each row when it is ready; return false to stop, with
// Error(cancelled). Weights are random and rotate: on CUDA over five times the second-level cache, as do x, y
// and workspaces; on the CPU over 1.2 GB. For speed, group cases by weight, and within a weight by dtype.
// Throws Error(usage) for bad cases. A case that no variant takes gives a row with a problem.
HALFBYTE_API void bench_qgemm(Device device, std::span<const QgemmBenchCase> cases,
                              const QgemmBenchOptions& options,
                              const std::function<bool(const QgemmBenchRow&)>& progress);

// ---- Products with the weights of experts

struct QgemmGroupedBenchCase {
  std::string name;                   // of experts and weights: "E128 top 8, 1536x2048"
  QgemmGroupedDescriptor descriptor;  // rows are indices; without bias and accumulate
  // How much more often experts are chosen than others: the i-th in proportion to i^-skew. 0: all alike.
  double skew = 0;
};

// Times are microseconds of one product, out of many in a row, with other routing in each. NaN: not measured.
struct QgemmGroupedBenchRow {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

  QgemmGroupedBenchCase test;
  std::string problem;  // why something was not measured; empty if everything was
  Sku sku;
  double experts = 0;       // that have rows, on average
  double weight_bytes = 0;  // of these
  double plain_us = kNone, plain_spread = kNone;
  double read_us = kNone;   // only reading as many bytes, by the fastest of several ways
  double loop_us = kNone;   // a product with one weight for each expert that has rows, gathered before
  double route_us = kNone;  // RoutePlan
  double flops = 0;         // of the product
};

// As bench_qgemm. Weights and routing rotate.
HALFBYTE_API void bench_qgemm_grouped(Device device, std::span<const QgemmGroupedBenchCase> cases,
                                      const BenchOptions& options,
                                      const std::function<bool(const QgemmGroupedBenchRow&)>& progress);

}  // namespace halfbyte
