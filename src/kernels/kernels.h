// The kernels of all ops as one table.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/kernel.h"

namespace halfbyte {

// In the order of the ops. An op adds its rows here.
std::span<const cuda::Kernel> kernel_table();
// Error(usage) naming the known ones.
const cuda::Kernel& find_kernel(std::string_view name);

// Checks keys and values, fills in defaults. Error(usage) naming the known ones.
cuda::KernelSpec specialise(const cuda::Kernel& kernel, const KernelConfig& config);

struct KernelConfiguration {
  KernelConfig config;  // complete
  cuda::KernelSpec spec;
};
// All that the listed values make, each kernel once: it has the first configuration that gives it. `uses`
// leaves out values (key, value).
std::vector<KernelConfiguration> all_configurations(
    const cuda::Kernel& kernel,
    const std::function<bool(const std::string& key, const std::string& value)>& uses = {});

}  // namespace halfbyte
