// halfbyte precompile --arch TARGET -o PACK
#include <fmt/format.h>
#include <sys/stat.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "command.h"
#include "halfbyte/error.hpp"
#include "halfbyte/kernels.hpp"
#include "halfbyte/output.hpp"
#include "halfbyte/system.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"
#include "workers.h"

namespace halfbyte::cli {

namespace {

namespace fs = std::filesystem;

struct PrecompileArguments {
  std::string output;
  std::vector<std::string> targets, ops, formats, dtypes;
  int num_jobs = 0;
  std::string progress = "auto";
  // "INDEX/COUNT": this process is a worker. It writes its share, and a byte to stdout for each kernel.
  std::string shard;
};

KernelPackOptions to_options(const PrecompileArguments& arguments, bool force) {
  KernelPackOptions options;
  options.targets = arguments.targets;
  options.ops = arguments.ops;
  options.formats = arguments.formats;
  options.dtypes = arguments.dtypes;
  options.force = force;
  return options;
}

// Workers compile; what they have made is loaded, so that writing the pack finds it.
void compile_in_workers(const PrecompileArguments& arguments, int64_t num_jobs,
                        const std::function<bool(int64_t done)>& progress) {
  const WorkDirectory directory(
      arguments.output);  // beside it: a place that cannot be written is known at once
  std::vector<std::string> paths;
  std::vector<std::vector<std::string>> commands;
  for (int64_t i = 0; i < num_jobs; ++i) {
    paths.push_back(fmt::format("{}/{}.hbk", directory.path(), i));
    std::vector<std::string> command = {"precompile", "--shard", fmt::format("{}/{}", i, num_jobs), "-o",
                                        paths.back()};
    const auto add = [&](const char* option, const std::vector<std::string>& words) {
      if (words.empty()) return;
      command.push_back(option);
      command.push_back(fmt::format("{}", fmt::join(words, ",")));
    };
    add("--arch", arguments.targets);
    add("--ops", arguments.ops);
    add("--formats", arguments.formats);
    add("--dtypes", arguments.dtypes);
    commands.push_back(std::move(command));
  }
  run_workers(commands, progress);
  for (const std::string& path : paths) load_kernel_pack(path);
}

void run_worker(const PrecompileArguments& arguments, bool force) {
  ::umask(077);  // its pack is of this run alone
  KernelPackOptions options = to_options(arguments, force);
  char slash = 0;
  std::istringstream shard(arguments.shard);
  shard >> options.shard >> slash >> options.num_shards;
  ProgressBar bar(false);
  options.progress = [stop = bar.function()](int64_t, int64_t) {
    write_stdout(".");
    return stop({"compile", 0, 0});
  };
  write_kernel_pack(arguments.output, options);
}

void run(const PrecompileArguments& arguments, bool force, std::string& text, Json& document) {
  const auto start = std::chrono::steady_clock::now();
  KernelPackOptions options = to_options(arguments, force);
  const std::vector<std::string>& known = kernel_targets();
  for (const std::string& target : options.targets)
    if (std::ranges::find(known, target) == known.end())
      throw Error(ErrorCode::usage, fmt::format("--arch: unknown target '{}': must be one of {}",
                                                printable(target), fmt::join(known, ", ")));
  std::error_code error;
  if (!force && fs::exists(fs::symlink_status(arguments.output, error)))
    throw Error(ErrorCode::exists, fmt::format("--output {}: exists already (use --force to replace it)",
                                               printable(arguments.output)));
  const int64_t total = count_pack_kernels(options);
  const int64_t jobs = arguments.num_jobs > 0 ? arguments.num_jobs : system_info().num_threads;

  ProgressBar bar(arguments.progress == "auto", [](uint64_t n) { return fmt::format("{}", n); });
  const auto progress = [&, draw = bar.function()](int64_t done) {
    return draw({"compile", static_cast<uint64_t>(done), static_cast<uint64_t>(total)});
  };
  const int64_t num_workers = std::min(jobs, total);
  // Even one: a process can be ended, while NVRTC cannot be stopped.
  compile_in_workers(arguments, num_workers, progress);
  options.progress = [&](int64_t, int64_t) { return progress(total); };
  const KernelPackReport report = write_kernel_pack(arguments.output, options);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  text +=
      summary_line("kernels", fmt::format("{} for {}", report.num_kernels, fmt::join(options.targets, ", ")));
  text += summary_line("output",
                       fmt::format("{} ({})", printable(arguments.output), format_bytes(report.num_bytes)));
  text += summary_line("time", fmt::format("{:.1f} s, {} jobs", seconds, num_workers));
  document["output"] = arguments.output;
  document["targets"] = options.targets;
  document["num_kernels"] = report.num_kernels;
  document["num_bytes"] = report.num_bytes;
  document["seconds"] = seconds;
  document["num_jobs"] = num_workers;
}

}  // namespace

void add_precompile_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<PrecompileArguments>();
  CLI::App& sub =
      *app.add_subcommand("precompile", "Write a pack of compiled CUDA kernels, for machines without NVRTC");
  const auto add_list = [&](const char* option, std::vector<std::string>& words, const std::string& help) {
    return sub.add_option(option, words, help)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->option_text("A[,B]...");
  };
  sub.add_option("-o,--output", arguments->output, "The file to write")->required()->option_text("PACK");
  add_list("--arch", arguments->targets, "The GPU targets to compile for, such as sm_90a,sm_120a")
      ->required();
  add_list("--ops", arguments->ops, "Only the kernels of these ops (default: all)");
  add_list("--formats", arguments->formats, "Only the kernels of these formats (default: all but lut4)");
  add_list("--dtypes", arguments->dtypes,
           "Only the kernels for dense tensors of these dtypes (default: all)");
  sub.add_option("--jobs", arguments->num_jobs, "Number of processes that compile (default 0: one per CPU)")
      ->check(CLI::Range(0, 4096))
      ->option_text("N");
  sub.add_option("--progress", arguments->progress, "auto (default: on a terminal) or never")
      ->check(CLI::IsMember({"auto", "never"}))
      ->option_text("WHEN");
  sub.add_option("--shard", arguments->shard)->group("");  // of workers: not in the help
  add_report_options(sub, command);
  sub.callback([arguments, &command] {
    command.name = "precompile";
    if (arguments->shard.empty()) command.output = arguments->output;
    command.run = [arguments, &command](std::string& text, Json& document) {
      if (arguments->shard.empty())
        run(*arguments, command.force, text, document);
      else
        run_worker(*arguments, command.force);
    };
  });
}

}  // namespace halfbyte::cli
