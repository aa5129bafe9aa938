// What variants for few rows of f32 and codes of 4 bits have in common, on the host.
#pragma once

#include <string>
#include <vector>

#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {

// Why such a variant does not take the problem, in one direction and with at most so many rows of x; empty if
// it does.
std::string refuse_for_f32_rows(const QgemmProblem& problem, bool transposed, int64_t most_rows);

// Of the table of kernels: the keys of the weight, without groups, on which their code does not depend, and
// the problem of their values and of the key "rows".
std::vector<KernelKey> f32_rows_keys();
QgemmProblem f32_rows_problem(const cuda::KernelValues& values);

}  // namespace halfbyte
