#include "benchmark/harness.h"

namespace halfbyte {

BenchHarness::BenchHarness(Device device, const BenchOptions& options)
    : device_(device),
      backend_(device.kind == DeviceKind::cpu ? make_cpu_backend(options.num_threads)
                                              : make_cuda_backend(device)),
      rounds_(backend_->rounds(options.quick)),
      passes_(backend_->passes(options.quick)) {}

void BenchHarness::fill(std::byte* to, int64_t num_bytes, std::span<const uint8_t> pool) const {
  auto filled = std::min<int64_t>(static_cast<int64_t>(pool.size()), num_bytes);
  copy(device_, to, pool.data(), filled, stream().handle());
  while (filled < num_bytes) {
    const int64_t n = std::min(filled, num_bytes - filled);
    copy(device_, to + filled, to, n, stream().handle());
    filled += n;
  }
  stream().synchronize();
}

std::vector<Timing> BenchHarness::medians(std::span<const std::shared_ptr<Work>> works, int rounds) const {
  constexpr double kMostSeconds = 2;
  for (const std::shared_ptr<Work>& work : works) work->start();
  stream().synchronize();
  const BenchClock::time_point start = BenchClock::now();
  std::vector<Timing> timings = backend_->medians(works, rounds);
  for (int pass = 1; pass < passes_ && rounds == rounds_ && seconds_since(start) < kMostSeconds; ++pass) {
    const std::vector<Timing> again = backend_->medians(works, rounds);
    for (size_t i = 0; i < timings.size(); ++i)
      if (again[i].us < timings[i].us) timings[i] = again[i];
  }
  return timings;
}

std::shared_ptr<Work> BenchHarness::fastest(std::span<const std::shared_ptr<Work>> works) const {
  const std::vector<Timing> timings = medians(works, 1);
  return works[static_cast<size_t>(std::ranges::min_element(timings, {}, &Timing::us) - timings.begin())];
}

}  // namespace halfbyte
