// The tool's work on a sharded checkpoint of 2 GiB, beside the rate of reading its files.
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "benchmark/harness.h"
#include "core/checks.h"
#include "formats/convert.h"
#include "halfbyte/checkpoint.hpp"
#include "halfbyte/output.hpp"
#include "halfbyte/system.hpp"

namespace halfbyte {
namespace {

namespace fs = std::filesystem;

constexpr int kShards = 4, kTensors = 4;  // tensors a shard
constexpr int64_t kExtent = 8192;         // [8192, 8192] bf16: 128 MiB
constexpr int64_t kTensorBytes = kExtent * kExtent * 2;

class SyntheticCheckpoint {
 public:
  explicit SyntheticCheckpoint(const std::string& directory) : work_(clean(directory)) { write(); }
  std::string model() const { return work_.path() + "/model"; }
  std::string output() const { return work_.path() + "/out"; }
  std::string shard(int number) const { return model() + "/" + shard_name(number); }

 private:
  // The name that the directory is made beside, without what earlier runs left.
  static std::string clean(const std::string& directory) {
    std::string name = directory + "/halfbyte-bench";
    remove_leftovers(name);
    return name;
  }
  static std::string shard_name(int number) {
    return fmt::format("model-{:05}-of-{:05}.safetensors", number + 1, kShards);
  }
  void write() const {
    fs::create_directory(model());
    std::vector<uint16_t> weights(kTensorBytes / 2);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 0.02f);
    for (size_t i = 0; i < weights.size(); ++i)
      weights[i] = i < kBenchPoolValues ? formats::to_bf16(normal(random)) : weights[i - kBenchPoolValues];
    std::string index = R"({"metadata":{},"weight_map":{)";
    for (int number = 0; number < kShards; ++number) {
      std::string header = "{";
      for (int64_t t = 0; t < kTensors; ++t) {
        const std::string name = fmt::format("layers.{}.mlp.up_proj.weight", number * kTensors + t);
        header += fmt::format(R"({}"{}":{{"dtype":"BF16","shape":[{},{}],"data_offsets":[{},{}]}})",
                              t ? "," : "", name, kExtent, kExtent, t * kTensorBytes, (t + 1) * kTensorBytes);
        index += fmt::format(R"({}"{}":"{}")", number + t ? "," : "", name, shard_name(number));
      }
      header += "}";
      const uint64_t length = header.size();
      std::ofstream file(shard(number), std::ios::binary);
      file.write(reinterpret_cast<const char*>(&length), sizeof length);
      file << header;
      for (int t = 0; t < kTensors; ++t)
        file.write(reinterpret_cast<const char*>(weights.data()), kTensorBytes);
      file.close();
      HALFBYTE_CHECK(file, io, "bench_checkpoint: {} cannot be written", shard(number));
    }
    std::ofstream(model() + "/model.safetensors.index.json") << index << "}}";
  }

  WorkDirectory work_;
};

// Seconds of reading all files by blocks of 1 MiB.
double time_reading(const SyntheticCheckpoint& checkpoint, int num_threads) {
  constexpr int64_t kBlock = 1 << 20, kPieceBlocks = 32;
  constexpr int kPieces = static_cast<int>(kTensors * kTensorBytes / kBlock / kPieceBlocks);
  std::atomic<int> next = 0;
  std::atomic<bool> failed = false;
  const auto read = [&] {
    std::vector<char> block(kBlock);
    for (int piece = next++; piece < kShards * kPieces; piece = next++) {
      const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
          std::fopen(checkpoint.shard(piece / kPieces).c_str(), "rb"), &std::fclose);
      if (!file) failed = true;
      if (failed) return;
      std::setvbuf(file.get(), nullptr, _IONBF, 0);
      std::fseek(file.get(), piece % kPieces * kPieceBlocks * kBlock, SEEK_SET);
      for (int64_t i = 0; i < kPieceBlocks; ++i)
        if (std::fread(block.data(), 1, block.size(), file.get()) == 0) failed = true;
    }
  };
  const BenchClock::time_point start = BenchClock::now();
  {
    std::vector<std::jthread> threads;
    for (int i = 1; i < num_threads; ++i) threads.emplace_back(read);
    read();
  }
  HALFBYTE_CHECK(!failed, io, "bench_checkpoint: {} cannot be read", checkpoint.model());
  return seconds_since(start);
}

}  // namespace

void bench_checkpoint(Device device, const std::string& directory, const std::vector<std::string>& formats,
                      const BenchOptions& options, const std::function<bool(const BenchRow&)>& progress) {
  check_device(device);
  const int num_threads = options.num_threads > 0 ? options.num_threads : system_info().num_threads;
  const int rounds = options.quick ? 1 : 3;
  const SyntheticCheckpoint checkpoint(directory);
  for (const std::string& format : formats) {
    QuantizeOptions quantize;
    quantize.format = find_format(format).format;
    quantize.num_threads = options.num_threads;
    quantize.devices = {device};
    quantize.force = true;
    quantize.verify = false;  // it would take threads from what is measured
    BenchRow row;
    row.op = "checkpoint";
    row.problem = format;
    std::vector<std::vector<double>> us(2);
    for (int i = 0; i < rounds; ++i) {
      const CheckpointReport report = quantize_checkpoint(checkpoint.model(), checkpoint.output(), quantize);
      us[0].push_back(1e6 * report.run_seconds);
      us[1].push_back(1e6 * time_reading(checkpoint, num_threads));
    }
    const std::vector<Timing> timings = medians_of(us);
    row.median_us = timings[0].us;
    row.spread = timings[0].spread;
    row.read_bytes = kShards * kTensors * kTensorBytes;
    row.ceilings = {{"read", timings[1].us}};
    HALFBYTE_CHECK(progress(row), cancelled, "bench_checkpoint: cancelled");
  }
}

}  // namespace halfbyte
