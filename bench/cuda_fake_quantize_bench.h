// How fast fake quantization and its gradients are on a CUDA device.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace halfbyte::bench {

// Times the cases whose name contains `filter`, checks their output, prints a table. False where an output is
// wrong or a rate below its target.
bool run_fake_quantize_bench(const std::string& filter, nlohmann::json& results);

}  // namespace halfbyte::bench
