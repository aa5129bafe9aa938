// Quantizes a checkpoint file by file. The sizes of all output tensors are known before the first byte is
// read, so blocks of all weights of a file are read, quantized and written in any order, in parallel. A CUDA
// device takes the quantizing; reading, converting for the layout, writing and verifying stay on the CPU.
#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "core/checks.h"
#include "core/counts.h"
#include "cpu/parallel.h"
#include "formats/codec.h"
#include "io/background.h"
#include "io/checkpoint_writer.h"
#include "io/config.h"
#include "io/foreign.h"
#include "io/fused.h"
#include "io/importance.h"
#include "io/journal.h"
#include "io/run_estimate.h"
#include "io/safetensors.h"
#include "io/selection.h"
#include "io/tiles.h"
#include "io/verify.h"

namespace halfbyte {
namespace io {
namespace {

// One weight of the output: what it is made of and what becomes of it.
struct QuantizeItem {
  OutputWeight source;
  size_t report;          // its place in CheckpointReport::weights
  bool quantize = false;  // false: copied
  QuantizedWeight target = {};
  std::vector<Part> parts = {};
  // What running has brought.
  ValueRange range = {};  // Granularity::tensor; with a global scale, of all weights that share it
  QuantizeStatus status = {};
  std::vector<float> scales = {};  // double quantization
};

// What a sample has taken, in seconds.
struct SampleTimes {
  double run = 0, verify = 0, sync = 0;
};

class Quantizer {
 public:
  // `timer`: since the run began.
  Quantizer(const Checkpoint::Impl& input, const std::string& output, const QuantizeOptions& options,
            Team& team, const Timer& timer)
      : input_(input),
        output_(output),
        options_(options),
        layout_(options.layout ? layout_info(*options.layout) : default_layout(options.format)),
        devices_(worker_devices(options.devices, options.num_threads)),
        team_(team),
        timer_(timer),
        reporter_(team.watched(options.progress)),
        decodes_(std::ranges::any_of(input_.weights,
                                     [](const Weight& weight) { return weight.layout.has_value(); })),
        config_(decodes_ && !input_.config.empty() ? without_quantization(input_.config, {})
                                                   : input_.config) {}

  CheckpointReport run();

 private:
  using Json = nlohmann::json;
  using TensorFiles = std::vector<std::unique_ptr<TensorFile>>;
  // Begins a file of the output.
  using BeginFile =
      std::function<std::unique_ptr<TensorFile>(size_t file, std::vector<StoredTensor>&& tensors)>;

  struct Task {
    size_t item;
    int64_t begin, count;  // elements to quantize, or bytes to copy
  };

  void plan();
  void complete_report();
  void refuse_adapter() const;
  void refuse_quantized() const;
  void select();
  std::string main_reason() const;
  std::vector<bool> is_dense() const;
  QuantizeOptions options_of(const QuantizeItem& item) const;
  void keep_dense(QuantizeItem& item, const std::string& reason);
  std::string decoded_note(const QuantizeItem& item) const;
  void set_note(const QuantizeItem& item, const std::string& note = "");
  void set_target(QuantizeItem& item, const QuantSpec& spec);
  void open_importance();
  std::optional<ModelQuantization> quantization() const;
  std::string config_text() const;
  std::map<std::string, std::string> quantization_files() const;
  Metadata metadata_of(size_t file) const;
  std::vector<StoredTensor> tensors_of(std::span<const size_t> items) const;
  // Of a block, on a device.
  int64_t max_elements(const QuantizeItem& item, Device device) const;
  // Of a block on the device that takes the largest.
  int64_t max_elements(const QuantizeItem& item) const;
  std::vector<Task> tasks_of(std::span<const size_t> items) const;
  uint64_t buffer_bytes(std::span<const size_t> items) const;

  uint64_t source_bytes_of(size_t file) const;
  // Whether a file is verified and completed while the next one is written.
  bool uses_cuda() const {
    return std::ranges::any_of(devices_, [](Device device) { return device.kind == DeviceKind::cuda; });
  }
  bool overlaps() const { return files_.names.size() > 1 && effective_threads(options_.num_threads) > 1; }
  Json identity() const;
  void resume_file(const Json& records, size_t file);
  // Files side by side.
  void run_files(OutputCheckpoint& writer, std::span<const size_t> files, Background& completion);
  void complete_files(OutputCheckpoint& writer, TensorFiles& written, std::span<const size_t> numbers);
  TensorFiles write_files(const BeginFile& begin, std::span<const size_t> indices);
  std::vector<size_t> with_ranges() const;
  void find_ranges(std::span<const size_t> wanted);
  void set_global_scale(QuantizeItem& item) const;
  void share(std::vector<ValueRange>& ranges, const std::function<int64_t(int rank)>& part) const;
  void share_ranges(OutputCheckpoint& writer);
  bool outpaces_feeding(std::span<const Device> threads);
  void choose_devices();
  void make_workers();
  TensorView read_block(const QuantizeItem& item, const Block& block, BlockWorker& worker) const;
  void copy_block(TensorFile& file, const Task& task, BlockWorker& worker) const;
  QuantizeStatus quantize_block(TensorFile& file, QuantizeItem& item, const Block& block,
                                BlockWorker& worker);
  QuantizeStatus quantize_tiles(TensorFile& file, QuantizeItem& item, const Block& block,
                                BlockWorker& worker);
  void finish_weight(TensorFile& file, QuantizeItem& item) const;
  bool plan_again(size_t file);
  std::vector<VerifyItem> checks_of(size_t file);

  RunPlan run_plan();
  std::vector<SampledWeight> sampled_weights() const;
  void take_sample(const Quantizer& whole, std::span<const std::vector<SampledUnits>> sets);
  std::vector<size_t> files_of_set(size_t set) const;
  uint64_t bytes_of_set(size_t set) const;
  TensorFiles begin_sample(size_t set, const std::string& directory) const;
  TensorFiles write_sample(size_t set, const std::string& directory, TensorFiles begun, SampleTimes& times);
  void complete_sample(size_t set, const TensorFiles& written, bool is_hashed, SampleTimes& times);
  double measure_reserve(uint64_t num_bytes, const std::string& directory) const;
  SampleRates measure(const RunPlan& plan, const std::string& directory);
  void estimate();

  WeightReport& report_of(const QuantizeItem& item) { return report_.weights[item.report]; }
  // Some scale is that of the whole weight.
  static bool needs_range(const QuantizeItem& item) {
    return item.quantize &&
           (item.target.spec.granularity == Granularity::tensor || has_global_scale(item.target.spec));
  }
  DType dtype_of(const QuantizeItem& item) const {
    return *input_.weights[item.source.sources.front().weight].dtype;
  }

