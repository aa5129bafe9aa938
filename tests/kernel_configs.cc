// Writes DIR/KERNEL/halfbyte_config.h, of the default configuration, for every kernel, and prints its source
// and that folder: what a compiler other than NVRTC needs to read it.
//
//   halfbyte_kernel_configs DIR
#include <fmt/format.h>

#include <filesystem>
#include <fstream>

#include "kernels/kernels.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (const halfbyte::cuda::Kernel& kernel : halfbyte::kernel_table()) {
    const halfbyte::cuda::KernelSpec spec = halfbyte::specialise(kernel, {});
    const std::filesystem::path folder = std::filesystem::path(argv[1]) / kernel.info.name;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "halfbyte_config.h") << spec.config;
    fmt::print("src/{} {}\n", spec.source, folder.string());
  }
}
