// Writes the weights of a checkpoint in another layout, with the codes that they have.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "core/checks.h"
#include "core/format.h"
#include "io/architecture.h"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/progress.h"
#include "io/recode.h"
#include "io/safetensors.h"

namespace halfbyte {
namespace io {
namespace {

// One weight on its way to the other layout. Its loading is repeated where it is written, so that no more
// than the weights of a file are in memory.
struct Item {
  const Weight* weight;
  bool turned = false;        // is [in, out] in the model, and [out, in] in the other layout
  std::string lost = {};      // why it cannot keep its codes; empty: it does
  QuantizedTensor form = {};  // in the other layout, without its parts
  double signal = 0, noise = 0, max_error = 0;
  int64_t max_error_index = 0;
};

// The rule and groups of the layout for codes of as many bits.
QuantizeOptions nearest_options(const LayoutInfo& layout, const Weight& weight) {
  QuantizeOptions options;
  options.layout = layout.layout;
  const int bits = info(weight.spec.format).bits;
  std::optional<Format> format;
  for (const Format held : layout.formats)
    if (info(held).bits == bits && !format) format = held;
  HALFBYTE_CHECK(format || layout.formats.empty(), usage, "layout {}: has no format of {} bits for \"{}\"",
                 layout.name, bits, printable(weight.name));
  options.format = format.value_or(weight.spec.format);
  options.table = weight.spec.table;
  const std::vector<int64_t>& sizes = layout.group_sizes;
  const bool grouped =
      weight.spec.granularity == Granularity::group || weight.spec.granularity == Granularity::flat;
  if (grouped && (sizes.empty() || std::ranges::find(sizes, weight.spec.group_size) != sizes.end()))
    options.group_size = weight.spec.group_size;
  options.asymmetric =
      weight.spec.asymmetric && layout.asymmetric && info(options.format).kind == FormatKind::integer;
  return options;
}

// The values of the weight, quantized as the layout does it; what this changes, in `item`.
QuantizedTensor requantized(const Checkpoint& from, const LayoutInfo& layout, DType dtype, Item& item) {
  const Weight& weight = *item.weight;
  const int64_t n = num_elements(weight);
  std::vector<float> x(static_cast<size_t>(n)), y(x.size());
  from.decode(weight, 0, n, DType::f32, x.data());
  const std::vector<int64_t>& shape = item.form.shape;
  if (item.turned) {
    for (int64_t row = 0; row < shape[0]; ++row)
      for (int64_t col = 0; col < shape[1]; ++col)
        y[static_cast<size_t>(row * shape[1] + col)] = x[static_cast<size_t>(col * shape[0] + row)];
    x.swap(y);
  }
  const QuantizeOptions options = nearest_options(layout, weight);
  const QuantSpec spec = resolve_spec(layout, options, dtype);
  const Encoding encoding = resolve_encoding(layout, options, spec);
  QuantizedTensor q = quantize({x.data(), DType::f32, shape, {}, {}}, spec, encoding);
  q.dtype = dtype;
  q.encoding = encoding;
  dequantize(q, {y.data(), DType::f32, shape, {}, {}});
  item.signal = item.noise = item.max_error = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double value = static_cast<double>(x[i]), error = static_cast<double>(y[i]) - value;
    item.signal += value * value;
    item.noise += error * error;
    if (std::fabs(error) <= item.max_error) continue;
    item.max_error = std::fabs(error);
    item.max_error_index = static_cast<int64_t>(i);
  }
  return q;
}

// What is not of the codes themselves; empty where nothing keeps them from being used.
std::string refuse_form(const Checkpoint& from, const LayoutInfo& layout, const Item& item) {
  const StoredWeight& stored = *from.impl().quantized_weight(*item.weight);
  if (!stored.weight.words.order.empty())
    return "its groups are of columns in another order (act-order), which is not written";
  if (stored.transposed != item.turned)
    return fmt::format("layout {}: holds this Conv1D as {}, and its groups are of the other axis",
                       layout.name, item.turned ? "[out, in]" : "[in, out]");
  return "";
}

QuantizedTensor form_of(const QuantSpec& spec, const std::vector<int64_t>& shape, DType dtype) {
  QuantizedTensor form;
  form.spec = spec;
  form.shape = shape;
  form.dtype = dtype;
  return form;
}

std::string note_of(const Item& item) { return item.lost.empty() ? "" : "requantized: " + item.lost; }

// What a run would do.
CheckpointReport planned(const LayoutInfo& layout, const std::vector<Item>& items) {
  CheckpointReport report;
  report.layout = layout.layout;
  for (const Item& item : items) {
    WeightReport& row = report.weights.emplace_back();
    row.name = item.weight->name;
    row.shape = item.weight->shape;
    row.dtype = dtype_to_safetensors(*item.weight->dtype);
    row.quantized = true;
    row.note = note_of(item);
    row.spec = item.form.spec;
    row.source_bytes = item.weight->num_bytes;
    for (const Part& part :
         parts_of(written_weight(row.name, row.shape, *item.weight->dtype, layout.layout, item.form.spec)))
      row.output_bytes +=
          static_cast<uint64_t>(safetensors_dtype_bits(part.dtype) / 8 * num_elements(part.shape));
    row.bits_per_weight = 8 * static_cast<double>(row.output_bytes) /
                          static_cast<double>(std::max<int64_t>(1, num_elements(row.shape)));
    report.source_bytes += row.source_bytes;
    report.output_bytes += row.output_bytes;
  }
  report.quantized_source_bytes = report.source_bytes;
  report.num_quantized = std::ssize(report.weights);
  return report;
}

}  // namespace
}  // namespace io

