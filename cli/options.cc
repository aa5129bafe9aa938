#include "options.h"

#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <charconv>
#include <string_view>

#include "halfbyte/error.hpp"
#include "output.h"

namespace halfbyte::cli {

namespace {

// Empty: "auto".
std::vector<Device> parse_device_option(const std::string& words) {
  if (words == "auto") return {};
  try {
    return parse_devices(words);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::usage)
      throw Error(error.code(), fmt::format("--device: {}", error.what()));
    throw Error(
        error.code(),
        fmt::format("--device: expected auto, or cpu, cuda, cuda:N and cuda:all, each once and divided by "
                    "commas, got '{}'",
                    printable(words)));
  }
}

// The device, and what makes each run compile its kernels again.
std::string describe(const CudaInfo& info, const CudaDevice& device) {
  if (!info.cache_directory.empty()) return device.name;
  return fmt::format("{}; no kernel cache: {}", device.name, info.cache_problem);
}

}  // namespace

void add_report_options(CLI::App& app, Command& command) {
  app.add_option("--json", command.json_path,
                 "Write a JSON report to FILE (-: to stdout, instead of the text)")
      ->option_text("FILE");
  app.add_flag("--force", command.force, "Replace output files that exist");
}

void add_destination_options(CLI::App& app, Destination& destination) {
  app.add_option("-o,--output", destination.path, "The file or directory to write")->option_text("OUT");
  app.add_flag("--dry-run", destination.dry_run,
               "Only report what would happen, quantize also how long it takes; needs no -o");
  app.add_option(
         "--shard-size", destination.shard_size,
         "Of a directory: at most so many bytes in a file, such as 5GB or 512MiB (default: the files of IN)")
      ->option_text("SIZE");
  CLI::Option* const resume =
      app.add_flag("--resume", destination.resume,
                   "Go on with what an interrupted run with this OUT left unfinished, if there is something");
  app.add_flag("--discard", destination.discard, "Remove what interrupted runs with this OUT left unfinished")
      ->excludes(resume);
}

void check_destination(const Destination& destination) {
  if (destination.path.empty() && !destination.dry_run) throw CLI::RequiredError("--output");
}

void add_compute_options(CLI::App& app, ComputeArguments& arguments) {
  app.add_option("--device", arguments.device,
                 "auto (default), or cpu, cuda, cuda:N and cuda:all, divided by commas")
      ->option_text("DEVICES");
  app.add_option("--threads", arguments.num_threads, "Number of CPU threads (default 0: all)")
      ->check(CLI::Range(0, 4096))
      ->option_text("N");
  app.add_option("--progress", arguments.progress, "auto (default: on a terminal) or never")
      ->check(CLI::IsMember({"auto", "never"}))
      ->option_text("WHEN");
}

std::string to_string(const DeviceChoice& choice) {
  const std::string device = to_string(std::span(choice.devices));
  return choice.note.empty() ? device : fmt::format("{} ({})", device, choice.note);
}

std::string names_of(std::span<const Device> devices) {
  std::string names;
  for (const Device device : devices) {
    if (device.kind == DeviceKind::cpu) continue;
    const CudaInfo info = cuda_info();
    const auto found = std::ranges::find(info.devices, device.index, &CudaDevice::index);
    if (found != info.devices.end()) names += (names.empty() ? "" : ", ") + describe(info, *found);
  }
  return names;
}

DeviceChoice select_devices(const std::string& words) {
  DeviceChoice choice = {parse_device_option(words)};
  for (const Device device : choice.devices) try {
      check_device(device);
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("--device {}: {}", words, error.what()));
    }
  choice.note = names_of(choice.devices);
  return choice;
}

void check_cpu(const std::string& word, const std::string& command) {
  const std::vector<Device> devices = parse_device_option(word);
  if (std::ranges::any_of(devices, [](Device device) { return device.kind != DeviceKind::cpu; }))
    throw Error(ErrorCode::device, fmt::format("--device {}: {} runs on the CPU only", word, command));
}

uint64_t parse_shard_size(const std::string& text) {
  if (text.empty()) return 0;
  struct Unit {
    std::string_view word;
    uint64_t num_bytes;
  };
  constexpr Unit kUnits[] = {{"", 1},
                             {"KB", 1'000},
                             {"MB", 1'000'000},
                             {"GB", 1'000'000'000},
                             {"KiB", uint64_t{1} << 10},
                             {"MiB", uint64_t{1} << 20},
                             {"GiB", uint64_t{1} << 30}};
  const char* const last = text.data() + text.size();
  uint64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), last, count);
  const auto* unit = std::ranges::find(kUnits, std::string_view(end, last), &Unit::word);
  if (error != std::errc() || unit == std::end(kUnits) || count == 0 || count > INT64_MAX / unit->num_bytes)
    throw Error(
        ErrorCode::usage,
        fmt::format(
            "--shard-size: expected a number above 0 with KB, MB, GB, KiB, MiB, GiB or no unit, got '{}'",
            printable(text)));
  return count * unit->num_bytes;
}

GroupSize parse_group_size(const std::string& text) {
  if (text == "channel") return {Granularity::channel};
  if (text == "tensor") return {Granularity::tensor};
  const char* const last = text.data() + text.size();
  GroupSize group;
  if (const auto [end, error] = std::from_chars(text.data(), last, group.size);
      error != std::errc() || end != last)
    throw Error(ErrorCode::usage,
                fmt::format("--group-size: expected a number of elements, channel or tensor, got '{}'",
                            printable(text)));
  return group;
}

}  // namespace halfbyte::cli
