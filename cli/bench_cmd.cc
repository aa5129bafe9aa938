// halfbyte bench
#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench.h"
#include "halfbyte/error.hpp"
#include "halfbyte/system.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"

namespace halfbyte::cli {

namespace {

constexpr const char* kCeilings[] = {"move", "read", "copy"};

double gb_per_s(const BenchRow& row) {
  return 1e-3 * static_cast<double>(row.read_bytes + row.write_bytes) / row.median_us;
}
double us_of(const BenchRow& row, const std::string& ceiling) {
  for (const BenchCeiling& found : row.ceilings)
    if (found.name == ceiling) return found.us;
  return BenchRow::kNone;
}

std::string verdict(const BenchRow& row) {
  if (!row.failure.empty()) return row.failure;
  if (row.correct == false) return "WRONG OUTPUT";
  if (row.target == 0) return "";
  const bool reached = row.share(row.ceilings.front()) >= row.target;
  return fmt::format("{} {}", reached ? "reaches" : "BELOW", row.target);
}

std::vector<BenchColumn> columns_of(const BenchRow& row) {
  const auto share = [&](const char* ceiling) {
    return bench_text(us_of(row, ceiling) / row.median_us, "{:.3f}");
  };
  std::vector<BenchColumn> columns = {{"problem", -56, row.op + " " + row.problem},
                                      {"us", 10, bench_text(row.median_us, "{:.2f}")},
                                      {"spread", 6, bench_percent(row.spread)}};
  if (row.op == "tensor_parallel") {
    columns.push_back({"one, us", 10, bench_text(us_of(row, "one"), "{:.2f}")});
    columns.push_back({"speed-up", 8, share("one")});
    columns.push_back({"sum, us", 8, bench_text(us_of(row, "sum"), "{:.2f}")});
  } else if (row.op == "latency") {
    columns.push_back({"first, ms", 9, bench_text(us_of(row, "first") / 1000, "{:.1f}")});
  } else {
    columns.push_back({"GB/s", 7, row.read_bytes == 0 ? "-" : bench_text(gb_per_s(row), "{:.1f}")});
    for (const char* ceiling : kCeilings) columns.push_back({ceiling, 6, share(ceiling)});
  }
  columns.push_back({"kernel", -20, row.sku.kernel.empty() ? "-" : row.sku.kernel});
  columns.push_back({"", -1, verdict(row)});
  return columns;
}

Json row_json(const BenchRow& row, const std::string& device) {
  Json json = {{"op", row.op},
               {"problem", row.problem},
               {"device", device},
               {"kernel", row.sku.kernel},
               {"backend", row.sku.backend},
               {"failure", row.failure},
               {"median_us", bench_number(row.median_us)},
               {"spread", bench_number(row.spread)},
               {"read_bytes", row.read_bytes},
               {"write_bytes", row.write_bytes},
               {"gb_per_s", bench_number(gb_per_s(row))},
               {"ceiling", nullptr},
               {"ceiling_us", nullptr},
               {"share", nullptr},
               {"ceilings", Json::object()},
               {"target", row.target},
               {"correct", nullptr}};
  if (!row.ceilings.empty()) {
    const BenchCeiling& first = row.ceilings.front();
    json["ceiling"] = first.name;
    json["ceiling_us"] = bench_number(first.us);
    json["share"] = bench_number(row.share(first));
  }
  for (const BenchCeiling& ceiling : row.ceilings) json["ceilings"][ceiling.name] = bench_number(ceiling.us);
  if (row.correct) json["correct"] = *row.correct;
  return json;
}

// What is measured beside operations.
constexpr const char* kOthers[][2] = {
    {"qgemm", "products with packed weights (docs/qgemm.md)"},
    {"latency", "CUDA: the host's time for the first plan of a kernel, for later plans, and for a run"},
    {"memory", "bare reads and copies"},
    {"checkpoint", "quantize of a checkpoint of 2 GiB"},
    {"tensor_parallel", "CUDA: layers of llama-70b, cut among several devices"}};

std::string known_ops() {
  std::string known = "all";
  for (const BenchOp& op : bench_ops()) known += ", " + op.name;
  for (const auto& other : kOthers) known += fmt::format(", {}", other[0]);
  return known;
}

// The one that is measured by itself; empty: operations.
std::string alone(const BenchArguments& arguments) {
  for (const auto& [name, what] : kOthers) {
    if (std::ranges::find(arguments.ops, name) == arguments.ops.end()) continue;
    if (arguments.ops.size() > 1)
      throw Error(ErrorCode::usage, fmt::format("bench: {} goes with no other operation", name));
    return name;
  }
  return "";
}

BenchSelection selection_of(const BenchArguments& arguments) {
  BenchSelection selection{arguments.ops, arguments.formats, arguments.dtypes, arguments.filter};
  const bool all = std::ranges::find(arguments.ops, "all") != arguments.ops.end();
  if (all) selection.ops.clear();
  const std::vector<BenchOp> known = bench_ops();
  for (const std::string& op : selection.ops)
    if (std::ranges::find(known, op, &BenchOp::name) == known.end())
      throw Error(ErrorCode::usage,
                  fmt::format("OP: expected one of {}, got '{}'", known_ops(), printable(op)));
  return selection;
}

void list(DeviceKind device, const BenchArguments& arguments, std::string& text, Json& document) {
  Json rows = Json::array();
  if (arguments.ops.empty()) {
    const auto add = [&](const std::string& name, const std::string& what) {
      text += fmt::format("{:<31} {}\n", name, what);
      rows.push_back({{"op", name}, {"what", what}});
    };
    for (const BenchOp& op : bench_ops()) add(op.name, op.what);
    for (const auto& [name, what] : kOthers) add(name, what);
  } else if (const std::string other = alone(arguments); !other.empty()) {
    throw Error(ErrorCode::usage,
                fmt::format("bench: {} has no list of problems: its options choose them", other));
  } else {
    for (const std::string& problem : bench_problems(device, selection_of(arguments))) {
      text += problem + "\n";
      rows.push_back({{"problem", problem}});
    }
  }
  document["rows"] = std::move(rows);
}

// Lines are printed as they come: who stops it early has what there is.
void measure(std::span<const Device> devices, const std::string& what, const BenchArguments& arguments,
             bool print, Json& document) {
  const Device device = devices.front();
  const auto say = [&](const std::string& text) {
    if (print) write_stdout(text);
  };
  say(describe_bench_device(device, arguments, document));
  document["rows"] = Json::array();
  int num_wrong = 0, num_late = 0, num_failed = 0;
  const auto report = [&](const BenchRow& row) {
    if (document["rows"].empty()) say(bench_line(columns_of(row), true));
    say(bench_line(columns_of(row), false));
    document["rows"].push_back(row_json(row, document["device"]));
    num_wrong += row.correct == false;
    num_failed += !row.failure.empty();
    num_late += arguments.limit_ms > 0 && us_of(row, "first") > 1000 * arguments.limit_ms;
    return !is_cancelled();
  };
  const BenchOptions options{arguments.quick, arguments.num_threads};
  if (what == "latency") {
    bench_latency(device, report);
  } else if (what == "tensor_parallel") {
    std::vector<int64_t> m = arguments.m;
    if (m.empty()) m = {1, 16, 128};
    bench_tensor_parallel(devices, m, options, report);
  } else if (what == "memory") {
    bench_memory(device, options, report);
  } else if (what == "checkpoint") {
    std::vector<std::string> formats = arguments.formats;
    if (formats.empty()) formats = {"nf4", "int4", "affine4"};
    bench_checkpoint(device, arguments.directory, formats, options, report);
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    document["peak_rss_bytes"] = int64_t{1024} * usage.ru_maxrss;
    say(summary_line("peak RSS", format_bytes(uint64_t{1024} * static_cast<uint64_t>(usage.ru_maxrss))));
  } else {
    bench(device, selection_of(arguments), options, report);
  }
  const size_t num_rows = document["rows"].size();
  if (num_wrong > 0)
    throw Error(ErrorCode::verify,
                fmt::format("the output of {} of {} problems is wrong", num_wrong, num_rows));
  if (num_failed > 0)
    throw Error(ErrorCode::device, fmt::format("{} of {} problems were not measured", num_failed, num_rows));
  if (num_late > 0)
    throw Error(ErrorCode::verify, fmt::format("the first of {} of {} plans took longer than {} ms", num_late,
                                               num_rows, arguments.limit_ms));
}

}  // namespace

std::string bench_line(const std::vector<BenchColumn>& columns, bool title) {
  std::string line;
  for (const BenchColumn& column : columns) {
    const std::string text = title ? column.title : column.text;
    line += column.width < 0 ? fmt::format("{:<{}} ", text, -column.width)
                             : fmt::format("{:>{}} ", text, column.width);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

Json bench_number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }
std::string bench_text(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "-";
}
std::string bench_percent(double part) { return bench_text(100 * part, "{:.1f}%"); }

std::string describe_bench_device(Device device, const BenchArguments& arguments, Json& document) {
  if (device.kind == DeviceKind::cpu) {
    const SystemInfo system = system_info();
    const int num_threads = arguments.num_threads > 0 ? arguments.num_threads : system.num_threads;
    document["device"] = "cpu";
    document["simd_target"] = system.simd_target;
    document["num_threads"] = num_threads;
    return summary_line("device", fmt::format("cpu ({}, {} threads)", system.simd_target, num_threads));
  }
  const CublasInfo cublas = cublas_info();
  const CudaInfo cuda = cuda_info();
  std::string name;
  for (const CudaDevice& found : cuda.devices)
    if (found.index == device.index) name = found.name;
  document["device"] = name;
  document["driver_version"] = cuda.driver_version;
  document["nvrtc_version"] = cuda.nvrtc_version;
  document["cublas"] = cublas.path;
  document["cublas_problem"] = cublas.problem;
  return summary_line("device", fmt::format("{} ({})", to_string(device), name)) +
         summary_line("cuBLAS", cublas.problem.empty() ? cublas.path : cublas.problem);
}

void add_bench_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App& sub = *app.add_subcommand("bench", "Measure operations on this machine");
  const auto add = [&](const std::string& name, auto& value, const char* placeholder,
                       const std::string& help) {
    return sub.add_option(name, value, help)->option_text(placeholder);
  };
  const auto add_list = [&](const std::string& name, auto& values, const char* placeholder,
                            const std::string& help) {
    return add(name, values, placeholder, help)->delimiter(',')->allow_extra_args(false);
  };
  const auto of_qgemm = [](CLI::Option* option) { option->group("qgemm"); };
  add("OP", arguments->ops, "OP...", "What to measure: " + known_ops());
  sub.add_flag("--list", arguments->list, "Only print the operations, or with OP its problems");
  add("--device", arguments->device, "DEVICE",
      "cuda (default), cuda:N or cpu; tensor_parallel: several, such as cuda:all");
  add("--threads", arguments->num_threads, "INT", "Number of CPU threads (default 0: all)")
      ->check(CLI::NonNegativeNumber);
  add_list("--format", arguments->formats, "FORMAT,...",
           "Formats of the weights (default: all; qgemm: nf4,int4; on CUDA also nf4 with --double-quant and "
           "affine4)");
  add_list(
      "--dtype", arguments->dtypes, "DTYPE,...",
      "Dtypes of the values (default: all; qgemm, which takes bf16, f16 and f32: bf16; on CUDA bf16,f16)");
  add("--filter", arguments->filter, "TEXT", "Only problems whose line in --list contains TEXT");
  sub.add_flag("--quick", arguments->quick, "Fewer repetitions");
  add("--limit-ms", arguments->limit_ms, "MS", "latency: fail if a first plan takes longer")
      ->check(CLI::PositiveNumber);
  add("--directory", arguments->directory, "DIR", "checkpoint: where to make it (default /dev/shm)");
  of_qgemm(
      add_list("--shape", arguments->shapes, "NxK,...",
               "Shapes of the weights (default 4096x4096,14336x4096; on CUDA also 8192x8192,28672x8192)"));
  of_qgemm(add_list("--model", arguments->models, "MODEL,...",
                    "The linear layers of llama-8b, llama-32b or llama-70b, instead of the default shapes"));
  of_qgemm(add_list(
      "--m", arguments->m, "M,...",
      "Rows of x (default: 1, 2, 4, ... 8192; on the CPU to 512); tensor_parallel too (1, 16, 128)"));
  of_qgemm(add("--direction", arguments->direction, "WHICH", "forward, transposed or both (default)")
               ->check(CLI::IsMember({"forward", "transposed", "both"})));
  of_qgemm(
      add_list("--group-size", arguments->group_sizes, "SIZE,...",
               "How many columns share a scale: a number, channel (a row) or tensor (default 64; int 128)"));
  of_qgemm(add("--scale-dtype", arguments->scale_dtype, "DTYPE",
               "Dtype of the scales: f16 (default), bf16 or f32"));
  of_qgemm(sub.add_flag("--double-quant", arguments->double_quant, "With --format: scales of 8 bits"));
  of_qgemm(sub.add_flag("--asymmetric", arguments->asymmetric, "With --format: integers with a zero point"));
  of_qgemm(add("--variant", arguments->variant, "NAME",
               "The variant to measure, as --explain names it (default: the first that takes the case)"));
  of_qgemm(add("--math", arguments->math, "WHICH",
               "auto (default), tf32, f64 or int8 (the CPU, forward), as QgemmMath has them"));
  of_qgemm(add("--lora", arguments->lora, "RANK",
               "CUDA: also measure with a low-rank adapter: two thin products by cuBLAS, then the product "
               "adds to them")
               ->check(CLI::NonNegativeNumber));
  of_qgemm(add("--experts", arguments->experts, "INT",
               "Products with the weights of so many experts; --m: tokens (default 1, 4, 16, ... 4096)")
               ->check(CLI::PositiveNumber));
  of_qgemm(add("--top-k", arguments->top_k, "INT", "With --experts: of a token (default 1)")
               ->check(CLI::PositiveNumber));
  of_qgemm(add("--skew", arguments->skew, "NUMBER",
               "With --experts: the i-th is chosen in proportion to i^-NUMBER (default 0: all alike)")
               ->check(CLI::NonNegativeNumber));
  of_qgemm(
      add("--y", arguments->y, "WHAT",
          "With --experts, a row of y: slots (default: of each slot), sum (those of a token, by its routing "
          "weights) or swiglu (of each slot, with --direction forward)")
          ->check(CLI::IsMember({"slots", "sum", "swiglu"})));
  of_qgemm(sub.add_flag("--cliffs", arguments->cliffs,
                        "Times many M and odd shapes against cuBLAS and the bare read, and against M - 1; "
                        "values are not checked. Has other defaults, see docs/qgemm.md"));
  of_qgemm(sub.add_flag("--explain", arguments->explain,
                        "Only print which variant takes each case, and why the others do not"));
  of_qgemm(add("--view", arguments->view, "LAYOUT",
               "With --explain: the weight is not packed but in this layout, such as bitsandbytes"));
  add_report_options(sub, command);
  sub.footer(
      "The JSON report has a line for the run, then one for each row. docs/benchmarks.md says how it is "
      "measured.");
  sub.callback([arguments, &command, &sub] {
    if (arguments->ops.empty() && !arguments->list) throw CLI::RequiredError("OP");
    command.name = "bench";
    command.is_json_lines = true;
    std::string given;  // an option that only qgemm has
    for (const CLI::Option* option : sub.get_options())
      if (option->get_group() == "qgemm" && option->count() > 0) given = option->get_name();
    command.run = [arguments, &command, given](std::string& text, Json& document) {
      if (arguments->list) {
        const Device device = parse_device(arguments->device);
        return list(device.kind, *arguments, text, document);
      }
      const std::string what = alone(*arguments);
      if (what.empty()) selection_of(*arguments);
      if (what != "qgemm" && !given.empty() && (what != "tensor_parallel" || given != "--m"))
        throw Error(ErrorCode::usage, fmt::format("{}: only with qgemm", given));
      const std::vector<Device> devices = select_devices(arguments->device).devices;
      if (devices.empty() || (devices.size() > 1 && what != "tensor_parallel"))
        throw Error(ErrorCode::usage, fmt::format("--device: bench takes one, got {}", arguments->device));
      const Device device = devices.front();
      if (device.kind != DeviceKind::cpu && arguments->num_threads != 0)
        throw Error(ErrorCode::usage,
                    fmt::format("--threads: only with --device cpu, got --device {}", arguments->device));
      if (what.empty()) bench_problems(device.kind, selection_of(*arguments));  // there are some
      document["ops"] = arguments->ops;
      const bool print = command.json_path != "-";
      if (what == "qgemm") return run_qgemm_bench(device, *arguments, print, text, document);
      measure(devices, what, *arguments, print, document);
    };
  });
}

}  // namespace halfbyte::cli
