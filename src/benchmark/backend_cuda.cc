#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "benchmark/backend.h"
#include "benchmark/benchmark_args.h"
#include "benchmark/benchmark_kernels.h"
#include "core/arithmetic.h"
#include "cuda/cublas.h"
#include "cuda/graph.h"
#include "cuda/launch.h"

namespace halfbyte {
namespace {

// A millisecond: the host enqueues a round meanwhile.
constexpr DelayArgs kDelay = {2'000'000};

class GraphWork : public Work {
 public:
  GraphWork(int num_launches, void* stream, const std::function<void(int)>& launch)
      : Work(num_launches), stream_(stream) {
    graph_.capture(stream, [&] {
      for (int i = num_launches - 1; i >= 0; --i) launch(i);
    });
  }
  void start() override { graph_.launch(stream_); }

 private:
  void* stream_;
  cuda::Graph graph_;
};

class LaunchedWork : public Work {
 public:
  LaunchedWork(int num_launches, std::function<void(int)> launch)
      : Work(num_launches), launch_(std::move(launch)) {}
  void start() override {
    for (int i = num_launches() - 1; i >= 0; --i) launch_(i);
  }

 private:
  std::function<void(int)> launch_;
};

struct MemoryReader {
  cuda::CUfunction function;
  cuda::Grid grid;
};

std::vector<MemoryReader> make_readers(const cuda::Context& context, int64_t num_bytes) {
  std::vector<MemoryReader> readers;
  const auto blocks_of = [&](int64_t bytes_per_block) { return ceil_div(num_bytes, bytes_per_block); };
  // blocks_per_multiprocessor 0: as many blocks as it takes for each to read once.
  const auto add_blocks = [&](int threads, int loads, int blocks_per_multiprocessor) {
    const int64_t all = blocks_of(int64_t{16} * threads * loads),
                  some = int64_t{blocks_per_multiprocessor} * context.num_multiprocessors;
    readers.push_back({cuda::get_kernel(context, read_blocks_kernel(threads, loads)),
                       {some > 0 ? std::min(all, some) : all, threads}});
  };
  for (const int threads : {128, 256, 512}) add_blocks(threads, 4, 0);
  add_blocks(256, 8, 0);
  add_blocks(256, 8, 8);
  add_blocks(512, 8, 4);
  if (context.capability < 90) return readers;
  const auto add_bulk = [&](int stages, int stage_bytes, int blocks_per_multiprocessor) {
    const cuda::CUfunction function = cuda::get_kernel(context, read_bulk_kernel(stages, stage_bytes));
    cuda::allow_shared_bytes(function, stages * stage_bytes);
    readers.push_back({function,
                       {std::min<int64_t>(blocks_of(stage_bytes),
                                          int64_t{blocks_per_multiprocessor} * context.num_multiprocessors),
                        kReadBulkThreads, stages * stage_bytes}});
  };
  add_bulk(12, 16384, 1);
  add_bulk(6, 16384, 2);
  add_bulk(6, 32768, 1);
  return readers;
}

class CudaBackend : public BenchBackend {
 public:
  explicit CudaBackend(Device device)
      : context_(cuda::context(device.index)),
        scope_(context_),
        stream_(device),
        delay_(cuda::get_kernel(context_, delay_kernel())),
        never_(device, 16) {
    if (cuda::find_cublas().problem.empty()) cublas_.emplace(device, stream_.handle());
  }

  const Stream& stream() const override { return stream_; }
  const char* reference_variant() const override { return "qgemm_simt"; }
  bool has_early_start() const override { return context_.capability >= 90; }
  const Cublas* cublas() const override { return cublas_ ? &*cublas_ : nullptr; }

  int64_t weight_rotation_bytes() const override {
    constexpr int kL2CacheSize = 38;  // CU_DEVICE_ATTRIBUTE_
    int l2_bytes = 0;
    cuda::check(cuda::driver().cuDeviceGetAttribute(&l2_bytes, kL2CacheSize, context_.device),
                "cuDeviceGetAttribute");
    return int64_t{5} * l2_bytes;
  }
  int64_t activation_rotation_bytes() const override { return weight_rotation_bytes(); }
  // Enough that the start of the graph does not count, all buffers the same number of times.
  int launches_of(double us, int num_buffers) const override {
    constexpr double kGraphUs = 400;
    const int wanted =
        std::max(us > kGraphUs ? 6 : 24, static_cast<int>(std::ceil(kGraphUs / std::max(us, 1.0))));
    return static_cast<int>(ceil_div(wanted, num_buffers)) * num_buffers;
  }
  int rounds(bool quick) const override { return quick ? 3 : 7; }
  int passes(bool quick) const override { return quick ? 1 : 2; }

