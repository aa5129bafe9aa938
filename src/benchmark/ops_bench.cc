#include <cmath>
#include <map>
#include <random>

#include "benchmark/harness.h"
#include "benchmark/problem.h"
#include "core/arithmetic.h"
#include "core/checks.h"
#include "formats/convert.h"

namespace halfbyte {
namespace {

struct OpTable {
  BenchOp op;
  BenchProblems (*problems)(DeviceKind);  // of this op, and of others of its folder
};
const std::vector<OpTable>& tables() {
  static const auto& all = *new std::vector<OpTable>{
      {{"quantize", "packed formats"}, quantize_problems},
      {{"dequantize", "packed formats"}, dequantize_problems},
      {{"quantize_linear", "integers with scale and zero point"}, quantize_linear_problems},
      {{"dequantize_linear", "integers with scale and zero point"}, quantize_linear_problems},
      {{"quantize_linear_backward", "its straight-through gradient"}, quantize_linear_problems},
      {{"fake_quantize", "training: rounded values in place of values"}, fake_quantize_problems},
      {{"fake_quantize_backward", "its gradient, from x or from a mask"}, fake_quantize_problems},
      {{"fake_quantize_learned_backward", "gradients of a learned scale"}, learned_scale_problems},
      {{"observe", "ranges of tensors"}, observe_problems},
      {{"affine_init", "codes, scales and biases of a weight"}, affine_qdq_problems},
      {{"affine_qdq", "codes with trained scales and biases, decoded"}, affine_qdq_problems},
      {{"affine_qdq_backward", "gradients of scales and biases"}, affine_qdq_problems},
      {{"reorder", "weights of other layouts to the packed form and back"}, reorder_problems},
  };
  return all;
}

bool allows(const std::vector<std::string>& words, const std::string& word) {
  return words.empty() || std::ranges::find(words, word) != words.end();
}

BenchProblems selected(DeviceKind device, const BenchSelection& selection) {
  for (const std::string& name : selection.ops) {
    std::string known;
    for (const OpTable& table : tables()) known += (known.empty() ? "" : ", ") + table.op.name;
    HALFBYTE_CHECK(std::ranges::any_of(tables(), [&](const OpTable& table) { return table.op.name == name; }),
                   usage, "bench: expected one of {}, got '{}'", known, name);
  }
  BenchProblems problems;
  for (const OpTable& table : tables()) {
    if (!allows(selection.ops, table.op.name)) continue;
    for (BenchProblem& p : table.problems(device))
      if (p.op == table.op.name && allows(selection.formats, p.format) &&
          allows(selection.dtypes, to_string(p.dtype)) &&
          (p.op + " " + p.name).find(selection.filter) != std::string::npos)
        problems.push_back(std::move(p));
  }
  HALFBYTE_CHECK(!problems.empty(), usage, "bench: no problem is selected");
  return problems;
}

constexpr uint8_t kPoison = 0xA5;
constexpr int kSets = 3;
constexpr int kLaunches = 21;                           // of CUDA, timed as one
constexpr int64_t kRotationBytes = int64_t{512} << 20;  // of the CPU
// What is compared on the CPU takes as long as it is large.
constexpr int64_t kMostCheckedBytes = int64_t{576} << 20;

void store(double value, DType dtype, uint8_t* to) {
  const auto put = [&](auto v) { std::memcpy(to, &v, sizeof v); };
  switch (dtype) {
    case DType::f64:
      return put(value);
    case DType::f32:
      return put(static_cast<float>(value));
    case DType::f16:
      return put(formats::to_f16(static_cast<float>(value)));
    case DType::bf16:
      return put(formats::to_bf16(static_cast<float>(value)));
    case DType::i32:
      return put(static_cast<int32_t>(std::lround(value)));
    default:  // of one byte, or two codes
      return put(static_cast<uint8_t>(std::lround(value)));
  }
}

class OpsBench {
 public:
  OpsBench(Device device, const BenchOptions& options) : harness_(device, options), device_(device) {}

  BenchRow run(const BenchProblem& problem) {
    BenchRow row;
    row.op = problem.op;
    row.problem = problem.name;
    row.read_bytes = problem.read_bytes;
    row.write_bytes = problem.write_bytes;
    row.target = device_.kind == DeviceKind::cuda ? problem.target : 0;
    try {
      measure(problem, row);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::device && error.code() != ErrorCode::usage) throw;
      row.failure = error.what();
      harness_.stream().synchronize();
    }
    return row;
  }

