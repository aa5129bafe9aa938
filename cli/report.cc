#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "output.h"

namespace halfbyte::cli {

namespace {

// "; limited by compute (run: compute 70 %, copy 12 %, read 12 %, write 6 %)"
std::string limit_text(const CheckpointReport& report) {
  const std::string_view limit = bottleneck(report);
  if (limit.empty()) return "";
  const double all =
      report.compute_seconds + report.copy_seconds + report.read_seconds + report.write_seconds;
  const auto share = [&](const char* what, double seconds) {
    return fmt::format("{} {:.0f} %", what, all > 0 ? 100 * seconds / all : 0);
  };
  std::string shares = share("compute", report.compute_seconds);
  if (report.copy_seconds > 0) shares += ", " + share("copy", report.copy_seconds);
  return fmt::format("; limited by {} (run: {}, {}, {})", limit, shares, share("read", report.read_seconds),
                     share("write", report.write_seconds));
}

// "2.51 s", "95 s", "31 min", "2.4 h"
std::string format_seconds(double seconds) {
  if (seconds < 9.995) return fmt::format("{:.2f} s", seconds);
  if (seconds < 120) return fmt::format("{:.0f} s", seconds);
  return seconds < 7200 ? fmt::format("{:.0f} min", seconds / 60) : fmt::format("{:.1f} h", seconds / 3600);
}

// "reason: 3 (a, b, c)", a line for each text that `field` has; the names only where they are few.
std::string by_text(std::span<const WeightReport> weights, std::string WeightReport::*field) {
  constexpr size_t kMaxNames = 8;
  std::map<std::string, std::vector<std::string>> names;
  for (const WeightReport& weight : weights)
    if (!(weight.*field).empty()) names[weight.*field].push_back(printable(weight.name));
  std::string text;
  for (const auto& [what, list] : names) {
    text += fmt::format("  {}: {}", printable(what), list.size());
    if (list.size() <= kMaxNames) text += fmt::format(" ({})", fmt::join(list, ", "));
    text += "\n";
  }
  return text;
}

// The names of the files of a directory.
std::string join_names(std::span<const std::string> names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + printable(name);
  return text;
}

Table weight_table(const CheckpointReport& report) {
  bool measured = false;
  for (const WeightReport& weight : report.weights) measured |= weight.measured;
  std::vector<Table::Column> columns = {
      {"name"}, {"shape"}, {"format"}, {"group"}, {"bits/weight", Align::right}};
  if (measured)
    for (const char* title : {"max error", "relative RMSE", "SNR dB"})
      columns.push_back({title, Align::right});
  Table table(std::move(columns));
  for (const WeightReport& weight : report.weights) {
    if (!weight.quantized) continue;
    std::vector<std::string> row = {printable(weight.name), format_shape(weight.shape),
                                    format_name(weight.spec), group_name(weight.spec, weight.scale_rows),
                                    fmt::format("{:.3f}", weight.bits_per_weight)};
    if (weight.measured)
      row.insert(row.end(), {fmt::format("{:.4g}", weight.max_error),
                             fmt::format("{:.4g}", weight.relative_rmse), format_snr(weight.snr_db)});
    table.add_row(std::move(row));
  }
  return table;
}

double elements_of(std::span<const int64_t> shape) {
  double product = 1;
  for (const int64_t extent : shape) product *= static_cast<double>(extent);
  return product;
}
double percent(double part, double all) { return all == 0 ? 0 : 100 * part / all; }

// "; dense: embedding 12.5%, head 12.5%": what is large, the largest first; of what was dense before,
// nothing.
std::string large_parts(const std::map<std::string, double>& dense, double all) {
  constexpr double kLarge = 1;  // percent
  std::vector<std::pair<double, std::string>> parts;
  for (const auto& [reason, count] : dense)
    if (percent(count, all) >= kLarge && reason != "dense") parts.emplace_back(-count, reason);
  std::ranges::sort(parts);
  std::string text;
  for (const auto& [count, reason] : parts)
    text += fmt::format("{}{} {:.1f}%", text.empty() ? "; dense: " : ", ", printable(reason),
                        percent(-count, all));
  return text;
}

// What was not run is said to be so.
std::string readers_text(const CheckpointReport& report, bool vouched) {
  if (!vouched) return "unknown";
  std::string loads, refuses;
  for (const ReaderVerdict& verdict : report.readers) {
    const bool of_words = report.layout == Layout::gptq || report.layout == Layout::awq;
    const bool run =
        verdict.reader == Reader::mlx_lm || (verdict.reader == Reader::transformers_5 && !of_words);
    if (verdict.why_not.empty())
      loads += fmt::format("{}{}{}", loads.empty() ? "" : ", ", to_string(verdict.reader),
                           run ? "" : " (by its rules, not run)");
    else
      refuses += fmt::format("; not in {} because {}", to_string(verdict.reader), verdict.why_not);
  }
  return (loads.empty() ? "none" : loads) + refuses;
}

Json encoding_json(const Encoding& encoding) {
  return {{"scale_rule", encoding.scale_rule ? Json(to_string(*encoding.scale_rule)) : Json()},
          {"code_scale", encoding.code_scale == CodeScale::stored ? "stored" : "unrounded"},
          {"search", encoding.search}};
}

Json weight_json(const WeightReport& weight) {
  Json json = {{"name", weight.name},
               {"shape", weight.shape},
               {"dtype", weight.dtype},
               {"quantized", weight.quantized},
               {"reason", weight.reason},
               {"note", weight.note},
               {"spec", weight.quantized ? spec_json(weight.spec, weight.scale_rows) : Json()},
               {"encoding", weight.quantized ? encoding_json(weight.encoding) : Json()},
               {"source_bytes", weight.source_bytes},
               {"output_bytes", weight.output_bytes},
               {"bits_per_weight", weight.bits_per_weight},
               {"measured", weight.measured}};
  if (weight.measured) {
    json["max_error"] = weight.max_error;
    json["max_error_index"] = weight.max_error_index;
    json["relative_rmse"] = weight.relative_rmse;
    json["snr_db"] = weight.snr_db;
  }
  return json;
}

}  // namespace

std::string format_name(const QuantSpec& spec) {
  return fmt::format("{}{}{}", info(spec.format).name, spec.asymmetric ? " asymmetric" : "",
                     spec.double_quant ? " double-quant" : "");
}

std::string group_name(const QuantSpec& spec, int64_t scale_rows) {
  switch (spec.granularity) {
    case Granularity::group:
      if (scale_rows > 1) return fmt::format("{}x{}", scale_rows, spec.group_size);
      return fmt::format("{}", spec.group_size);
    case Granularity::flat:
      return fmt::format("{} flat", spec.group_size);
    default:
      return to_string(spec.granularity);
  }
}

Json spec_json(const QuantSpec& spec, int64_t scale_rows) {
  const bool grouped = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
  Json json = {{"format", info(spec.format).name},
               {"asymmetric", spec.asymmetric},
               {"granularity", to_string(spec.granularity)},
               {"group_size", grouped ? Json(spec.group_size) : Json()},
               {"block_size", scale_rows > 1 ? Json::array({scale_rows, spec.group_size}) : Json()},
               {"scale_dtype", to_string(spec.scale_dtype)},
               {"double_quant", spec.double_quant}};
  if (spec.format == Format::lut4) json["table"] = spec.table;
  return json;
}

void BitsPerWeight::add(uint64_t weight_bytes, std::span<const int64_t> shape) {
  num_bytes += static_cast<double>(weight_bytes);
  num_elements += elements_of(shape);
}

void describe(const CheckpointReport& report, const RunInfo& run, std::string& text, Json& document) {
  BitsPerWeight bits;
  uint64_t dense_bytes = 0;
  double all_elements = 0;
  std::map<std::string, double> dense_elements;  // by reason
  Json weights = Json::array();
  for (const WeightReport& weight : report.weights) {
    const double count = elements_of(weight.shape);
    all_elements += count;
    if (weight.quantized) {
      bits.add(weight.output_bytes, weight.shape);
    } else {
      dense_bytes += weight.source_bytes;
      dense_elements[weight.reason] += count;
    }
    weights.push_back(weight_json(weight));
  }
  const double share = report.source_bytes == 0 ? 0
                                                : static_cast<double>(report.quantized_source_bytes) /
                                                      static_cast<double>(report.source_bytes);
  const int64_t num_dense = static_cast<int64_t>(report.weights.size()) - report.num_quantized;

  const bool vouched = report.reader == Reader::none || !report.architecture.empty();
  if (!vouched)
    text += summary_line("warning",
                         "no config.json with a model type that is known: weights were selected by "
                         "their names, and nothing vouches that a reader loads the result");
  text +=
      summary_line(run.verb, fmt::format("{:.1f}% of the model{}", percent(bits.num_elements, all_elements),
                                         large_parts(dense_elements, all_elements)));
  if (const Table table = weight_table(report); !table.empty()) text += "\n" + table.text() + "\n";
  text += summary_line(run.verb, fmt::format("{} weights, {:.1f}% of the bytes, {:.3f} bits per weight",
                                             report.num_quantized, 100 * share, bits.value()));
  text += summary_line("dense", fmt::format("{} weights, {}", num_dense, format_bytes(dense_bytes)));
  text += by_text(report.weights, &WeightReport::reason);
  if (const std::string notes = by_text(report.weights, &WeightReport::note); !notes.empty())
    text += "notes\n" + notes;
  if (!report.left_out.empty())
    text +=
        summary_line("left out", fmt::format("{} weights that {} does not load: {}{}", report.left_out.size(),
                                             to_string(report.reader), printable(report.left_out.front()),
                                             report.left_out.size() > 1 ? ", ..." : ""));
  if (std::ranges::any_of(report.weights, [](const WeightReport& weight) { return weight.encoding.search; }))
    text += summary_line("scales", run.importance.empty()
                                       ? "searched"
                                       : fmt::format("searched by {}", printable(run.importance)));
  text += summary_line("layout", report.layout ? to_string(*report.layout) : "-");
  text += summary_line("bytes",
                       fmt::format("{} -> {} ({} -> {})", report.source_bytes, report.output_bytes,
                                   format_bytes(report.source_bytes), format_bytes(report.output_bytes)));
  text +=
      summary_line("memory", fmt::format("at most {} of buffers", format_bytes(report.peak_buffer_bytes)));
  DeviceChoice device = run.device;
  if (device.devices.empty())
    device = {report.devices, report.device_note.empty() ? names_of(report.devices) : report.device_note};
  text += summary_line("device", to_string(device));
  if (!report.copied_files.empty()) text += summary_line("copied", join_names(report.copied_files));
  if (!report.skipped_files.empty()) text += summary_line("skipped", join_names(report.skipped_files));
  if (run.dry_run) {
    if (report.total_seconds > 0)
      text += summary_line(
          "time", fmt::format("about {} (run {}, sync {}, {}){}", format_seconds(report.total_seconds),
                              format_seconds(report.run_seconds), format_seconds(report.sync_seconds),
                              report.verify_seconds > 0 ? "verify " + format_seconds(report.verify_seconds)
                                                        : "not verified",
                              limit_text(report)));
    if (!report.time_note.empty()) text += summary_line("sample", report.time_note);
    text += summary_line("output", "nothing written (dry run)");
  } else {
    const std::string verify =
        run.verified ? fmt::format("verify {:.2f} s", report.verify_seconds) : "not verified";
    if (report.num_resumed_files > 0)
      text += summary_line("resumed", fmt::format("{} files of an earlier run", report.num_resumed_files));
    text += summary_line("time", fmt::format("run {:.2f} s, sync {:.2f} s, {}{}", report.run_seconds,
                                             report.sync_seconds, verify, limit_text(report)));
    text += summary_line("output", printable(report.output));
  }
  if (!report.readers.empty()) text += summary_line("loads in", readers_text(report, vouched));

  document["input"] = report.input;
  document["output"] = report.output;
  document["dry_run"] = run.dry_run;
  document["verified"] = run.verified;
  document["device"] = to_string(std::span(report.devices));
  document["device_note"] = device.note;
  document["importance"] = run.importance.empty() ? Json() : Json(run.importance);
  document["architecture"] = report.architecture;
  document["reader"] = to_string(report.reader);
  document["readers"] = Json::array();
  for (const ReaderVerdict& verdict : report.readers)
    document["readers"].push_back({{"reader", to_string(verdict.reader)},
                                   {"loads", vouched ? Json(verdict.why_not.empty()) : Json()},
                                   {"why_not", verdict.why_not}});
  document["left_out"] = report.left_out;
  document["layout"] = report.layout ? Json(to_string(*report.layout)) : Json();
  document["weights"] = std::move(weights);
  document["copied_files"] = report.copied_files;
  document["skipped_files"] = report.skipped_files;
  document["source_bytes"] = report.source_bytes;
  document["output_bytes"] = report.output_bytes;
  document["quantized_source_bytes"] = report.quantized_source_bytes;
  document["quantized_share"] = share;
  document["bits_per_weight"] = bits.value();
  document["num_quantized"] = report.num_quantized;
  document["num_resumed_files"] = report.num_resumed_files;
  document["peak_buffer_bytes"] = report.peak_buffer_bytes;
  document["run_seconds"] = report.run_seconds;
  document["sync_seconds"] = report.sync_seconds;
  document["verify_seconds"] = report.verify_seconds;
  document["read_seconds"] = report.read_seconds;
  document["write_seconds"] = report.write_seconds;
  document["copy_seconds"] = report.copy_seconds;
  document["compute_seconds"] = report.compute_seconds;
  document["total_seconds"] = report.total_seconds;
  document["time_note"] = report.time_note;
  document["bottleneck"] = bottleneck(report);
}

}  // namespace halfbyte::cli
