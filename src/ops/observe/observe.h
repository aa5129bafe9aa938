// What the variants of `observe` share. A run has two steps: the range of the batch in each group, then the
// state takes these up. min-max and moving-average may do both at once; percentile and mse find ranges of
// their own and leave the second step to what is declared here.
#pragma once

#include <memory>
#include <string>

#include "core/scratch.h"
#include "formats/observer.h"
#include "grouped/grouping.h"
#include "halfbyte/observe.hpp"
#include "ops/observe/observe_args.h"

namespace halfbyte {

// Throws Error(usage) or Error(bad_input) where the fields do not belong together.
void check_state(const ObserverState& state);

// A checked problem, without the addresses.
struct ObserveProblem : Grouping {
  DType dtype = DType::f32;  // of x
  ObserverConfig observer;
  double history = -1;  // the weight of what was seen before, as formats::observed has it; or kMean
  int num_threads = 0;
  Device device;

  bool is_mean() const { return history == kMean; }  // num_batches has a count of each group
};

// Of a checked descriptor.
ObserveProblem observe_problem(const ObserveDescriptor& descriptor, Device device,
                               const PlanPreference& preference);
// The tensors of a run.
struct ObserveTensors {
  const void* x = nullptr;
  void *min = nullptr, *max = nullptr;  // of F, see below
  int64_t* num_batches = nullptr;
  Scratch* scratch = nullptr;  // null: all that is needed is allocated
};

// F is double where x is f64, else float.

// ---- CPU: returns when all is done.
QuantizeStatus observe_cpu(const ObserveProblem& problem, const ObserveTensors& tensors);
// Step 1, min-max and moving-average: the range of the finite values of every group; `seen`: num_scales
// Seen<F>.
QuantizeStatus value_ranges_cpu(const ObserveProblem& problem, const void* x, void* seen);

// ---- CUDA: kernels chosen and loaded for a problem. The workspace has the counts, then what the kernels
// need.
struct ObserveCuda;
// `alignment`: of x, in bytes.
std::shared_ptr<const ObserveCuda> select_observe_cuda(const ObserveProblem& problem, int64_t alignment);
const std::string& kernel_name(const ObserveCuda& cuda);  // of the one that reads x
int64_t workspace_bytes(const ObserveCuda& cuda);
// Enqueues on `stream`.
void run_observe_cuda(const ObserveCuda& cuda, const ObserveTensors& tensors, void* stream, void* workspace);

}  // namespace halfbyte
