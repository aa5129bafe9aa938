// What variant qgemm_cublas takes, and how it cuts up a product.
#pragma once

#include "ops/qgemm/qgemm.h"

namespace halfbyte {

// Why no device takes the problem; empty if one does.
std::string refuse_qgemm_cublas(const QgemmProblem& problem);

// Slices of y, and so of the weight, along the features, which are rows (forward) or columns (transposed) of
// the weight. All have `features` but for the last, which may have fewer.
struct QgemmSlices {
  int64_t features = 0, count = 0;
};
QgemmSlices qgemm_cublas_slices(const QgemmProblem& problem);

}  // namespace halfbyte
