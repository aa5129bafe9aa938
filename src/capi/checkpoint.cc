// Checkpoints, reports, comparisons, and what is wrong with checkpoints.
#include "halfbyte/checkpoint.hpp"

#include <memory>

#include "capi/support.h"
#include "halfbyte/verify.hpp"

using namespace halfbyte;
using namespace halfbyte::capi;

struct halfbyte_checkpoint {
  Checkpoint checkpoint;
};
struct halfbyte_report {
  CheckpointReport report;
};
struct halfbyte_writer {
  CheckpointWriter writer;
};
struct halfbyte_comparison {
  std::vector<CompareRow> rows;
};
struct halfbyte_verification {
  std::vector<Fault> faults;
};
struct halfbyte_repair {
  RepairReport report;
};

namespace {

// HALFBYTE_UNSET where there is none.
constexpr halfbyte_layout layout_of(Layout layout) {
  switch (layout) {
    case Layout::halfbyte:
      return HALFBYTE_LAYOUT_HALFBYTE;
    case Layout::bitsandbytes:
      return HALFBYTE_LAYOUT_BITSANDBYTES;
    case Layout::compressed_tensors:
      return HALFBYTE_LAYOUT_COMPRESSED_TENSORS;
    case Layout::mlx:
      return HALFBYTE_LAYOUT_MLX;
    case Layout::gptq:
      return HALFBYTE_LAYOUT_GPTQ;
    case Layout::awq:
      return HALFBYTE_LAYOUT_AWQ;
    case Layout::modelopt:
      return HALFBYTE_LAYOUT_MODELOPT;
    case Layout::fp8:
      return HALFBYTE_LAYOUT_FP8;
    case Layout::gpt_oss:
      return HALFBYTE_LAYOUT_GPT_OSS;
  }
  return HALFBYTE_UNSET;
}
constexpr halfbyte_layout num_layouts() {
  halfbyte_layout count = 0;
  while (layout_of(static_cast<Layout>(count)) == count) ++count;
  return count;
}
constexpr auto kLastLayout = static_cast<Layout>(num_layouts() - 1);
static_assert(layout_of(static_cast<Layout>(num_layouts())) == HALFBYTE_UNSET,
              "a HALFBYTE_LAYOUT_ is not the number of its Layout");
static_assert(HALFBYTE_READER_TRANSFORMERS_4 == static_cast<int32_t>(Reader::transformers_4));
static_assert(HALFBYTE_READER_VLLM == static_cast<int32_t>(Reader::vllm));
static_assert(HALFBYTE_READER_MLX_LM == static_cast<int32_t>(Reader::mlx_lm));
static_assert(HALFBYTE_READER_NONE == static_cast<int32_t>(Reader::none));
static_assert(HALFBYTE_EXPERTS_PER_EXPERT == static_cast<int32_t>(ExpertForm::per_expert));
static_assert(HALFBYTE_EXPERTS_PARAMETRIZE == static_cast<int32_t>(ExpertForm::parametrize));
static_assert(HALFBYTE_EXPERTS_EXPERTS4BIT == static_cast<int32_t>(ExpertForm::experts4bit));
static_assert(HALFBYTE_UNFINISHED_RESUME == static_cast<int32_t>(Unfinished::resume));
static_assert(HALFBYTE_UNFINISHED_DISCARD == static_cast<int32_t>(Unfinished::discard));
static_assert(HALFBYTE_NONFINITE_KEEP_DENSE == static_cast<int32_t>(NonFinite::keep_dense));

template <class T>
int64_t count_of(const std::vector<T>& list) {
  return static_cast<int64_t>(list.size());
}
template <class Enum>
int32_t or_unset(const std::optional<Enum>& value) {
  return value ? static_cast<int32_t>(*value) : HALFBYTE_UNSET;
}

ProgressFunction progress_of(halfbyte_progress_function function, void* user_data) {
  if (function == nullptr) return {};
  return [function, user_data](const Progress& progress) {
    const halfbyte_progress c{sizeof c, progress.phase, progress.done_bytes, progress.total_bytes};
    return function(&c, user_data) == 0;
  };
}

std::vector<Device> devices_of(const DLDevice* devices, int64_t num_devices) {
  if (num_devices < 0) refuse("options.devices: their number must not be negative, got {}", num_devices);
  if (num_devices > 0) required(devices, "options.devices");
  std::vector<Device> result;
  for (int64_t i = 0; i < num_devices; ++i) result.push_back(from_dlpack(devices[i], "options.devices"));
  return result;
}

halfbyte_quantize_options default_quantize_options() {
  const QuantizeOptions defaults;
  halfbyte_quantize_options options{};
  options.format = static_cast<int32_t>(defaults.format);
  options.layout = HALFBYTE_UNSET;
  options.granularity = HALFBYTE_UNSET;
  options.scale_rule = HALFBYTE_UNSET;
  options.scale_dtype = HALFBYTE_UNSET;
  options.nonfinite = static_cast<int32_t>(defaults.nonfinite);
  options.verify = defaults.verify;
  options.reader = HALFBYTE_UNSET;
  return options;
}

QuantizeOptions options_of(const halfbyte_quantize_options* given) {
  const halfbyte_quantize_options c = read_struct(given, default_quantize_options(), "options");
  QuantizeOptions options;
  options.format = enum_of(c.format, all_formats().back().format, "options.format");
  options.asymmetric = flag_of(c.asymmetric, "options.asymmetric");
  options.double_quant = flag_of(c.double_quant, "options.double_quant");
  std::copy(std::begin(c.table), std::end(c.table), options.table.begin());
  options.layout = optional_of(c.layout, kLastLayout, "options.layout");
  options.granularity = optional_of(c.granularity, Granularity::flat, "options.granularity");
  if (c.group_size != 0) options.group_size = c.group_size;
  options.scale_rule = optional_of(c.scale_rule, ScaleRule::mlx_edge, "options.scale_rule");
  options.scale_dtype = optional_of(c.scale_dtype, DType::f8_e8m0, "options.scale_dtype");
  options.search = flag_of(c.search, "options.search");
  if (c.importance != nullptr) options.importance = c.importance;
  options.nonfinite = enum_of(c.nonfinite, NonFinite::keep_dense, "options.nonfinite");
  options.include = words_of(c.include, c.num_include, "options.include");
  options.exclude = words_of(c.exclude, c.num_exclude, "options.exclude");
  options.reader = optional_of(c.reader, Reader::none, "options.reader");
  options.force_layout = flag_of(c.force_layout, "options.force_layout");
  options.keep_embeddings = flag_of(c.keep_embeddings, "options.keep_embeddings");
  options.fallback_dense = flag_of(c.fallback_dense, "options.fallback_dense");
  options.dry_run = flag_of(c.dry_run, "options.dry_run");
  options.verify = flag_of(c.verify, "options.verify");
  options.shard_bytes = c.shard_bytes;
  options.force = flag_of(c.force, "options.force");
  options.unfinished = enum_of(c.unfinished, Unfinished::discard, "options.unfinished");
  options.devices = devices_of(c.devices, c.num_devices);
  options.choose_devices = flag_of(c.choose_devices, "options.choose_devices");
  options.num_threads = threads_of(c.num_threads, "options.num_threads");
  options.progress = progress_of(c.progress, c.user_data);
  return options;
}

halfbyte_dequantize_options default_dequantize_options() {
  halfbyte_dequantize_options options{};
  options.dtype = HALFBYTE_UNSET;
  return options;
}

DequantizeOptions options_of(const halfbyte_dequantize_options* given) {
  const halfbyte_dequantize_options c = read_struct(given, default_dequantize_options(), "options");
  DequantizeOptions options;
  options.dtype = optional_of(c.dtype, DType::f8_e8m0, "options.dtype");
  options.dry_run = flag_of(c.dry_run, "options.dry_run");
  options.shard_bytes = c.shard_bytes;
  options.force = flag_of(c.force, "options.force");
  options.unfinished = enum_of(c.unfinished, Unfinished::discard, "options.unfinished");
  options.devices = devices_of(c.devices, c.num_devices);
  options.num_threads = threads_of(c.num_threads, "options.num_threads");
  options.progress = progress_of(c.progress, c.user_data);
  return options;
}

halfbyte_writer_options default_writer_options() {
  const WriterOptions defaults;
  halfbyte_writer_options options{};
  options.layout = static_cast<int32_t>(defaults.layout);
  options.reader = HALFBYTE_UNSET;
  options.verify = defaults.verify;
  return options;
}

WriterOptions options_of(const halfbyte_writer_options* given) {
  const halfbyte_writer_options c = read_struct(given, default_writer_options(), "options");
  WriterOptions options;
  options.layout = enum_of(c.layout, kLastLayout, "options.layout");
  if (c.base != nullptr) options.base = c.base;
  if (c.config != nullptr) options.config = c.config;
  if (c.identity != nullptr) options.identity = c.identity;
  options.reader = optional_of(c.reader, Reader::none, "options.reader");
  options.force_layout = flag_of(c.force_layout, "options.force_layout");
  options.verify = flag_of(c.verify, "options.verify");
  options.force = flag_of(c.force, "options.force");
  options.unfinished = enum_of(c.unfinished, Unfinished::discard, "options.unfinished");
  options.shard_bytes = c.shard_bytes;
  options.num_threads = threads_of(c.num_threads, "options.num_threads");
  options.progress = progress_of(c.progress, c.user_data);
  options.experts4bit = flag_of(c.experts4bit, "options.experts4bit");
  return options;
}

halfbyte_convert_options default_convert_options() {
  halfbyte_convert_options options{};
  options.reader = HALFBYTE_UNSET;
  options.experts = HALFBYTE_UNSET;
  options.verify = 1;
  return options;
}

ConvertOptions options_of(const halfbyte_convert_options* given) {
  const halfbyte_convert_options c = read_struct(given, default_convert_options(), "options");
  ConvertOptions options;
  options.layout = enum_of(c.layout, kLastLayout, "options.layout");
  options.reader = optional_of(c.reader, Reader::none, "options.reader");
  options.requantize = flag_of(c.requantize, "options.requantize");
  options.experts = optional_of(c.experts, ExpertForm::experts4bit, "options.experts");
  options.dry_run = flag_of(c.dry_run, "options.dry_run");
  options.force_layout = flag_of(c.force_layout, "options.force_layout");
  options.verify = flag_of(c.verify, "options.verify");
  options.force = flag_of(c.force, "options.force");
  options.unfinished = enum_of(c.unfinished, Unfinished::discard, "options.unfinished");
  options.num_threads = threads_of(c.num_threads, "options.num_threads");
  options.shard_bytes = c.shard_bytes;
  options.progress = progress_of(c.progress, c.user_data);
  return options;
}

// Hands the report of `run` to who asked for one. Memory for it is taken first: the output is there
// afterwards.
template <class Handle, class Run>
void give_report(Handle** to, const Run& run) {
  std::unique_ptr<Handle> report = to == nullptr ? nullptr : std::make_unique<Handle>();
  auto done = run();
  if (to == nullptr) return;
  report->report = std::move(done);
  *to = report.release();
}

const Weight& weight_of(const halfbyte_checkpoint* checkpoint, int64_t index) {
  return element(required(checkpoint, "checkpoint").checkpoint.weights(), index, "weights");
}

}  // namespace