  const Checkpoint::Impl& input_;
  const std::string& output_;
  const QuantizeOptions& options_;
  const LayoutInfo& layout_;
  std::vector<Device> devices_;  // of each worker
  std::optional<BlockWorkers> workers_;
  Team& team_;
  const Timer& timer_;
  ProgressReporter reporter_;
  const bool decodes_;        // some weights of the input are quantized
  const std::string config_;  // of the input, as if none were
  std::shared_ptr<const ImportanceFile> importance_;
  Selection selection_;
  std::vector<QuantizeItem> items_;  // one for each weight of selection_
  OutputFiles files_;
  SideFiles side_files_;
  CheckpointReport report_;
  std::vector<size_t> mine_;  // of files_, where the time is estimated: those of this process
  std::unique_ptr<ProgressPhase> quantize_phase_, verify_phase_;
};

// ---- The plan

// What the error of a weight is measured against, where that is not what was trained.
std::string Quantizer::decoded_note(const QuantizeItem& item) const {
  const Weight& source = input_.weights[item.source.sources.front().weight];
  if (!source.layout) return "";
  return fmt::format("decoded from {} ({}), against which the error is", info(source.spec.format).name,
                     to_string(*source.layout));
}

// Adapters of PEFT are small, and their readers do not look for quantized ones.
void Quantizer::refuse_adapter() const {
  constexpr std::string_view kPrefix = "base_model.model.";  // of every tensor that PEFT saves
  const auto own = std::ranges::find_if(input_.tensors,
                                        [&](const auto& tensor) { return tensor.name.starts_with(kPrefix); });
  const bool is_adapter = own != input_.tensors.end();
  HALFBYTE_CHECK(
      !input_.has_adapter_config && !is_adapter, bad_input,
      "\"{}\" is an adapter of PEFT ({}), not a model: merge it into the dense model that it was trained on "
      "(merge_and_unload, then save_pretrained) and quantize that, or quantize that model alone and load the "
      "adapter beside it",
      printable(input_.path),
      is_adapter ? fmt::format("tensor \"{}\"", printable(own->name)) : "adapter_config.json");
}

// Quantizing what was quantized before measures its error against the wrong weights, unless there are no
// others.
void Quantizer::refuse_quantized() const {
  for (const Weight& weight : input_.weights) {
    if (!weight.layout) continue;
    const std::vector<Format>& sources = layout_info(*weight.layout).sources;
    HALFBYTE_CHECK(
        std::ranges::find(sources, weight.spec.format) != sources.end(), bad_input,
        "weight \"{}\" is already quantized (layout {}): make it dense first, with halfbyte dequantize",
        printable(weight.name), to_string(*weight.layout));
  }
  refuse_foreign(input_);
  const std::string method = config_.empty() ? "" : quant_method(config_);
  HALFBYTE_CHECK(method.empty(), bad_input,
                 "\"{}\": config.json says that the model is already quantized ({}), but none of its tensors "
                 "is: remove \"quantization_config\" and \"quantization\" if the weights are dense",
                 printable(input_.path), printable(method));
}

void Quantizer::select() {
  selection_ = select_weights(input_, layout_, options_);
  for (const Weight& weight : input_.weights) report_.source_bytes += weight.num_bytes;
  for (const SelectedWeight& selected : selection_.weights) {
    QuantizeItem& item = items_.emplace_back(QuantizeItem{selected.weight, report_.weights.size()});
    check_output_weight(input_, item.source);
    WeightReport& report = report_.weights.emplace_back();
    report.name = item.source.name;
    report.shape = item.source.shape;
    report.dtype = stored_dtype(input_, item.source);
    report.source_bytes = num_bytes(input_, item.source);
    item.quantize = selected.quantize;
    if (!selected.quantize) keep_dense(item, selected.reason);
  }
}

// Of what stays dense, the reason that most elements have.
std::string Quantizer::main_reason() const {
  std::map<std::string, int64_t> elements;
  for (const QuantizeItem& item : items_)
    if (!item.quantize) elements[report_.weights[item.report].reason] += num_elements(item.source.shape);
  const auto most = std::ranges::max_element(elements, {}, [](const auto& entry) { return entry.second; });
  return most == elements.end() ? "it has no weights" : most->first;
}

void Quantizer::set_note(const QuantizeItem& item, const std::string& note) {
  const std::string decoded = decoded_note(item);
  report_of(item).note = decoded + (decoded.empty() || note.empty() ? "" : "; ") + note;
}

void Quantizer::keep_dense(QuantizeItem& item, const std::string& reason) {
  item.quantize = false;
  WeightReport& report = report_of(item);
  report.quantized = false;
  report.reason = reason;
  set_note(item);
  report.spec = {};
  report.encoding = {};
  report.output_bytes = report.source_bytes;
  const int64_t n = num_elements(item.source.shape);
  report.bits_per_weight = n == 0 ? 0 : 8 * static_cast<double>(report.output_bytes) / static_cast<double>(n);
}

void Quantizer::set_target(QuantizeItem& item, const QuantSpec& spec) {
  WeightReport& report = report_of(item);
  const Encoding encoding = resolve_encoding(layout_, options_of(item), spec);
  item.target = written_weight(item.source.name, item.source.shape, dtype_of(item), layout_.layout, spec);
  item.target.encoding = encoding;
  item.parts = parts_of(item.target);
  for (Part& part : item.parts) part.content = {};  // made again when it is written
  report.quantized = true;
  set_note(item);
  report.spec = spec;
  report.scale_rows = item.target.scale_rows;
  report.encoding = encoding;
  report.output_bytes = 0;
  for (const Part& part : item.parts) {
    uint64_t num_bytes = static_cast<uint64_t>(safetensors_dtype_bits(part.dtype) / 8);
    for (const int64_t extent : part.shape) num_bytes *= static_cast<uint64_t>(extent);
    report.output_bytes += num_bytes;
  }
  report.bits_per_weight =
      8 * static_cast<double>(report.output_bytes) / static_cast<double>(num_elements(item.source.shape));
}

// With bits and groups of its own where the reader has such.
QuantizeOptions Quantizer::options_of(const QuantizeItem& item) const {
  QuantizeOptions own = options_;
  const auto& grid = selection_.weights[item.report].grid;
  if (!grid || item.source.cols() % grid->group_size != 0) return own;
  own.format = mlx_format(grid->bits, item.source.name);
  own.group_size = grid->group_size;
  return own;
}

void Quantizer::plan() {
  HALFBYTE_CHECK(options_.num_threads >= 0, usage, "num_threads must not be negative, got {}",
                 options_.num_threads);
  check_devices(options_.devices);
  // Wrong options are reported even where nothing would be quantized.
  resolve_encoding(layout_, options_,
                   resolve_spec(layout_, options_, options_.scale_dtype.value_or(DType::bf16)));
  refuse_adapter();
  refuse_quantized();
  select();
  std::vector<std::string> not_held;
  std::string first_reason;
  for (QuantizeItem& item : items_) {
    if (!item.quantize) continue;
    const QuantSpec spec = resolve_spec(layout_, options_of(item), dtype_of(item));
    const std::string reason = cannot_hold(layout_, spec, item.source.shape);
    if (reason.empty()) {
      set_target(item, spec);
    } else {
      keep_dense(item, "fallback: " + reason);
      not_held.push_back(item.source.name);
      if (first_reason.empty()) first_reason = reason;
    }
  }
  HALFBYTE_CHECK(
      not_held.empty() || options_.fallback_dense, bad_input,
      "{} of the selected weights cannot be quantized: {} ({}); exclude them, or let them stay dense with "
      "--fallback dense",
      not_held.size(), name_list(not_held), first_reason);
  const bool any = std::ranges::any_of(items_, &QuantizeItem::quantize);
  HALFBYTE_CHECK(any, usage, "nothing to quantize in \"{}\": {} tensors, {}", printable(input_.path),
                 input_.tensors.size(),
                 !not_held.empty()           ? first_reason
                 : !options_.include.empty() ? "none that include selects is a matrix that is not excluded"
                 : selection_.architecture.empty()
                     ? "none is a matrix of F32, F16 or BF16 of a linear layer that is not excluded"
                     : fmt::format("of {}: {}", selection_.architecture, main_reason()));
  open_importance();
  std::vector<const OutputWeight*> weights;
  std::vector<uint64_t> output_bytes;
  for (const QuantizeItem& item : items_) {
    weights.push_back(&item.source);
    output_bytes.push_back(report_of(item).output_bytes);
  }
  files_ = output_files(input_, weights, output_bytes, options_.shard_bytes);
  // Names must be unique over all files.
  std::set<std::string> names;
  for (const auto& items : files_.weights)
    for (const StoredTensor& tensor : tensors_of(items))
      HALFBYTE_CHECK(names.insert(tensor.name).second, bad_input,
                     "layout {} would write tensor \"{}\", but the input has one of this name", layout_.name,
                     printable(tensor.name));
  check_output(input_, files_, [&](size_t file) {
    return FileContent{tensors_of(files_.weights[file]), metadata_of(file)};
  });
  side_files_ = find_side_files(input_);
  const auto replaced = quantization_files();
  std::erase_if(side_files_.copied, [&](const std::string& name) { return replaced.contains(name); });
  if (decodes_)
    std::erase_if(side_files_.copied, [](const std::string& name) { return name == kModeloptFile; });
  if (!config_.empty()) config_text();  // it must be valid before hours of work
}

void Quantizer::open_importance() {
  if (options_.importance.empty()) return;
  HALFBYTE_CHECK(options_.search, usage, "importance is for searched scales: search is false");
  importance_ = std::make_shared<const ImportanceFile>(options_.importance);
  std::vector<const QuantizedWeight*> targets;
  for (const QuantizeItem& item : items_)
    if (item.quantize) targets.push_back(&item.target);
  importance_->check(targets);
}

std::vector<bool> Quantizer::is_dense() const {
  std::vector<bool> dense;
  for (const QuantizeItem& item : items_) dense.push_back(!item.quantize);
  return dense;
}

// What the configs of the output say; nothing where no weight is quantized.
std::optional<ModelQuantization> Quantizer::quantization() const {
  std::vector<const QuantizedWeight*> targets;
  for (const QuantizeItem& item : items_) targets.push_back(item.quantize ? &item.target : nullptr);
  if (std::ranges::all_of(targets, [](auto* target) { return target == nullptr; })) return {};
  return model_quantization(selection_, layout_, options_.force_layout, targets);
}

std::string Quantizer::config_text() const {
  const std::optional<ModelQuantization> all = quantization();
  return all ? with_quantization(config_, *all) : config_;
}

// Other files of the output that say how it is quantized.
std::map<std::string, std::string> Quantizer::quantization_files() const {
  const std::optional<ModelQuantization> all = quantization();
  return all ? files_beside_config(*all) : std::map<std::string, std::string>();
}

Metadata Quantizer::metadata_of(size_t file) const {
  const std::vector<size_t>& items = files_.weights[file];
  Metadata metadata = input_.files[files_.sources[file].front()].metadata;
  if (layout_.layout == Layout::mlx) {
    set_metadata(metadata, "format", "mlx");
    for (const size_t i : items)
      if (items_[i].quantize && !selection_.weights[i].grid) {
        set_metadata(metadata, "quantization", mlx_quantization(items_[i].target.spec));
        break;
      }
  } else {
    set_metadata(metadata, "format", "pt");  // older readers demand it
    std::erase_if(metadata, [](const auto& entry) { return entry.first == kWordMetadata; });
    const bool tells = hides_dtype(layout_, options_.format) && !input_.is_directory;
    if (const auto all = tells ? quantization() : std::nullopt)
      set_metadata(metadata, kWordMetadata, word_quantization(*all, /*with_dtype=*/true));
  }
  return metadata;
}

std::vector<StoredTensor> Quantizer::tensors_of(std::span<const size_t> items) const {
  std::vector<StoredTensor> tensors;
  for (const size_t i : items) {
    const QuantizeItem& item = items_[i];
    if (item.quantize) {
      for (const Part& part : item.parts) tensors.push_back({part.name, part.dtype, part.shape, "", 0, 0});
    } else {
      tensors.push_back({item.source.name, stored_dtype(input_, item.source), item.source.shape, "", 0, 0});
    }
  }
  return tensors;
}

int64_t Quantizer::max_elements(const QuantizeItem& item, Device device) const {
  const int64_t most = preferred_elements(item.target, block_elements(device));
  return is_transposed(item.source) ? std::max(most, kTransposedElements) : most;
}

int64_t Quantizer::max_elements(const QuantizeItem& item) const {
  return max_elements(item, devices_.front());  // CUDA devices are first
}

std::vector<Quantizer::Task> Quantizer::tasks_of(std::span<const size_t> items) const {
  std::vector<Task> tasks;
  for (const size_t i : items) {
    const QuantizeItem& item = items_[i];
    if (item.quantize) {
      for (int64_t begin = 0, n = num_elements(item.source.shape); begin < n;) {
        const int64_t count = block_at(item.target, begin, max_elements(item)).count;
        tasks.push_back({i, begin, count});
        begin += count;
      }
    } else {
      const auto bytes = static_cast<int64_t>(num_bytes(input_, item.source));
      for (int64_t begin = 0; begin < bytes; begin += kCopyBytes)
        tasks.push_back({i, begin, std::min(kCopyBytes, bytes - begin)});
    }
  }
  return tasks;
}

// Upper bound of the buffers of one file, on the host.
uint64_t Quantizer::buffer_bytes(std::span<const size_t> items) const {
  int64_t copy_bytes = 0, block_bytes = 0, verify_bytes = 0, whole_bytes = 0, scales = 0;
  for (const size_t i : items) {
    const QuantizeItem& item = items_[i];
    const bool whole = is_whole(input_, item.source);
    if (!item.quantize) {
      const int64_t bytes = std::min(kCopyBytes, static_cast<int64_t>(num_bytes(input_, item.source)));
      copy_bytes = std::max(copy_bytes, bytes + (whole ? 0 : scratch_bytes(bytes)));
      continue;
    }
    const Block block = block_at(item.target, 0, max_elements(item));  // none is larger
    int64_t bytes = block.count * size_of(item.target.dtype);
    if (item.target.scale_rows > 1)
      bytes += 2 * Tiles(item.target, block).num_elements() * size_of(item.target.dtype);
    if (!whole) bytes += scratch_bytes(bytes);
    if (importance_) bytes += item.target.cols() * int64_t{sizeof(float)};
    for (const Role role : block_roles(item.target.spec))
      bytes += native_bytes(item.target, block, role) +
               static_cast<int64_t>(stored_range(item.target, block, role).num_bytes());
    if (has_short_runs(stored_range(item.target, block, Role::codes))) {
      // Put together to be written, and again to be verified: by threads with blocks of two tensors at each
      // end.
      const int64_t codes = num_elements(item.target.shape) * info(item.target.spec.format).bits / 8;
      whole_bytes = std::max(whole_bytes, 2 * codes);
      bytes += static_cast<int64_t>(stored_range(item.target, block, Role::codes).num_bytes());
    }
    block_bytes = std::max(block_bytes, bytes);
    verify_bytes = std::max(verify_bytes, verify_buffer_bytes(item.source, item.target));
    // As f32, and as the codes that they become.
    if (item.target.spec.double_quant) scales += 5 * item.target.quant_shape().num_groups;
  }
  const int64_t writing = std::ssize(devices_) * (copy_bytes + block_bytes) + whole_bytes;
  const int64_t verifying = effective_threads(options_.num_threads) * verify_bytes + whole_bytes;
  return static_cast<uint64_t>((overlaps() ? writing + verifying : std::max(writing, verifying)) +
                               scales * files_at_once(static_cast<int>(devices_.size()))) +
         input_.whole_bytes();
}

// ---- The run

// The block, on the device of the worker.
TensorView Quantizer::read_block(const QuantizeItem& item, const Block& block, BlockWorker& worker) const {
  const int64_t size = size_of(item.target.dtype);
  std::byte* data = worker.dense.reserve(block.count * size);
  {
    const Stopwatch reading(worker.read_seconds);
    read_output(input_, item.source, static_cast<uint64_t>(block.begin * size),
                {data, static_cast<size_t>(block.count * size)}, worker.stored);
  }
  worker.transfer([&] { worker.dense.upload(worker.stream); });
  return {worker.dense.mirror(), item.target.dtype, {block.rows, block.cols}, {}, worker.device};
}

void Quantizer::copy_block(TensorFile& file, const Task& task, BlockWorker& worker) const {
  const QuantizeItem& item = items_[task.item];
  const std::span<std::byte> bytes(worker.stored.reserve(task.count), static_cast<size_t>(task.count));
  {
    const Stopwatch reading(worker.read_seconds);
    read_output(input_, item.source, static_cast<uint64_t>(task.begin), bytes, worker.dense);
  }
  const Stopwatch writing(worker.write_seconds);
  file.write(file.tensor(item.source.name), static_cast<uint64_t>(task.begin), bytes);
}

QuantizeStatus Quantizer::quantize_block(TensorFile& file, QuantizeItem& item, const Block& block,
                                         BlockWorker& worker) {
  if (item.target.scale_rows > 1) return quantize_tiles(file, item, block, worker);
  const QuantSpec& spec = item.target.spec;
  const TensorView x = read_block(item, block, worker);
  const QuantizedView view = native_view(item.target, block, worker.native);
  const Importance importance = importance_ ? importance_->read(item.target, block, worker) : Importance();
  QuantizeStatus status = quantize(x, view, *item.target.encoding, worker.execution(),
                                   needs_range(item) ? &item.range : nullptr, importance);
  if (status.num_nonfinite > 0) status.first_nonfinite += block.begin;
  worker.transfer([&] {
    for (const Role role : block_roles(spec)) worker.native.of(role).download(worker.stream);
  });
  for (const Part& part : item.parts) {
    if (part.role == Role::constant || part.role == Role::scales_absmax) continue;
    if (part.role != Role::codes && spec.granularity == Granularity::tensor && block.begin > 0) continue;
    std::byte* native = worker.native.of(part.role).data();
    if (part.role == Role::scales && spec.double_quant) {
      std::memcpy(item.scales.data() + block.first_group, native,
                  static_cast<size_t>(block.shape.num_groups) * sizeof(float));
    } else {
      if (part.role == Role::scales) replace_zero_scales(item.target, block.shape.num_groups, native);
      const auto stored = to_stored(item.target, block, part.role, native, worker.stored);
      const Stopwatch writing(worker.write_seconds);
      file.write(file.tensor(part.name), stored_range(item.target, block, part.role), stored);
    }
  }
  return status;
}

// Blocks with a scale of their own are the rows of a matrix, filled up with zeros, that has a scale a row.
QuantizeStatus Quantizer::quantize_tiles(TensorFile& file, QuantizeItem& item, const Block& block,
                                         BlockWorker& worker) {
  const QuantizedWeight& target = item.target;
  const Tiles tiles(target, block);
  const int64_t size = size_of(target.dtype), num_bytes = block.count * size;
  std::byte* const x = worker.untiled.reserve(num_bytes);
  {
    const Stopwatch reading(worker.read_seconds);
    read_output(input_, item.source, static_cast<uint64_t>(block.begin * size),
                {x, static_cast<size_t>(num_bytes)}, worker.stored);
  }
  tiles.gather(x, size, worker.dense.reserve(tiles.num_elements() * size));
  worker.transfer([&] { worker.dense.upload(worker.stream); });
  QuantizedView view{tiles.spec(), tiles.count(), tiles.num_elements() / tiles.count()};
  worker.native.codes.reserve(tiles.num_elements());
  view.codes = reinterpret_cast<uint8_t*>(worker.native.codes.mirror());
  worker.native.scales.reserve(tiles.count() * size_of(target.spec.scale_dtype));
  view.scales = worker.native.scales.mirror();
  QuantizeStatus status =
      quantize({worker.dense.mirror(), target.dtype, {view.rows, view.cols}, {}, worker.device}, view,
               *target.encoding, worker.execution());
  if (status.num_nonfinite > 0) status.first_nonfinite = block.begin + tiles.element(status.first_nonfinite);
  worker.transfer([&] {
    worker.native.codes.download(worker.stream);
    worker.native.scales.download(worker.stream);
  });
  std::byte* const scales = worker.native.scales.data();
  replace_zero_scales(target, tiles.count(), scales);
  for (const Part& part : item.parts) {
    const StoredRange range = stored_range(target, block, part.role);
    const std::byte* stored = scales;
    if (part.role == Role::codes) {
      std::byte* const codes = worker.stored.reserve(block.count);
      tiles.scatter(worker.native.codes.data(), codes);
      stored = codes;
    }
    const Stopwatch writing(worker.write_seconds);
    file.write(file.tensor(part.name), range, {stored, range.num_bytes()});
  }
  return status;
}

// What is known only after the last block.
void Quantizer::finish_weight(TensorFile& file, QuantizeItem& item) const {
  const auto num_scales = static_cast<int64_t>(item.scales.size());
  std::vector<uint8_t> codes(item.scales.size());
  std::vector<float> absmax(static_cast<size_t>((num_scales + kDoubleQuantBlock - 1) / kDoubleQuantBlock));
  if (item.target.spec.double_quant) {
    DoubleQuantizedView view{codes.data(), absmax.data(), 0};
    double_quantize(item.scales.data(), num_scales, view);
    item.target.scales_offset = view.offset;
    item.scales = {};
  }
  for (const Part& part : parts_of(item.target)) {
    const StoredTensor& tensor = file.tensor(part.name);
    if (part.role == Role::constant) file.write_repeated(tensor, part.content);
    if (part.role == Role::scales) file.write(tensor, 0, std::as_bytes(std::span(codes)));
    if (part.role == Role::scales_absmax) file.write(tensor, 0, std::as_bytes(std::span(absmax)));
  }
}

// Whether the threads quantize a block faster than they would feed a device.
bool Quantizer::outpaces_feeding(std::span<const Device> threads) {
  const QuantizeItem& largest = *std::ranges::max_element(items_, {}, [](const QuantizeItem& item) {
    return item.quantize ? num_elements(item.source.shape) : -1;
  });
  if (largest.target.scale_rows > 1) return false;  // tiles: not measured
  QuantizeItem item = largest;
  item.range = {-1, 1};
  set_global_scale(item);
  const Block block = block_at(item.target, 0, max_elements(item, {}));
  const auto num_bytes = static_cast<double>(block.count * size_of(item.target.dtype));
  BlockWorkers workers(threads, [&](Device) { return block.count; });
  std::vector<double> rates(threads.size());
  for (int round = 0; round < 2; ++round)  // the first one fills caches and takes memory
    parallel_for(std::ssize(threads), 1, workers.size(), [&](int64_t begin, int64_t end, int w) {
      BlockWorker& worker = workers[w];
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        const TensorView x = read_block(item, block, worker);
        const QuantizedView view = native_view(item.target, block, worker.native);
        const Importance importance =
            importance_ ? importance_->read(item.target, block, worker) : Importance();
        double seconds = 0;
        {
          const Stopwatch computing(seconds);
          quantize(x, view, *item.target.encoding, worker.execution(),
                   needs_range(item) ? &item.range : nullptr, importance);
        }
        rates[i] = num_bytes / seconds;
        reporter_.poll();
      }
    });
  const double on_cpu = std::accumulate(rates.begin(), rates.end(), 0.0);
  // Verifying takes about as long of the same threads.
  return on_cpu >= (options_.verify ? 2 : 1) * device_rate(options_.num_threads);
}

void Quantizer::choose_devices() {
  // Starting a CUDA device takes some tenths of a second, about as long as the CPU needs for this much.
  constexpr uint64_t kMinCudaBytes = uint64_t{1} << 30;
  const bool is_open = options_.devices.empty();  // which CUDA device that is
  if (!options_.choose_devices ||
      (!is_open && (!uses_cuda() || std::ranges::find(options_.devices, Device{}) == options_.devices.end())))
    return;
  const std::vector<Device> threads = worker_devices({}, options_.num_threads);
  const auto take_cpu = [&](const std::string& why) {
    report_.device_note = why;
    report_.devices = {Device{}};
    devices_ = threads;
  };
  if (is_open && report_.source_bytes < kMinCudaBytes)
    return take_cpu(fmt::format("input below {} GiB", kMinCudaBytes >> 30));
  if (outpaces_feeding(threads)) return take_cpu("faster without CUDA, as measured");
  if (!is_open) return;
  const CudaInfo info = cuda_info();
  const auto usable = std::ranges::find(info.devices, "", &CudaDevice::problem);
  if (!info.usable() || usable == info.devices.end()) return take_cpu(info.problem);
  report_.devices = {Device{}, {DeviceKind::cuda, usable->index}};
  devices_ = worker_devices(report_.devices, options_.num_threads);
}

void Quantizer::make_workers() {
  workers_.emplace(devices_, [&](Device device) {
    int64_t most = block_elements(device);
    for (const QuantizeItem& item : items_)
      if (item.quantize) most = std::max(most, max_elements(item, device));
    return most;
  });
}

// The ranges of these weights, which have one scale for all of it.
void Quantizer::find_ranges(std::span<const size_t> wanted) {
  const std::vector<Task> tasks = tasks_of(wanted);
  BlockWorkers& workers = *workers_;
  std::vector<ValueRange> ranges(tasks.size());
  // Of a team, each has a part of the tasks.
  const auto part = [&](int rank) { return std::ssize(tasks) * rank / team_.size(); };
  const int64_t first = part(team_.rank());
  const auto merge = [](ValueRange& total, const ValueRange& part) {  // quantize counts non-finite elements
    total.min = std::min(total.min, part.min);
    total.max = std::max(total.max, part.max);
  };
  parallel_for(part(team_.rank() + 1) - first, 1, workers.size(), [&](int64_t begin, int64_t end, int w) {
    BlockWorker& worker = workers[w];
    const Stopwatch working(worker.seconds);
    for (auto i = static_cast<size_t>(first + begin); i < static_cast<size_t>(first + end); ++i) {
      const Task& task = tasks[i];
      const QuantizeItem& item = items_[task.item];
      worker.for_each_block(item.target, task.begin, task.count, [&](const Block& block) {
        merge(ranges[i], value_range(read_block(item, block, worker), worker.execution()));
        reporter_.poll();
      });
    }
  });
  share(ranges, part);
  std::map<std::string, ValueRange> shared;
  const auto range_of = [&](size_t i) -> ValueRange& {
    const QuantizeItem& item = items_[i];
    return shared[has_global_scale(item.target.spec) ? fused_name(item.source.name) : item.source.name];
  };
  for (size_t i = 0; i < tasks.size(); ++i) merge(range_of(tasks[i].item), ranges[i]);
  for (const size_t i : wanted) {
    items_[i].range = range_of(i);
    set_global_scale(items_[i]);
  }
}

// Completes what each process of a team has of `ranges`.
void Quantizer::share(std::vector<ValueRange>& ranges, const std::function<int64_t(int rank)>& part) const {
  if (team_.is_alone()) return;
  const int64_t begin = part(team_.rank()), end = part(team_.rank() + 1);
  const auto size = [](int64_t count) { return static_cast<size_t>(count) * sizeof(ValueRange); };
  const std::vector<std::string> parts =
      team_.meet({reinterpret_cast<const char*>(ranges.data() + begin), size(end - begin)});
  for (int rank = 0; rank < team_.size(); ++rank)
    std::memcpy(ranges.data() + part(rank), parts[static_cast<size_t>(rank)].data(),
                size(part(rank + 1) - part(rank)));
}

// From the range.
void Quantizer::set_global_scale(QuantizeItem& item) const {
  if (!has_global_scale(item.target.spec)) return;
  const double absmax = std::max({-item.range.min, item.range.max, 0.0});
  item.target.global_scale = dtype_of(item) == DType::f64
                                 ? formats::global_scale_of(absmax)
                                 : formats::global_scale_of(static_cast<float>(absmax));
  if (!layout_.global_is_reciprocal) return;
  // As ModelOpt computes it: no quotient of a quotient.
  const auto reciprocal = static_cast<float>(absmax / 2688);
  item.target.global_reciprocal = reciprocal >= 0x1p-126f ? reciprocal : 1 / item.target.global_scale;
  item.target.global_scale = 1 / item.target.global_reciprocal;
}

// The weights that have a scale for all of it.
std::vector<size_t> Quantizer::with_ranges() const {
  std::vector<size_t> wanted;
  for (size_t i = 0; i < items_.size(); ++i)
    if (needs_range(items_[i])) wanted.push_back(i);
  return wanted;
}

// They take a pass over the weights, which another run can spare.
void Quantizer::share_ranges(OutputCheckpoint& writer) {
  const std::string name = "ranges";
  const std::vector<size_t> wanted = with_ranges();
  if (wanted.empty()) return;
  if (const Json record = writer.find_record(name); !record.is_null()) {
    for (const size_t i : wanted) {
      QuantizeItem& item = items_[i];
      const Json& range = record.at("weights").at(item.source.name);
      item.range = {exact_value(range.at(0)), exact_value(range.at(1))};
      set_global_scale(item);
    }
    return;
  }
  find_ranges(wanted);
  Json ranges = Json::object();
  for (const size_t i : wanted)
    ranges[items_[i].source.name] = {exact_text(items_[i].range.min), exact_text(items_[i].range.max)};
  if (team_.leads()) writer.add_record(name, json_object({{"weights", std::move(ranges)}}));
}

Quantizer::TensorFiles Quantizer::write_files(const BeginFile& begin_file, std::span<const size_t> indices) {
  TensorFiles files;
  std::vector<std::pair<Task, TensorFile*>> tasks;
  std::vector<std::pair<QuantizeItem*, TensorFile*>> quantized;
  for (const size_t index : indices) {
    const std::vector<size_t>& items = files_.weights[index];
    files.push_back(begin_file(index, tensors_of(items)));
    TensorFile* const file = files.back().get();
    for (const Task& task : tasks_of(items)) tasks.emplace_back(task, file);
    for (const size_t i : items) {
      QuantizeItem& item = items_[i];
      item.status = {};
      if (!item.quantize) continue;
      quantized.emplace_back(&item, file);
      if (item.target.spec.double_quant)
        item.scales.resize(static_cast<size_t>(item.target.quant_shape().num_groups));
    }
  }
  std::vector<QuantizeStatus> status(tasks.size());
  BlockWorkers& workers = *workers_;
  parallel_for(std::ssize(tasks), 1, workers.size(), [&](int64_t begin, int64_t end, int w) {
    BlockWorker& worker = workers[w];
    const Stopwatch working(worker.seconds);
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const auto& [task, file] = tasks[i];
      QuantizeItem& item = items_[task.item];
      if (item.quantize) {
        worker.for_each_block(item.target, task.begin, task.count, [&, to = file](const Block& block) {
          merge(status[i], quantize_block(*to, item, block, worker));
        });
        quantize_phase_->add(static_cast<uint64_t>(task.count * size_of(item.target.dtype)));
      } else {
        copy_block(*file, task, worker);
        quantize_phase_->add(static_cast<uint64_t>(task.count));
      }
    }
  });
  for (size_t i = 0; i < tasks.size(); ++i) merge(items_[tasks[i].first.item].status, status[i]);
  parallel_for(std::ssize(quantized), 1, options_.num_threads, [&](int64_t begin, int64_t end, int) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      finish_weight(*quantized[i].second, *quantized[i].first);
      reporter_.poll();
    }
  });
  return files;
}