  void fill(void* memory, uint8_t byte, int64_t num_bytes) const override {
    cuda::fill(memory, byte, num_bytes, stream_.handle());
  }

  std::shared_ptr<Work> record(int num_launches, std::function<void(int)> launch) const override {
    return std::make_shared<GraphWork>(num_launches, stream_.handle(), launch);
  }

  std::shared_ptr<Work> repeat(int num_launches, std::function<void(int)> launch) const override {
    return std::make_shared<LaunchedWork>(num_launches, std::move(launch));
  }

  std::vector<std::shared_ptr<Work>> movers(std::span<const Move> sets, int64_t read_bytes,
                                            int64_t write_bytes, int num_launches) const override {
    std::vector<std::shared_ptr<Work>> works;
    const auto at = [sets = std::vector(sets.begin(), sets.end())](int i) {
      return sets[static_cast<size_t>(i) % sets.size()];
    };
    for (const int64_t block_bytes : {16384, 32768})
      for (const bool stream : {false, true}) {
        const int64_t blocks = ceil_div(std::max(read_bytes, write_bytes), block_bytes);
        const auto words = [&](int64_t num_bytes) { return ceil_div(num_bytes / 16, blocks); };
        const cuda::CUfunction function =
            cuda::get_kernel(context_, move_blocks_kernel(words(read_bytes), words(write_bytes), stream));
        works.push_back(repeat(num_launches, [=, this](int i) {
          cuda::launch(function, {blocks, kMoveThreads}, stream_.handle(),
                       MoveArgs{at(i).from, at(i).to, read_bytes / 16, write_bytes / 16});
        }));
      }
    if (read_bytes == write_bytes)
      works.push_back(repeat(num_launches, [=, this](int i) {
        cuda::copy(at(i).to, at(i).from, read_bytes, stream_.handle());
      }));
    return works;
  }

  std::vector<std::shared_ptr<Work>> readers(std::span<const void* const> sets, int64_t num_bytes,
                                             int num_launches, bool chained) const override {
    std::vector<std::shared_ptr<Work>> works;
    if (chained && !has_early_start()) return works;
    for (const MemoryReader& reader : make_readers(context_, num_bytes))
      works.push_back(record(num_launches, [&](int i) {
        const ReadArgs args = {sets[static_cast<size_t>(i) % sets.size()], num_bytes,
                               reinterpret_cast<formats::u32*>(never_.data()), chained};
        if (chained)
          cuda::launch_early(reader.function, reader.grid, stream_.handle(), args);
        else
          cuda::launch(reader.function, reader.grid, stream_.handle(), args);
      }));
    return works;
  }

  std::vector<Timing> medians(std::span<const std::shared_ptr<Work>> works, int rounds) const override {
    const cuda::Driver& driver = cuda::driver();
    std::vector<Event> events;
    while (events.size() <= works.size()) {
      cuda::CUevent event = nullptr;
      cuda::check(driver.cuEventCreate(&event, 0), "cuEventCreate");
      events.emplace_back(event, [](cuda::CUevent p) { cuda::find_driver().cuEventDestroy_v2(p); });
    }
    const auto record = [&](size_t i) {
      cuda::check(driver.cuEventRecord(events[i].get(), static_cast<cuda::CUstream>(stream_.handle())),
                  "cuEventRecord");
    };
    std::vector<std::vector<double>> times(works.size());
    for (int round = 0; round < rounds; ++round) {
      cuda::launch(delay_, {1, 1}, stream_.handle(), kDelay);
      record(0);
      for (size_t i = 0; i < works.size(); ++i) {
        works[i]->start();
        record(i + 1);
      }
      cuda::check(driver.cuEventSynchronize(events.back().get()), "cuEventSynchronize");
      for (size_t i = 0; i < works.size(); ++i) {
        float milliseconds = 0;
        cuda::check(driver.cuEventElapsedTime(&milliseconds, events[i].get(), events[i + 1].get()),
                    "cuEventElapsedTime");
        times[i].push_back(1e3 * static_cast<double>(milliseconds) / works[i]->num_launches());
      }
    }
    return medians_of(times);
  }

 private:
  using Event = std::shared_ptr<std::remove_pointer_t<cuda::CUevent>>;

  const cuda::Context& context_;
  cuda::Scope scope_;
  Stream stream_;
  cuda::CUfunction delay_;
  Memory never_;
  std::optional<Cublas> cublas_;
};

}  // namespace

std::unique_ptr<BenchBackend> make_cuda_backend(Device device) {
  return std::make_unique<CudaBackend>(device);
}

}  // namespace halfbyte
