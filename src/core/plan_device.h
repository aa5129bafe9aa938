// What plans ask of their device. Defined in cuda/plan_device.cc, of the CPU in cpu/system.cc.
#pragma once

#include <string>

#include "halfbyte/ops.hpp"

namespace halfbyte {

// What kernels of the CPU use on this machine: SystemInfo::simd_target.
const char* simd_target();
// Of a CUDA device, what kernels are compiled for: "sm_90a".
std::string target_of(Device device);
// Waits for `stream` of a CUDA device; on the CPU there is nothing to wait for.
void wait_for(Device device, void* stream);
// The QuantizeCounts that a run on a CUDA device left at the beginning of its workspace. Waits for `stream`.
QuantizeStatus read_counts(Device device, const void* workspace, void* stream);

}  // namespace halfbyte