// After a file was written: whether what its data brought changes the plan, so that it must be written again.
bool Quantizer::plan_again(size_t file) {
  const bool may_widen = layout_.scale_dtypes == ScaleDTypes::any && !options_.scale_dtype;
  bool changed = false;
  std::vector<std::string> failed;
  std::string first_reason;
  for (const size_t i : files_.weights[file]) {
    QuantizeItem& item = items_[i];
    if (!item.quantize) continue;
    const QuantizeStatus& status = item.status;
    const QuantSpec spec = item.target.spec;
    const char* dtype = to_string(spec.scale_dtype);
    if (status.num_nonfinite == 0 && may_widen && spec.scale_dtype == DType::f16 &&
        status.num_unheld_scales + status.num_coarse_scales > 0) {
      QuantSpec wide = spec;
      wide.scale_dtype = DType::f32;
      set_target(item, wide);
      set_note(item, "scales in f32: f16 cannot hold them");
      changed = true;
    } else if (!status.ok()) {
      const bool nonfinite = status.num_nonfinite > 0;
      const std::string reason =
          nonfinite ? fmt::format("non-finite: {} elements, the first at index {}", status.num_nonfinite,
                                  status.first_nonfinite)
                    : fmt::format("{} cannot hold {} scales", dtype, status.num_unheld_scales);
      if (nonfinite ? options_.nonfinite == NonFinite::keep_dense : options_.fallback_dense) {
        keep_dense(item, nonfinite ? reason : "fallback: " + reason);
        changed = true;
      } else {
        failed.push_back(item.source.name);
        if (first_reason.empty()) first_reason = reason;
      }
    } else if (status.num_coarse_scales > 0) {
      set_note(item, fmt::format("{} scales keep fewer than 8 significant bits in {}",
                                 status.num_coarse_scales, dtype));
    }
  }
  HALFBYTE_CHECK(failed.empty(), bad_input, "cannot quantize {} ({})", name_list(failed), first_reason);
  return changed;
}