halfbyte_status halfbyte_layout_find(const char* word, halfbyte_layout* layout) {
  return guard(
      [&] { required(layout, "layout") = static_cast<int32_t>(parse_layout(&required(word, "word"))); });
}
const char* halfbyte_layout_name(halfbyte_layout layout) {
  return layout < 0 || layout >= num_layouts() ? nullptr : to_string(static_cast<Layout>(layout));
}

halfbyte_status halfbyte_reader_find(const char* word, halfbyte_reader* reader) {
  return guard(
      [&] { required(reader, "reader") = static_cast<int32_t>(parse_reader(&required(word, "word"))); });
}
const char* halfbyte_reader_name(halfbyte_reader reader) {
  return reader < 0 || reader > HALFBYTE_READER_NONE ? nullptr : to_string(static_cast<Reader>(reader));
}

// ---- Reading

halfbyte_status halfbyte_checkpoint_open(const char* path, halfbyte_checkpoint** checkpoint) {
  return guard([&] {
    required(checkpoint, "checkpoint");
    *checkpoint = new halfbyte_checkpoint{Checkpoint::open(&required(path, "path"))};
  });
}
void halfbyte_checkpoint_close(halfbyte_checkpoint* checkpoint) { delete checkpoint; }

halfbyte_status halfbyte_checkpoint_get_info(const halfbyte_checkpoint* checkpoint,
                                             halfbyte_checkpoint_info* info) {
  return guard([&] {
    const Checkpoint& of = required(checkpoint, "checkpoint").checkpoint;
    write_struct(info,
                 {0, of.is_directory(), static_cast<int64_t>(of.tensors().size()),
                  static_cast<int64_t>(of.weights().size()), static_cast<int64_t>(of.foreign().size())},
                 "info");
  });
}

