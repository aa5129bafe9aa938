// What the measurements of products share.
#pragma once

#include "bench.h"

namespace halfbyte::cli {

// The cases that the arguments ask for, of these shapes and M where they name none; one weight after the
// other.
std::vector<QgemmBenchCase> cases_of_qgemm(const BenchArguments& arguments,
                                           const std::vector<std::string>& shapes,
                                           const std::vector<int64_t>& m);
// "nf4 g64 f16", "nf4 g64 dq"
std::string weight_text(const QuantSpec& spec);

// With --experts.
void run_grouped_bench(Device device, const BenchArguments& arguments, bool print, Json& document);

}  // namespace halfbyte::cli
