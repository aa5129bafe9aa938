// Makes the quantized weights of a checkpoint dense, file by file; everything else is copied.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "cpu/parallel.h"
#include "io/checkpoint_writer.h"
#include "io/config.h"
#include "io/foreign.h"
#include "io/safetensors.h"

namespace halfbyte {
namespace io {
namespace {

struct Task {
  const Weight* weight;
  int64_t begin, count;  // elements to decode, or bytes to copy
};

class Dequantizer {
 public:
  Dequantizer(const Checkpoint& input, const std::string& output, const DequantizeOptions& options)
      : input_(input.impl()),
        output_(output),
        options_(options),
        num_workers_(num_workers(options.device, options.num_threads)),
        reporter_(options.progress) {}

  CheckpointReport run();

 private:
  void plan();
  int64_t max_elements(const StoredWeight& quantized) const;  // of a block
  DType dtype_of(const Weight& weight) const { return options_.dtype.value_or(*weight.dtype); }
  Metadata metadata_of(size_t file) const;
  void write_file(CheckpointWriter& writer, size_t file, ProgressPhase& progress);
  void copy_bytes(CheckpointWriter& writer, const Task& task, BlockWorker& worker) const;
  void dequantize_elements(CheckpointWriter& writer, const Task& task, BlockWorker& worker) const;

