// How fast quantize and dequantize are on a CUDA device, against what its memory gives in the same process.
//   halfbyte_cuda_bench [--json FILE] [--filter TEXT]
//     Times each case (those whose name contains TEXT), checks its output, prints a table. Exit code 1 where
//     an output is wrong or a rate is below its target.
//   halfbyte_cuda_bench --first-calls LIMIT_MS [--json FILE]
//     Times how long a kernel takes to get: the first time in this process (with an empty cache directory: to
//     compile; the second time: to load), then from memory. Exit code 1 above LIMIT_MS, or 5 us from memory.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/cuda_affine_bench.h"
#include "bench/cuda_fake_quantize_bench.h"
#include "bench/cuda_linear_bench.h"
#include "bench/cuda_lsq_bench.h"
#include "bench/cuda_observe_bench.h"
#include "bench/cuda_timing.h"
#include "core/format.h"
#include "halfbyte/device.hpp"
#include "ops/dequantize/dequantize_cuda.h"
#include "ops/quantize/quantize_cuda.h"

namespace halfbyte {
namespace {

using namespace bench;
using nlohmann::json;

// A quantized matrix in one array: on the device or the host.
struct Layout {
  QuantSpec spec;
  int64_t rows, cols;
  int64_t scales, zeros, biases, num_bytes;  // where they begin; the codes are first
  Layout(const QuantSpec& s, int64_t r, int64_t c) : spec(s), rows(r), cols(c) {
    const QuantShape shape = quant_shape(s, r, c);
    const auto aligned = [](int64_t n) { return (n + 255) / 256 * 256; };
    const int64_t scale_bytes = shape.num_groups * size_of(s.scale_dtype);
    scales = aligned(shape.code_bytes());
    zeros = scales + aligned(scale_bytes);
    biases = zeros + (has_zeros(s) ? aligned(shape.num_groups) : 0);
    num_bytes = biases + (has_biases(s) ? aligned(scale_bytes) : 0);
    payload =
        shape.code_bytes() + scale_bytes * (has_biases(s) ? 2 : 1) + (has_zeros(s) ? shape.num_groups : 0);
  }
  int64_t payload;  // bytes without the gaps
  QuantizedView view(void* memory) const {
    auto* const p = static_cast<uint8_t*>(memory);
    return {spec,
            rows,
            cols,
            p,
            p + scales,
            has_zeros(spec) ? p + zeros : nullptr,
            has_biases(spec) ? p + biases : nullptr};
  }
};

// ---- Cases

struct Case {
  std::string name;
  QuantSpec spec;
  DType dtype = DType::bf16;
  double target = 0;  // least ratio; 0: for information
};

std::vector<Case> make_cases(int64_t rows) {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, const QuantSpec& spec, double target,
                       DType dtype = DType::bf16) {
    cases.push_back({name, spec, dtype, target});
  };
  QuantSpec nf4, int4{.format = Format::int4, .scale_rule = ScaleRule::half_range, .scale_dtype = DType::f16},
      affine4{.format = Format::affine4, .scale_rule = ScaleRule::minmax, .scale_dtype = DType::f16};
  for (const int64_t group_size : {64, 128}) {
    nf4.group_size = int4.group_size = affine4.group_size = group_size;
    add("nf4", nf4, 0.9);
    add("int4", int4, 0.9);
    add("affine4", affine4, 0.9);
    for (const FormatInfo& format : all_formats()) {
      QuantSpec spec{.format = format.format, .group_size = group_size, .scale_rule = format.default_rule};
      if (format.kind != FormatKind::table) spec.scale_dtype = DType::f16;
      if (format.format == Format::lut4)
        spec.table = {-1,    -0.7f, -0.53f, -0.4f, -0.29f, -0.19f, -0.1f, 0,
                      0.08f, 0.16f, 0.25f,  0.34f, 0.44f,  0.57f,  0.73f, 0.95f};
      if (spec.format == Format::nf4 || spec == affine4) continue;
      add(spec.format == Format::int4 ? "int4_absmax" : format.name, spec, 0.8);
    }
    QuantSpec asymmetric = int4, edge = affine4;
    asymmetric.asymmetric = true;
    asymmetric.scale_rule = ScaleRule::minmax;
    add("int4_asymmetric", asymmetric, 0.8);
    edge.scale_rule = ScaleRule::mlx_edge;
    edge.code_scale = CodeScale::unrounded;
    add("affine4_mlx_edge", edge, 0.8);
  }
  if (rows > 8192) return cases;
  for (QuantSpec spec : {nf4, int4}) {
    const std::string name = info(spec.format).name;
    for (const int64_t group_size : {32, 256, 100}) {
      spec.group_size = group_size;
      add(name, spec, 0);
    }
    spec.granularity = Granularity::channel;
    add(name, spec, 0);
    spec.granularity = Granularity::tensor;
    add(name, spec, 0);
  }
  nf4.group_size = 64;
  add("nf4_f16", nf4, 0, DType::f16);
  add("nf4_f32", nf4, 0, DType::f32);
  return cases;
}

std::string group_text(const QuantSpec& spec) {
  return spec.granularity == Granularity::group ? fmt::format("g{}", spec.group_size)
                                                : to_string(spec.granularity);
}

std::string label(const Case& test) { return fmt::format("{} {}", test.name, group_text(test.spec)); }

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {}