halfbyte_status halfbyte_checkpoint_get_tensor(const halfbyte_checkpoint* checkpoint, int64_t index,
                                               halfbyte_stored_tensor* tensor) {
  return guard([&] {
    const StoredTensor& of =
        element(required(checkpoint, "checkpoint").checkpoint.tensors(), index, "tensors");
    write_struct(tensor,
                 {0, of.name.c_str(), of.dtype.c_str(), of.file.c_str(), of.shape.data(), count_of(of.shape),
                  of.offset, of.num_bytes},
                 "tensor");
  });
}

halfbyte_status halfbyte_checkpoint_get_weight(const halfbyte_checkpoint* checkpoint, int64_t index,
                                               halfbyte_weight* weight) {
  return guard([&] {
    const Weight& of = weight_of(checkpoint, index);
    write_struct(weight,
                 {0, of.name.c_str(), of.shape.data(), count_of(of.shape), or_unset(of.dtype),
                  or_unset(of.layout), of.parts.data(), count_of(of.parts), of.num_bytes, bits_per_weight(of),
                  of.foreign.empty() ? nullptr : of.foreign.c_str(),
                  of.note.empty() ? nullptr : of.note.c_str(), of.scale_rows},
                 "weight");
  });
}

halfbyte_status halfbyte_checkpoint_get_foreign(const halfbyte_checkpoint* checkpoint, int64_t index,
                                                halfbyte_foreign* foreign) {
  return guard([&] {
    const ForeignQuantization& of =
        element(required(checkpoint, "checkpoint").checkpoint.foreign(), index, "foreign");
    write_struct(foreign,
                 {0, of.method.c_str(), of.layout.c_str(), of.source.c_str(), of.example.c_str(),
                  of.advice.c_str(), of.num_weights, count_of(of.parameters)},
                 "foreign");
  });
}

