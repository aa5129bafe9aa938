// Writes the weights of a checkpoint in another layout, with the codes that they have.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "core/format.h"
#include "io/architecture.h"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/experts.h"
#include "io/progress.h"
#include "io/recode.h"
#include "io/safetensors.h"
#include "io/team.h"

namespace halfbyte {
namespace io {
namespace {

// One weight on its way to the other layout. Its loading is repeated where it is written, so that no more
// than the weights of a file are in memory.
struct ConvertItem {
  std::string name;                     // in the output
  const Weight* weight;                 // of the input: of experts that become one tensor the first
  bool turned = false;                  // is [in, out] in the model, and [out, in] in the other layout
  std::optional<ExpertRows> rows = {};  // of the tensor of all experts, which this one is of
  std::vector<std::pair<const Weight*, ExpertRows>> experts = {};  // that this is made of
  std::string lost = {};      // why it cannot keep its codes; empty: it does
  QuantizedTensor form = {};  // in the other layout, without its parts
};

// Error(bad_input) where experts do not make up a tensor.
QuantizedTensor all_experts(const Checkpoint& from, const ConvertItem& item) {
  const int64_t parts = item.experts.front().second.num_parts, count = std::ssize(item.experts);
  const Weight& first = *item.weight;
  std::vector<char> seen(static_cast<size_t>(count));
  const auto check = [&](const Weight& weight, bool fits) {
    HALFBYTE_CHECK(fits, bad_input, "convert: \"{}\" does not fit the other experts of \"{}\"",
                   printable(weight.name), printable(item.name));
  };
  for (const auto& [weight, own] : item.experts) {
    const int64_t place = own.expert < count ? own.expert * parts + own.part : count;
    check(*weight, weight->shape == first.shape && weight->spec == first.spec &&
                       weight->dtype == first.dtype && weight->shape.size() == 2 && place < count &&
                       seen[static_cast<size_t>(place)]++ == 0);
  }
  const QuantSpec spec = by_rows(first.spec, first.shape.back());
  check(first, count % parts == 0 && spec.granularity == Granularity::group && !spec.double_quant &&
                   !has_global_scale(spec));
  QuantizedTensor all(spec, {count / parts, first.shape[0] * parts, first.shape[1]}, *first.dtype);
  for (const auto& [weight, own] : item.experts) put_rows(load_weight(from, weight->name), own, all);
  return all;
}

// As it is in the input, but for the form of experts.
QuantizedTensor load(const Checkpoint& from, const ConvertItem& item) {
  if (!item.experts.empty()) return all_experts(from, item);
  if (!item.rows) return load_weight(from, item.weight->name);
  const StoredWeight& stored = *from.impl().quantized_weight(*item.weight);
  return take_rows(load_expert(from.impl(), stored, item.rows->expert), *item.rows);
}

// The biases of experts in the form that their weights get, and the names of what they were.
struct Biases {
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::vector<std::string> replaced;
};
Biases convert_biases(const Checkpoint& from, const std::vector<ConvertItem>& items) {
  const Checkpoint::Impl& impl = from.impl();
  Biases biases;
  const auto read = [&](const Weight& bias) {
    Tensor tensor({}, *bias.dtype, bias.shape);
    impl.read(impl.tensors[static_cast<size_t>(bias.parts.front())], 0,
              {tensor.data(), static_cast<size_t>(tensor.num_bytes())});
    return tensor;
  };
  const auto copy = [](const Tensor& of_one, const ExpertRows& rows, const Tensor& all, bool apart) {
    const int64_t size = size_of(all.dtype()), cols = all.shape()[1];
    for (int64_t i = 0; i < of_one.num_elements(); ++i) {
      std::byte* const one = of_one.data() + i * size;
      std::byte* const other = all.data() + (rows.expert * cols + rows.row(i, cols)) * size;
      std::memcpy(apart ? one : other, apart ? other : one, static_cast<size_t>(size));
    }
  };
  for (const ConvertItem& item : items) {
    if (item.rows) {
      const Weight* bias = from.find(item.weight->name + "_bias");
      if (bias == nullptr || bias->layout || !bias->dtype || bias->shape.size() != 2) continue;
      HALFBYTE_CHECK(bias->shape[0] > item.rows->expert && bias->shape[1] % item.rows->num_parts == 0,
                     bad_input, "convert: \"{}\" does not fit \"{}\"", printable(bias->name),
                     printable(item.weight->name));
      const Tensor tensor({}, *bias->dtype, {item.rows->count(bias->shape[1])});
      copy(tensor, *item.rows, read(*bias), true);
      biases.tensors.emplace_back(module_of(item.name) + ".bias", tensor);
      biases.replaced.push_back(bias->name);
    } else if (!item.experts.empty()) {
      std::optional<Tensor> all;
      size_t found = 0;
      for (const auto& [weight, rows] : item.experts) {
        const Weight* bias = from.find(module_of(weight->name) + ".bias");
        if (bias == nullptr || bias->layout || !bias->dtype || bias->shape.size() != 1) continue;
        const int64_t count = std::ssize(item.experts) / rows.num_parts, out = weight->shape[0];
        if (!all) all.emplace(Device{}, *bias->dtype, std::vector<int64_t>{count, out * rows.num_parts});
        HALFBYTE_CHECK(bias->shape[0] == out && *bias->dtype == all->dtype(), bad_input,
                       "convert: \"{}\" does not fit the other experts of \"{}\"", printable(bias->name),
                       printable(item.name));
        copy(read(*bias), rows, *all, false);
        biases.replaced.push_back(bias->name);
        ++found;
      }
      if (!all) continue;
      HALFBYTE_CHECK(found == item.experts.size(), bad_input,
                     "convert: of the experts of \"{}\" some have a bias, and some have none",
                     printable(item.name));
      biases.tensors.emplace_back(item.name + "_bias", *all);
    }
  }
  return biases;
}

// The tensor of all experts: [E, out, in], gate first.
bool is_of_experts(const std::string& name, const std::optional<Architecture>& architecture) {
  const auto module = architecture ? architecture->find_tensor(name) : std::nullopt;
  return module && module->kind == ModuleKind::experts && !module->transposed && !module->interleaved;
}

// Whether a tensor of all experts is taken apart for the layout, as gpt-oss and where readers want matrices.
bool is_taken_apart(const StoredWeight& stored, const LayoutInfo& layout,
                    const std::optional<Architecture>& architecture) {
  const QuantizedWeight& weight = stored.weight;
  if (layout_info(weight.layout).turns_experts) return !layout.turns_experts;
  if (weight.e5m2_codes) return false;
  const Granularity granularity = by_rows(weight.spec, weight.cols()).granularity;
  return layout.apart && weight.shape.size() == 3 && !weight.spec.double_quant &&
         (granularity == Granularity::group || granularity == Granularity::channel) &&
         is_of_experts(weight.name, architecture);
}

// Where options name the form of experts: whether this weight is of some, and must take another form. Error(
// bad_input) where it cannot.
bool changes_form(const QuantizedWeight& weight, ExpertForm form, const std::string& fused,
                  const std::optional<Architecture>& architecture) {
  const bool whole = weight.shape.size() == 3;
  if (whole != (form == ExpertForm::per_expert)) return false;
  const auto fail = [&](const std::string& why) {
    HALFBYTE_FAIL(bad_input, "convert: the experts of \"{}\" cannot become {}: {}", printable(weight.name),
                  to_string(form), why);
  };
  if (!is_of_experts(fused, architecture))
    fail("config.json must name a known architecture whose experts are [E, out, in], gate first");
  if (weight.spec.double_quant) fail("blocks of double quantized scales are not of one expert");
  if (by_rows(weight.spec, weight.cols()).granularity == Granularity::flat)
    fail(fmt::format("groups of {} cross rows: {} columns are not a multiple", weight.spec.group_size,
                     weight.cols()));
  return true;
}

// What the output has for the quantized weights of the input.
std::vector<ConvertItem> items_of(const Checkpoint& from, const LayoutInfo& layout,
                                  const std::optional<Architecture>& architecture,
                                  const std::optional<ExpertForm>& form) {
  std::vector<ConvertItem> items;
  std::map<std::string, size_t> fused;  // where they are among the items
  for (const Weight& weight : from.weights()) {
    if (!weight.layout) continue;
    const StoredWeight& stored = *from.impl().quantized_weight(weight);
    const bool of_all = layout_info(*weight.layout).turns_experts;
    const auto own = form || layout.turns_experts ? expert_of(weight.name, !form) : std::nullopt;
    const bool changes = form && !of_all && (own || weight.shape.size() == 3) &&
                         changes_form(stored.weight, *form, own ? own->fused : weight.name, architecture);
    if (is_taken_apart(stored, layout, architecture) || (changes && !own)) {
      std::vector<ExpertName> names = experts_of(module_of(weight.name), stored.weight.shape[0], of_all);
      HALFBYTE_CHECK(!names.empty() && stored.weight.shape[1] % names.front().rows.num_parts == 0, bad_input,
                     "convert: \"{}\" [{}] is no tensor of experts that have names in layout {}",
                     printable(weight.name), fmt::join(stored.weight.shape, ", "), layout.name);
      for (ExpertName& name : names) items.push_back({std::move(name.own), &weight, false, name.rows});
    } else if (own && (changes || !form) && !of_all) {
      const auto [place, added] = fused.emplace(own->fused, items.size());
      if (added) items.push_back({own->fused, &weight});
      items[place->second].experts.emplace_back(&weight, own->rows);
    } else {
      items.push_back({weight.name, &weight});
    }
  }
  return items;
}

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

std::string note_of(const ConvertItem& item) { return item.lost.empty() ? "" : "requantized: " + item.lost; }

// The values of the weight, quantized as the layout does it; what this changes, in `row`.
QuantizedTensor requantized(const Checkpoint& from, const LayoutInfo& layout, DType dtype,
                            const ConvertItem& item, WeightReport& row) {
  const Weight& weight = *item.weight;
  const std::vector<int64_t>& shape = item.form.shape;
  std::vector<float> x(static_cast<size_t>(num_elements(shape))), y(x.size());
  if (item.rows || !item.experts.empty())
    dequantize(load(from, item), {x.data(), DType::f32, shape, {}, {}});
  else
    from.decode(weight, 0, std::ssize(x), DType::f32, x.data());
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
  double signal = 0, noise = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double value = static_cast<double>(x[i]), error = static_cast<double>(y[i]) - value;
    signal += value * value;
    noise += error * error;
    if (std::fabs(error) <= row.max_error) continue;
    row.max_error = std::fabs(error);
    row.max_error_index = static_cast<int64_t>(i);
  }
  row.note = note_of(item);
  row.measured = true;
  row.relative_rmse = signal == 0 ? 0 : std::sqrt(noise / signal);
  row.snr_db = noise == 0 ? std::numeric_limits<double>::infinity() : 10 * std::log10(signal / noise);
  return q;
}

// What is not of the codes themselves; empty where nothing keeps them from being used.
std::string refuse_form(const Checkpoint& from, const LayoutInfo& layout, const ConvertItem& item) {
  if (item.rows || !item.experts.empty()) return "";
  const StoredWeight& stored = *from.impl().quantized_weight(*item.weight);
  if (stored.weight.e5m2_codes) return "its codes are of E5M2, which no format of halfbyte has";
  if (!stored.weight.words.order.empty())
    return "its groups are of columns in another order (act-order), which is not written";
  if (stored.transposed != item.turned && !layout_info(stored.weight.layout).turns_experts)
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

// No reader has experts of bitsandbytes in one tensor; of those that are known one has them one by one.
std::optional<Reader> reader_of(const ConvertOptions& options) {
  if (options.reader || !options.experts) return options.reader;
  return options.experts == ExpertForm::per_expert ? Reader::transformers_4 : Reader::none;
}

// What a run would do.
CheckpointReport planned(const LayoutInfo& layout, const std::vector<ConvertItem>& items, bool experts4bit) {
  CheckpointReport report;
  report.layout = layout.layout;
  for (const ConvertItem& item : items) {
    WeightReport& row = report.weights.emplace_back();
    row.name = item.name;
    row.shape = item.rows || !item.experts.empty() ? item.form.shape : item.weight->shape;
    row.dtype = dtype_to_safetensors(*item.weight->dtype);
    row.quantized = true;
    row.note = note_of(item);
    row.spec = item.form.spec;
    row.source_bytes = item.weight->num_bytes;
    QuantizedWeight written =
        written_weight(row.name, row.shape, *item.weight->dtype, layout.layout, item.form.spec);
    written.experts4bit = experts4bit && row.shape.size() == 3;
    row.scale_rows = written.scale_rows;
    for (const Part& part : parts_of(written))
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

// What planning has found out about an item, as the processes of a team send it to each other.
struct PlanHead {
  QuantSpec spec;
  DType dtype;
  size_t rank, lost_bytes;
};
void put_plan(const ConvertItem& item, std::string& to) {
  const PlanHead head = {item.form.spec, item.form.dtype, item.form.shape.size(), item.lost.size()};
  to.append(reinterpret_cast<const char*>(&head), sizeof head);
  to.append(reinterpret_cast<const char*>(item.form.shape.data()), head.rank * sizeof(int64_t));
  to.append(item.lost);
}
void take_plan(ConvertItem& item, std::string_view& from) {
  PlanHead head;
  const auto take = [&](void* to, size_t num_bytes) {
    HALFBYTE_CHECK(from.size() >= num_bytes, bug, "convert: the plan of another process is too short");
    std::memcpy(to, from.data(), num_bytes);
    from.remove_prefix(num_bytes);
  };
  take(&head, sizeof head);
  item.form.spec = head.spec;
  item.form.dtype = head.dtype;
  item.form.shape.resize(head.rank);
  take(item.form.shape.data(), head.rank * sizeof(int64_t));
  item.lost.resize(head.lost_bytes);
  take(item.lost.data(), head.lost_bytes);
}

CheckpointReport convert(const std::string& input, const std::string& output, const ConvertOptions& options,
                         Team& team) {
  const ProgressFunction progress = team.watched(options.progress);
  const Checkpoint from = Checkpoint::open(input, progress);
  const LayoutInfo& layout = layout_info(options.layout);
  HALFBYTE_CHECK(!options.experts || options.layout == Layout::bitsandbytes, usage,
                 "convert: layout {} has one form of experts; only bitsandbytes has {}", layout.name,
                 to_string(*options.experts));
  const bool experts4bit = options.experts == ExpertForm::experts4bit;
  const std::optional<DType> model_dtype = dtype_of_config(from.impl().config);
  const auto dtype_of = [&](const Weight& weight) { return model_dtype.value_or(*weight.dtype); };

  std::optional<Architecture> architecture;
  if ((layout.turns_conv1d || layout.apart) && !from.impl().config.empty())
    architecture = Architecture::find(config_json(from.impl().config));
  const auto is_turned = [&](const Weight& weight) {
    const auto module =
        architecture && layout.turns_conv1d ? architecture->find_tensor(weight.name) : std::nullopt;
    return module && module->kind == ModuleKind::conv1d && weight.shape.size() == 2;
  };

  std::vector<ConvertItem> items = items_of(from, layout, architecture, options.experts);
  for (ConvertItem& item : items) item.turned = !item.rows && item.experts.empty() && is_turned(*item.weight);
  HALFBYTE_CHECK(!items.empty(), usage, "convert: \"{}\" has no quantized weights", printable(input));
  CheckpointWriter writer(output, {.layout = options.layout,
                                   .base = input,
                                   .experts4bit = experts4bit,
                                   .reader = reader_of(options),
                                   .force_layout = options.force_layout,
                                   .verify = options.verify,
                                   .force = options.force,
                                   .identity = options.requantize ? "convert --requantize" : "convert",
                                   .unfinished = options.unfinished,
                                   .shard_bytes = options.shard_bytes,
                                   .num_threads = options.num_threads,
                                   .progress = progress,
                                   .process_group = options.process_group});
  ProgressReporter reporter(progress);
  // Of a team, each plans a part.
  const auto first_of = [&](int rank) {
    return items.size() * static_cast<size_t>(rank) / static_cast<size_t>(team.size());
  };
  for (size_t i = first_of(team.rank()); i < first_of(team.rank() + 1); ++i) {
    ConvertItem& item = items[i];
    reporter.poll();
    const Weight& weight = *item.weight;
    item.lost = refuse_form(from, layout, item);
    if (item.lost.empty()) {
      const Recoded recoded = recode(load(from, item), layout, dtype_of(weight));
      item.lost = recoded.lost;
      if (recoded.weight)
        item.form = form_of(recoded.weight->spec, recoded.weight->shape, recoded.weight->dtype);
    }
    if (!item.lost.empty() && options.requantize) {
      std::vector<int64_t> shape = weight.shape;
      if (item.rows || !item.experts.empty()) shape = load(from, item).shape;
      if (item.turned) std::ranges::reverse(shape);
      item.form = form_of(resolve_spec(layout, nearest_options(layout, weight), dtype_of(weight)), shape,
                          dtype_of(weight));
    }
  }
  if (!team.is_alone()) {
    std::string own;
    for (size_t i = first_of(team.rank()); i < first_of(team.rank() + 1); ++i) put_plan(items[i], own);
    const std::vector<std::string> plans = team.meet(own);
    for (int rank = 0; rank < team.size(); ++rank) {
      std::string_view plan = plans[static_cast<size_t>(rank)];
      for (size_t i = first_of(rank); i < first_of(rank + 1); ++i) take_plan(items[i], plan);
    }
  }
  const auto is_lost = [](const ConvertItem& item) { return !item.lost.empty(); };
  const auto num_lost = std::ranges::count_if(items, is_lost);
  const auto first_lost = std::ranges::find_if(items, is_lost);
  HALFBYTE_CHECK(num_lost == 0 || options.requantize, bad_input,
                 "convert: {} of {} weights cannot be converted with the codes that they have; the first is "
                 "\"{}\": {}. With requantize (--requantize) they are decoded and quantized anew",
                 num_lost, items.size(), printable(first_lost->name), first_lost->lost);
  if (options.dry_run) {
    CheckpointReport report = planned(layout, items, experts4bit);
    report.input = input;
    report.output = output;
    return report;
  }
  for (const ConvertItem& item : items) {
    if (item.rows) writer.leave_out(item.weight->name);
    for (const auto& expert : item.experts) writer.leave_out(expert.first->name);
  }
  Biases biases = convert_biases(from, items);
  for (const std::string& name : biases.replaced) writer.leave_out(name);
  for (auto& [name, tensor] : biases.tensors) writer.set(name, std::move(tensor));
  for (const ConvertItem& item : items) {
    const Weight& weight = *item.weight;
    writer.set(item.name, item.form,
               [&from, &layout, &item, dtype = dtype_of(weight)](WeightReport& row) -> QuantizedTensor {
                 std::optional<QuantizedTensor> made;
                 if (item.lost.empty())
                   made = recode(load(from, item), layout, dtype).weight;
                 else
                   made = requantized(from, layout, dtype, item, row);
                 // Since `from` was opened: the writer opened it later.
                 from.impl().check_unchanged(*item.weight);
                 HALFBYTE_CHECK(made, bad_input, "convert: weight \"{}\" has changed while it was read",
                                printable(item.weight->name));
                 return *std::move(made);
               });
  }
  std::string path = input;  // memory for what comes after the output is there: taken before
  CheckpointReport report = writer.finish();
  report.input = std::move(path);
  return report;
}

}  // namespace
}  // namespace io

CheckpointReport convert_checkpoint(const std::string& input, const std::string& output,
                                    const ConvertOptions& options) {
  io::Team team(options.process_group);
  return team.run([&] { return io::convert(input, output, options, team); });
}

}  // namespace halfbyte