  void run(int64_t rows, int64_t cols) {
    rows_ = rows;
    cols_ = cols;
    const int64_t most_bytes = rows * cols * 4;
    std::vector<Memory> values, quantized;
    for (int i = 0; i < kSets; ++i) {
      values.emplace_back(kCuda, most_bytes);
      quantized.emplace_back(kCuda, most_bytes);
    }
    copy_gbs_ = copy_rate(values, quantized);
    fmt::print("\n[{}, {}]: copy {:.0f} GB/s (read and written)\n{:<34} {:>9} {:>8} {:>8} {:>8}\n", rows,
               cols, copy_gbs_, "", "us", "GB/s", "of copy", "of move");
    DType filled = DType::u8;
    std::vector<uint8_t> pool;
    for (const Case& test : make_cases(rows)) {
      if (!is_chosen(test)) continue;
      if (test.dtype != filled) {
        pool = make_pool(test.dtype);
        for (const Memory& memory : values) fill(memory, pool);
        filled = test.dtype;
      }
      run(test, values, quantized, pool);
    }
  }
  bool passed() const { return passed_; }
  const json& results() const { return results_; }

 private:
  bool is_chosen(const Case& test) const {
    return fmt::format("{} {}x{}", label(test), rows_, cols_).find(filter_) != std::string::npos;
  }

  // GB/s of the faster of a copy by the driver and by a kernel.
  double copy_rate(const std::vector<Memory>& from, const std::vector<Memory>& to) const {
    const int64_t num_bytes = rows_ * cols_ * 2;
    std::vector<Move> moves;
    for (size_t i = 0; i < kSets; ++i) moves.push_back({from[i].data(), to[i].data()});
    const std::vector<uint8_t> pool = make_pool(DType::bf16);
    for (const Memory& memory : from) fill(memory, pool);
    const double driver = timer_.time([&](int i) {
      const auto k = static_cast<size_t>(i);
      copy(kCuda, to[k].data(), from[k].data(), num_bytes);
    });
    return 2e-3 * static_cast<double>(num_bytes) /
           std::min(driver, time_move(timer_, moves, num_bytes, num_bytes));
  }

  void report(const char* op, const Case& test, double us, double move_us, int64_t num_bytes, bool correct) {
    const double gbs = 1e-3 * static_cast<double>(num_bytes) / us, of_copy = gbs / copy_gbs_,
                 of_move = move_us / us;
    const double ratio = std::strcmp(op, "quantize") == 0 ? of_copy : of_move;
    const bool passed = correct && ratio >= test.target;
    passed_ = passed_ && passed;
    fmt::print("{:<34} {:>9.1f} {:>8.0f} {:>8.3f} {:>8.3f}  {}\n", fmt::format("{} {}", op, label(test)), us,
               gbs, of_copy, of_move,
               !correct           ? "WRONG OUTPUT"
               : test.target == 0 ? ""
               : passed           ? fmt::format("pass {}", test.target)
                                  : fmt::format("BELOW {}", test.target));
    std::fflush(stdout);
    results_.push_back({{"op", op},
                        {"format", test.name},
                        {"dtype", to_string(test.dtype)},
                        {"group", group_text(test.spec)},
                        {"scale_dtype", to_string(test.spec.scale_dtype)},
                        {"rows", rows_},
                        {"cols", cols_},
                        {"us", us},
                        {"gb_per_s", gbs},
                        {"copy_gb_per_s", copy_gbs_},
                        {"move_us", move_us},
                        {"of_copy", of_copy},
                        {"of_move", of_move},
                        {"target", test.target},
                        {"correct", test.spec.granularity == Granularity::tensor ? json() : json(correct)},
                        {"passed", passed}});
  }