halfbyte_status halfbyte_checkpoint_get_foreign_parameter(const halfbyte_checkpoint* checkpoint,
                                                          int64_t index, int64_t parameter, const char** key,
                                                          const char** value) {
  return guard([&] {
    const ForeignQuantization& of =
        element(required(checkpoint, "checkpoint").checkpoint.foreign(), index, "foreign");
    const auto& [name, text] = element(std::span(of.parameters), parameter, "parameters");
    const char*& given_key = required(key, "key");
    required(value, "value") = text.c_str();
    given_key = name.c_str();
  });
}

halfbyte_status halfbyte_checkpoint_get_spec(const halfbyte_checkpoint* checkpoint, int64_t index,
                                             halfbyte_quant_spec* spec) {
  return guard([&] {
    const Weight& of = weight_of(checkpoint, index);
    if (!of.layout) refuse("weight {} is dense: it has no spec", index);
    write_struct(spec, to_c(of.spec), "spec");
  });
}

halfbyte_status halfbyte_checkpoint_find(const halfbyte_checkpoint* checkpoint, const char* name,
                                         int64_t* index) {
  return guard([&] {
    const Checkpoint& of = required(checkpoint, "checkpoint").checkpoint;
    const Weight* const weight = of.find(&required(name, "name"));
    required(index, "index") = weight == nullptr ? -1 : weight - of.weights().data();
  });
}

halfbyte_status halfbyte_checkpoint_read(const halfbyte_checkpoint* checkpoint, int64_t tensor_index,
                                         uint64_t offset, uint64_t num_bytes, void* bytes) {
  return guard([&] {
    const Checkpoint& of = required(checkpoint, "checkpoint").checkpoint;
    const StoredTensor& tensor = element(of.tensors(), tensor_index, "tensors");
    if (offset > tensor.num_bytes || num_bytes > tensor.num_bytes - offset)
      refuse("bytes [{}, {} + {}) are not within tensor {} of {} bytes", offset, offset, num_bytes,
             tensor_index, tensor.num_bytes);
    if (bytes == nullptr && num_bytes > 0) refuse("bytes must not be NULL");
    of.read(tensor, offset, {static_cast<std::byte*>(bytes), static_cast<size_t>(num_bytes)});
  });
}

