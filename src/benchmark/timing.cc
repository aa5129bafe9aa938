#include "benchmark/timing.h"

#include <algorithm>

#include "benchmark/benchmark_args.h"
#include "benchmark/benchmark_kernels.h"
#include "cuda/launch.h"

namespace halfbyte {
namespace {

// A millisecond: the host enqueues a round meanwhile.
constexpr DelayArgs kDelay = {2'000'000};

double median_of(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

GraphTimer::GraphTimer(const cuda::Context& context, void* stream)
    : delay_(cuda::get_kernel(context, delay_kernel())), stream_(stream) {}

std::vector<double> GraphTimer::medians(std::span<const cuda::Graph* const> graphs, int rounds) {
  const cuda::Driver& driver = cuda::driver();
  while (events_.size() <= graphs.size()) {
    cuda::CUevent event = nullptr;
    cuda::check(driver.cuEventCreate(&event, 0), "cuEventCreate");
    events_.emplace_back(event, [](cuda::CUevent p) { cuda::find_driver().cuEventDestroy_v2(p); });
  }
  const auto record = [&](size_t i) {
    cuda::check(driver.cuEventRecord(events_[i].get(), static_cast<cuda::CUstream>(stream_)),
                "cuEventRecord");
  };
  std::vector<std::vector<double>> times(graphs.size());
  for (int round = 0; round < rounds; ++round) {
    cuda::launch(delay_, {1, 1}, stream_, kDelay);
    record(0);
    for (size_t i = 0; i < graphs.size(); ++i) {
      graphs[i]->launch(stream_);
      record(i + 1);
    }
    cuda::check(driver.cuEventSynchronize(events_[graphs.size()].get()), "cuEventSynchronize");
    for (size_t i = 0; i < graphs.size(); ++i) {
      float milliseconds = 0;
      cuda::check(driver.cuEventElapsedTime(&milliseconds, events_[i].get(), events_[i + 1].get()),
                  "cuEventElapsedTime");
      times[i].push_back(1e3 * static_cast<double>(milliseconds));
    }
  }
  std::vector<double> result;
  for (std::vector<double>& of_graph : times) result.push_back(median_of(of_graph));
  return result;
}

}  // namespace halfbyte
