// Which kernel of variant qgemm_simt a product has.
#pragma once

#include "ops/qgemm/qgemm.h"

namespace halfbyte {

// That of few rows of x, forward; else that of tiles of y.
bool has_simt_rows(const QgemmProblem& problem);

}  // namespace halfbyte