  const Checkpoint::Impl& input_;
  const std::string& output_;
  const DequantizeOptions& options_;
  const int num_workers_;
  ProgressReporter reporter_;
  OutputFiles files_;
  std::vector<std::vector<Task>> tasks_of_file_;
  SideFiles side_files_;
  CheckpointReport report_;
};

void Dequantizer::plan() {
  HALFBYTE_CHECK(options_.num_threads >= 0, usage, "num_threads must not be negative, got {}",
                 options_.num_threads);
  check_device(options_.device);
  const auto dtype = options_.dtype.value_or(DType::f32);
  HALFBYTE_CHECK(is_floating(dtype) && dtype != DType::f64, usage, "dtype must be f32, f16 or bf16, got {}",
                 to_string(dtype));
  refuse_foreign(input_);  // its tensors would lose the config that tells how to read them
  std::vector<OutputWeight> outputs;
  std::vector<uint64_t> num_bytes;
  outputs.reserve(input_.weights.size());
  std::vector<const OutputWeight*> pointers;
  for (const Weight& weight : input_.weights) {
    pointers.push_back(&outputs.emplace_back(whole_weight(weight, outputs.size())));
    num_bytes.push_back(weight.layout
                            ? static_cast<uint64_t>(num_elements(weight) * size_of(dtype_of(weight)))
                            : weight.num_bytes);
  }
  files_ = output_files(input_, pointers, num_bytes, options_.shard_bytes);
  std::vector<size_t> file_of(input_.weights.size());
  for (size_t file = 0; file < files_.weights.size(); ++file)
    for (const size_t weight : files_.weights[file]) file_of[weight] = file;
  tasks_of_file_.resize(files_.weights.size());
  int64_t copy_bytes = 0, block_bytes = 0;
  for (const Weight& weight : input_.weights) {
    const size_t file = file_of[report_.weights.size()];
    const StoredWeight* quantized = input_.quantized_weight(weight);
    const int64_t size = quantized ? size_of(dtype_of(weight)) : 1;
    const int64_t n = quantized ? num_elements(weight) : static_cast<int64_t>(weight.num_bytes);
    for (int64_t begin = 0; begin < n;) {
      const int64_t count = quantized ? block_at(quantized->weight, begin, max_elements(*quantized)).count
                                      : std::min(kCopyBytes, n - begin);
      tasks_of_file_[file].push_back({&weight, begin, count});
      // Decoded, and at most once more for the parts, in their stored and their native form.
      if (quantized) block_bytes = std::max(block_bytes, count * (size + 8));
      if (!quantized) copy_bytes = std::max(copy_bytes, count);
      begin += count;
    }
    WeightReport& report = report_.weights.emplace_back();
    report.name = weight.name;
    report.shape = weight.shape;
    report.dtype = quantized ? dtype_to_safetensors(dtype_of(weight))
                             : input_.tensors[static_cast<size_t>(weight.parts.front())].dtype;
    report.quantized = quantized != nullptr;
    report.reason = quantized ? "" : "dense";
    report.spec = weight.spec;
    report.source_bytes = weight.num_bytes;
    report.output_bytes = static_cast<uint64_t>(n * size);
    const int64_t elements = num_elements(weight);
    report.bits_per_weight =
        elements == 0 ? 0 : 8 * static_cast<double>(report.output_bytes) / static_cast<double>(elements);
    report_.source_bytes += report.source_bytes;
    report_.output_bytes += report.output_bytes;
    if (!quantized) continue;
    if (!report_.layout) report_.layout = weight.layout;
    report_.quantized_source_bytes += weight.num_bytes;
    ++report_.num_quantized;
  }
  HALFBYTE_CHECK(report_.num_quantized > 0, bad_input,
                 "\"{}\" has no quantized weights in a layout that is known", printable(input_.path));
  report_.peak_buffer_bytes = static_cast<uint64_t>(num_workers_ * (copy_bytes + block_bytes));
  side_files_ = find_side_files(input_);
}

int64_t Dequantizer::max_elements(const StoredWeight& quantized) const {
  const int64_t most = block_elements(options_.device);
  return quantized.transposed ? std::max(most, kTransposedElements) : most;
}

Metadata Dequantizer::metadata_of(size_t file) const {
  Metadata metadata = input_.files[files_.sources[file].front()].metadata;
  if (report_.layout == Layout::mlx) {
    std::erase_if(metadata, [](const auto& entry) { return entry.first == "quantization"; });
    set_metadata(metadata, "format", "pt");
  }
  return metadata;
}

void Dequantizer::copy_bytes(CheckpointWriter& writer, const Task& task, BlockWorker& worker) const {
  const std::span<std::byte> bytes(worker.stored.reserve(task.count), static_cast<size_t>(task.count));
  input_.read(input_.tensors[static_cast<size_t>(task.weight->parts.front())],
              static_cast<uint64_t>(task.begin), bytes);
  writer.write(writer.tensor(task.weight->name), static_cast<uint64_t>(task.begin), bytes);
}

void Dequantizer::dequantize_elements(CheckpointWriter& writer, const Task& task, BlockWorker& worker) const {
  const StoredWeight& quantized = *input_.quantized_weight(*task.weight);
  const DType dtype = dtype_of(*task.weight);
  const int64_t size = size_of(dtype);
  worker.for_each_block(quantized.weight, task.begin, task.count, [&](const Block& block) {
    const std::span<const std::byte> bytes(worker.dense.reserve(block.count * size),
                                           static_cast<size_t>(block.count * size));
    decode_block(input_, quantized, block, worker,
                 {worker.dense.mirror(), dtype, {block.rows, block.cols}, {}, worker.device});
    worker.dense.download(worker.stream);
    worker.stream.synchronize();
    const StoredTensor& tensor = writer.tensor(task.weight->name);
    if (!quantized.transposed) return writer.write(tensor, static_cast<uint64_t>(block.begin * size), bytes);
    // A column of the block is a run of a row of the weight.
    const int64_t out = quantized.weight.shape[0], in = quantized.weight.shape[1];
    for (int64_t column = 0; column < in; ++column) {
      const RowRange rows = rows_of_column(block.begin, block.begin + block.count, column, in);
      const auto run_bytes = static_cast<size_t>((rows.end - rows.begin) * size);
      std::byte* const run = worker.stored.reserve(static_cast<int64_t>(run_bytes));
      for (int64_t row = rows.begin; row < rows.end; ++row)
        std::memcpy(run + (row - rows.begin) * size, bytes.data() + (row * in + column - block.begin) * size,
                    static_cast<size_t>(size));
      writer.write(tensor, static_cast<uint64_t>((column * out + rows.begin) * size), {run, run_bytes});
    }
  });
}

void Dequantizer::write_file(CheckpointWriter& writer, size_t file, ProgressPhase& progress) {
  std::vector<StoredTensor> tensors;
  for (const size_t i : files_.weights[file]) {
    const Weight& weight = input_.weights[i];
    const StoredTensor& first = input_.tensors[static_cast<size_t>(weight.parts.front())];
    const std::string dtype = weight.layout ? dtype_to_safetensors(dtype_of(weight)) : first.dtype;
    tensors.push_back({weight.name, dtype, weight.shape, "", 0, 0});
  }
  writer.begin_file(file, std::move(tensors), metadata_of(file));
  const std::vector<Task>& tasks = tasks_of_file_[file];
  int64_t most = block_elements(options_.device);
  for (const size_t i : files_.weights[file])
    if (const StoredWeight* quantized = input_.quantized_weight(input_.weights[i]))
      most = std::max(most, max_elements(*quantized));
  std::vector<BlockWorker> workers;
  for (int i = 0; i < num_workers_; ++i) workers.emplace_back(options_.device, most);
  parallel_for(static_cast<int64_t>(tasks.size()), 1, num_workers_, [&](int64_t begin, int64_t end, int w) {
    BlockWorker& worker = workers[static_cast<size_t>(w)];
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const Task& task = tasks[i];
      if (task.weight->layout) {
        dequantize_elements(writer, task, worker);
        progress.add(static_cast<uint64_t>(task.count * size_of(dtype_of(*task.weight))));
      } else {
        copy_bytes(writer, task, worker);
        progress.add(static_cast<uint64_t>(task.count));
      }
    }
  });
}

CheckpointReport Dequantizer::run() {
  report_.input = input_.path;
  report_.output = output_;
  report_.device = options_.device;
  plan();
  report_.copied_files = side_files_.copied;
  report_.skipped_files = side_files_.skipped;
  const std::string config = input_.config.empty() ? "" : without_quantization(input_.config, options_.dtype);
  if (options_.dry_run) return std::move(report_);

  ProgressPhase progress(reporter_, "dequantize", report_.output_bytes);
  CheckpointWriter writer(input_, output_, options_.force, files_);
  for (size_t file = 0; file < files_.names.size(); ++file) {
    const auto start = std::chrono::steady_clock::now();
    write_file(writer, file, progress);
    const auto written = std::chrono::steady_clock::now();
    writer.sync();
    writer.commit_file();
    const auto synced = std::chrono::steady_clock::now();
    report_.run_seconds += std::chrono::duration<double>(written - start).count();
    report_.sync_seconds += std::chrono::duration<double>(synced - written).count();
  }
  writer.finish(side_files_, config);
  return std::move(report_);
}

}  // namespace
}  // namespace io

CheckpointReport dequantize_checkpoint(const std::string& input, const std::string& output,
                                       const DequantizeOptions& options) {
  return io::Dequantizer(Checkpoint::open(input), output, options).run();
}

}  // namespace halfbyte
