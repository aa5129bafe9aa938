// Makes the quantized weights of a checkpoint dense, file by file; everything else is copied.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "cpu/parallel.h"
#include "io/architecture.h"
#include "io/background.h"
#include "io/checkpoint_writer.h"
#include "io/config.h"
#include "io/foreign.h"
#include "io/journal.h"
#include "io/name_patterns.h"
#include "io/safetensors.h"

namespace halfbyte {
namespace io {
namespace {

// Where the rows of a weight lie in an output, in elements. Turned (row_stride 1): a row is a column there.
struct Place {
  size_t output;
  int64_t first = 0, row_stride = 0, col_stride = 1;
  bool turned() const { return col_stride != 1; }
};

struct DequantizeTask {
  size_t weight;
  int64_t begin, count;  // elements to decode, or bytes to copy
};

class Dequantizer {
 public:
  Dequantizer(const Checkpoint& input, const std::string& output, const DequantizeOptions& options,
              Team& team)
      : input_(input.impl()),
        output_(output),
        options_(options),
        devices_(worker_devices(options.devices, options.num_threads)),
        team_(team),
        reporter_(team.watched(options.progress)) {}

  CheckpointReport run();

 private:
  void plan();
  void find_places();
  bool place_expert(size_t weight, const Architecture& architecture, std::map<std::string, size_t>& outputs);
  int64_t max_elements(size_t weight, Device device) const;  // of a block
  DType dtype_of(const Weight& weight) const { return options_.dtype.value_or(*weight.dtype); }
  uint64_t output_bytes(const DequantizeTask& task) const {
    const Weight& weight = input_.weights[task.weight];
    return static_cast<uint64_t>(weight.layout ? task.count * size_of(dtype_of(weight)) : task.count);
  }
  Metadata metadata_of(size_t file) const;
  FileContent content_of(size_t file) const;
  void make_workers();
  // Files side by side.
  std::vector<std::unique_ptr<TensorFile>> write_files(OutputCheckpoint& writer,
                                                       std::span<const size_t> indices,
                                                       ProgressPhase& progress);
  void copy_bytes(TensorFile& file, const DequantizeTask& task, BlockWorker& worker) const;
  void dequantize_elements(TensorFile& file, const DequantizeTask& task, BlockWorker& worker) const;
  void write_elements(TensorFile& file, size_t weight, int64_t begin, std::span<const std::byte> bytes,
                      int64_t size) const;

