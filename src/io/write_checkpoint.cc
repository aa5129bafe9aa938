// Writes a checkpoint of given weights, file by file, beside those of a base. One Checkpoint::Impl stands for
// all of them: the base, and weights without bytes for what is given.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "core/checks.h"
#include "core/format.h"
#include "core/quantized_tensor.h"
#include "cpu/parallel.h"
#include "io/checkpoint_writer.h"
#include "io/config.h"
#include "io/foreign.h"
#include "io/journal.h"
#include "io/safetensors.h"
#include "io/selection.h"
#include "io/verify.h"

namespace halfbyte {
namespace io {
namespace {

constexpr const char* kSingleFile = ".safetensors";

// A weight that was given: one of the two.
struct Given {
  std::optional<QuantizedTensor> quantized;
  Tensor dense;
  QuantizedWeight target = {};                              // of quantized
  std::function<QuantizedTensor(WeightReport&)> make = {};  // then `quantized` has no parts
};

// One weight of the output.
struct WrittenItem {
  OutputWeight source;                      // of the weight itself
  const QuantizedWeight* target = nullptr;  // what is quantized, given or of the base
  const Given* given = nullptr;
  std::vector<OutputWeight> copies = {};  // tensors of the base that are copied as they are
  // Of what is given, while its file is written.
  std::optional<QuantizedTensor> quantized = {};
  Tensor dense = {};
  QuantizedWeight made = {};  // the target, where it is made
};

uint64_t stored_bytes(std::span<const Part> parts) {
  uint64_t sum = 0;
  for (const Part& part : parts)
    sum += static_cast<uint64_t>(safetensors_dtype_bits(part.dtype) / 8 * num_elements(part.shape));
  return sum;
}

// What the layout has of a weight. Error(usage) where it cannot hold it.
QuantizedWeight target_of(const std::string& name, const WriterOptions& writer, const QuantizedTensor& q,
                          bool has_parts = true) {
  const LayoutInfo& layout = layout_info(writer.layout);
  try {
    if (has_parts) check_quantized("parts", q);
    const size_t rank = q.shape.size();
    HALFBYTE_CHECK(rank >= (layout.layout == Layout::halfbyte ? 1u : 2u) && rank <= 3, usage,
                   "layout {}: a weight has {} to 3 axes, got {}", layout.name,
                   layout.layout == Layout::halfbyte ? 1 : 2, rank);
    HALFBYTE_CHECK(num_elements(q.shape) > 0, usage, "it has no elements");
    QuantizeOptions options;
    options.format = q.spec.format;
    options.asymmetric = q.spec.asymmetric;
    options.double_quant = q.spec.double_quant;
    options.table = q.spec.table;
    options.granularity = q.spec.granularity;
    if (q.spec.granularity == Granularity::group || q.spec.granularity == Granularity::flat)
      options.group_size = q.spec.group_size;
    options.scale_dtype = q.spec.scale_dtype;
    // Some files say the dtype of the weight by that of its scales.
    const DType dtype = layout.scale_dtypes == ScaleDTypes::of_weight && !hides_dtype(layout, q.spec.format)
                            ? q.spec.scale_dtype
                            : q.dtype;
    HALFBYTE_CHECK(dtype != DType::f64, usage,
                   "layout {}: the dtype of a weight is f32, f16 or bf16, got f64", layout.name);
    QuantSpec spec = resolve_spec(layout, options, dtype);
    const std::string reason = cannot_hold(layout, spec, q.shape);
    HALFBYTE_CHECK(reason.empty(), usage, "{}", reason);
    HALFBYTE_CHECK(!has_parts || shares_scales(q, scale_rows_of(layout, spec)), usage,
                   "layout {}: has a scale for a group of {} rows, in which they differ", layout.name,
                   kFp8Block);
    QuantizedWeight target = written_weight(name, q.shape, dtype, layout.layout, spec);
    target.encoding = q.encoding;
    if (writer.experts4bit && rank == 3) {
      target.experts4bit = true;
      const std::string why_not = refuse_experts4bit(target);
      HALFBYTE_CHECK(why_not.empty(), usage, "{}", why_not);
    }
    if (has_global_scale(spec) && has_parts) {
      const Tensor scale = q.global_scale.to({});
      std::memcpy(&target.global_scale, scale.data(), sizeof(float));
      HALFBYTE_CHECK(std::isfinite(target.global_scale) && target.global_scale > 0, bad_input,
                     "global_scale is {}", target.global_scale);
    }
    if (!spec.double_quant || !has_parts) return target;
    const Tensor map = q.scales_map.to({}), offset = q.scales_offset.to({});
    const auto* const values = reinterpret_cast<const float*>(map.data());
    if (!std::equal(values, values + 256, double_quant_map())) {
      HALFBYTE_CHECK(layout.layout == Layout::bitsandbytes, usage,
                     "layout {}: its scales have a map of their own, which the layout does not store",
                     layout.name);
      target.scales_map.assign(values, values + 256);
    }
    std::memcpy(&target.scales_offset, offset.data(), sizeof(float));
    HALFBYTE_CHECK(std::isfinite(target.scales_offset), bad_input, "scales_offset is {}",
                   target.scales_offset);
    return target;
  } catch (const Error& error) {
    HALFBYTE_CHECK(error.code() != ErrorCode::usage && error.code() != ErrorCode::bad_input, usage,
                   "writer: weight \"{}\": {}", printable(name), error.what());
    throw;
  }
}

// Error(bad_input) where a part, in host memory, has values that no reader could use.
void check_values(const std::string& name, const QuantizedTensor& q) {
  const auto check = [&](const char* what, const Tensor& part) {
    const auto type = scale_type(part.dtype());
    for (int64_t i = 0, n = part.num_elements(); i < n; ++i)
      HALFBYTE_CHECK(std::isfinite(formats::load_scale<float>(part.data(), i, type)), bad_input,
                     "writer: weight \"{}\": {} {} is not finite", printable(name), what, i);
  };
  if (q.spec.double_quant)
    check("scales_absmax", q.scales_absmax);
  else
    check("scale", q.scales);
  check("bias", q.biases);
  const int codes = 1 << info(q.spec.format).bits;
  for (int64_t i = 0, n = q.zeros.num_elements(); i < n; ++i)
    HALFBYTE_CHECK(std::to_integer<int>(q.zeros.data()[i]) < codes, bad_input,
                   "writer: weight \"{}\": zero point {} is {}, not a code of {} bits", printable(name), i,
                   std::to_integer<int>(q.zeros.data()[i]), info(q.spec.format).bits);
}

}  // namespace
}  // namespace io

using io::printable;

struct CheckpointWriter::Impl {
  Impl(std::string to, WriterOptions wanted)
      : output(std::move(to)), options(std::move(wanted)), layout(io::layout_info(options.layout)) {}