std::vector<VerifyItem> Quantizer::checks_of(size_t file) {
  std::vector<VerifyItem> checks;
  for (const size_t i : files_.weights[file])
    checks.push_back(
        {&items_[i].source, items_[i].quantize ? &items_[i].target : nullptr, &report_of(items_[i])});
  return checks;
}

uint64_t Quantizer::source_bytes_of(size_t file) const {
  uint64_t sum = 0;
  for (const size_t i : files_.weights[file]) sum += report_.weights[items_[i].report].source_bytes;
  return sum;
}

// Every option that the bytes or the report depend on.
Quantizer::Json Quantizer::identity() const {
  Json options = json_object({{"format", info(options_.format).name},
                              {"asymmetric", options_.asymmetric},
                              {"double_quant", options_.double_quant},
                              {"layout", to_string(layout_.layout)},
                              {"granularity", option_json(options_.granularity)},
                              {"group_size", option_json(options_.group_size)},
                              {"scale_rule", option_json(options_.scale_rule)},
                              {"scale_dtype", option_json(options_.scale_dtype)},
                              {"search", options_.search},
                              {"importance", importance_ ? importance_->identity() : Json()},
                              {"nonfinite", options_.nonfinite == NonFinite::error ? "error" : "keep-dense"},
                              {"include", options_.include},
                              {"exclude", options_.exclude},
                              {"reader", option_json(options_.reader)},
                              {"force_layout", options_.force_layout},
                              {"keep_embeddings", options_.keep_embeddings},
                              {"fallback_dense", options_.fallback_dense},
                              {"verify", options_.verify},
                              {"shard_bytes", options_.shard_bytes}});
  if (options_.format == Format::lut4) options["table"] = options_.table;
  return json_object({{"operation", "quantize"}, {"options", std::move(options)}});
}