  const Checkpoint::Impl& input_;
  const std::string& output_;
  const DequantizeOptions& options_;
  const std::vector<Device> devices_;  // of each worker
  std::optional<BlockWorkers> workers_;
  Team& team_;
  ProgressReporter reporter_;
  std::vector<OutputWeight> outputs_;
  std::vector<Place> places_;  // of each weight of the input
  OutputFiles files_;
  std::vector<std::vector<DequantizeTask>> tasks_of_file_;
  SideFiles side_files_;
  CheckpointReport report_;
};

void Dequantizer::plan() {
  HALFBYTE_CHECK(options_.num_threads >= 0, usage, "num_threads must not be negative, got {}",
                 options_.num_threads);
  check_devices(options_.devices);
  const auto dtype = options_.dtype.value_or(DType::f32);
  HALFBYTE_CHECK(is_floating(dtype) && dtype != DType::f64, usage, "dtype must be f32, f16 or bf16, got {}",
                 to_string(dtype));
  refuse_foreign(input_);  // its tensors would lose the config that tells how to read them
  find_places();
  std::vector<uint64_t> num_bytes(outputs_.size());
  for (size_t i = 0; i < places_.size(); ++i) {
    const Weight& weight = input_.weights[i];
    num_bytes[places_[i].output] +=
        weight.layout ? static_cast<uint64_t>(num_elements(weight) * size_of(dtype_of(weight)))
                      : weight.num_bytes;
  }
  std::vector<const OutputWeight*> pointers;
  for (const OutputWeight& output : outputs_) pointers.push_back(&output);
  files_ = output_files(input_, pointers, num_bytes, options_.shard_bytes);
  std::vector<size_t> file_of(outputs_.size());
  for (size_t file = 0; file < files_.weights.size(); ++file)
    for (const size_t output : files_.weights[file]) file_of[output] = file;
  tasks_of_file_.resize(files_.weights.size());
  int64_t copy_bytes = 0, block_bytes = 0;
  for (const Weight& weight : input_.weights) {
    const size_t number = report_.weights.size(), file = file_of[places_[number].output];
    const StoredWeight* quantized = input_.quantized_weight(weight);
    const int64_t size = quantized ? size_of(dtype_of(weight)) : 1;
    const int64_t n = quantized ? num_elements(weight) : static_cast<int64_t>(weight.num_bytes);
    for (int64_t begin = 0; begin < n;) {
      const int64_t count =
          quantized ? block_at(quantized->weight, begin, max_elements(number, devices_.front())).count
                    : std::min(kCopyBytes, n - begin);
      tasks_of_file_[file].push_back({number, begin, count});
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
    report.note = weight.note;
    report.spec = weight.spec;
    report.scale_rows = weight.scale_rows;
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
  report_.peak_buffer_bytes =
      static_cast<uint64_t>(std::ssize(devices_) * (copy_bytes + block_bytes)) + input_.whole_bytes();
  check_output(input_, files_, [&](size_t file) { return content_of(file); });
  side_files_ = find_side_files(input_);
  // They describe what is no longer there.
  std::erase_if(side_files_.copied,
                [&](const std::string& name) { return input_.quantization_configs.contains(name); });
}

// Where the weights go: each into a tensor of its name, but for experts that only readers of quantized
// weights have apart.
void Dequantizer::find_places() {
  std::optional<Architecture> architecture;
  if (!input_.config.empty()) architecture = Architecture::find(config_json(input_.config));
  std::map<std::string, size_t> experts;  // names of outputs with several
  for (size_t i = 0; i < input_.weights.size(); ++i) {
    const Weight& weight = input_.weights[i];
    if (architecture && place_expert(i, *architecture, experts)) continue;
    const int64_t cols = weight.shape.empty() ? 1 : weight.shape.back();
    Place place{outputs_.size(), 0, cols, 1};
    if (const StoredWeight* quantized = input_.quantized_weight(weight); quantized && quantized->transposed)
      place = {outputs_.size(), 0, 1, weight.shape.back()};
    places_.push_back(place);
    outputs_.push_back(whole_weight(weight, i));
  }
  // How many experts there are is known now.
  for (const auto& [name, number] : experts) {
    OutputWeight& output = outputs_[number];
    const int64_t parts = name.ends_with("gate_up_proj") ? 2 : 1;
    const auto count = static_cast<int64_t>(output.sources.size());
    const Weight& first = input_.weights[output.sources.front().weight];
    const int64_t out = first.shape[0], in = first.shape[1];
    output.shape = {count / parts, in, parts * out};
    for (const SourceRows& source : output.sources) {
      const Weight& weight = input_.weights[source.weight];
      HALFBYTE_CHECK(weight.shape == first.shape && weight.dtype == first.dtype && count % parts == 0 &&
                         places_[source.weight].first < count / parts * in * parts * out,
                     bad_input, "weight \"{}\" does not fit the other experts of \"{}\"",
                     printable(weight.name), printable(name));
    }
  }
}

// "X.experts.7.up_proj.weight" into X.experts.gate_up_proj [experts, in, gate and up].
bool Dequantizer::place_expert(size_t weight, const Architecture& architecture,
                               std::map<std::string, size_t>& outputs) {
  const Weight& own = input_.weights[weight];
  const names::Parts parts = names::split(own.name, '.');
  const size_t rank = own.shape.size(), last = parts.size() - 1;
  if (rank != 2 || !own.dtype || last < 3 || parts[last] != "weight" || parts[last - 3] != "experts")
    return false;
  const std::string& projection = parts[last - 1];
  const bool is_down = projection == "down_proj", is_up = projection == "up_proj";
  int64_t number = -1;
  const std::string& digits = parts[last - 2];
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (!(is_down || is_up || projection == "gate_proj") || error != std::errc() ||
      end != digits.data() + digits.size() || number < 0 || number >= std::ssize(input_.weights))
    return false;
  const std::string name = names::join(parts, 0, last - 2) + (is_down ? ".down_proj" : ".gate_up_proj");
  const auto module = architecture.find_tensor(name);
  if (!module || !module->apart || !module->transposed) return false;
  const int64_t out = own.shape[0], in = own.shape[1], num_parts = is_down ? 1 : 2;
  const auto [entry, is_new] = outputs.emplace(name, outputs_.size());
  if (is_new) outputs_.push_back({name, {}, {}});
  outputs_[entry->second].sources.push_back({weight, 0, out, in, 1});
  places_.push_back({entry->second, number * in * num_parts * out + (is_up ? out : 0), 1, num_parts * out});
  return true;
}

int64_t Dequantizer::max_elements(size_t weight, Device device) const {
  const StoredWeight* quantized = input_.quantized_weight(input_.weights[weight]);
  int64_t most = block_elements(device);
  if (quantized) most = preferred_elements(quantized->weight, most);
  return places_[weight].turned() ? std::max(most, kTransposedElements) : most;
}

Metadata Dequantizer::metadata_of(size_t file) const {
  Metadata metadata = input_.files[files_.sources[file].front()].metadata;
  if (report_.layout == Layout::mlx) {
    std::erase_if(metadata, [](const auto& entry) { return entry.first == "quantization"; });
    set_metadata(metadata, "format", "pt");
  }
  std::erase_if(metadata, [](const auto& entry) { return entry.first == kWordMetadata; });
  return metadata;
}

// Elements of the weight from `begin` on.
void Dequantizer::write_elements(TensorFile& file, size_t weight, int64_t begin,
                                 std::span<const std::byte> bytes, int64_t size) const {
  const Place& place = places_[weight];
  const StoredTensor& tensor = file.tensor(outputs_[place.output].name);
  if (!place.turned()) return file.write(tensor, static_cast<uint64_t>((place.first + begin) * size), bytes);
  // Rows as they are stored: of those that are turned when they are read, the columns. Matrix by matrix.
  const StoredWeight* quantized = input_.quantized_weight(input_.weights[weight]);
  const std::vector<int64_t>& shape = quantized ? quantized->weight.shape : input_.weights[weight].shape;
  const int64_t cols = shape.back(), matrix = shape[shape.size() - 2] * cols;
  const std::byte* from = bytes.data();
  std::vector<std::byte> run;
  for (const int64_t end = begin + static_cast<int64_t>(bytes.size()) / size; begin < end;) {
    const int64_t first = begin / matrix * matrix, low = begin - first, high = std::min(end - first, matrix);
    for (int64_t column = 0; column < cols; ++column) {
      const RowRange rows = rows_of_column(low, high, column, cols);
      run.resize(static_cast<size_t>((rows.end - rows.begin) * size));
      for (int64_t row = rows.begin; row < rows.end; ++row)
        std::memcpy(run.data() + (row - rows.begin) * size, from + (row * cols + column - low) * size,
                    static_cast<size_t>(size));
      const int64_t at = place.first + first + column * place.col_stride + rows.begin;
      file.write(tensor, static_cast<uint64_t>(at * size), run);
    }
    from += (high - low) * size;
    begin = first + high;
  }
}

void Dequantizer::copy_bytes(TensorFile& file, const DequantizeTask& task, BlockWorker& worker) const {
  const Weight& weight = input_.weights[task.weight];
  const std::span<std::byte> bytes(worker.stored.reserve(task.count), static_cast<size_t>(task.count));
  {
    const Stopwatch reading(worker.read_seconds);
    input_.read(input_.tensors[static_cast<size_t>(weight.parts.front())], static_cast<uint64_t>(task.begin),
                bytes);
  }
  const Stopwatch writing(worker.write_seconds);
  const int64_t size = places_[task.weight].turned() ? size_of(*weight.dtype) : 1;
  write_elements(file, task.weight, task.begin / size, bytes, size);
}

void Dequantizer::dequantize_elements(TensorFile& file, const DequantizeTask& task,
                                      BlockWorker& worker) const {
  const Weight& weight = input_.weights[task.weight];
  const StoredWeight& quantized = *input_.quantized_weight(weight);
  const DType dtype = dtype_of(weight);
  const int64_t size = size_of(dtype);
  worker.for_each_block(quantized.weight, task.begin, task.count, [&](const Block& block) {
    const std::span<const std::byte> bytes(worker.dense.reserve(block.count * size),
                                           static_cast<size_t>(block.count * size));
    decode_block(input_, quantized, block, worker,
                 {worker.dense.mirror(), dtype, {block.rows, block.cols}, {}, worker.device});
    worker.stream.synchronize();
    worker.transfer([&] { worker.dense.download(worker.stream); });
    restore_columns(quantized.weight, worker.dense.data(), block.rows, size);
    const Stopwatch writing(worker.write_seconds);
    write_elements(file, task.weight, block.begin, bytes, size);
  });
}

FileContent Dequantizer::content_of(size_t file) const {
  std::vector<StoredTensor> tensors;
  for (const size_t i : files_.weights[file]) {
    const Weight& weight = input_.weights[outputs_[i].sources.front().weight];
    const StoredTensor& first = input_.tensors[static_cast<size_t>(weight.parts.front())];
    const std::string dtype = weight.layout ? dtype_to_safetensors(dtype_of(weight)) : first.dtype;
    tensors.push_back({outputs_[i].name, dtype, outputs_[i].shape, "", 0, 0});
  }
  return {std::move(tensors), metadata_of(file)};
}

std::vector<std::unique_ptr<TensorFile>> Dequantizer::write_files(OutputCheckpoint& writer,
                                                                  std::span<const size_t> indices,
                                                                  ProgressPhase& progress) {
  std::vector<std::unique_ptr<TensorFile>> files;
  std::vector<std::pair<const DequantizeTask*, TensorFile*>> tasks;
  for (const size_t index : indices) {
    files.push_back(writer.begin_file(index, content_of(index)));
    for (const DequantizeTask& task : tasks_of_file_[index]) tasks.emplace_back(&task, files.back().get());
  }
  BlockWorkers& workers = *workers_;
  parallel_for(std::ssize(tasks), 1, workers.size(), [&](int64_t begin, int64_t end, int w) {
    BlockWorker& worker = workers[w];
    const Stopwatch working(worker.seconds);
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const auto [task, file] = tasks[i];
      if (input_.weights[task->weight].layout)
        dequantize_elements(*file, *task, worker);
      else
        copy_bytes(*file, *task, worker);
      progress.add(output_bytes(*task));
    }
  });
  return files;
}

void Dequantizer::make_workers() {
  workers_.emplace(devices_, [&](Device device) {
    int64_t most = block_elements(device);
    for (size_t i = 0; i < input_.weights.size(); ++i)
      if (input_.weights[i].layout) most = std::max(most, max_elements(i, device));
    return most;
  });
}

CheckpointReport Dequantizer::run() {
  report_.input = input_.path;
  report_.output = output_;
  if (!options_.devices.empty()) report_.devices = options_.devices;
  plan();
  report_.copied_files = side_files_.copied;
  report_.skipped_files = side_files_.skipped;
  const std::string config = input_.config.empty() ? "" : without_quantization(input_.config, options_.dtype);
  if (options_.dry_run) return std::move(report_);

  ProgressPhase progress(reporter_, "dequantize", report_.output_bytes);
  const nlohmann::json identity = json_object(
      {{"operation", "dequantize"},
       {"options",
        json_object({{"dtype", option_json(options_.dtype)}, {"shard_bytes", options_.shard_bytes}})}});
  OutputCheckpoint writer(input_, output_, options_.force, files_, side_files_, reporter_,
                          {options_.unfinished, identity, options_.num_threads}, team_);
  writer.run([&] {
    writer.reserve([&](size_t file) { return content_of(file); });
    make_workers();
    Background completion(effective_threads(options_.num_threads) > 1);
    std::vector<size_t> mine;
    for (size_t file = 0; file < files_.names.size(); ++file) {
      if (writer.is_resumed(file) && writer.take_resumed(file, content_of(file))) {
        ++report_.num_resumed_files;
        for (const DequantizeTask& task : tasks_of_file_[file]) progress.add(output_bytes(task));
      } else if (writer.is_mine(file)) {
        mine.push_back(file);
      }
    }
    const auto at_once = static_cast<size_t>(files_at_once(workers_->size()));
    for (size_t first = 0; first < mine.size(); first += at_once) {
      const auto files = std::make_shared<std::vector<std::unique_ptr<TensorFile>>>();
      {
        const Stopwatch running(report_.run_seconds);
        *files = write_files(writer, std::span(mine).subspan(first, std::min(at_once, mine.size() - first)),
                             progress);
      }
      completion.start([this, &writer, files] {
        const Stopwatch syncing(report_.sync_seconds);
        for (std::unique_ptr<TensorFile>& file : *files) {
          writer.sync(*file);
          writer.commit_file(std::move(file));
        }
      });
    }
    completion.wait();
    workers_->add_seconds(report_);
    writer.gather_files();
    for (size_t file = 0; file < files_.names.size(); ++file)
      if (writer.is_gathered(file)) writer.take_resumed(file, content_of(file));
    writer.finish(config);
  });
  return std::move(report_);
}

}  // namespace
}  // namespace io

CheckpointReport dequantize_checkpoint(const std::string& input, const std::string& output,
                                       const DequantizeOptions& options) {
  io::Team team(options.process_group);
  const io::Timer timer;
  return team.run([&] {
    const Checkpoint checkpoint = Checkpoint::open(input, team.watched(options.progress));
    CheckpointReport report = io::Dequantizer(checkpoint, output, options, team).run();
    if (!options.dry_run) report.total_seconds = timer.seconds();
    return report;
  });
}

}  // namespace halfbyte
