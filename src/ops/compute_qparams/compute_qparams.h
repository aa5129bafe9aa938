// What the variants of the plan of `compute_qparams` share.
#pragma once

#include <memory>
#include <string>

#include "halfbyte/observe.hpp"
#include "ops/compute_qparams/compute_qparams_args.h"

namespace halfbyte {

// A checked problem, without the addresses.
struct QParamsProblem {
  int64_t num_groups = 0;
  DType dtype = DType::f32;  // of min and max, f32 or f64: what is computed in
  formats::QParamsRule rule;
  QParamsZero zero_type = QParamsZero::none;
  int num_threads = 0;
  Device device;
};

struct QParamsTensors {
  const void *min = nullptr, *max = nullptr;
  void *scale = nullptr, *zero_point = nullptr;
};

// ---- CUDA: the kernel, chosen and loaded for a problem. The workspace has the counts.
struct QParamsCuda;
std::shared_ptr<const QParamsCuda> select_qparams_cuda(const QParamsProblem& problem);
const std::string& kernel_name(const QParamsCuda& cuda);
int64_t workspace_bytes(const QParamsCuda& cuda);
// Enqueues on `stream`.
void run_qparams_cuda(const QParamsCuda& cuda, const QParamsTensors& tensors, void* stream, void* workspace);

}  // namespace halfbyte