  CheckpointReport finish();
  CheckpointReport finish(io::Team& team);

  std::string output;
  WriterOptions options;
  const io::LayoutInfo& layout;
  std::map<std::string, io::Given> given;
  std::set<std::string> left_out;
  bool finished = false;

 private:
  void open_base();
  void add_given();
  void select();
  void make_items();
  void check_experts4bit() const;
  void plan_files();
  bool keeps_names() const;
  void take(size_t index, const io::OutputWeight& weight);
  io::Metadata metadata_of(size_t file) const;
  std::vector<StoredTensor> tensors_of(const io::WrittenItem& item) const;
  uint64_t output_bytes(const io::WrittenItem& item) const;
  uint64_t written_bytes(const io::WrittenItem& item) const;
  uint64_t verified_bytes(const io::WrittenItem& item) const;
  nlohmann::json identity() const;
  const io::ModelQuantization& quantization() const;  // of the items, which are complete
  void take_quantized(io::WrittenItem& item, WeightReport& report) const;
  void write_block(io::TensorFile& to, const io::WrittenItem& item, const io::Block& block,
                   io::BlockWorker& worker) const;
  void write_constants(io::TensorFile& to, const io::WrittenItem& item) const;
  io::FileContent content_of(size_t file) const;
  std::unique_ptr<io::TensorFile> write_file(io::OutputCheckpoint& to, size_t index,
                                             io::ProgressPhase& progress);
  void verify(const io::OutputCheckpoint& to, const io::TensorFile& file, size_t index,
              io::ProgressPhase& progress) const;

