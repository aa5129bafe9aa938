#include <algorithm>
#include <barrier>
#include <cmath>
#include <optional>
#include <random>
#include <thread>

#include "benchmark/harness.h"
#include "core/checks.h"
#include "cuda/graph.h"
#include "formats/convert.h"
#include "halfbyte/bench.hpp"
#include "halfbyte/qgemm_parallel.hpp"

namespace halfbyte {
namespace {

constexpr DType kDType = DType::bf16;
constexpr int64_t kHidden = 8192, kHeads = kHidden + 2 * 1024, kIntermediate = 28672;
constexpr int kLayers = 4;  // of a graph: 2 GB of weights on one device, so that none stays in a cache
constexpr int kSums = 16;   // of a graph that only sums

struct Shape {
  ParallelStyle style;
  int64_t n, k;
};
constexpr Shape kShapes[] = {{ParallelStyle::colwise, kHeads, kHidden},
                             {ParallelStyle::rowwise, kHidden, kHidden},
                             {ParallelStyle::colwise, 2 * kIntermediate, kHidden},
                             {ParallelStyle::rowwise, kHidden, kIntermediate}};

// A member: what it holds, and its graphs.
class Member {
 public:
  // Random weights whose products are about as large as their x.
  explicit Member(const Communicator& group) : group_(group), stream_(group.device()) {
    std::mt19937 random(static_cast<unsigned>(group.rank()));
    std::normal_distribution<float> normal;
    std::vector<uint16_t> pool(static_cast<size_t>(kBenchPoolValues));
    for (uint16_t& value : pool) value = formats::f32_to_bf16(normal(random));
    const QuantSpec spec{.format = Format::nf4, .scale_dtype = DType::f16};
    const Device device = group.device();
    for (const Shape& shape : kShapes) {
      const bool by_cols = shape.style == ParallelStyle::rowwise;
      const Slice slice =
          part_of(by_cols ? 1 : 0, by_cols ? shape.k : shape.n, 64, group.rank(), group.size());
      const int64_t part = slice.end - slice.begin;
      const int64_t n = by_cols ? shape.n : part, k = by_cols ? part : shape.k;
      const Memory dense(device, n * k * 2);
      std::vector<uint16_t> scaled = pool;
      for (uint16_t& value : scaled)
        value = formats::f32_to_bf16(formats::bf16_to_f32(value) / std::sqrt(static_cast<float>(shape.k)));
      fill(dense, scaled);
      const TensorView view{dense.data(), kDType, {n, k}, {}, device};
      for (int layer = 0; layer < kLayers; ++layer)
        weights_.push_back(
            quantize(view, spec, {}, {.stream = stream_.handle()}).pack({.stream = stream_.handle()}));
      stream_.synchronize();
    }
    x_values_.assign(pool.begin(), pool.begin() + (int64_t{1} << 20));
  }

  void prepare(int64_t m) {
    plans_.clear();
    y_.clear();
    layers_.reset();
    sums_.reset();
    const Device device = group_.device();
    int64_t workspace_bytes = 1;
    for (size_t i = 0; i < std::size(kShapes); ++i) {
      const PackedWeight& weight = weights_[i * kLayers].view();
      QgemmDescriptor d{.spec = weight.spec, .m = m, .n = weight.rows, .k = weight.cols, .dtype = kDType};
      d.early_start = true;
      plans_.push_back(ParallelQgemmPlan::select(group_, d, kShapes[i].style));
      workspace_bytes = std::max(workspace_bytes, plans_.back().workspace_size());
      y_.emplace_back(device, m * weight.rows * 2);
    }
    x_ = Memory(device, m * kHidden * 2);
    workspace_ = Memory(device, workspace_bytes);
    fill(x_, x_values_);
    m_ = m;
    enqueue_layers();  // NCCL connects members when they first meet
    stream_.synchronize();
    enqueue_sum();
    stream_.synchronize();
    const cuda::Scope scope(cuda::context(device.index));
    layers_.emplace().capture(stream_.handle(), [&] { enqueue_layers(); });
    if (group_.size() > 1) sums_.emplace().capture(stream_.handle(), [&] { enqueue_sums(); });
  }
  void run_layers(int times) const { run(*layers_, times); }
  void run_sums(int times) const { run(*sums_, times); }
  void synchronize() const { stream_.synchronize(); }
  const Communicator& group() const { return group_; }
  const Sku& sku() const { return plans_.front().sku(); }

 private:
  // The pool, over and over.
  void fill(const Memory& memory, std::span<const uint16_t> pool) const {
    const auto num_bytes = static_cast<int64_t>(pool.size_bytes());
    for (int64_t at = 0; at < memory.num_bytes(); at += num_bytes)
      copy(group_.device(), memory.data() + at, pool.data(), std::min(num_bytes, memory.num_bytes() - at),
           stream_.handle());
  }
  void run(const cuda::Graph& graph, int times) const {
    const cuda::Scope scope(cuda::context(group_.device().index));
    for (int i = 0; i < times; ++i) graph.launch(stream_.handle());
  }
  // The first columns of what a product gave are what the next one takes: those of the queries, and of gate.
  void enqueue_layers() const {
    const Device device = group_.device();
    for (int layer = 0; layer < kLayers; ++layer)
      for (size_t i = 0; i < plans_.size(); ++i) {
        const QgemmDescriptor& d = plans_[i].descriptor();
        const std::byte* const from = i > 0 ? y_[i - 1].data() : layer > 0 ? y_.back().data() : x_.data();
        Qgemm::Args args{.weight = weights_[i * kLayers + static_cast<size_t>(layer)].view()};
        args.x = {from, kDType, {m_, d.k}, {}, device};
        args.y = {y_[i].data(), kDType, {m_, d.n}, {}, device};
        plans_[i].run(stream_.handle(), workspace_, args);
      }
  }
  void enqueue_sum() const {
    group_.all_reduce({y_.back().data(), kDType, {m_, kHidden}, {}, group_.device()}, stream_.handle());
  }
  void enqueue_sums() const {
    for (int i = 0; i < kSums; ++i) enqueue_sum();
  }