CheckpointReport convert_checkpoint(const std::string& input, const std::string& output,
                                    const ConvertOptions& options) {
  const Checkpoint from = Checkpoint::open(input, options.progress);
  const io::LayoutInfo& layout = io::layout_info(options.layout);
  const std::optional<DType> model_dtype = io::dtype_of_config(from.impl().config);
  const auto dtype_of = [&](const Weight& weight) { return model_dtype.value_or(*weight.dtype); };

  std::optional<io::Architecture> architecture;
  if (layout.turns_conv1d && !from.impl().config.empty())
    architecture = io::Architecture::find(io::config_json(from.impl().config));
  const auto is_turned = [&](const Weight& weight) {
    const auto module = architecture ? architecture->find_tensor(weight.name) : std::nullopt;
    return module && module->kind == io::ModuleKind::conv1d && weight.shape.size() == 2;
  };

  std::vector<io::Item> items;
  const io::Item* first_lost = nullptr;
  int64_t num_lost = 0;
  for (const Weight& weight : from.weights())
    if (weight.layout) items.push_back({&weight, is_turned(weight)});
  HALFBYTE_CHECK(!items.empty(), usage, "convert: \"{}\" has no quantized weights", io::printable(input));
  CheckpointWriter writer(output, {.layout = options.layout,
                                   .base = input,
                                   .reader = options.reader,
                                   .force_layout = options.force_layout,
                                   .verify = options.verify,
                                   .force = options.force,
                                   .shard_bytes = options.shard_bytes,
                                   .num_threads = options.num_threads,
                                   .progress = options.progress});
  io::ProgressReporter reporter(options.progress);
  for (io::Item& item : items) {
    reporter.poll();
    const Weight& weight = *item.weight;
    item.lost = io::refuse_form(from, layout, item);
    if (item.lost.empty()) {
      const io::Recoded recoded = io::recode(load_weight(from, weight.name), layout, dtype_of(weight));
      item.lost = recoded.lost;
      if (recoded.weight)
        item.form = io::form_of(recoded.weight->spec, recoded.weight->shape, recoded.weight->dtype);
    }
    if (!item.lost.empty() && options.requantize) {
      std::vector<int64_t> shape = weight.shape;
      if (item.turned) std::ranges::reverse(shape);
      item.form = io::form_of(io::resolve_spec(layout, io::nearest_options(layout, weight), dtype_of(weight)),
                              shape, dtype_of(weight));
    }
    if (!item.lost.empty() && num_lost++ == 0) first_lost = &item;
  }
  HALFBYTE_CHECK(num_lost == 0 || options.requantize, bad_input,
                 "convert: {} of {} weights cannot be converted with the codes that they have; the first is "
                 "\"{}\": {}. With requantize (--requantize) they are decoded and quantized anew",
                 num_lost, items.size(), io::printable(first_lost->weight->name), first_lost->lost);
  if (options.dry_run) {
    CheckpointReport report = io::planned(layout, items);
    report.input = input;
    report.output = output;
    return report;
  }
  for (io::Item& item : items) {
    const Weight& weight = *item.weight;
    writer.set(
        weight.name, item.form, [&from, &layout, &item, dtype = dtype_of(weight)]() -> QuantizedTensor {
          std::optional<QuantizedTensor> made;
          if (item.lost.empty())
            made = io::recode(load_weight(from, item.weight->name), layout, dtype).weight;
          else
            made = io::requantized(from, layout, dtype, item);
          from.impl().check_unchanged(*item.weight);  // since `from` was opened: the writer opened it later
          HALFBYTE_CHECK(made, bad_input, "convert: weight \"{}\" has changed while it was read",
                         io::printable(item.weight->name));
          return *std::move(made);
        });
  }
  // Memory for what comes after the output is there: taken before.
  struct Requantized {
    const io::Item* item;
    std::string note;
  };
  std::unordered_map<std::string_view, Requantized> requantized;
  for (const io::Item& item : items)
    if (!item.lost.empty()) requantized.emplace(item.weight->name, Requantized{&item, io::note_of(item)});
  std::string path = input;
  CheckpointReport report = writer.finish();
  report.input = std::move(path);
  for (WeightReport& row : report.weights) {
    const auto found = requantized.find(row.name);
    if (found == requantized.end()) continue;
    const io::Item& item = *found->second.item;
    row.note = std::move(found->second.note);
    row.measured = true;
    row.max_error = item.max_error;
    row.max_error_index = item.max_error_index;
    row.relative_rmse = item.signal == 0 ? 0 : std::sqrt(item.noise / item.signal);
    row.snr_db =
        item.noise == 0 ? std::numeric_limits<double>::infinity() : 10 * std::log10(item.signal / item.noise);
  }
  return report;
}

}  // namespace halfbyte
