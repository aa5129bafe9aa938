// The checkpoint interface: quantize a model to NF4, read it back, print what it cost.
//   checkpoint_cpp MODEL OUTPUT
#include <cstdio>
#include <vector>

#include "halfbyte/checkpoint.hpp"

using namespace halfbyte;

int main(int argc, char** argv) try {
  if (argc != 3) throw Error(ErrorCode::usage, "usage: checkpoint_cpp MODEL OUTPUT");
  QuantizeOptions options;
  options.format = Format::nf4;
  options.force = true;  // replaces OUTPUT
  options.progress = [](const Progress& progress) {
    if (progress.total_bytes > 0)
      std::fprintf(
          stderr, "\r%-10s %3.0f %%", progress.phase,
          100.0 * static_cast<double>(progress.done_bytes) / static_cast<double>(progress.total_bytes));
    return true;  // false cancels
  };
  const CheckpointReport report = quantize_checkpoint(argv[1], argv[2], options);
  std::fprintf(stderr, "\n");
  for (const WeightReport& weight : report.weights)
    if (weight.quantized)
      std::printf("%-45s %5.2f bits  %6.2f dB\n", weight.name.c_str(), weight.bits_per_weight, weight.snr_db);

  const Checkpoint checkpoint = Checkpoint::open(argv[2]);
  for (const Weight& weight : checkpoint.weights()) {
    if (!weight.layout) continue;
    std::vector<float> first(4);
    checkpoint.decode(weight, 0, 4, DType::f32, first.data());
    std::printf("%s, layout %s, begins with %g %g %g %g\n", weight.name.c_str(), to_string(*weight.layout),
                static_cast<double>(first[0]), static_cast<double>(first[1]), static_cast<double>(first[2]),
                static_cast<double>(first[3]));
    break;
  }
  std::printf("%lld weights quantized, %.1f MB -> %.1f MB\n", static_cast<long long>(report.num_quantized),
              static_cast<double>(report.source_bytes) / 1e6, static_cast<double>(report.output_bytes) / 1e6);
  return report.num_quantized > 0 ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return static_cast<int>(error.code());
}
