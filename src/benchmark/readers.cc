#include "benchmark/readers.h"

#include <algorithm>

#include "benchmark/benchmark_args.h"
#include "benchmark/benchmark_kernels.h"
#include "cuda/launch.h"

namespace halfbyte {
namespace {

struct Reader {
  cuda::CUfunction function;
  cuda::Grid grid;
};

std::vector<Reader> make_readers(const cuda::Context& context, int64_t num_bytes) {
  std::vector<Reader> readers;
  const auto blocks_of = [&](int64_t bytes_per_block) {
    return (num_bytes + bytes_per_block - 1) / bytes_per_block;
  };
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

}  // namespace

FastestRead::FastestRead(const cuda::Context& context, void* stream, GraphTimer& timer,
                         std::span<const void* const> sets, int64_t num_bytes, int num_launches, int rounds)
    : never_({DeviceKind::cuda, context.index}, 16), num_launches_(num_launches) {
  const auto capture = [&](const Reader& reader, bool early) {
    auto graph = std::make_shared<cuda::Graph>();
    graph->capture(stream, [&] {
      for (int i = 0; i < num_launches; ++i) {
        const ReadArgs args = {sets[static_cast<size_t>(i) % sets.size()], num_bytes,
                               reinterpret_cast<formats::u32*>(never_.data()), early};
        if (early)
          cuda::launch_early(reader.function, reader.grid, stream, args);
        else
          cuda::launch(reader.function, reader.grid, stream, args);
      }
    });
    graph->launch(stream);
    return graph;
  };
  const std::vector<Reader> readers = make_readers(context, num_bytes);
  std::vector<std::shared_ptr<const cuda::Graph>> graphs;
  std::vector<const cuda::Graph*> timed;
  for (const Reader& reader : readers) timed.push_back(graphs.emplace_back(capture(reader, false)).get());
  const std::vector<double> us = timer.medians(timed, rounds);
  const auto best = std::ranges::min_element(us) - us.begin();
  graph_ = graphs[static_cast<size_t>(best)];
  us_ = us[static_cast<size_t>(best)] / num_launches;
  if (context.capability < 90) return;
  const auto chained = capture(readers[static_cast<size_t>(best)], true);
  const cuda::Graph* const one[] = {chained.get()};
  chained_us_ = timer.medians(one, rounds)[0] / num_launches;
}

}  // namespace halfbyte