// Brings the plan and the report to what they were when an earlier run had written the file.
void Quantizer::resume_file(const Json& records, size_t file) {
  for (size_t i = 0; i < files_.weights[file].size(); ++i) {
    const Json& record = records.at(i);
    QuantizeItem& item = items_[files_.weights[file][i]];
    if (item.quantize && !record.at("quantized")) {
      keep_dense(item, record.at("reason"));
    } else if (item.quantize && record.at("scale_dtype") != to_string(item.target.spec.scale_dtype)) {
      QuantSpec wide = item.target.spec;
      wide.scale_dtype = DType::f32;
      set_target(item, wide);
    }
    from_record(record, report_of(item));
  }
}

void Quantizer::run_files(OutputCheckpoint& writer, std::span<const size_t> files, Background& completion) {
  const BeginFile begin = [&](size_t file, std::vector<StoredTensor>&& tensors) {
    return writer.begin_file(file, {std::move(tensors), metadata_of(file)});
  };
  TensorFiles written;
  {
    const Stopwatch running(report_.run_seconds);
    written = write_files(begin, files);
    const auto again = [&] {
      std::vector<size_t> changed;
      for (size_t i = 0; i < files.size(); ++i) {
        if (!plan_again(files[i])) continue;
        quantize_phase_->take_back(source_bytes_of(files[i]));
        written[i].reset();
        changed.push_back(i);
      }
      return changed;
    };
    for (std::vector<size_t> changed = again(); !changed.empty(); changed = again())
      for (const size_t i : changed) written[i] = std::move(write_files(begin, files.subspan(i, 1)).front());
  }
  completion.start([this, &writer, numbers = std::vector(files.begin(), files.end()),
                    files = std::make_shared<decltype(written)>(std::move(written))] {
    complete_files(writer, *files, numbers);
  });
}