halfbyte_status halfbyte_checkpoint_decode(const halfbyte_checkpoint* checkpoint, int64_t weight_index,
                                           int64_t begin, const DLTensor* y) {
  return guard([&] {
    const Weight& weight = weight_of(checkpoint, weight_index);
    const TensorView view = view_of(y, "y");
    const int64_t count = num_elements(view);
    if (!is_contiguous(view)) refuse("y must be contiguous");
    if (view.device != Device{}) refuse("y must be on cpu");
    if (view.data == nullptr && count > 0) refuse("y has {} elements but no data", count);
    checkpoint->checkpoint.decode(weight, begin, count, view.dtype, view.data);
  });
}

halfbyte_status halfbyte_checkpoint_load(const halfbyte_checkpoint* checkpoint, int64_t weight_index,
                                         DLDevice device, const halfbyte_execution* execution,
                                         const halfbyte_slice* slice, halfbyte_quantized_weight** weight) {
  return guard([&] {
    const std::string& name = weight_of(checkpoint, weight_index).name;
    required(weight, "weight");
    std::optional<Slice> part;
    if (slice != nullptr) part = slice_of(slice, "slice");
    *weight = new_weight(
        load_weight(checkpoint->checkpoint, name, from_dlpack(device), execution_of(execution), part));
  });
}

// ---- Writing

halfbyte_status halfbyte_quantize_options_init(halfbyte_quantize_options* options, size_t struct_size) {
  return init_struct(options, default_quantize_options(), struct_size, "options");
}
halfbyte_status halfbyte_dequantize_options_init(halfbyte_dequantize_options* options, size_t struct_size) {
  return init_struct(options, default_dequantize_options(), struct_size, "options");
}
halfbyte_status halfbyte_convert_options_init(halfbyte_convert_options* options, size_t struct_size) {
  return init_struct(options, default_convert_options(), struct_size, "options");
}
halfbyte_status halfbyte_compare_options_init(halfbyte_compare_options* options, size_t struct_size) {
  return init_struct(options, {}, struct_size, "options");
}

halfbyte_status halfbyte_quantize_checkpoint(const char* input, const char* output,
                                             const halfbyte_quantize_options* options,
                                             halfbyte_report** report) {
  return guard([&] {
    give_report(report, [&] {
      return quantize_checkpoint(&required(input, "input"), &required(output, "output"), options_of(options));
    });
  });
}
halfbyte_status halfbyte_dequantize_checkpoint(const char* input, const char* output,
                                               const halfbyte_dequantize_options* options,
                                               halfbyte_report** report) {
  return guard([&] {
    give_report(report, [&] {
      return dequantize_checkpoint(&required(input, "input"), &required(output, "output"),
                                   options_of(options));
    });
  });
}

halfbyte_status halfbyte_writer_options_init(halfbyte_writer_options* options, size_t struct_size) {
  return init_struct(options, default_writer_options(), struct_size, "options");
}
halfbyte_status halfbyte_writer_create(const char* output, const halfbyte_writer_options* options,
                                       halfbyte_writer** writer) {
  return guard([&] {
    required(writer, "writer");
    *writer = new halfbyte_writer{CheckpointWriter(&required(output, "output"), options_of(options))};
  });
}
halfbyte_status halfbyte_writer_set(halfbyte_writer* writer, const char* name,
                                    const halfbyte_quantized_weight* weight) {
  return guard(
      [&] { required(writer, "writer").writer.set(&required(name, "name"), tensor_of(weight, "weight")); });
}
halfbyte_status halfbyte_writer_set_dense(halfbyte_writer* writer, const char* name, const DLTensor* dense) {
  return guard([&] {
    required(writer, "writer").writer.set(&required(name, "name"), Tensor::copy_of(view_of(dense, "dense")));
  });
}
halfbyte_status halfbyte_writer_finish(halfbyte_writer* writer, halfbyte_report** report) {
  return guard([&] { give_report(report, [&] { return required(writer, "writer").writer.finish(); }); });
}
void halfbyte_writer_destroy(halfbyte_writer* writer) { delete writer; }