  std::unique_ptr<Checkpoint::Impl> input_;
  std::vector<const io::Given*> given_of_;  // of the weights of input_; null: of the base
  io::Selection selection_;
  std::vector<io::WrittenItem> items_;  // one for each weight of selection_
  mutable std::optional<io::ModelQuantization> quantization_;
  io::OutputFiles files_;
  CheckpointReport report_;
};

// ---- What there is

void CheckpointWriter::Impl::open_base() {
  if (!options.base.empty()) {
    input_ = io::open_checkpoint(options.base, io::stop_of(options.progress));
    io::refuse_foreign(*input_);
  } else {
    input_ = std::make_unique<Checkpoint::Impl>();
    input_->is_directory = !output.ends_with(io::kSingleFile);
    input_->files.push_back(
        {input_->is_directory ? "model.safetensors" : output.substr(output.rfind('/') + 1), {}, {}});
  }
  HALFBYTE_CHECK(!options.experts4bit || options.layout == Layout::bitsandbytes, usage,
                 "writer: layout {} has no Experts4bit, which bitsandbytes has", layout.name);
  HALFBYTE_CHECK(!options.config || input_->is_directory, usage,
                 "writer: a config goes into a directory, and \"{}\" is a single file", printable(output));
  std::string& config = input_->config;
  if (options.config) config = *options.config;
  if (!config.empty() && !io::quant_method(config).empty()) config = io::without_quantization(config, {});
}

// Puts what is given among the weights of the base.
void CheckpointWriter::Impl::add_given() {
  Checkpoint::Impl& in = *input_;
  const size_t own_tensors = in.tensors.size();
  std::vector<Weight> weights;
  const auto add = [&](const std::string& name, const io::Given& given, size_t file) {
    const Tensor& dense = given.dense;
    const bool quantized = given.quantized.has_value();
    const DType dtype = quantized ? given.target.dtype : dense.dtype();
    const std::vector<int64_t>& shape = quantized ? given.target.shape : dense.shape();
    in.tensors.push_back({name, io::dtype_to_safetensors(dtype), shape, in.files[file].name, 0,
                          static_cast<uint64_t>(contiguous_bytes(dtype, shape))});
    in.file_of.push_back(file);
    weights.push_back(
        {name, shape, dtype, {}, {}, {static_cast<int>(in.tensors.size() - 1)}, in.tensors.back().num_bytes});
    given_of_.push_back(&given);
  };
  auto next = given.begin();
  std::vector<io::StoredWeight> kept;
  std::vector<int> quantized_of;
  // What base does not have lies beside the weight of base that follows in the order of names.
  const auto add_new = [&](size_t file, const auto& end) {
    for (; next != given.end() && !end(next->first); ++next) {
      add(next->first, next->second, file);
      quantized_of.push_back(-1);
    }
  };
  for (size_t i = 0; i < in.weights.size(); ++i) {
    const Weight& weight = in.weights[i];
    add_new(in.file_index(weight), [&](const std::string& name) { return name >= weight.name; });
    if (left_out.contains(weight.name)) continue;
    if (next != given.end() && next->first == weight.name) {
      add(next->first, next->second, in.file_index(weight));
      quantized_of.push_back(-1);
      ++next;
      continue;
    }
    HALFBYTE_CHECK(
        !weight.layout || weight.layout == options.layout, bad_input,
        "writer: weight \"{}\" of \"{}\" is quantized in layout {}, and was not given for layout {}",
        printable(weight.name), printable(options.base), to_string(*weight.layout), layout.name);
    if (weight.layout) {
      const std::string form = io::refuse_written_form(in.quantized_weight(weight)->weight);
      HALFBYTE_CHECK(form.empty(), bad_input,
                     "writer: weight \"{}\" of \"{}\" has {}, which layout {} reads and does not write, and "
                     "was not given",
                     printable(weight.name), printable(options.base), form, layout.name);
    }
    weights.push_back(weight);
    quantized_of.push_back(in.quantized_of[i]);
    given_of_.push_back(nullptr);
  }
  add_new(in.files.size() - 1, [](const std::string&) { return false; });
  in.weights = std::move(weights);
  in.quantized_of = std::move(quantized_of);
  in.by_name.clear();  // the names have moved
  for (size_t i = 0; i < own_tensors; ++i) in.by_name.emplace(in.tensors[i].name, static_cast<int>(i));
}

// What a reader has already is not brought into its form again.
bool CheckpointWriter::Impl::keeps_names() const {
  if (options.base.empty()) return true;
  return std::ranges::any_of(input_->weights,
                             [&](const Weight& weight) { return weight.layout.has_value(); });
}

void CheckpointWriter::Impl::select() {
  QuantizeOptions as;
  as.layout = options.layout;
  as.reader = options.reader;
  as.force_layout = options.force_layout;
  std::set<std::string> chosen;
  for (size_t i = 0; i < input_->weights.size(); ++i) {
    const Weight& weight = input_->weights[i];
    const io::Given* own = given_of_[i];
    const QuantSpec* spec = own != nullptr && own->quantized ? &own->target.spec
                            : weight.layout                  ? &weight.spec
                                                             : nullptr;
    if (spec == nullptr) continue;
    chosen.insert(weight.name);
    as.asymmetric |= spec->asymmetric;
  }
  const bool keeps = keeps_names();
  if (keeps && options.layout == Layout::mlx) {
    selection_.reader = options.reader.value_or(Reader::mlx_lm);
    for (size_t i = 0; i < input_->weights.size(); ++i)
      selection_.weights.push_back({io::whole_weight(input_->weights[i], i)});
    return;
  }
  selection_ = io::select_weights(*input_, layout, as, &chosen);
  std::vector<io::SelectedWeight> weights;
  std::vector<char> seen(input_->weights.size());
  for (io::SelectedWeight& selected : selection_.weights) {
    io::OutputWeight& weight = selected.weight;
    const size_t first = weight.sources.front().weight;
    const bool one = std::ranges::all_of(weight.sources, [&](auto& rows) { return rows.weight == first; });
    for (const io::SourceRows& rows : weight.sources) {
      const Weight& source = input_->weights[rows.weight];
      HALFBYTE_CHECK(given_of_[rows.weight] == nullptr || keeps || (one && weight.name == source.name), usage,
                     "writer: {} holds \"{}\" as \"{}\": give it so", to_string(selection_.reader),
                     printable(source.name), printable(weight.name));
    }
    if (!keeps && given_of_[first] == nullptr) {
      weights.push_back(std::move(selected));
    } else if (!seen[first]) {
      seen[first] = 1;
      weight = io::whole_weight(input_->weights[first], first);
      weights.push_back(std::move(selected));
    }
  }
  selection_.weights = std::move(weights);
  for (const size_t index : selection_.left_out)
    HALFBYTE_CHECK(given_of_[index] == nullptr, usage, "writer: {} does not load weight \"{}\"",
                   to_string(selection_.reader), printable(input_->weights[index].name));
}

// The weight as an item, and those tensors of it that are copied.
void CheckpointWriter::Impl::make_items() {
  const size_t num_weights = input_->weights.size();
  for (io::SelectedWeight& selected : selection_.weights) {
    io::WrittenItem& item = items_.emplace_back(io::WrittenItem{selected.weight});
    const size_t index = item.source.sources.front().weight;
    item.given = given_of_[index];
    if (item.given != nullptr) {
      if (item.given->quantized) item.target = &item.given->target;
      continue;
    }
    const int quantized = input_->quantized_of[index];
    if (quantized < 0) {
      io::check_output_weight(*input_, item.source);
      item.copies.push_back(item.source);
      continue;
    }
    item.target = &input_->quantized[static_cast<size_t>(quantized)].weight;
    const std::vector<int> parts = input_->weights[index].parts;
    for (const int part : parts) {
      const StoredTensor& tensor = input_->tensors[static_cast<size_t>(part)];
      input_->weights.push_back({tensor.name, tensor.shape, {}, {}, {}, {part}, tensor.num_bytes});
      item.copies.push_back(io::whole_weight(input_->weights.back(), input_->weights.size() - 1));
    }
  }
  for (size_t i = 0; i < num_weights; ++i) report_.source_bytes += input_->weights[i].num_bytes;
}

// Their tensors do not tell their shape: config.json must.
void CheckpointWriter::Impl::check_experts4bit() const {
  std::optional<int64_t> hidden;
  if (!input_->config.empty()) hidden = io::experts4bit_config(input_->config).hidden_size;
  for (const io::WrittenItem& item : items_) {
    if (item.target == nullptr || !item.target->experts4bit) continue;
    const int64_t own = io::experts4bit_hidden_size(*item.target);
    HALFBYTE_CHECK(hidden == own, usage,
                   "writer: weight \"{}\": readers of Experts4bit take its shape from \"hidden_size\" of "
                   "config.json, which must be {}, and {}",
                   printable(item.target->name), own,
                   hidden ? fmt::format("is {}", *hidden) : "is not there");
  }
}

std::vector<StoredTensor> CheckpointWriter::Impl::tensors_of(const io::WrittenItem& item) const {
  std::vector<StoredTensor> tensors;
  if (item.given != nullptr && item.target != nullptr) {
    for (const io::Part& part : io::parts_of(*item.target))
      tensors.push_back({part.name, part.dtype, part.shape, "", 0, 0});
  } else if (item.given != nullptr) {
    tensors.push_back(
        {item.source.name, io::stored_dtype(*input_, item.source), item.source.shape, "", 0, 0});
  }
  for (const io::OutputWeight& copy : item.copies)
    tensors.push_back({copy.name, io::stored_dtype(*input_, copy), copy.shape, "", 0, 0});
  return tensors;
}

uint64_t CheckpointWriter::Impl::output_bytes(const io::WrittenItem& item) const {
  if (item.given != nullptr && item.target != nullptr) return io::stored_bytes(io::parts_of(*item.target));
  if (item.given != nullptr) return io::num_bytes(*input_, item.source);
  uint64_t sum = 0;
  for (const io::OutputWeight& copy : item.copies) sum += io::num_bytes(*input_, copy);
  return sum;
}

const io::ModelQuantization& CheckpointWriter::Impl::quantization() const {
  if (!quantization_) {
    std::vector<const io::QuantizedWeight*> targets;
    for (const io::WrittenItem& item : items_) targets.push_back(item.target);
    quantization_ = io::model_quantization(selection_, layout, options.force_layout, targets);
  }
  return *quantization_;
}

void CheckpointWriter::Impl::plan_files() {
  std::vector<const io::OutputWeight*> weights;
  std::vector<uint64_t> bytes;
  std::set<std::string> names;
  std::vector<bool> is_dense;
  QuantizeOptions as;  // what readers ask of
  as.layout = options.layout;
  for (size_t i = 0; i < items_.size(); ++i) {
    const io::WrittenItem& item = items_[i];
    weights.push_back(&item.source);
    bytes.push_back(output_bytes(item));
    is_dense.push_back(item.target == nullptr);
    if (item.target != nullptr) {
      as.format = item.target->spec.format;
      as.asymmetric |= item.target->spec.asymmetric;
    }
    for (const StoredTensor& tensor : tensors_of(item))
      HALFBYTE_CHECK(names.insert(tensor.name).second, bad_input,
                     "writer: tensor \"{}\" would be written twice", printable(tensor.name));
    WeightReport& report = report_.weights.emplace_back();
    report.name = item.source.name;
    report.shape = item.source.shape;
    report.dtype = item.target != nullptr ? io::dtype_to_safetensors(item.target->dtype)
                                          : io::stored_dtype(*input_, item.source);
    report.quantized = item.target != nullptr;
    report.reason = item.target != nullptr  ? ""
                    : item.given != nullptr ? "given"
                                            : selection_.weights[i].reason;
    if (item.target != nullptr) report.spec = item.target->spec;
    if (item.target != nullptr) report.scale_rows = item.target->scale_rows;
    if (item.target != nullptr && item.target->encoding) report.encoding = *item.target->encoding;
    report.source_bytes = report.output_bytes = bytes.back();
    const int64_t n = io::num_elements(item.source.shape);
    report.bits_per_weight = n == 0 ? 0 : 8 * static_cast<double>(bytes.back()) / static_cast<double>(n);
    report_.output_bytes += report.output_bytes;
    report_.num_quantized += report.quantized ? 1 : 0;
    report_.quantized_source_bytes += report.quantized ? report.source_bytes : 0;
  }
  files_ = io::output_files(*input_, weights, bytes, options.shard_bytes);
  if (options.base.empty())
    for (auto& sources : files_.sources) sources.clear();
  io::check_output(*input_, files_, [&](size_t file) { return content_of(file); });
  report_.reader = selection_.reader;
  report_.architecture = selection_.architecture;
  report_.readers = io::reader_verdicts(selection_, layout, as, is_dense);
  for (const size_t weight : selection_.left_out) report_.left_out.push_back(input_->weights[weight].name);
}

// ---- The output

io::Metadata CheckpointWriter::Impl::metadata_of(size_t file) const {
  io::Metadata metadata;
  if (!files_.sources[file].empty()) metadata = input_->files[files_.sources[file].front()].metadata;
  std::erase_if(metadata, [](const auto& entry) {
    return entry.first == "quantization" || entry.first == io::kWordMetadata;
  });
  if (options.layout != Layout::mlx) {
    io::set_metadata(metadata, "format", "pt");
    const auto first =
        std::ranges::find_if(items_, [](const io::WrittenItem& item) { return item.target != nullptr; });
    if (!input_->is_directory && first != items_.end() && io::hides_dtype(layout, first->target->spec.format))
      io::set_metadata(metadata, io::kWordMetadata,
                       io::word_quantization(quantization(), /*with_dtype=*/true));
    return metadata;
  }
  io::set_metadata(metadata, "format", "mlx");
  if (report_.num_quantized == 0) return metadata;
  const io::ModelQuantization& all = quantization();
  for (const size_t i : files_.weights[file])
    if (items_[i].target != nullptr && !all.modules.contains(io::module_of(items_[i].target->name))) {
      io::set_metadata(metadata, "quantization", io::mlx_quantization(all.spec));
      break;
    }
  return metadata;
}

// Progress counts elements of what is quantized, which is then decoded.
uint64_t CheckpointWriter::Impl::written_bytes(const io::WrittenItem& item) const {
  const bool codes = item.given != nullptr && item.target != nullptr;
  return codes ? static_cast<uint64_t>(io::num_elements(item.source.shape)) : output_bytes(item);
}
uint64_t CheckpointWriter::Impl::verified_bytes(const io::WrittenItem& item) const {
  const bool codes = item.given != nullptr && item.target != nullptr;
  return written_bytes(item) * (codes ? static_cast<uint64_t>(size_of(item.target->dtype)) : 1);
}

// Null where nothing says what is given.
nlohmann::json CheckpointWriter::Impl::identity() const {
  if (options.identity.empty()) return {};
  nlohmann::json weights = nlohmann::json::object();
  for (const auto& [name, own] : given) {
    nlohmann::json& weight = weights[name] =
        io::json_object({{"dtype", to_string(own.quantized ? own.quantized->dtype : own.dense.dtype())},
                         {"shape", own.quantized ? own.quantized->shape : own.dense.shape()}});
    if (!own.quantized) continue;
    const QuantSpec& spec = own.quantized->spec;
    weight["format"] = info(spec.format).name;
    weight["asymmetric"] = spec.asymmetric;
    weight["double_quant"] = spec.double_quant;
    weight["granularity"] = to_string(spec.granularity);
    weight["group_size"] = spec.group_size;
    weight["scale_dtype"] = to_string(spec.scale_dtype);
    if (spec.format == Format::lut4) weight["table"] = spec.table;
  }
  return io::json_object({{"operation", options.identity},
                          {"options", io::json_object({{"layout", to_string(options.layout)},
                                                       {"reader", io::option_json(options.reader)},
                                                       {"config", io::option_json(options.config)},
                                                       {"experts4bit", options.experts4bit},
                                                       {"force_layout", options.force_layout},
                                                       {"verify", options.verify},
                                                       {"shard_bytes", options.shard_bytes}})},
                          {"weights", std::move(weights)},
                          {"left_out", left_out}});
}

void CheckpointWriter::Impl::write_block(io::TensorFile& to, const io::WrittenItem& item,
                                         const io::Block& block, io::BlockWorker& worker) const {
  const io::QuantizedWeight& target = *item.target;
  for (const io::Part& part : io::parts_of(target)) {
    const io::Role role = part.role;
    if (role == io::Role::constant || role == io::Role::scales_absmax) continue;
    if (role == io::Role::scales && target.spec.double_quant) continue;
    if (role != io::Role::codes && target.spec.granularity == Granularity::tensor && block.begin > 0)
      continue;
    const int64_t num_bytes = io::native_bytes(target, block, role);
    std::byte* const native = worker.native.of(role).reserve(num_bytes);
    std::memcpy(native, io::part_of(*item.quantized, role).data() + io::native_offset(target, block, role),
                static_cast<size_t>(num_bytes));
    to.write(to.tensor(part.name), io::stored_range(target, block, role),
             io::to_stored(target, block, role, native, worker.stored));
  }
}

// What is not cut into blocks.
void CheckpointWriter::Impl::write_constants(io::TensorFile& to, const io::WrittenItem& item) const {
  for (const io::Part& part : io::parts_of(*item.target)) {
    const StoredTensor& tensor = to.tensor(part.name);
    const bool nested = item.target->spec.double_quant &&
                        (part.role == io::Role::scales || part.role == io::Role::scales_absmax);
    if (part.role == io::Role::constant) {
      to.write_repeated(tensor, part.content);
    } else if (nested) {
      const Tensor& own = io::part_of(*item.quantized, part.role);
      to.write(tensor, 0, {own.data(), static_cast<size_t>(own.num_bytes())});
    }
  }
}

void CheckpointWriter::Impl::take_quantized(io::WrittenItem& item, WeightReport& report) const {
  const io::Given& own = *item.given;
  const QuantizedTensor& form = *own.quantized;
  item.quantized = (own.make ? own.make(report) : form).to({});
  if (own.make) {
    const QuantizedTensor& made = *item.quantized;
    HALFBYTE_CHECK(made.spec == form.spec && made.shape == form.shape && made.dtype == form.dtype, usage,
                   "writer: weight \"{}\" was made of another spec, shape or dtype than it was set",
                   printable(item.source.name));
    item.made = io::target_of(item.source.name, options, made);
    item.target = &item.made;
  }
  if (has_global_scale(form.spec) && layout.global_is_reciprocal) {
    // As it is read again: at most one unit in the last place away.
    item.made = *item.target;
    item.made.global_reciprocal = 1 / item.made.global_scale;
    item.made.global_scale = 1 / item.made.global_reciprocal;
    item.target = &item.made;
    item.quantized->global_scale = Tensor({}, DType::f32, {1});
    std::memcpy(item.quantized->global_scale.data(), &item.made.global_scale, sizeof(float));
  }
  io::check_values(item.source.name, *item.quantized);
}

io::FileContent CheckpointWriter::Impl::content_of(size_t file) const {
  std::vector<StoredTensor> tensors;
  for (const size_t i : files_.weights[file])
    for (StoredTensor& tensor : tensors_of(items_[i])) tensors.push_back(std::move(tensor));
  return {std::move(tensors), metadata_of(file)};
}

std::unique_ptr<io::TensorFile> CheckpointWriter::Impl::write_file(io::OutputCheckpoint& to, size_t index,
                                                                   io::ProgressPhase& progress) {
  struct Task {
    size_t item;
    const io::OutputWeight* copy;  // null: of what is given
    int64_t begin, count;          // elements of what is quantized, otherwise bytes
  };
  std::vector<Task> tasks;
  const auto add_bytes = [&](size_t i, const io::OutputWeight* copy, uint64_t num_bytes) {
    for (int64_t begin = 0, end = static_cast<int64_t>(num_bytes); begin < end; begin += io::kCopyBytes)
      tasks.push_back({i, copy, begin, std::min(io::kCopyBytes, end - begin)});
  };
  for (const size_t i : files_.weights[index]) {
    io::WrittenItem& item = items_[i];
    to.poll();
    if (item.given != nullptr && item.target != nullptr) take_quantized(item, report_.weights[i]);
    for (const io::OutputWeight& copy : item.copies) add_bytes(i, &copy, io::num_bytes(*input_, copy));
    if (item.given == nullptr) continue;
    if (item.target == nullptr) {
      item.dense = item.given->dense.to({});
      add_bytes(i, nullptr, static_cast<uint64_t>(item.dense.num_bytes()));
      continue;
    }
    const int64_t most = io::preferred_elements(*item.target, io::kBlockElements);
    for (int64_t begin = 0, n = io::num_elements(item.source.shape); begin < n; begin += tasks.back().count)
      tasks.push_back({i, nullptr, begin, io::block_at(*item.target, begin, most).count});
  }
  auto file = to.begin_file(index, content_of(index));
  std::vector<io::BlockWorker> workers(static_cast<size_t>(effective_threads(options.num_threads)));
  parallel_for(std::ssize(tasks), 1, options.num_threads, [&](int64_t first, int64_t last, int w) {
    io::BlockWorker& worker = workers[static_cast<size_t>(w)];
    for (auto t = static_cast<size_t>(first); t < static_cast<size_t>(last); ++t) {
      const auto [i, copy, begin, count] = tasks[t];
      const io::WrittenItem& item = items_[i];
      if (copy != nullptr) {
        const std::span<std::byte> bytes(worker.stored.reserve(count), static_cast<size_t>(count));
        io::read_output(*input_, *copy, static_cast<uint64_t>(begin), bytes, worker.dense);
        file->write(file->tensor(copy->name), static_cast<uint64_t>(begin), bytes);
      } else if (item.quantized) {
        const int64_t most = io::preferred_elements(*item.target, io::kBlockElements);
        write_block(*file, item, io::block_at(*item.target, begin, most), worker);
      } else {
        file->write(file->tensor(item.source.name), static_cast<uint64_t>(begin),
                    {item.dense.data() + begin, static_cast<size_t>(count)});
      }
      progress.add(static_cast<uint64_t>(count));
    }
  });
  for (const size_t i : files_.weights[index])
    if (items_[i].quantized) to.poll(), write_constants(*file, items_[i]);
  return file;
}

void CheckpointWriter::Impl::verify(const io::OutputCheckpoint& to, const io::TensorFile& file, size_t index,
                                    io::ProgressPhase& progress) const {
  std::vector<io::VerifyItem> checks;
  std::vector<QuantizedTensor> expanded;
  expanded.reserve(files_.weights[index].size());
  for (const size_t i : files_.weights[index]) {
    const io::WrittenItem& item = items_[i];
    if (item.quantized) {
      expanded.push_back(item.quantized->expanded());
      checks.push_back({&item.source, item.target, nullptr, &expanded.back()});
    } else if (item.given != nullptr) {
      checks.push_back({&item.source, nullptr, nullptr, nullptr, &item.dense});
    }
    for (const io::OutputWeight& copy : item.copies) checks.push_back({&copy, nullptr, nullptr});
  }
  const io::TensorFile* const files[] = {&file};
  to.verify(files, {std::move(checks)}, options.num_threads, progress);
}

CheckpointReport CheckpointWriter::Impl::finish() {
  io::Team team(options.process_group);
  return team.run([&] { return finish(team); });
}

CheckpointReport CheckpointWriter::Impl::finish(io::Team& team) {
  HALFBYTE_CHECK(!finished, usage, "writer: \"{}\" is finished", printable(output));
  finished = true;
  HALFBYTE_CHECK(!output.empty(), usage, "the output path is empty");
  HALFBYTE_CHECK(options.num_threads >= 0, usage, "num_threads must not be negative, got {}",
                 options.num_threads);
  HALFBYTE_CHECK(team.is_alone() || !options.identity.empty(), usage,
                 "writer: several processes need an identity");
  report_.input = options.base;
  report_.output = output;
  open_base();
  io::SideFiles side_files = options.base.empty() ? io::SideFiles{} : io::find_side_files(*input_);
  add_given();
  select();
  make_items();
  HALFBYTE_CHECK(!items_.empty(), usage, "writer: \"{}\" would have no weights", printable(output));
  check_experts4bit();
  plan_files();
  std::string config = input_->config;
  std::map<std::string, std::string> texts;  // of other files
  if (report_.num_quantized > 0) {
    report_.layout = options.layout;
    const io::ModelQuantization& all = quantization();
    HALFBYTE_CHECK(
        all.modules.empty() || !config.empty(), usage,
        "writer: weights of layout mlx differ in bits or group size, which only config.json can tell");
    if (!config.empty()) config = io::with_quantization(config, all);
    if (input_->is_directory) texts = io::files_beside_config(all);
  }
  if (!config.empty()) io::check_config(config);  // it must be valid before hours of work
  std::erase_if(side_files.copied, [&](const std::string& name) { return texts.contains(name); });
  report_.copied_files = side_files.copied;
  report_.skipped_files = side_files.skipped;
  uint64_t written = 0, verified = 0;  // as the phases count them
  for (const io::WrittenItem& item : items_) {
    written += written_bytes(item);
    verified += verified_bytes(item);
  }
  io::ProgressReporter reporter(team.watched(options.progress));
  io::ProgressPhase writing(reporter, "write", written), verifying(reporter, "verify", verified);
  io::OutputCheckpoint to(*input_, output, options.force, files_, side_files, reporter,
                          {options.unfinished, identity(), options.num_threads}, team);
  const auto take_records = [&](size_t file) {
    const nlohmann::json records = to.records_of(file);
    for (size_t i = 0; i < files_.weights[file].size(); ++i)
      io::from_record(records.at(i), report_.weights[files_.weights[file][i]]);
  };
  to.run([&] {
    to.reserve([&](size_t file) { return content_of(file); });
    for (size_t file = 0; file < files_.names.size(); ++file) {
      if (to.is_resumed(file) && to.take_resumed(file, content_of(file))) {
        ++report_.num_resumed_files;
        take_records(file);
        for (const size_t item : files_.weights[file]) {
          writing.add(written_bytes(items_[item]));
          if (options.verify) verifying.add(verified_bytes(items_[item]));
        }
        continue;
      }
      if (!to.is_mine(file)) continue;
      std::unique_ptr<io::TensorFile> written = write_file(to, file, writing);
      if (options.verify) verify(to, *written, file, verifying);
      to.sync(*written);
      nlohmann::json records = nlohmann::json::array();
      for (const size_t i : files_.weights[file]) {
        items_[i].quantized.reset();
        items_[i].dense = {};
        records.push_back(io::to_record(report_.weights[i]));
      }
      to.commit_file(std::move(written), &records);
    }
    to.gather_files();
    for (size_t file = 0; file < files_.names.size(); ++file)
      if (to.is_gathered(file)) {
        take_records(file);
        to.take_resumed(file, content_of(file));
      }
    to.finish(config, texts);
  });
  return std::move(report_);
}

CheckpointWriter::CheckpointWriter(std::string output, WriterOptions options)
    : impl_(std::make_unique<Impl>(std::move(output), std::move(options))) {}
CheckpointWriter::CheckpointWriter(CheckpointWriter&&) noexcept = default;
CheckpointWriter& CheckpointWriter::operator=(CheckpointWriter&&) noexcept = default;
CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::set(const std::string& name, QuantizedTensor weight) {
  io::Given given{std::move(weight), {}};
  given.target = io::target_of(name, impl_->options, *given.quantized);
  HALFBYTE_CHECK(impl_->given.emplace(name, std::move(given)).second, usage,
                 "writer: weight \"{}\" was given before", printable(name));
}

void CheckpointWriter::set(const std::string& name, const QuantizedTensor& form,
                           std::function<QuantizedTensor()> make) {
  HALFBYTE_CHECK(make != nullptr, usage, "writer: weight \"{}\": make must not be empty", printable(name));
  set(name, form, [make = std::move(make)](WeightReport&) { return make(); });
}

void CheckpointWriter::set(const std::string& name, const QuantizedTensor& form,
                           std::function<QuantizedTensor(WeightReport&)> make) {
  HALFBYTE_CHECK(make != nullptr, usage, "writer: weight \"{}\": make must not be empty", printable(name));
  QuantizedTensor own;
  own.spec = form.spec;
  own.shape = form.shape;
  own.dtype = form.dtype;
  io::Given given{std::move(own), {}};
  given.target = io::target_of(name, impl_->options, *given.quantized, false);
  given.make = std::move(make);
  HALFBYTE_CHECK(impl_->given.emplace(name, std::move(given)).second, usage,
                 "writer: weight \"{}\" was given before", printable(name));
}

void CheckpointWriter::set(const std::string& name, Tensor dense) {
  HALFBYTE_CHECK(!is_packed(dense.dtype()), usage, "writer: weight \"{}\": no file holds dtype {}",
                 printable(name), to_string(dense.dtype()));
  HALFBYTE_CHECK(impl_->given.emplace(name, io::Given{{}, std::move(dense)}).second, usage,
                 "writer: weight \"{}\" was given before", printable(name));
}

void CheckpointWriter::leave_out(const std::string& name) { impl_->left_out.insert(name); }

CheckpointReport CheckpointWriter::finish() { return impl_->finish(); }

}  // namespace halfbyte