void Quantizer::complete_files(OutputCheckpoint& writer, TensorFiles& written,
                               std::span<const size_t> numbers) {
  if (options_.verify) {
    const Stopwatch verifying(report_.verify_seconds);
    std::vector<const TensorFile*> files;
    std::vector<std::vector<VerifyItem>> checks;
    for (size_t i = 0; i < numbers.size(); ++i) {
      files.push_back(written[i].get());
      checks.push_back(checks_of(numbers[i]));
    }
    writer.verify(files, std::move(checks), options_.num_threads, *verify_phase_);
  }
  const Stopwatch syncing(report_.sync_seconds);
  for (size_t i = 0; i < numbers.size(); ++i) {
    writer.sync(*written[i]);
    Json records = Json::array();
    for (const size_t weight : files_.weights[numbers[i]])
      records.push_back(to_record(report_of(items_[weight])));
    writer.commit_file(std::move(written[i]), &records);
  }
}

// ---- The time of a run

// What this process does of it, each file by its bytes of the source.
RunPlan Quantizer::run_plan() {
  std::vector<uint64_t> planned;
  for (size_t file = 0; file < files_.names.size(); ++file)
    planned.push_back(file_bytes({tensors_of(files_.weights[file]), metadata_of(file)}));
  // One file, or several: only these are dealt.
  const std::vector<int> owner = deal_files(planned, team_.size());
  RunPlan plan;
  const auto at_once = static_cast<size_t>(files_at_once(static_cast<int>(devices_.size())));
  for (size_t file = 0; file < owner.size(); ++file) {
    if (owner[file] != team_.rank()) continue;
    if (mine_.size() % at_once == 0) plan.batch_bytes.push_back(0);
    plan.batch_bytes.back() += source_bytes_of(file);
    mine_.push_back(file);
  }
  plan.overlaps = overlaps();
  plan.starts_beside = uses_cuda();
  if (team_.leads()) plan.reserved_bytes = std::accumulate(planned.begin(), planned.end(), uint64_t{0});
  for (const QuantizeItem& item : items_)
    if (needs_range(item)) plan.ranges_bytes += report_.weights[item.report].source_bytes;
  plan.ranges_bytes /= static_cast<uint64_t>(team_.size());
  return plan;
}

// Rows of a unit: as many as share scales or words. Of more axes than two they are those of a matrix, and of
// what cannot be divided all.
int64_t unit_rows(const Checkpoint::Impl& input, const OutputWeight& weight) {
  const int64_t rows = num_elements(weight.shape) / weight.cols();
  const size_t rank = weight.shape.size();
  if (rank < 2 || safetensors_dtype_bits(stored_dtype(input, weight)) % 8 != 0) return rows;
  return rank == 2 ? std::min(rows, kFp8Block) : weight.shape[rank - 2];
}

// Those of this process; of others nothing.
std::vector<SampledWeight> Quantizer::sampled_weights() const {
  std::vector<SampledWeight> weights(items_.size());
  for (const size_t file : mine_)
    for (const size_t i : files_.weights[file]) {
      const QuantizeItem& item = items_[i];
      if (const int64_t n = num_elements(item.source.shape); n > 0)
        weights[i] = {ceil_div(n / item.source.cols(), unit_rows(input_, item.source)),
                      report_.weights[item.report].source_bytes};
    }
  return weights;
}

// Makes the sets the weights of this, each in as many files as are written side by side.
void Quantizer::take_sample(const Quantizer& whole, std::span<const std::vector<SampledUnits>> sets) {
  const auto num_files = static_cast<size_t>(files_at_once(static_cast<int>(devices_.size())));
  importance_ = whole.importance_;
  files_.weights.resize(sets.size() * num_files);
  for (size_t set = 0; set < sets.size(); ++set)
    for (size_t i = 0; i < sets[set].size();) {
      const size_t weight = sets[set][i].weight;
      const QuantizeItem& of = whole.items_[weight];
      const int64_t unit = unit_rows(input_, of.source),
                    rows = num_elements(of.source.shape) / of.source.cols();
      std::vector<RowRange> ranges;
      for (; i < sets[set].size() && sets[set][i].weight == weight; ++i)
        ranges.push_back({sets[set][i].begin * unit, std::min(rows, sets[set][i].end * unit)});
      const QuantizeItem item{with_rows(of.source, ranges), report_.weights.size()};
      files_.weights[set * num_files + items_.size() % num_files].push_back(items_.size());
      selection_.weights.push_back({item.source});
      selection_.weights.back().grid = whole.selection_.weights[of.report].grid;
      WeightReport& report = report_.weights.emplace_back();
      report.shape = item.source.shape;
      report.source_bytes = num_bytes(input_, item.source);
      items_.push_back(item);
      items_.back().quantize = of.quantize && cannot_hold(layout_, of.target.spec, item.source.shape).empty();
      if (items_.back().quantize)
        set_target(items_.back(), of.target.spec);
      else
        keep_dense(items_.back(), "");
    }
  uint64_t total_bytes = 0;
  for (const WeightReport& weight : report_.weights) total_bytes += weight.source_bytes;
  quantize_phase_ = std::make_unique<ProgressPhase>(reporter_, "measure", total_bytes);
  verify_phase_ = std::make_unique<ProgressPhase>(reporter_, "measure", total_bytes, quantize_phase_.get());
}

