// How fast gradients of learned scales are on a CUDA device.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace halfbyte::bench {

// Times the cases whose name contains `filter`, checks their output, prints a table. False where an output is
// wrong or a rate below its target.
bool run_lsq_bench(const std::string& filter, nlohmann::json& results);

}  // namespace halfbyte::bench
