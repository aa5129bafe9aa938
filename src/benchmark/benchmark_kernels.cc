#include "benchmark/benchmark_kernels.h"

#include <fmt/format.h>

#include "cuda/config.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

int number(const KernelValues& values, const char* key) { return std::stoi(values.at(key)); }

}  // namespace

cuda::KernelSpec read_blocks_kernel(int threads, int loads) {
  return {"benchmark/read_blocks.cu", "read_blocks",
          cuda::config_text(fmt::format("constexpr int kThreads = {}, kLoads = {};\n", threads, loads))};
}
cuda::KernelSpec read_bulk_kernel(int stages, int stage_bytes) {
  return {
      "benchmark/read_bulk.cu", "read_bulk",
      cuda::config_text(fmt::format("constexpr int kStages = {}, kStageBytes = {};\n", stages, stage_bytes))};
}
cuda::KernelSpec move_blocks_kernel(int64_t reads, int64_t writes, bool stream) {
  return {"benchmark/move_blocks.cu", "move_blocks",
          cuda::config_text(
              fmt::format("constexpr int kReads = {}, kWrites = {};\nconstexpr bool kStream = {};\n", reads,
                          writes, stream))};
}
cuda::KernelSpec delay_kernel() { return {"benchmark/delay.cu", "delay", cuda::config_text("")}; }

std::vector<cuda::Kernel> benchmark_kernels() {
  return {
      {{"benchmark",
        "read_blocks",
        "Reads memory by loads, for comparison.",
        {{"threads", {"256", "128", "512"}, false, "Threads of a block."},
         {"loads", {"4", "8"}, false, "Words of 16 bytes that a thread has in flight."}}},
       [](const KernelValues& values) {
         return read_blocks_kernel(number(values, "threads"), number(values, "loads"));
       },
       true},
      {{"benchmark",
        "read_bulk",
        "Reads memory by bulk copies, for comparison (sm_90 and later).",
        {{"stages", {"12", "6"}, false, "Copies that a block has in flight."},
         {"stage-bytes", {"16384", "32768"}, false, "Bytes of a copy."}}},
       [](const KernelValues& values) {
         return read_bulk_kernel(number(values, "stages"), number(values, "stage-bytes"));
       }},
      {{"benchmark",
        "move_blocks",
        "Reads and writes memory, for comparison.",
        {{"reads", {"1024", "512"}, false, "Words of 16 bytes that a block reads."},
         {"writes", {"1024", "512"}, false, "Words that it writes."},
         {"stream", {"no", "yes"}, false, "Past the caches."}}},
       [](const KernelValues& values) {
         return move_blocks_kernel(number(values, "reads"), number(values, "writes"),
                                   values.at("stream") == "yes");
       }},
      {{"benchmark", "delay", "Keeps the device busy for a while.", {}},
       [](const KernelValues&) { return delay_kernel(); }},
  };
}

}  // namespace halfbyte