 private:
  const std::vector<uint8_t>& pool(const BenchFill& fill) {
    std::vector<uint8_t>& bytes = pools_[fill];
    if (!bytes.empty()) return bytes;
    std::mt19937_64 random(1);
    if (fill.kind == BenchFill::poison) {
      bytes.assign(size_t{1} << 20, kPoison);
      return bytes;
    }
    const bool is_bytes = fill.kind == BenchFill::random;
    const auto size = static_cast<size_t>(is_bytes || is_packed(fill.dtype) ? 1 : size_of(fill.dtype));
    bytes.resize(static_cast<size_t>(kBenchPoolValues) * size);
    std::normal_distribution<float> normal(0, 0.02f);
    for (size_t i = 0; i < bytes.size(); i += size) {
      if (is_bytes) {
        bytes[i] = static_cast<uint8_t>(random());
      } else if (fill.kind == BenchFill::normal) {
        store(static_cast<double>(normal(random)), fill.dtype, &bytes[i]);
      } else {
        const double part = static_cast<double>(random() >> 11) * 0x1p-53;
        store(fill.low + (fill.high - fill.low) * part, fill.dtype, &bytes[i]);
      }
    }
    return bytes;
  }

  std::vector<std::byte*> arrays_at(const BenchProblem& problem, std::byte* data) const {
    std::vector<std::byte*> arrays;
    for (const BenchProblem::Array& array : problem.arrays) {
      arrays.push_back(data);
      data += bench_padded(array.num_bytes);
    }
    return arrays;
  }

  void measure(const BenchProblem& problem, BenchRow& row) {
    int64_t set_bytes = 0;
    for (const BenchProblem::Array& array : problem.arrays) set_bytes += bench_padded(array.num_bytes);
    const bool cuda = device_.kind == DeviceKind::cuda;
    const auto num_sets =
        cuda ? kSets : static_cast<int>(std::clamp<int64_t>(ceil_div(kRotationBytes, set_bytes), 1, kSets));
    arena_.reserve(device_, num_sets * set_bytes);
    std::vector<BenchRun> runs;
    std::vector<Move> moves, copies;
    std::vector<const void*> reads;
    int64_t workspace_bytes = 0;
    for (int set = 0; set < num_sets; ++set) {
      const std::vector<std::byte*> arrays = arrays_at(problem, arena_.at(set, set_bytes));
      const BenchMemory memory{device_, arrays};
      if (set == 0)
        fill(harness_, problem, memory);
      else
        copy(device_, arrays[0], arena_.at(0, set_bytes), set_bytes, harness_.stream().handle());
      runs.push_back(problem.bind(memory, harness_.backend().preference()));
      workspace_bytes = std::max(workspace_bytes, runs.back().workspace_bytes);
      reads.push_back(arrays[problem.from]);
    }
    workspace_.reserve(device_, workspace_bytes);
    harness_.stream().synchronize();
    row.sku = runs[0].sku;
    if (cuda) row.correct = check(problem, runs[0], set_bytes);

    const auto launch = [&](int i) {
      runs[static_cast<size_t>(i % num_sets)].run(harness_.stream().handle(), workspace_.memory());
    };
    const BenchBackend& backend = harness_.backend();
    std::vector<std::shared_ptr<Work>> works = {backend.repeat(cuda ? kLaunches : 1, launch)};
    // Several ways each; which is fastest is seen in the same rounds.
    std::vector<std::pair<std::string, size_t>> names;  // with the number of the first work behind
    const auto add = [&](const char* name, const std::vector<std::shared_ptr<Work>>& more) {
      works.insert(works.end(), more.begin(), more.end());
      names.emplace_back(name, works.size());
    };
    const auto whole = [](int64_t num_bytes) { return std::max<int64_t>(num_bytes / 16 * 16, 16); };
    const int64_t read = whole(problem.read_bytes), written = whole(problem.write_bytes),
                  half = whole((problem.read_bytes + problem.write_bytes) / 2);
    // They write to memory of their own: what the op reads stays as it is.
    const int64_t scratch_bytes = bench_padded(std::max(written, problem.has_more_ceilings ? half : 0));
    if (scratch_.reserve(device_, num_sets * scratch_bytes))
      harness_.fill(scratch_.memory().data(), scratch_.memory().num_bytes(), pool({}));
    for (int set = 0; set < num_sets; ++set) {
      moves.push_back({reads[static_cast<size_t>(set)], scratch_.at(set, scratch_bytes)});
      copies.push_back({arena_.at(set, set_bytes), moves.back().to});
    }
    add("move", backend.movers(moves, read, written, kLaunches));
    if (problem.has_more_ceilings && !cuda) {
      add("read", {harness_.fastest(backend.readers(reads, read, kLaunches, false))});
      add("copy", backend.movers(copies, half, half, kLaunches));
    }
    const std::vector<Timing> timings = harness_.medians(works, harness_.rounds());
    row.median_us = timings[0].us;
    row.spread = timings[0].spread;
    size_t first = 1;
    for (const auto& [name, end] : names) {
      double best = timings[first].us;
      for (; first < end; ++first) best = std::min(best, timings[first].us);
      row.ceilings.push_back({name, best});
    }
    if (problem.has_more_ceilings && cuda)
      row.ceilings.push_back({"copy", static_cast<double>(half) / copy_rate(copies, half)});
  }