  void run(const Case& test, const std::vector<Memory>& values, const std::vector<Memory>& quantized,
           const std::vector<uint8_t>& pool) {
    const Layout layout(test.spec, rows_, cols_);
    const int64_t value_bytes = rows_ * cols_ * size_of(test.dtype);
    const auto matrix = [&](const Memory& memory) {
      return TensorView{memory.data(), test.dtype, {rows_, cols_}, {}, kCuda};
    };
    std::vector<QuantizeProblem> problems;
    std::vector<std::shared_ptr<const QuantizeCuda>> selected;
    std::vector<Memory> workspaces;
    std::vector<Move> in, out;
    for (size_t i = 0; i < kSets; ++i) {
      problems.push_back(
          make_quantize_problem(matrix(values[i]), layout.view(quantized[i].data()), {}, nullptr));
      selected.push_back(select_quantize_cuda(problems[i]));
      workspaces.emplace_back(kCuda, workspace_bytes(*selected[i]));
      in.push_back({values[i].data(), quantized[i].data()});
      out.push_back({quantized[i].data(), values[i].data()});
    }
    const double move_in = time_move(timer_, in, value_bytes, layout.payload);
    poison(quantized[0].data(), layout.num_bytes);
    const double quantize_us = timer_.time([&](int set) {
      const auto i = static_cast<size_t>(set);
      run_quantize_cuda(*selected[i], problems[i], workspaces[i].data());
    });
    const bool quantized_well = check_quantized(layout, quantized[0], pool, test.dtype);
    report("quantize", test, quantize_us, move_in, value_bytes + layout.payload, quantized_well);

    // Into the buffers of x, which are filled again.
    poison(values[0].data(), value_bytes);
    const double dequantize_us = timer_.time([&](int i) {
      dequantize(layout.view(quantized[static_cast<size_t>(i)].data()),
                 matrix(values[static_cast<size_t>(i)]));
    });
    const bool dequantized_well = check_dequantized(layout, quantized[0], values[0], test.dtype);
    const double move_out = time_move(timer_, out, layout.payload, value_bytes);
    for (const Memory& memory : values) fill(memory, pool);
    report("dequantize", test, dequantize_us, move_out, value_bytes + layout.payload, dequantized_well);
  }

  // Rows that are compared with the CPU: first and last.
  static constexpr int64_t kCheckedRows = 32;

  bool check_quantized(const Layout& all, const Memory& memory, const std::vector<uint8_t>& pool,
                       DType dtype) const {
    if (all.spec.granularity == Granularity::tensor) return true;  // its scale is not that of some rows
    const Layout part(all.spec, kCheckedRows, cols_);
    for (const int64_t row : {int64_t{0}, rows_ - kCheckedRows}) {
      std::vector<uint8_t> x, expected(static_cast<size_t>(part.num_bytes), kPoison);
      const int64_t size = size_of(dtype);
      for (int64_t i = row * cols_; i < (row + kCheckedRows) * cols_; ++i) {
        const uint8_t* const value = pool.data() + i % kPool * size;
        x.insert(x.end(), value, value + size);
      }
      quantize({x.data(), dtype, {kCheckedRows, cols_}, {}, {}}, part.view(expected.data()));
      if (rows_of(all, memory, row) != expected) return false;
    }
    return true;
  }
  bool check_dequantized(const Layout& all, const Memory& memory, const Memory& y, DType dtype) const {
    if (all.spec.granularity == Granularity::tensor) return true;
    const Layout part(all.spec, kCheckedRows, cols_);
    const int64_t num_bytes = kCheckedRows * cols_ * size_of(dtype);
    for (const int64_t row : {int64_t{0}, rows_ - kCheckedRows}) {
      std::vector<uint8_t> from = rows_of(all, memory, row), expected(static_cast<size_t>(num_bytes));
      dequantize(part.view(from.data()), {expected.data(), dtype, {kCheckedRows, cols_}, {}, {}});
      if (download(y.data() + row * cols_ * size_of(dtype), num_bytes) != expected) return false;
    }
    return true;
  }
  // kCheckedRows rows from `row` of a quantized matrix, laid out as one of their own.
  std::vector<uint8_t> rows_of(const Layout& all, const Memory& memory, int64_t row) const {
    const Layout part(all.spec, kCheckedRows, cols_);
    const QuantShape shape = quant_shape(all.spec, rows_, cols_);
    std::vector<uint8_t> bytes(static_cast<size_t>(part.num_bytes), kPoison);
    const auto take = [&](int64_t from, int64_t to, int64_t row_bytes) {
      const auto piece = download(memory.data() + from + row * row_bytes, kCheckedRows * row_bytes);
      std::copy(piece.begin(), piece.end(), bytes.begin() + to);
    };
    const int64_t scale_bytes = shape.groups_per_row * size_of(all.spec.scale_dtype);
    take(0, 0, shape.row_bytes);
    take(all.scales, part.scales, scale_bytes);
    if (has_zeros(all.spec)) take(all.zeros, part.zeros, shape.groups_per_row);
    if (has_biases(all.spec)) take(all.biases, part.biases, scale_bytes);
    return bytes;
  }

