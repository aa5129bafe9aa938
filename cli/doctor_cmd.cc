// halfbyte doctor
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "command.h"
#include "halfbyte/device.hpp"
#include "halfbyte/error.hpp"
#include "halfbyte/kernels.hpp"
#include "halfbyte/system.hpp"
#include "options.h"
#include "output.h"

namespace halfbyte::cli {

namespace {

std::string compiler() {
#ifdef __clang__
  return __VERSION__;
#else
  return "GCC " __VERSION__;
#endif
}

// "13.0" of 1000 * major + 10 * minor
std::string cuda_version(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string found_library(const std::string& path, int version) {
  return path.empty() ? "not found" : fmt::format("{} (CUDA {})", path, cuda_version(version));
}

// "NVIDIA H200, capability 9.0 (sm_90a), 132 multiprocessors, 139.80 GiB"
std::string device_line(const CudaDevice& device) {
  return fmt::format("{}, capability {}.{}{}, {} multiprocessors, {}{}", device.name, device.capability / 10,
                     device.capability % 10, device.target.empty() ? "" : fmt::format(" ({})", device.target),
                     device.num_multiprocessors, format_bytes(device.memory_bytes),
                     device.problem.empty() ? "" : ": " + device.problem);
}

// "k.hbk: 8104 kernels for sm_90a", and how many are of no use here
std::string pack_line(const KernelPackInfo& pack) {
  std::string line = fmt::format("{}: {} kernels for {}", printable(pack.path), pack.num_kernels,
                                 printable(fmt::format("{}", fmt::join(pack.targets, " "))));
  if (pack.num_matching < pack.num_kernels)
    line += fmt::format("; {} of them match this library, the pack is of halfbyte {}", pack.num_matching,
                        printable(pack.version));
  return line;
}

void describe_packs(std::string& text, Json& document) {
  Json packs = Json::array();
  std::string problem;
  try {
    for (const KernelPackInfo& pack : loaded_kernel_packs()) {
      text += summary_line("kernel pack", pack_line(pack));
      packs.push_back({{"path", pack.path},
                       {"version", pack.version},
                       {"num_kernels", pack.num_kernels},
                       {"num_matching", pack.num_matching},
                       {"targets", pack.targets}});
    }
  } catch (const Error& error) {
    problem = error.what();
    text += summary_line("kernel pack", problem);
  }
  document["cuda"]["kernel_packs"] = std::move(packs);
  document["cuda"]["kernel_pack_problem"] = problem;
}

void describe(const CudaInfo& cuda, std::string& text, Json& document) {
  text += summary_line("CUDA", cuda.usable() ? "usable" : cuda.problem);
  text += summary_line("driver", found_library(cuda.driver_path, cuda.driver_version));
  text += summary_line("NVRTC", found_library(cuda.nvrtc_path, cuda.nvrtc_version));
  std::string cache = cuda.cache_directory.empty() ? "none" : cuda.cache_directory;
  if (!cuda.cache_problem.empty()) cache += ": " + cuda.cache_problem;
  text += summary_line("kernel cache", cache);
  Json devices = Json::array();
  for (const CudaDevice& device : cuda.devices) {
    text += summary_line(to_string(Device{DeviceKind::cuda, device.index}), device_line(device));
    devices.push_back({{"index", device.index},
                       {"name", device.name},
                       {"capability", device.capability},
                       {"target", device.target},
                       {"num_multiprocessors", device.num_multiprocessors},
                       {"memory_bytes", device.memory_bytes},
                       {"problem", device.problem}});
  }
  document["cuda"] = {{"usable", cuda.usable()},
                      {"problem", cuda.problem},
                      {"driver_path", cuda.driver_path},
                      {"driver_version", cuda.driver_version},
                      {"nvrtc_path", cuda.nvrtc_path},
                      {"nvrtc_version", cuda.nvrtc_version},
                      {"cache_directory", cuda.cache_directory},
                      {"cache_problem", cuda.cache_problem},
                      {"devices", std::move(devices)}};
  describe_packs(text, document);
}

void run_doctor(std::string& text, Json& document) {
  const SystemInfo system = system_info();
  const uint64_t memory_bytes =
      static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));

  text += summary_line("version", system.version);
  text += summary_line("build", HALFBYTE_BUILD_TYPE);
  text += summary_line("compiler", compiler());
  text += summary_line(
      "SIMD", fmt::format("{} (compiled: {})", system.simd_target, fmt::join(system.compiled_targets, ", ")));
  text += summary_line("threads", fmt::format("{}", system.num_threads));
  text += summary_line("memory", format_bytes(memory_bytes));

  document["version"] = system.version;
  document["build_type"] = HALFBYTE_BUILD_TYPE;
  document["compiler"] = compiler();
  document["simd_target"] = system.simd_target;
  document["compiled_targets"] = system.compiled_targets;
  document["num_threads"] = system.num_threads;
  document["memory_bytes"] = memory_bytes;
  describe(cuda_info(), text, document);
}

}  // namespace

void add_doctor_command(CLI::App& app, Command& command) {
  CLI::App& sub = *app.add_subcommand("doctor", "Show what this build finds on this machine");
  add_report_options(sub, command);
  sub.callback([&command] {
    command.name = "doctor";
    command.run = run_doctor;
  });
}

}  // namespace halfbyte::cli
