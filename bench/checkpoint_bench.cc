// The tool's work on a sharded checkpoint of 2 GiB in memory (/dev/shm), beside the rate of reading its
// files.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kShards = 4, kTensors = 4;  // tensors a shard
constexpr int64_t kExtent = 8192;         // [8192, 8192] bf16: 128 MiB
constexpr int64_t kBytes = kExtent * kExtent * 2;

std::string shard_name(int shard) {
  return "model-0000" + std::to_string(shard + 1) + "-of-00004.safetensors";
}

class SyntheticCheckpoint {
 public:
  SyntheticCheckpoint() : path_("/dev/shm/halfbyte-bench-" + std::to_string(getpid())) {
    fs::create_directory(path_);
    const Buffer weights = make_buffer(kBytes);
    fill_weights(weights.get(), kExtent * kExtent);
    std::string index = "{\"metadata\":{},\"weight_map\":{";
    for (int shard = 0; shard < kShards; ++shard) {
      std::string header = "{";
      for (int t = 0; t < kTensors; ++t) {
        const std::string name = "layers." + std::to_string(shard * kTensors + t) + ".mlp.up_proj.weight";
        header += (t ? ",\"" : "\"") + name +
                  "\":{\"dtype\":\"BF16\",\"shape\":[8192,8192],\"data_offsets\":[" +
                  std::to_string(t * kBytes) + "," + std::to_string((t + 1) * kBytes) + "]}";
        index += (shard + t ? ",\"" : "\"") + name + "\":\"" + shard_name(shard) + "\"";
      }
      header += "}";
      const uint64_t length = header.size();
      std::ofstream file(path_ + "/" + shard_name(shard), std::ios::binary);
      file.write(reinterpret_cast<const char*>(&length), 8);
      file << header;
      for (int t = 0; t < kTensors; ++t) file.write(reinterpret_cast<const char*>(weights.get()), kBytes);
    }
    std::ofstream(path_ + "/model.safetensors.index.json") << index << "}}";
  }
  ~SyntheticCheckpoint() { fs::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

const SyntheticCheckpoint& checkpoint() {
  static const SyntheticCheckpoint instance;
  return instance;
}

// Reading the files with pread into buffers of 1 MiB.
void BM_pread(benchmark::State& state) {
  constexpr int64_t kBlock = 1 << 20;
  std::vector<int> files;
  for (int shard = 0; shard < kShards; ++shard)
    files.push_back(open((checkpoint().path() + "/" + shard_name(shard)).c_str(), O_RDONLY));
  const Buffer buffers = make_buffer(state.range(0) * kBlock);
  const int64_t blocks = kTensors * kBytes / kBlock;
  for (auto _ : state)
    parallel_for(
        kShards * blocks, 1, static_cast<int>(state.range(0)), [&](int64_t begin, int64_t end, int worker) {
          for (int64_t i = begin; i < end; ++i)
            benchmark::DoNotOptimize(pread(files[static_cast<size_t>(i / blocks)],
                                           buffers.get() + worker * kBlock, kBlock, i % blocks * kBlock));
        });
  state.SetBytesProcessed(state.iterations() * kShards * kTensors * kBytes);
  for (const int file : files) close(file);
}
BENCHMARK(BM_pread)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

// Rates are of source bytes; the time is that of the run, without sync and verification, which are reported
// apart.
void BM_quantize_checkpoint(benchmark::State& state, Format format) {
  const std::string output = checkpoint().path() + "-out";
  double sync = 0, verify = 0;
  for (auto _ : state) {
    QuantizeOptions options;
    options.format = format;
    options.num_threads = static_cast<int>(state.range(0));
    options.force = true;
    const CheckpointReport report = quantize_checkpoint(checkpoint().path(), output, options);
    state.SetIterationTime(report.run_seconds);
    sync += report.sync_seconds;
    verify += report.verify_seconds;
  }
  fs::remove_all(output);
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto n = static_cast<double>(state.iterations());
  state.counters["sync_s"] = sync / n;
  state.counters["verify_s"] = verify / n;
  state.counters["peak_rss_MiB"] = static_cast<double>(usage.ru_maxrss) / 1024;
  state.SetBytesProcessed(state.iterations() * kShards * kTensors * kBytes);
}
BENCHMARK_CAPTURE(BM_quantize_checkpoint, nf4, Format::nf4)
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseManualTime();
BENCHMARK_CAPTURE(BM_quantize_checkpoint, int4, Format::int4)
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseManualTime();
BENCHMARK_CAPTURE(BM_quantize_checkpoint, affine4, Format::affine4)
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseManualTime();

}  // namespace
}  // namespace halfbyte::bench
