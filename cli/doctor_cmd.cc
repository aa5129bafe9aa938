// halfbyte doctor
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "command.h"
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

void run(std::string& text, Json& document) {
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
  text += summary_line("CUDA", system.cuda_status);

  document["version"] = system.version;
  document["build_type"] = HALFBYTE_BUILD_TYPE;
  document["compiler"] = compiler();
  document["simd_target"] = system.simd_target;
  document["compiled_targets"] = system.compiled_targets;
  document["num_threads"] = system.num_threads;
  document["memory_bytes"] = memory_bytes;
  document["cuda_status"] = system.cuda_status;
}

}  // namespace

void add_doctor_command(CLI::App& app, Command& command) {
  CLI::App& sub = *app.add_subcommand("doctor", "Show what this build finds on this machine");
  add_report_options(sub, command);
  sub.callback([&command] {
    command.name = "doctor";
    command.run = run;
  });
}

}  // namespace halfbyte::cli