  // CUDA: bytes a microsecond, of about as many: once for each 64 MiB.
  double copy_rate(const std::vector<Move>& sets, int64_t num_bytes) {
    double& rate = copy_rates_[num_bytes >> 26];
    if (rate > 0) return rate;
    const auto copies = harness_.backend().movers(sets, num_bytes, num_bytes, kLaunches);
    const std::vector<Timing> timings = harness_.medians(copies, harness_.rounds());
    const double us = std::ranges::min_element(timings, {}, &Timing::us)->us;
    return rate = static_cast<double>(num_bytes) / us;
  }

  void fill(const BenchHarness& harness, const BenchProblem& problem, const BenchMemory& memory) {
    for (size_t i = 0; i < problem.arrays.size(); ++i)
      harness.fill(memory.at(i), bench_padded(problem.arrays[i].num_bytes), pool(problem.arrays[i].fill));
    if (problem.prepare) problem.prepare(memory);
  }

  // Two runs here and on the CPU leave the same bytes.
  std::optional<bool> check(const BenchProblem& problem, const BenchRun& run, int64_t set_bytes) {
    if (set_bytes > kMostCheckedBytes) return std::nullopt;
    if (!host_) host_.emplace(Device{}, BenchOptions());
    host_arena_.reserve({}, 2 * set_bytes);
    const std::vector<std::byte*> arrays = arrays_at(problem, host_arena_.at(0, set_bytes));
    const BenchMemory memory{{}, arrays};
    fill(*host_, problem, memory);
    const BenchRun expected = problem.bind(memory, {});
    host_workspace_.reserve({}, expected.workspace_bytes);
    for (int i = 0; i < 2; ++i) {
      run.run(harness_.stream().handle(), workspace_.memory());
      expected.run(nullptr, host_workspace_.memory());
    }
    std::byte* const found = host_arena_.at(1, set_bytes);
    copy(device_, found, arena_.at(0, set_bytes), set_bytes, harness_.stream().handle());
    harness_.stream().synchronize();
    return std::memcmp(found, arrays[0], static_cast<size_t>(set_bytes)) == 0;
  }

  BenchHarness harness_;
  Device device_;
  std::map<BenchFill, std::vector<uint8_t>> pools_;
  std::map<int64_t, double> copy_rates_;
  BenchArena arena_, workspace_, scratch_;
  // CUDA: what is compared.
  std::optional<BenchHarness> host_;
  BenchArena host_arena_, host_workspace_;
};

}  // namespace

std::vector<BenchOp> bench_ops() {
  std::vector<BenchOp> ops;
  for (const OpTable& table : tables()) ops.push_back(table.op);
  return ops;
}

std::vector<std::string> bench_problems(DeviceKind device, const BenchSelection& selection) {
  std::vector<std::string> names;
  for (const BenchProblem& problem : selected(device, selection))
    names.push_back(problem.op + " " + problem.name);
  return names;
}

void bench(Device device, const BenchSelection& selection, const BenchOptions& options,
           const std::function<bool(const BenchRow&)>& progress) {
  HALFBYTE_CHECK(options.num_threads >= 0, usage, "bench: options.num_threads must be >= 0, got {}",
                 options.num_threads);
  check_device(device);
  const BenchProblems problems = selected(device.kind, selection);
  OpsBench bench(device, options);
  for (const BenchProblem& problem : problems)
    HALFBYTE_CHECK(progress(bench.run(problem)), cancelled, "bench: cancelled");
}

}  // namespace halfbyte