halfbyte_status halfbyte_convert_checkpoint(const char* input, const char* output,
                                            const halfbyte_convert_options* options,
                                            halfbyte_report** report) {
  return guard([&] {
    give_report(report, [&] {
      return convert_checkpoint(&required(input, "input"), &required(output, "output"), options_of(options));
    });
  });
}

void halfbyte_report_destroy(halfbyte_report* report) { delete report; }

halfbyte_status halfbyte_report_get_info(const halfbyte_report* report, halfbyte_report_info* info) {
  return guard([&] {
    const CheckpointReport& of = required(report, "report").report;
    write_struct(info,
                 {0,
                  of.input.c_str(),
                  of.output.c_str(),
                  or_unset(of.layout),
                  count_of(of.devices),
                  static_cast<int32_t>(of.reader),
                  count_of(of.weights),
                  of.num_quantized,
                  count_of(of.copied_files),
                  count_of(of.skipped_files),
                  of.source_bytes,
                  of.output_bytes,
                  of.quantized_source_bytes,
                  of.peak_buffer_bytes,
                  of.run_seconds,
                  of.sync_seconds,
                  of.verify_seconds,
                  of.architecture.c_str(),
                  count_of(of.readers),
                  count_of(of.left_out),
                  of.num_resumed_files,
                  of.read_seconds,
                  of.write_seconds,
                  of.compute_seconds,
                  bottleneck(of),
                  of.total_seconds,
                  of.time_note.c_str(),
                  of.copy_seconds,
                  of.device_note.c_str()},
                 "info");
  });
}

halfbyte_status halfbyte_report_get_reader(const halfbyte_report* report, int64_t index,
                                           halfbyte_reader_verdict* verdict) {
  return guard([&] {
    const ReaderVerdict& of = element(required(report, "report").report.readers, index, "readers");
    write_struct(verdict, {0, static_cast<int32_t>(of.reader), of.why_not.c_str()}, "verdict");
  });
}

halfbyte_status halfbyte_report_get_weight(const halfbyte_report* report, int64_t index,
                                           halfbyte_weight_report* weight) {
  return guard([&] {
    const WeightReport& of = element(required(report, "report").report.weights, index, "weights");
    write_struct(
        weight,
        {0, of.name.c_str(), of.shape.data(), count_of(of.shape), of.dtype.c_str(), of.reason.c_str(),
         of.note.c_str(), of.quantized, of.measured, of.source_bytes, of.output_bytes, of.bits_per_weight,
         of.max_error, of.max_error_index, of.relative_rmse, of.snr_db, of.scale_rows},
        "weight");
  });
}

halfbyte_status halfbyte_report_get_spec(const halfbyte_report* report, int64_t index,
                                         halfbyte_quant_spec* spec) {
  return guard([&] {
    const WeightReport& of = element(required(report, "report").report.weights, index, "weights");
    if (!of.quantized) refuse("weight {} stayed dense: it has no spec", index);
    write_struct(spec, to_c(of.spec), "spec");
  });
}
halfbyte_status halfbyte_report_get_encoding(const halfbyte_report* report, int64_t index,
                                             halfbyte_encoding* encoding) {
  return guard([&] {
    const WeightReport& of = element(required(report, "report").report.weights, index, "weights");
    if (!of.quantized) refuse("weight {} stayed dense: it has no encoding", index);
    write_struct(encoding, to_c(of.encoding), "encoding");
  });
}

halfbyte_status halfbyte_report_get_device(const halfbyte_report* report, int64_t index, DLDevice* device) {
  return guard([&] {
    required(device, "device") =
        to_dlpack(element(required(report, "report").report.devices, index, "devices"));
  });
}

const char* halfbyte_report_left_out(const halfbyte_report* report, int64_t index) {
  const char* name = nullptr;
  guard([&] { name = element(required(report, "report").report.left_out, index, "left out").c_str(); });
  return name;
}

