#include "benchmark/harness.h"
#include "core/checks.h"

namespace halfbyte {

void bench_memory(Device device, const BenchOptions& options,
                  const std::function<bool(const BenchRow&)>& progress) {
  check_device(device);
  const bool cuda = device.kind == DeviceKind::cuda;
  const int64_t num_bytes = int64_t{1} << (cuda ? 28 : 30);
  constexpr int kLaunches = 21;
  const int num_sets = cuda ? 3 : 1;
  const BenchHarness harness(device, options);
  const Memory from(device, num_sets * num_bytes), to(device, num_sets * num_bytes);
  const std::vector<uint8_t> pool(1 << 20, 1);
  for (const Memory* memory : {&from, &to}) harness.fill(memory->data(), memory->num_bytes(), pool);
  std::vector<Move> sets;
  std::vector<const void*> reads;
  for (int64_t set = 0; set < num_sets; ++set) {
    sets.push_back({from.data() + set * num_bytes, to.data() + set * num_bytes});
    reads.push_back(sets.back().from);
  }
  const auto report = [&](const char* name, const std::vector<std::shared_ptr<Work>>& works, int64_t read,
                          int64_t written) {
    BenchRow row;
    row.op = "memory";
    row.problem = name;
    row.read_bytes = read;
    row.write_bytes = written;
    for (const Timing& timing : harness.medians(works, harness.rounds())) {
      if (row.median_us <= timing.us) continue;
      row.median_us = timing.us;
      row.spread = timing.spread;
    }
    HALFBYTE_CHECK(progress(row), cancelled, "bench_memory: cancelled");
  };
  const BenchBackend& backend = harness.backend();
  report("read", backend.readers(reads, num_bytes, kLaunches, false), num_bytes, 0);
  report("copy", backend.movers(sets, num_bytes, num_bytes, kLaunches), num_bytes, num_bytes);
  const int64_t codes = num_bytes / 4 + num_bytes / 32;  // a scale of f32 for 64
  report("move nf4 to bf16", backend.movers(sets, codes, num_bytes, kLaunches), codes, num_bytes);
  if (!cuda) return;
  const Memory host = Memory::host(device, num_bytes);
  const auto copies = [&](bool to_device) {
    return std::vector{backend.repeat(3, [&, to_device](int i) {
      std::byte* const memory = to.data() + i % num_sets * num_bytes;
      copy(device, to_device ? memory : host.data(), to_device ? host.data() : memory, num_bytes,
           harness.stream().handle());
    })};
  };
  report("copy host to device", copies(true), 0, num_bytes);
  report("copy device to host", copies(false), num_bytes, 0);
}

}  // namespace halfbyte
