#include "ops/quantize_linear/quantize_linear_ref.h"

namespace halfbyte {

QuantizeStatus quantize_linear_cpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return linear_ref::run(problem, tensors);
}

}  // namespace halfbyte