std::vector<size_t> Quantizer::files_of_set(size_t set) const {
  const auto num_files = static_cast<size_t>(files_at_once(static_cast<int>(devices_.size())));
  std::vector<size_t> files(num_files);
  std::iota(files.begin(), files.end(), set * num_files);
  std::erase_if(files, [&](size_t file) { return files_.weights[file].empty(); });
  return files;
}

uint64_t Quantizer::bytes_of_set(size_t set) const {
  uint64_t sum = 0;
  for (const size_t file : files_of_set(set)) sum += source_bytes_of(file);
  return sum;
}

// Files whose space is reserved.
Quantizer::TensorFiles Quantizer::begin_sample(size_t set, const std::string& directory) const {
  TensorFiles files;
  for (const size_t file : files_of_set(set))
    files.push_back(TensorFile::unnamed(directory, {tensors_of(files_.weights[file]), {}}));
  return files;
}

// `begun`: by begin_sample.
Quantizer::TensorFiles Quantizer::write_sample(size_t set, const std::string& directory, TensorFiles begun,
                                               SampleTimes& times) {
  const std::vector<size_t> files = files_of_set(set);
  while (true) {
    double run = 0;
    TensorFiles written;
    size_t next = 0;
    {
      const Stopwatch running(run);
      written =
          write_files([&](size_t, std::vector<StoredTensor>&&) { return std::move(begun[next++]); }, files);
    }
    bool is_held = true;
    for (const size_t file : files)
      for (const size_t i : files_.weights[file]) {
        if (!items_[i].quantize || items_[i].status.ok()) continue;
        keep_dense(items_[i], "");  // what the run does with it is seen by the run
        is_held = false;
      }
    if (is_held) {
      times.run += run;
      return written;
    }
    begun = begin_sample(set, directory);
  }
}

// As complete_files.
void Quantizer::complete_sample(size_t set, const TensorFiles& written, bool is_hashed, SampleTimes& times) {
  const std::vector<size_t> files = files_of_set(set);
  if (options_.verify) {
    const Stopwatch verifying(times.verify);
    std::vector<VerifyFile> checked;
    for (size_t i = 0; i < files.size(); ++i) checked.push_back({written[i]->path(), checks_of(files[i])});
    verify_files(input_, checked, options_.num_threads, *verify_phase_);
  }
  const Stopwatch syncing(times.sync);
  for (size_t i = 0; i < files.size(); ++i) {
    written[i]->sync([&] { reporter_.poll(); });
    if (is_hashed) hash_file(InputFile::open(written[i]->path()), options_.num_threads, reporter_);
  }
}

// Seconds for each byte of files that are reserved as those of the run, which has `num_bytes` of them.
double Quantizer::measure_reserve(uint64_t num_bytes, const std::string& directory) const {
  constexpr uint64_t kMostBytes = 256 << 20;  // of all files
  const int threads = reserving_threads(num_bytes, options_.num_threads);
  const auto count = std::min(static_cast<size_t>(effective_threads(threads)), files_.names.size());
  const uint64_t each = std::min(kMostBytes, num_bytes) / count + 1;
  std::vector<std::unique_ptr<OutputFile>> files(count);
  const Timer timer;
  parallel_for(std::ssize(files), 1, threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      files[static_cast<size_t>(i)] = OutputFile::unnamed(directory, each);
  });
  return timer.seconds() / static_cast<double>(each * count);
}

// Does to samples what the run does to all. `directory`: as OutputFile::unnamed takes it.
SampleRates Quantizer::measure(const RunPlan& plan, const std::string& directory) {
  constexpr int kNumSets = 4;
  constexpr double kSetSeconds = 0.2;
  constexpr uint64_t kPieceBytes = 16 << 20, kMinSetBytes = 4 << 20, kMaxSetBytes = 512 << 20;
  // Sets of a large model are larger where threads are many: they verify and hash small files more slowly, as
  // there are few parts for each.
  constexpr uint64_t kMaxLargeSetBytes = uint64_t{2} << 30, kParts = 16;
  Team alone(nullptr);
  const std::vector<SampledWeight> weights = sampled_weights();
  make_workers();
  const auto num_workers = static_cast<uint64_t>(workers_->size());
  uint64_t block_bytes = 0;
  for (const QuantizeItem& item : items_)
    if (item.quantize)
      block_bytes =
          std::max(block_bytes, static_cast<uint64_t>(max_elements(item) * size_of(item.target.dtype)));
  const bool has_journal = files_.names.size() > 1;
  SampleRates rates;

  // Threads, devices and memory are got first; and how much a set may have.
  SampleTimes first, second;
  uint64_t first_bytes = 0, first_ranges_bytes = 0,
           set_bytes = std::max({kMaxSetBytes, std::min(kMaxLargeSetBytes, report_.source_bytes / kParts),
                                 2 * num_workers * block_bytes});
  {
    const uint64_t warm_bytes = std::max(kPieceBytes / 2, num_workers * block_bytes);
    const auto sets = choose_sample(weights, 2, warm_bytes, warm_bytes);
    Quantizer warm(input_, output_, options_, alone, timer_);
    warm.devices_ = devices_;
    warm.take_sample(*this, sets);
    std::swap(warm.workers_, workers_);
    const std::vector<size_t> wanted = warm.with_ranges();
    for (const size_t i : wanted) first_ranges_bytes += warm.report_.weights[i].source_bytes;
    if (!wanted.empty()) {
      const Stopwatch starting(first.run);
      warm.find_ranges(wanted);
    }
    first_bytes = warm.bytes_of_set(0);
    const auto take = [&](size_t set, SampleTimes& times) {
      const TensorFiles written = warm.write_sample(set, directory, warm.begin_sample(set, directory), times);
      warm.complete_sample(set, written, has_journal, times);
    };
    take(0, first);
    take(sets.size() - 1, second);
    const double rate =
        static_cast<double>(warm.bytes_of_set(sets.size() - 1)) / (second.run + second.verify + second.sync);
    set_bytes = static_cast<uint64_t>(
        std::clamp(kSetSeconds * rate, static_cast<double>(kMinSetBytes), static_cast<double>(set_bytes)));
    std::swap(warm.workers_, workers_);
  }

  // With devices, a set that is not measured comes before: only blocks of this size, on each of them, get all
  // kernels compiled and loaded.
  const auto sets =
      choose_sample(weights, kNumSets + (uses_cuda() ? 1 : 0), set_bytes, std::max(kPieceBytes, block_bytes));
  const size_t first_measured = uses_cuda() && sets.size() > 1 ? 1 : 0;
  Quantizer sample(input_, output_, options_, alone, timer_);
  sample.devices_ = devices_;
  sample.take_sample(*this, sets);
  std::swap(sample.workers_, workers_);
  if (const std::vector<size_t> wanted = sample.with_ranges(); !wanted.empty()) {
    uint64_t ranges_bytes = 0;
    for (const size_t i : wanted) ranges_bytes += sample.report_.weights[i].source_bytes;
    const Timer timer;
    sample.find_ranges(wanted);
    rates.ranges = timer.seconds() / static_cast<double>(ranges_bytes);
  }
  if (first_measured > 0) {
    SampleTimes ignored;
    sample.write_sample(0, directory, sample.begin_sample(0, directory), ignored);
  }
  CheckpointReport before, after;
  sample.workers_->add_seconds(before);
  // Of writing, and of completing.
  SampleTimes alone_times, beside_times;
  double all_bytes = 0, alone_bytes[2] = {}, beside_bytes[2] = {};
  const bool overlaps = plan.overlaps && plan.batch_bytes.size() > 1;
  Background completion(overlaps);
  std::shared_ptr<TensorFiles> previous;
  TensorFiles begun = sample.begin_sample(first_measured, directory);
  for (size_t set = first_measured; set < sets.size(); ++set) {
    const auto bytes = static_cast<double>(sample.bytes_of_set(set));
    all_bytes += bytes;
    const bool is_beside = previous != nullptr;
    (is_beside ? beside_bytes : alone_bytes)[0] += bytes;
    const auto written = std::make_shared<TensorFiles>(sample.write_sample(
        set, directory, std::exchange(begun, {}), is_beside ? beside_times : alone_times));
    completion.wait();
    if (set + 1 < sets.size()) begun = sample.begin_sample(set + 1, directory);  // beside nothing, as the run
    const bool is_last = !overlaps || set + 1 == sets.size();
    (is_last ? alone_bytes : beside_bytes)[1] += bytes;
    SampleTimes& times = is_last ? alone_times : beside_times;
    completion.start([&sample, set, written, has_journal, &times] {
      sample.complete_sample(set, *written, has_journal, times);
    });
    if (overlaps) previous = written;
  }
  completion.wait();
  sample.workers_->add_seconds(after);
  const auto rates_of = [](const SampleTimes& times, const double* bytes) {
    const auto each = [](double seconds, double num_bytes) {
      return num_bytes > 0 ? seconds / num_bytes : 0;
    };
    return StageRates{each(times.run, bytes[0]), each(times.verify, bytes[1]), each(times.sync, bytes[1])};
  };
  rates.alone = rates_of(alone_times, alone_bytes);
  rates.beside = beside_bytes[0] > 0 ? rates_of(beside_times, beside_bytes) : rates.alone;
  rates.read = (after.read_seconds - before.read_seconds) / all_bytes;
  rates.write = (after.write_seconds - before.write_seconds) / all_bytes;
  rates.compute = (after.compute_seconds - before.compute_seconds) / all_bytes;
  rates.copy = (after.copy_seconds - before.copy_seconds) / all_bytes;
  if (plan.reserved_bytes > 0) rates.reserve = measure_reserve(plan.reserved_bytes, directory);
  rates.start = std::max(0.0, first.run - rates.alone.run * static_cast<double>(first_bytes) -
                                  rates.ranges * static_cast<double>(first_ranges_bytes));
  return rates;
}