  Communicator group_;
  Stream stream_;
  std::vector<PackedTensor> weights_;  // of the first product in all layers, then of the second
  std::vector<uint16_t> x_values_;
  int64_t m_ = 0;
  Memory x_, workspace_;
  std::vector<Memory> y_;
  std::vector<ParallelQgemmPlan> plans_;
  std::optional<cuda::Graph> layers_, sums_;
};

struct Times {
  double layer_us = BenchRow::kNone, spread = BenchRow::kNone, sum_us = BenchRow::kNone;
};

// Times of m after m: members are threads, which start each measurement together.
class Group {
 public:
  Group(std::vector<Communicator> members, std::span<const int64_t> m, bool quick)
      : members_(std::move(members)), m_(m), rounds_(quick ? 5 : 15), start_(std::ssize(members_)) {}

  std::vector<Times> measure(Sku& sku) {
    std::vector<Times> times(m_.size());
    std::vector<std::optional<Error>> errors(members_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < members_.size(); ++i)
      threads.emplace_back([&, i] {
        try {
          Member member(members_[i]);
          for (size_t j = 0; j < m_.size(); ++j) {
            member.prepare(m_[j]);
            const Times own = measure(member);
            if (i == 0) times[j] = own;
            if (i == 0 && j == 0) sku = member.sku();
          }
        } catch (const Error& error) {
          errors[i] = error;
          members_[i].abort();
          start_.arrive_and_drop();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::optional<Error>& error : errors)  // not those that another member has ended
      if (error && error->code() != ErrorCode::cancelled) throw Error(*error);
    return times;
  }

 private:
  Times measure(const Member& member) {
    constexpr double kSeconds = 0.02;  // of a measurement, about
    const auto time = [&](const std::function<void(int)>& run, int per_run, double& spread) {
      int times = 8;
      std::vector<double> found;
      for (int round = -1; round < rounds_; ++round) {  // -1: how long it takes
        member.synchronize();
        start_.arrive_and_wait();
        const BenchClock::time_point begin = BenchClock::now();
        run(times);
        member.synchronize();
        const double seconds = seconds_since(begin) / times;
        if (round >= 0) found.push_back(1e6 * seconds / per_run);
        // As many for all: the first member says how many.
        if (round < 0 && member.group().rank() == 0)
          times_ = std::max(1, static_cast<int>(kSeconds / seconds));
        start_.arrive_and_wait();
        times = times_;
      }
      std::ranges::sort(found);
      const size_t count = found.size();
      spread = (found[count * 3 / 4] - found[count / 4]) / found[count / 2];
      return found[count / 2];
    };
    Times result;
    double ignored = 0;
    result.layer_us = time([&](int times) { member.run_layers(times); }, kLayers, result.spread);
    if (members_.size() > 1) result.sum_us = time([&](int times) { member.run_sums(times); }, kSums, ignored);
    return result;
  }

  std::vector<Communicator> members_;
  std::span<const int64_t> m_;
  int rounds_;
  std::barrier<> start_;
  int times_ = 1;
};

}  // namespace

void bench_tensor_parallel(std::span<const Device> devices, std::span<const int64_t> m,
                           const BenchOptions& options,
                           const std::function<bool(const BenchRow&)>& progress) {
  HALFBYTE_CHECK(!devices.empty() && devices.front().kind == DeviceKind::cuda, usage,
                 "bench_tensor_parallel: it is for CUDA devices, got {}", to_string(devices));
  for (const int64_t rows : m)
    HALFBYTE_CHECK(rows > 0, usage, "bench_tensor_parallel: m must be at least 1, got {}", rows);
  std::vector<double> one(m.size(), BenchRow::kNone);
  const auto measure = [&](size_t count, Transport transport) {
    const bool alone = count == 1;
    std::vector<Times> times(m.size());
    BenchRow row;
    row.op = "tensor_parallel";
    std::string how = "one device";
    try {
      std::vector<Communicator> members = Communicator::of_devices(devices.first(count), transport);
      if (!alone) how = fmt::format("{} devices, {}", count, members[0].transport());
      times = Group(std::move(members), m, options.quick).measure(row.sku);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::device) throw;
      if (!alone) how = fmt::format("{} devices, {}", count, to_string(transport));
      row.failure = error.what();
    }
    for (size_t i = 0; i < m.size(); ++i) {
      if (alone) one[i] = times[i].layer_us;
      row.problem = fmt::format("llama-70b M={}, {}", m[i], how);
      row.median_us = times[i].layer_us;
      row.spread = times[i].spread;
      row.ceilings = {{"one", one[i]}, {"sum", times[i].sum_us}};
      HALFBYTE_CHECK(progress(row), cancelled, "bench_tensor_parallel: cancelled");
    }
  };
  measure(1, Transport::automatic);
  for (size_t count = 2; count <= devices.size(); count *= 2)
    for (const Transport transport : {Transport::peer, Transport::nccl}) measure(count, transport);
}

}  // namespace halfbyte
