#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "benchmark/harness.h"
#include "core/arithmetic.h"
#include "core/checks.h"
#include "cuda/cublas.h"
#include "formats/convert.h"
#include "halfbyte/bench.hpp"

namespace halfbyte {
namespace {

constexpr int kMostSets = 4096;          // of weights, where they are tiny
constexpr int64_t kCheckedRows = 16;     // of y; at most
constexpr uint8_t kOutputPoison = 0xFF;  // NaN in every dtype

void store_value(float value, DType dtype, void* to) {
  const uint16_t half = dtype == DType::f16 ? formats::to_f16(value) : formats::to_bf16(value);
  if (dtype == DType::f32)
    std::memcpy(to, &value, sizeof value);
  else
    std::memcpy(to, &half, sizeof half);
}
float load(DType dtype, const void* from) {
  float value = 0;
  uint16_t half = 0;
  if (dtype == DType::f32) {
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  std::memcpy(&half, from, sizeof half);
  return dtype == DType::f16 ? formats::f16_to_f32(half) : formats::bf16_to_f32(half);
}

// Of the norm of y: bf16 has 8 bits, f16 11; twice what rounding the weights and y gives. Values of 8 bits
// between -1 and 1 are wrong by 2.3e-3, where their root mean square is 0.5: twice that for x and the weight.
// The error of a few elements of y may by chance be some times that of many.
double error_limit(const QgemmDescriptor& d) {
  const double of_math = d.math == QgemmMath::int8 ? 1.2e-2 : d.math == QgemmMath::tf32 ? 1e-3 : 0;
  const int64_t num_checked = std::min(d.m, kCheckedRows) * (d.transposed ? d.k : d.n);
  const double of_few = 1 + 2 / std::sqrt(static_cast<double>(num_checked));
  return (of_math + (d.dtype == DType::bf16 ? 5e-3 : d.dtype == DType::f16 ? 8e-4 : 1e-5)) * of_few;
}

// A buffer of `bytes` each, of which there are `count`.
struct Sets {
  int64_t bytes = 0;
  int count = 0;
  int64_t all() const { return bytes * count; }
};

class QgemmBench {
 public:
  QgemmBench(Device device, const BenchOptions& options)
      : device_(device),
        harness_(device, options),
        backend_(&harness_.backend()),
        stream_(backend_->stream()),
        times_only_(options.times_only) {
    std::mt19937_64 random(1);
    std::vector<uint64_t> words(static_cast<size_t>(kBenchPoolValues / 8));
    for (uint64_t& word : words) word = random();
    random_bytes_.resize(words.size() * 8);
    std::memcpy(random_bytes_.data(), words.data(), random_bytes_.size());
    pool_.resize(static_cast<size_t>(kBenchPoolValues));
    for (float& value : pool_) value = static_cast<float>(static_cast<int64_t>(random())) * 0x1p-63f;
  }

  QgemmBenchRow run(const QgemmBenchCase& test) {
    QgemmBenchRow row;
    row.test = test;
    const QgemmDescriptor& d = test.descriptor;
    if (!read_ || d.spec != spec_ || d.n != n_ || d.k != k_) prepare_weight(d);
    row.weight_bytes = weight_.bytes;
    row.read_us = read_us_;
    row.read_chained_us = read_chained_us_;
    row.error_limit = error_limit(d);
    noting(row, "", [&] { measure(test, row); });
    return row;
  }

 private:
  // What a case cannot have is noted; what the device cannot do any more shows at once.
  template <class Function>
  void noting(QgemmBenchRow& row, const char* what, const Function& function) {
    try {
      function();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::device && error.code() != ErrorCode::usage) throw;
      row.problem += fmt::format("{}{}{}", row.problem.empty() ? "" : "; ", what, error.what());
      stream_.synchronize();
    }
  }

  // As many buffers as it takes to fill so much memory.
  static Sets sets_of(int64_t bytes, int64_t rotation_bytes, int least, int most) {
    const int64_t each = bench_padded(std::max<int64_t>(bytes, 1));
    return {each, static_cast<int>(std::clamp<int64_t>(ceil_div(rotation_bytes, each), least, most))};
  }
  Sets activation_sets_of(int64_t bytes) const {
    return sets_of(bytes, backend_->activation_rotation_bytes(), 2, weight_.count);
  }
  Sets weight_sets_of(int64_t bytes) const {
    return sets_of(bytes, backend_->weight_rotation_bytes(), 3, kMostSets);
  }

  void fill(const Memory& memory, const std::vector<uint8_t>& pool) const {
    harness_.fill(memory.data(), memory.num_bytes(), pool);
  }
  Memory filled(int64_t num_bytes, const std::vector<uint8_t>& pool) const {
    Memory memory(device_, num_bytes);
    fill(memory, pool);
    return memory;
  }
  // The pool, scaled.
  std::vector<uint8_t> values(DType dtype, float scale, float offset) const {
    const auto size = static_cast<size_t>(size_of(dtype));
    std::vector<uint8_t> bytes(pool_.size() * size);
    for (size_t i = 0; i < pool_.size(); ++i)
      store_value(pool_[i] * scale + offset, dtype, bytes.data() + i * size);
    return bytes;
  }

  // Random codes, other ones in each buffer; scales of 0.005 to 0.015.
  void prepare_weight(const QgemmDescriptor& d) {
    read_.reset();
    references_.clear();
    spec_ = d.spec;
    n_ = d.n;
    k_ = d.k;
    constexpr int64_t kShift = 4096;  // of the codes of a buffer against those of the one before
    const QuantShape shape = quant_shape(spec_, n_, k_);
    weight_ = weight_sets_of(packed_weight_bytes(spec_, n_, k_));
    packed_.reserve(device_, weight_.all());
    const Memory codes = filled(shape.code_bytes() + weight_.count * kShift, codes_without_nan());
    Memory scales, zeros, biases, absmax, map, offset, global_scale;
    if (spec_.double_quant) {
      const auto block = values(DType::f32, 0.001f, 0.005f), mean = values(DType::f32, 0, 0.01f);
      std::vector<uint8_t> entries(256 * sizeof(float));
      std::memcpy(entries.data(), double_quant_map(), entries.size());
      scales = filled(shape.num_groups, random_bytes_);
      absmax = filled((shape.num_groups + kDoubleQuantBlock - 1) / kDoubleQuantBlock * 4, block);
      map = filled(static_cast<int64_t>(entries.size()), entries);
      offset = filled(4, mean);
    } else if (size_of(spec_.scale_dtype) == 1) {
      scales = filled(shape.num_groups, byte_scales());
      if (has_global_scale(spec_)) global_scale = filled(4, values(DType::f32, 0, 2e4f));
    } else {
      scales =
          filled(shape.num_groups * size_of(spec_.scale_dtype), values(spec_.scale_dtype, 0.005f, 0.01f));
    }
    if (has_zeros(spec_)) {
      std::vector<uint8_t> points = random_bytes_;
      for (uint8_t& point : points) point &= static_cast<uint8_t>((1 << info(spec_.format).bits) - 1);
      zeros = filled(shape.num_groups, points);
    }
    if (has_biases(spec_))
      biases =
          filled(shape.num_groups * size_of(spec_.scale_dtype), values(spec_.scale_dtype, 0.05f, -0.08f));
    for (int set = 0; set < weight_.count; ++set) {
      WeightView view{.spec = spec_, .rows = n_, .cols = k_};
      view.codes = codes.data() + set * kShift;
      view.scales = scales.data();
      view.zeros = zeros.data();
      view.biases = biases.data();
      view.absmax = reinterpret_cast<float*>(absmax.data());
      view.map = reinterpret_cast<float*>(map.data());
      view.offset = reinterpret_cast<float*>(offset.data());
      view.global_scale = reinterpret_cast<float*>(global_scale.data());
      view.device = device_;
      reorder(view, packed(set), {.stream = stream_.handle()});
    }
    stream_.synchronize();
    find_fastest_read();
  }
  std::vector<uint8_t> codes_without_nan() const {
    std::vector<uint8_t> codes = random_bytes_;
    if (info(spec_.format).kind == FormatKind::floating)
      for (uint8_t& code : codes) code &= 0xF7;  // below 2^8
    return codes;
  }
  // Scales of one byte: e4m3 from 2 up, before the global scale; e8m0 from 2^-10 to 2^-7.
  std::vector<uint8_t> byte_scales() const {
    std::vector<uint8_t> scales = random_bytes_;
    for (uint8_t& scale : scales)
      scale = static_cast<uint8_t>(has_global_scale(spec_) ? 0x40 + scale % 0x3F : 117 + scale % 4);
    return scales;
  }
  void find_fastest_read() {
    std::vector<const void*> sets;
    for (int set = 0; set < weight_.count; ++set) sets.push_back(packed_.at(set, weight_.bytes));
    const double guess_us = static_cast<double>(weight_.bytes) / 4e6;  // 4 TB/s
    const auto readers = [&](bool chained) {
      return backend_->readers(sets, weight_.bytes, backend_->launches_of(guess_us, weight_.count), chained);
    };
    const std::vector<std::shared_ptr<Work>> plain = readers(false);
    const std::vector<Timing> timings = harness_.medians(plain, harness_.rounds());
    const auto best =
        static_cast<size_t>(std::ranges::min_element(timings, {}, &Timing::us) - timings.begin());
    read_ = plain[best];
    read_us_ = timings[best].us;
    read_chained_us_ = QgemmBenchRow::kNone;
    if (times_only_ || !backend_->has_early_start()) return;
    const std::vector<std::shared_ptr<Work>> chained = readers(true);
    read_chained_us_ = harness_.medians({&chained[best], 1}, harness_.rounds())[0].us;
  }
  PackedWeight packed(int set) const {
    return {.spec = spec_, .rows = n_, .cols = k_, .data = packed_.at(set, weight_.bytes), .device = device_};
  }

  // x, y, workspaces and dense weights of a dtype.
  void reserve(DType dtype, int64_t x_bytes, int64_t y_bytes, int64_t workspace_bytes, int64_t dense_bytes) {
    if (y_.reserve(device_, y_bytes)) poison(y_.memory().data(), y_bytes);
    if (workspaces_.reserve(device_, workspace_bytes)) poison(workspaces_.memory().data(), workspace_bytes);
    const bool other = filled_with_ != dtype;
    const bool fill_x = x_.reserve(device_, x_bytes) || other,
               fill_dense = dense_.reserve(device_, dense_bytes) || other;
    if (!fill_x && !fill_dense) return;
    std::vector<uint8_t>& pool = pools_[dtype];
    if (pool.empty()) pool = values(dtype, 1, 0);
    if (fill_x) fill(x_.memory(), pool);
    if (fill_dense) fill(dense_.memory(), pool);
    filled_with_ = dtype;
  }
  void poison(void* memory, int64_t num_bytes) const { backend_->fill(memory, kOutputPoison, num_bytes); }

  // Products a second of large dense matrices, times two. Once per dtype.
  double cublas_flops(DType dtype) {
    if (!backend_->cublas()) return QgemmBenchRow::kNone;
    if (const auto found = cublas_flops_.find(dtype); found != cublas_flops_.end()) return found->second;
    constexpr int64_t kExtent = 8192;
    constexpr int kLaunches = 4;
    const int64_t bytes = kExtent * kExtent * size_of(dtype);
    reserve(dtype, bytes, bytes, 0, bytes);
    const std::shared_ptr<Work> product = dense_work(kLaunches, [=, this](int) {
      backend_->cublas()->product(dtype, false, kExtent, kExtent, kExtent, x_.at(0, 0), dense_.at(0, 0),
                                  y_.at(0, 0));
    });
    const double us = harness_.medians({&product, 1}, harness_.rounds())[0].us;
    return cublas_flops_[dtype] = 2e6 * std::pow(static_cast<double>(kExtent), 3) / us;
  }

  // cuBLAS can be captured once it has run.
  std::shared_ptr<Work> dense_work(int num_launches, const std::function<void(int)>& product) const {
    product(0);
    return backend_->record(num_launches, product);
  }

  // A product that adds to y, and a low-rank adapter: A [lora, k], B [n, lora], as many as there are weights.
  struct LowRankProduct {
    QgemmPlan adding;
    int64_t a_bytes;
    Sets sets;
    Memory adapters, projected, workspace;
    std::pair<std::byte*, std::byte*> factors(int i) const {
      std::byte* const a = adapters.data() + i % sets.count * sets.bytes;
      return {a, a + a_bytes};
    }
  };
  LowRankProduct make_low_rank(const QgemmBenchCase& test) {
    QgemmDescriptor d = test.descriptor;
    d.accumulate = true;
    QgemmPlan adding = QgemmPlan::select(device_, d);
    const int64_t size = size_of(d.dtype), workspace_bytes = adding.workspace_size();
    const Sets sets = activation_sets_of((d.n + d.k) * test.lora * size);
    return {std::move(adding),
            d.k * test.lora * size,
            sets,
            filled(sets.all(), pools_.at(d.dtype)),
            Memory(device_, d.m * test.lora * size),
            Memory(device_, workspace_bytes)};
  }

  void measure(const QgemmBenchCase& test, QgemmBenchRow& row) {
    const QgemmDescriptor& d = test.descriptor;
    const int64_t size = size_of(d.dtype), in = d.transposed ? d.n : d.k, out = d.transposed ? d.k : d.n;
    const auto select = [&](bool early_start) {
      QgemmDescriptor chosen = d;
      chosen.early_start = early_start;
      return QgemmPlan::select(device_, chosen, backend_->preference());
    };
    std::vector<QgemmPlan> plans = {select(false)};
    row.sku = plans[0].sku();
    if (!times_only_ && backend_->has_early_start())
      noting(row, "chained: ", [&] { plans.push_back(select(true)); });
    row.cublas_flops = cublas_flops(d.dtype);
    const double flop = 2.0 * static_cast<double>(d.m) * static_cast<double>(d.n) * static_cast<double>(d.k);
    const double least_us = std::fmax(row.read_us, 1e6 * flop / row.cublas_flops);

    int64_t workspace_bytes = 0;
    for (const QgemmPlan& plan : plans) workspace_bytes = std::max(workspace_bytes, plan.workspace_size());
    const Sets x = activation_sets_of(std::max(d.m, kCheckedRows) * in * size),
               y = activation_sets_of(d.m * out * size), workspace = activation_sets_of(workspace_bytes),
               dense = backend_->cublas() ? weight_sets_of(d.n * d.k * size) : Sets{};
    reserve(d.dtype, x.all(), y.all(), workspace.all(), dense.all());

    // The last launch of the first start, whose y is checked, has the first buffer of each.
    const int num_launches = backend_->launches_of(least_us, weight_.count);
    const auto x_at = [&](int i) { return x_.at(i % x.count, x.bytes); };
    const auto y_at = [&](int i) { return y_.at(i % y.count, y.bytes); };
    const auto view = [&](std::byte* data, int64_t cols) {
      return TensorView{data, d.dtype, {d.m, cols}, {}, device_};
    };
    std::vector<std::shared_ptr<Work>> works;
    for (const QgemmPlan& plan : plans)
      works.push_back(backend_->record(num_launches, [&](int i) {
        plan.run(stream_.handle(), {workspaces_.at(i % workspace.count, workspace.bytes), workspace.bytes},
                 {.x = view(x_at(i), in), .weight = packed(i % weight_.count), .y = view(y_at(i), out)});
      }));
    const std::vector<int64_t> rows = checked_rows(d.m);
    const std::vector<float>* expected = nullptr;
    if (!times_only_) noting(row, "values not checked: ", [&] { expected = &reference(d, in, out, rows); });
    if (expected) row.error = 0;
    double seconds = 0;
    for (const std::shared_ptr<Work>& work : works) {
      poison(y_.at(0, 0), y.bytes);
      stream_.synchronize();
      const BenchClock::time_point start = BenchClock::now();
      work->start();
      stream_.synchronize();
      seconds += seconds_since(start);
      if (!expected) continue;
      const double error = error_of(d, out, rows, *expected);
      if (!(error <= row.error)) row.error = error;  // NaN too
    }
    if (const Cublas* const cublas = backend_->cublas()) {
      works.push_back(dense_work(num_launches, [&](int i) {
        cublas->product(d.dtype, d.transposed, d.m, d.n, d.k, x_at(i),
                        dense_.at(i % dense.count, dense.bytes), y_at(i));
      }));
    }
    const size_t lora = works.size();
    std::optional<LowRankProduct> adapter;
    if (test.lora > 0 && backend_->cublas()) {
      adapter.emplace(make_low_rank(test));
      works.push_back(dense_work(num_launches, [&](int i) {
        const auto [a, b] = adapter->factors(i);
        const Cublas& cublas = *backend_->cublas();
        // y = (x . A^T) . B^T, then y += x . W^T; transposed: y = (x . B) . A, then y += x . W.
        std::byte* const projected = adapter->projected.data();
        if (d.transposed) {
          cublas.product(d.dtype, true, d.m, d.n, test.lora, x_at(i), b, projected);
          cublas.product(d.dtype, true, d.m, test.lora, d.k, projected, a, y_at(i));
        } else {
          cublas.product(d.dtype, false, d.m, test.lora, d.k, x_at(i), a, projected);
          cublas.product(d.dtype, false, d.m, d.n, test.lora, projected, b, y_at(i));
        }
        adapter->adding.run(
            stream_.handle(), adapter->workspace,
            {.x = view(x_at(i), in), .weight = packed(i % weight_.count), .y = view(y_at(i), out)});
      }));
    }
    const size_t read = works.size(), first_loop = read + 1;
    works.push_back(read_);
    const std::vector<MultiplyLoop> loops =
        times_only_ ? std::vector<MultiplyLoop>() : backend_->multiply_loops(d.dtype);
    for (const MultiplyLoop& loop : loops) works.push_back(loop.work);

    // What takes long is steady.
    const int rounds = static_cast<int>(std::clamp<double>(1 / seconds, 1, harness_.rounds()));
    const std::vector<Timing> timings = harness_.medians(works, rounds);
    row.plain_us = timings[0].us;
    row.plain_spread = timings[0].spread;
    if (plans.size() > 1) row.chained_us = timings[1].us;
    if (backend_->cublas()) row.cublas_us = timings[plans.size()].us;
    row.read_us = timings[read].us;
    double flops = row.cublas_flops;
    for (size_t i = 0; i < loops.size(); ++i) {
      row.rates.push_back({loops[i].name, 1e6 * loops[i].flops / timings[first_loop + i].us});
      flops = std::fmax(flops, row.rates.back().flops);
    }
    if (adapter) row.lora_us = timings[lora].us;
    row.floor_us = std::fmax(row.read_us, 1e6 * flop / flops);
  }

  // Rows 0 to 15, or as many from first to last.
  static std::vector<int64_t> checked_rows(int64_t m) {
    std::vector<int64_t> rows(static_cast<size_t>(kCheckedRows));
    for (int64_t i = 0; i < kCheckedRows; ++i)
      rows[static_cast<size_t>(i)] = m > kCheckedRows ? i * (m - 1) / (kCheckedRows - 1) : i;
    return rows;
  }
  // Of y in the first buffer, see QgemmBenchRow::error.
  double error_of(const QgemmDescriptor& d, int64_t out, const std::vector<int64_t>& rows,
                  const std::vector<float>& expected) const {
    const int64_t size = size_of(d.dtype), num_rows = std::min(d.m, kCheckedRows);
    std::vector<uint8_t> bytes(static_cast<size_t>(out * size));
    // The norm is that of all rows of the reference, since a few elements may by chance be close to zero.
    double difference = 0, norm = 0;
    for (const float right : expected) norm += static_cast<double>(right) * static_cast<double>(right);
    norm *= static_cast<double>(num_rows) / kCheckedRows;
    for (int64_t i = 0; i < num_rows; ++i) {
      copy(device_, bytes.data(), y_.at(0, 0) + rows[static_cast<size_t>(i)] * out * size, out * size,
           stream_.handle());
      stream_.synchronize();
      for (int64_t j = 0; j < out; ++j) {
        const double right = static_cast<double>(expected[static_cast<size_t>(i * out + j)]),
                     wrong = static_cast<double>(load(d.dtype, bytes.data() + j * size)) - right;
        difference += wrong * wrong;
      }
    }
    return std::sqrt(difference / norm);
  }

  // These rows of y for the first buffers of x and weight, by another kernel, in another precision.
  const std::vector<float>& reference(const QgemmDescriptor& d, int64_t in, int64_t out,
                                      const std::vector<int64_t>& rows) {
    std::vector<float>& y = references_[{d.transposed, d.dtype, rows}];
    if (!y.empty()) return y;
    QgemmDescriptor exact;
    exact.spec = spec_;
    exact.m = kCheckedRows;
    exact.n = n_;
    exact.k = k_;
    exact.transposed = d.transposed;
    exact.dtype = DType::f32;
    exact.math = QgemmMath::f64;
    exact.variant = backend_->reference_variant();
    const QgemmPlan plan = QgemmPlan::select(device_, exact, backend_->preference());
    std::vector<float> x;
    for (const int64_t row : rows)
      for (int64_t j = 0; j < in; ++j) {
        uint8_t stored[4];  // as x_ is filled
        store_value(pool_[static_cast<size_t>((row * in + j) % kBenchPoolValues)], d.dtype, stored);
        x.push_back(load(d.dtype, stored));
      }
    const int64_t y_bytes = kCheckedRows * out * 4;
    const Memory x_memory(device_, kCheckedRows * in * 4), y_memory(device_, y_bytes),
        workspace(device_, plan.workspace_size());
    copy(device_, x_memory.data(), x.data(), x_memory.num_bytes(), stream_.handle());
    poison(y_memory.data(), y_bytes);
    plan.run(stream_.handle(), workspace,
             {.x = {x_memory.data(), DType::f32, {kCheckedRows, in}, {}, device_},
              .weight = packed(0),
              .y = {y_memory.data(), DType::f32, {kCheckedRows, out}, {}, device_}});
    y.resize(static_cast<size_t>(kCheckedRows * out));
    copy(device_, y.data(), y_memory.data(), y_bytes, stream_.handle());
    stream_.synchronize();
    return y;
  }

  Device device_;
  const BenchHarness harness_;
  const BenchBackend* backend_;
  const Stream& stream_;
  const bool times_only_;
  std::map<DType, double> cublas_flops_;
  std::vector<uint8_t> random_bytes_;
  std::vector<float> pool_;                      // -1 to 1
  std::map<DType, std::vector<uint8_t>> pools_;  // the same

  QuantSpec spec_;
  int64_t n_ = 0, k_ = 0;
  Sets weight_;
  std::shared_ptr<Work> read_;
  double read_us_ = 0, read_chained_us_ = 0;
  std::map<std::tuple<bool, DType, std::vector<int64_t>>, std::vector<float>> references_;

  BenchArena packed_, x_, y_, workspaces_, dense_;
  std::optional<DType> filled_with_;  // x_ and dense_
};

void check_case(const QgemmBenchCase& test) {
  const QgemmDescriptor& d = test.descriptor;
  check_descriptor(d);
  HALFBYTE_CHECK(d.packed && !d.bias && !d.accumulate, usage,
                 "bench_qgemm: {}: weights must be packed, and there is no bias and accumulate", test.shape);
  HALFBYTE_CHECK(d.m > 0 && d.n > 0 && d.k > 0, usage,
                 "bench_qgemm: {}: m, n, k must be positive, got {}, {}, {}", test.shape, d.m, d.n, d.k);
  HALFBYTE_CHECK(test.lora >= 0, usage, "bench_qgemm: {}: lora must not be negative, got {}", test.shape,
                 test.lora);
}

}  // namespace

CublasInfo cublas_info() { return {cuda::find_cublas().path, cuda::find_cublas().problem}; }

void bench_qgemm(Device device, std::span<const QgemmBenchCase> cases, const BenchOptions& options,
                 const std::function<bool(const QgemmBenchRow&)>& progress) {
  HALFBYTE_CHECK(options.num_threads >= 0, usage, "bench_qgemm: options.num_threads must be >= 0, got {}",
                 options.num_threads);
  for (const QgemmBenchCase& test : cases) check_case(test);
  check_device(device);
  QgemmBench bench(device, options);
  for (const QgemmBenchCase& test : cases)
    HALFBYTE_CHECK(progress(bench.run(test)), cancelled, "bench_qgemm: cancelled");
}

}  // namespace halfbyte