const char* halfbyte_report_copied_file(const halfbyte_report* report, int64_t index) {
  const char* name = nullptr;
  guard(
      [&] { name = element(required(report, "report").report.copied_files, index, "copied files").c_str(); });
  return name;
}
const char* halfbyte_report_skipped_file(const halfbyte_report* report, int64_t index) {
  const char* name = nullptr;
  guard([&] {
    name = element(required(report, "report").report.skipped_files, index, "skipped files").c_str();
  });
  return name;
}

// ---- Comparing

halfbyte_status halfbyte_compare_checkpoints(const char* a, const char* b,
                                             const halfbyte_compare_options* options,
                                             halfbyte_comparison** comparison) {
  return guard([&] {
    required(comparison, "comparison");
    const halfbyte_compare_options c = read_struct(options, {}, "options");
    *comparison = new halfbyte_comparison{compare_checkpoints(
        &required(a, "a"), &required(b, "b"), threads_of(c.num_threads, "options.num_threads"),
        progress_of(c.progress, c.user_data))};
  });
}
void halfbyte_comparison_destroy(halfbyte_comparison* comparison) { delete comparison; }

halfbyte_status halfbyte_comparison_num_rows(const halfbyte_comparison* comparison, int64_t* num_rows) {
  return guard([&] { required(num_rows, "num_rows") = count_of(required(comparison, "comparison").rows); });
}
halfbyte_status halfbyte_comparison_get_row(const halfbyte_comparison* comparison, int64_t index,
                                            halfbyte_comparison_row* row) {
  return guard([&] {
    const CompareRow& of = element(required(comparison, "comparison").rows, index, "rows");
    write_struct(row,
                 {0, of.name.c_str(), of.problem.c_str(), of.max_error, of.max_error_index, of.relative_rmse,
                  of.snr_db},
                 "row");
  });
}

// ---- Checking and mending

halfbyte_status halfbyte_verify_options_init(halfbyte_verify_options* options, size_t struct_size) {
  return init_struct(options, {}, struct_size, "options");
}

halfbyte_status halfbyte_verify_checkpoint(const char* path, const halfbyte_verify_options* options,
                                           halfbyte_verification** verification) {
  return guard([&] {
    required(verification, "verification");
    const halfbyte_verify_options c = read_struct(options, {}, "options");
    *verification = new halfbyte_verification{
        verify_checkpoint(&required(path, "path"), progress_of(c.progress, c.user_data))};
  });
}
void halfbyte_verification_destroy(halfbyte_verification* verification) { delete verification; }

halfbyte_status halfbyte_verification_num_faults(const halfbyte_verification* verification,
                                                 int64_t* num_faults) {
  return guard(
      [&] { required(num_faults, "num_faults") = count_of(required(verification, "verification").faults); });
}
halfbyte_status halfbyte_verification_get_fault(const halfbyte_verification* verification, int64_t index,
                                                halfbyte_fault* fault) {
  return guard([&] {
    const Fault& of = element(required(verification, "verification").faults, index, "faults");
    write_struct(fault, {0, of.rule.c_str(), of.name.c_str(), of.text.c_str()}, "fault");
  });
}

halfbyte_status halfbyte_repair_options_init(halfbyte_repair_options* options, size_t struct_size) {
  return init_struct(options, {}, struct_size, "options");
}

halfbyte_status halfbyte_repair_checkpoint(const char* input, const char* output,
                                           const halfbyte_repair_options* options, halfbyte_repair** repair) {
  return guard([&] {
    const halfbyte_repair_options c = read_struct(options, {}, "options");
    give_report(repair, [&] {
      return repair_checkpoint(&required(input, "input"), &required(output, "output"),
                               flag_of(c.force, "options.force"), progress_of(c.progress, c.user_data));
    });
  });
}
void halfbyte_repair_destroy(halfbyte_repair* repair) { delete repair; }

halfbyte_status halfbyte_repair_num_weights(const halfbyte_repair* repair, int64_t* num_weights) {
  return guard(
      [&] { required(num_weights, "num_weights") = count_of(required(repair, "repair").report.weights); });
}
halfbyte_status halfbyte_repair_get_weight(const halfbyte_repair* repair, int64_t index,
                                           halfbyte_repaired_weight* weight) {
  return guard([&] {
    const RepairedWeight& of = element(required(repair, "repair").report.weights, index, "weights");
    write_struct(weight, {0, of.name.c_str(), of.global_scale_before, of.global_scale, of.num_scales},
                 "weight");
  });
}