  std::string filter_;
  Timer timer_;
  int64_t rows_ = 0, cols_ = 0;
  double copy_gbs_ = 0;
  bool passed_ = true;
  json results_ = json::array();
};

// ---- First calls

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

bool time_first_calls(double limit_ms, json& results) {
  const cuda::Context& context = cuda::context(kCuda.index);
  cuda::get_kernel(context, value_range_kernel(DType::f64));  // NVRTC loads its parts with the first program
  alignas(64) static uint8_t memory[64];                      // never accessed
  std::vector<std::pair<std::string, cuda::KernelSpec>> kernels;
  for (const Case& test : make_cases(28672)) {
    if (test.spec.group_size != 64) continue;
    for (const DType dtype : {DType::bf16, DType::f64}) {
      const QuantizedView view{test.spec,
                               64,
                               4096,
                               memory,
                               memory,
                               has_zeros(test.spec) ? memory : nullptr,
                               has_biases(test.spec) ? memory : nullptr};
      const QuantizeProblem problem =
          make_quantize_problem({memory, dtype, {64, 4096}, {}, kCuda}, view, {}, nullptr);
      kernels.emplace_back(fmt::format("quantize {} {}", test.name, to_string(dtype)),
                           quantize_kernel(problem));
      kernels.emplace_back(fmt::format("dequantize {} {}", test.name, to_string(dtype)),
                           dequantize_kernel(make_dequantize_problem(view, memory, dtype)));
    }
  }
  double longest = 0, sum = 0;
  std::string slowest;
  for (const auto& [name, spec] : kernels) {
    const auto start = std::chrono::steady_clock::now();
    cuda::get_kernel(context, spec);
    const double ms = 1e3 * seconds_since(start);
    sum += ms;
    if (ms > longest) {
      longest = ms;
      slowest = name;
    }
  }
  constexpr int kCalls = 1000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i)
    for (const auto& [name, spec] : kernels) cuda::get_kernel(context, spec);
  const double memory_us = 1e6 * seconds_since(start) / kCalls / static_cast<double>(kernels.size());
  const double mean = sum / static_cast<double>(kernels.size());
  const bool passed = longest < limit_ms && memory_us < 5;
  fmt::print(
      "{} kernels: first call mean {:.1f} ms, longest {:.1f} ms ({}), limit {} ms; from memory {:.2f} us, "
      "limit 5 us: {}\n",
      kernels.size(), mean, longest, slowest, limit_ms, memory_us, passed ? "pass" : "FAIL");
  results = {{"kernels", kernels.size()}, {"mean_ms", mean},      {"longest_ms", longest},
             {"longest", slowest},        {"limit_ms", limit_ms}, {"memory_us", memory_us},
             {"passed", passed}};
  return passed;
}

int run(int argc, char** argv) {
  std::string json_path, filter;
  double limit_ms = 0;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--json" && !value.empty()) {
      json_path = value;
    } else if (option == "--filter" && !value.empty()) {
      filter = value;
    } else if (option == "--first-calls" && std::atof(value.c_str()) > 0) {
      limit_ms = std::atof(value.c_str());
    } else {
      fmt::print(stderr, "halfbyte_cuda_bench [--json FILE] [--filter TEXT] [--first-calls LIMIT_MS]\n");
      return 2;
    }
  }
  check_device(kCuda);
  const cuda::Scope scope(cuda::context(kCuda.index));
  json document;
  bool passed = true;
  if (limit_ms > 0) {
    passed = time_first_calls(limit_ms, document);
  } else {
    Bench bench(filter);
    for (const int64_t rows : {8192, 28672}) bench.run(rows, 8192);
    json linear, observe, affine, fake, lsq;
    passed = run_linear_bench(filter, linear);
    passed = run_observe_bench(filter, observe) && passed;
    passed = run_affine_bench(filter, affine) && passed;
    passed = run_fake_quantize_bench(filter, fake) && passed;
    passed = run_lsq_bench(filter, lsq) && passed;
    const CudaInfo found = cuda_info();
    document = {{"device", found.devices[0].name},
                {"driver", found.driver_version},
                {"nvrtc", found.nvrtc_version},
                {"results", bench.results()},
                {"linear", linear},
                {"observe", observe},
                {"affine", affine},
                {"fake_quantize", fake},
                {"lsq", lsq}};
    passed = passed && bench.passed();
    fmt::print("\n{}\n", passed ? "All targets are met." : "Some targets are not met.");
  }
  if (!json_path.empty()) std::ofstream(json_path) << document.dump(1) << '\n';
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace halfbyte

int main(int argc, char** argv) {
  try {
    return halfbyte::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "halfbyte_cuda_bench: {}\n", error.what());
    return 2;
  }
}
