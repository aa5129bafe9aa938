#include <algorithm>
#include <chrono>
#include <cstring>

#include "benchmark/backend.h"
#include "benchmark/loops.h"
#include "core/arithmetic.h"
#include "cpu/parallel.h"

namespace halfbyte {
namespace {

constexpr double kSampleUs = 2000;  // of a round, at least: far above what the clock and waking a thread take

class CpuWork : public Work {
 public:
  using Run = std::function<void(int first)>;
  CpuWork(int num_launches, Run run) : Work(num_launches), run_(std::move(run)) {}
  void start() override {
    run_(next_);
    next_ += num_launches();
  }

 private:
  Run run_;  // all launches from this one
  int next_ = 0;
};

double us_of(Work& work, int num_starts) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < num_starts; ++i) work.start();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

class CpuBackend : public BenchBackend {
 public:
  explicit CpuBackend(int num_threads) : num_threads_(num_threads) {}

  const Stream& stream() const override { return stream_; }
  PlanPreference preference() const override { return {num_threads_}; }
  const char* reference_variant() const override { return "qgemm_ref"; }

  std::vector<MultiplyLoop> multiply_loops(DType dtype) const override {
    constexpr double kTaskFlops = 5e6;
    const int num_tasks = 16 * effective_threads(num_threads_);
    std::vector<MultiplyLoop> loops;
    for (const ArithmeticLoop& loop : arithmetic_loops(dtype)) {
      const auto steps = static_cast<int64_t>(kTaskFlops / loop.flops);
      const auto run = [this, loop, steps, num_tasks](int) {
        parallel_for(num_tasks, 1, num_threads_, [&](int64_t, int64_t, int) { loop.run(steps); });
      };
      loops.push_back({loop.name, num_tasks * static_cast<double>(steps) * loop.flops,
                       std::make_shared<CpuWork>(1, run)});
    }
    return loops;
  }

  // Beyond any cache. x, y and workspaces are warm, as they are in a model.
  int64_t weight_rotation_bytes() const override { return int64_t{1200} << 20; }
  int64_t activation_rotation_bytes() const override { return 0; }
  int launches_of(double, int) const override { return 1; }  // medians() starts often enough
  // Others that run for a while spoil whole passes.
  int rounds(bool quick) const override { return quick ? 5 : 7; }
  int passes(bool quick) const override { return quick ? 4 : 12; }

  void fill(void* memory, uint8_t byte, int64_t num_bytes) const override {
    std::memset(memory, byte, static_cast<size_t>(num_bytes));
  }

  std::shared_ptr<Work> record(int num_launches, std::function<void(int)> launch) const override {
    return std::make_shared<CpuWork>(num_launches, [num_launches, launch = std::move(launch)](int first) {
      for (int i = num_launches - 1; i >= 0; --i) launch(first + i);
    });
  }

  std::shared_ptr<Work> repeat(int num_launches, std::function<void(int)> launch) const override {
    return record(num_launches, std::move(launch));
  }

  // So many sets at once that starting the threads does not count.
  std::vector<std::shared_ptr<Work>> readers(std::span<const void* const> sets, int64_t num_bytes, int,
                                             bool chained) const override {
    std::vector<std::shared_ptr<Work>> readers;
    if (chained) return readers;
    constexpr int64_t kLeastBytes = 64 << 20;
    const auto num_sets = static_cast<int>(ceil_div(kLeastBytes, num_bytes));
    const auto add = [&](int64_t chunk_bytes, ReadLoop loop) {
      const int64_t chunks = ceil_div(num_bytes, chunk_bytes);
      const auto run = [=, this, sets = std::vector(sets.begin(), sets.end())](int first) {
        parallel_for(num_sets * chunks, 1, num_threads_, [&](int64_t i, int64_t, int) {
          const auto set = static_cast<size_t>(first + i / chunks) % sets.size();
          const int64_t begin = i % chunks * chunk_bytes;
          read_bytes(static_cast<const std::byte*>(sets[set]) + begin,
                     std::min(chunk_bytes, num_bytes - begin), loop);
        });
      };
      readers.push_back(std::make_shared<CpuWork>(num_sets, run));
    };
    for (const int64_t chunk_bytes : {int64_t{64} << 10, int64_t{1} << 20})
      for (const int num_streams : {1, 2, 4})
        for (const int64_t prefetch_bytes : {0, 1024, 4096}) add(chunk_bytes, {num_streams, prefetch_bytes});
    return readers;
  }

  std::vector<std::shared_ptr<Work>> movers(std::span<const Move> sets, int64_t read_bytes,
                                            int64_t write_bytes, int) const override {
    std::vector<std::shared_ptr<Work>> movers;
    const auto add = [&](int64_t block_bytes, int64_t grain, auto move) {
      const int64_t blocks = ceil_div(std::max(read_bytes, write_bytes), block_bytes);
      const int64_t reads = read_bytes / blocks / 64 * 64, writes = write_bytes / blocks / 64 * 64;
      movers.push_back(record(1, [=, this, sets = std::vector(sets.begin(), sets.end())](int number) {
        const Move& set = sets[static_cast<size_t>(number) % sets.size()];
        parallel_for(blocks, grain, num_threads_, [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i)
            move(static_cast<const std::byte*>(set.from) + i * reads, reads,
                 static_cast<std::byte*>(set.to) + i * writes, writes);
          end_moves();
        });
      }));
    };
    add(1 << 14, 16, [](const void* from, int64_t reads, void* to, int64_t writes) {
      move_bytes(from, reads, to, writes);
    });
    if (read_bytes == write_bytes)
      add(1 << 16, 4,
          [](const void* from, int64_t, void* to, int64_t writes) { copy_bytes(from, to, writes); });
    return movers;
  }

  std::vector<Timing> medians(std::span<const std::shared_ptr<Work>> works, int rounds) const override {
    std::vector<int> num_starts;
    for (const auto& work : works)
      num_starts.push_back(static_cast<int>(std::clamp(kSampleUs / us_of(*work, 1), 1.0, 1e6)));
    std::vector<std::vector<double>> times(works.size());
    for (int round = 0; round < rounds; ++round)
      for (size_t i = 0; i < works.size(); ++i)
        times[i].push_back(us_of(*works[i], num_starts[i]) / (num_starts[i] * works[i]->num_launches()));
    return medians_of(times);
  }

 private:
  int num_threads_;
  Stream stream_;
};

}  // namespace

std::unique_ptr<BenchBackend> make_cpu_backend(int num_threads) {
  return std::make_unique<CpuBackend>(num_threads);
}

}  // namespace halfbyte