void Quantizer::estimate() {
  const RunPlan plan = run_plan();
  std::string path = output_;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const char* const in_memory = "written to memory instead";
  if (path.empty()) report_.time_note = fmt::format("no output is named: {}", in_memory);
  team_.meet();  // all measure at a time, as they run
  RunTimes times;
  const auto is_some = [](uint64_t num_bytes) { return num_bytes > 0; };
  if (std::ranges::any_of(plan.batch_bytes, is_some)) {
    const double planned = timer_.seconds();
    for (std::string directory = path.empty() ? "" : parent_of(path);;) try {
        times = estimate_times(measure(plan, directory), plan);
        times.total += planned;
        break;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::io) throw;
        report_.time_note = fmt::format("{}{}{}", error.what(), directory.empty() ? "" : ": ",
                                        directory.empty() ? "" : in_memory);
        if (directory.empty()) break;
        directory.clear();
      }
  }
  // The slowest process.
  for (const std::string& word : team_.meet({reinterpret_cast<const char*>(&times), sizeof times})) {
    RunTimes of_rank;
    std::memcpy(&of_rank, word.data(), sizeof of_rank);
    if (of_rank.total > times.total) times = of_rank;
  }
  report_.total_seconds = times.total;
  report_.run_seconds = times.run;
  report_.sync_seconds = times.sync;
  report_.verify_seconds = times.verify;
  report_.read_seconds = times.read;
  report_.write_seconds = times.write;
  report_.compute_seconds = times.compute;
  report_.copy_seconds = times.copy;
}

CheckpointReport Quantizer::run() {
  report_.input = input_.path;
  report_.output = output_;
  report_.layout = layout_.layout;
  if (!options_.devices.empty()) report_.devices = options_.devices;
  plan();
  choose_devices();
  report_.copied_files = side_files_.copied;
  report_.skipped_files = side_files_.skipped;
  for (const auto& items : files_.weights)
    report_.peak_buffer_bytes = std::max(report_.peak_buffer_bytes, buffer_bytes(items));
  if (!options_.dry_run) {
    uint64_t total_bytes = 0;
    for (const WeightReport& weight : report_.weights) total_bytes += weight.source_bytes;
    quantize_phase_ = std::make_unique<ProgressPhase>(reporter_, "quantize", total_bytes);
    verify_phase_ = std::make_unique<ProgressPhase>(reporter_, "verify", total_bytes, quantize_phase_.get());
    OutputCheckpoint writer(input_, output_, options_.force, files_, side_files_, reporter_,
                            {options_.unfinished, identity(), options_.num_threads}, team_);
    writer.run([&] {
      const auto content = [&](size_t file) {
        return FileContent{tensors_of(files_.weights[file]), metadata_of(file)};
      };
      for (size_t file = 0; file < files_.names.size(); ++file)
        if (writer.is_resumed(file)) resume_file(writer.records_of(file), file);
      make_workers();
      Background starting(uses_cuda());  // a device starts in 0.4 s
      starting.start([&] { workers_->start(); });
      writer.reserve(content);
      starting.wait();
      share_ranges(writer);
      Background completion(overlaps());
      std::vector<size_t> mine;
      for (size_t file = 0; file < files_.names.size(); ++file) {
        if (writer.is_resumed(file) && writer.take_resumed(file, content(file))) {
          ++report_.num_resumed_files;
          quantize_phase_->add(source_bytes_of(file));
          if (options_.verify) verify_phase_->add(source_bytes_of(file));
        } else if (writer.is_mine(file)) {
          mine.push_back(file);
        }
      }
      const auto at_once = static_cast<size_t>(files_at_once(workers_->size()));
      for (size_t first = 0; first < mine.size(); first += at_once)
        run_files(writer, std::span(mine).subspan(first, std::min(at_once, mine.size() - first)), completion);
      completion.wait();
      writer.gather_files();
      for (size_t file = 0; file < files_.names.size(); ++file)
        if (writer.is_gathered(file)) {
          resume_file(writer.records_of(file), file);
          writer.take_resumed(file, content(file));
        }
      workers_->add_seconds(report_);
      complete_report();
      writer.finish(config_.empty() ? "" : config_text(), quantization_files());
    });
    report_.total_seconds = timer_.seconds();
  } else {
    estimate();
    complete_report();
  }
  return std::move(report_);
}

void Quantizer::complete_report() {
  report_.reader = selection_.reader;
  report_.architecture = selection_.architecture;
  for (const size_t weight : selection_.left_out) report_.left_out.push_back(input_.weights[weight].name);
  report_.readers = reader_verdicts(selection_, layout_, options_, is_dense());
  for (const WeightReport& weight : report_.weights) {
    report_.output_bytes += weight.output_bytes;
    report_.quantized_source_bytes += weight.quantized ? weight.source_bytes : 0;
    report_.num_quantized += weight.quantized ? 1 : 0;
  }
}

}  // namespace
}  // namespace io

CheckpointReport quantize_checkpoint(const std::string& input, const std::string& output,
                                     const QuantizeOptions& options) {
  io::Team team(options.process_group);
  const io::Timer timer;
  return team.run([&] {
    const Checkpoint checkpoint = Checkpoint::open(input, team.watched(options.progress));
    return io::Quantizer(checkpoint.impl(), output, options, team, timer).run();
  });
}

}  // namespace halfbyte
