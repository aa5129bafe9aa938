// halfbyte bench qgemm
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "bench_qgemm.h"
#include "halfbyte/error.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"
#include "report.h"

namespace halfbyte::cli {

std::string weight_text(const QuantSpec& spec) {
  return fmt::format("{}{} {}{} {}", info(spec.format).name, spec.asymmetric ? " asym" : "",
                     spec.granularity == Granularity::group ? "g" : "", group_name(spec),
                     spec.double_quant ? "dq" : to_string(spec.scale_dtype));
}

namespace {

// What is measured where nothing is asked for.
struct Defaults {
  std::vector<std::string> shapes, models = {}, dtypes;
  std::vector<int64_t> m;
  struct Weight {
    const char* format;
    bool double_quant;
    const char* group_size = nullptr;  // null: that of the format
  };
  std::vector<Weight> weights;
  // Where neither shapes nor formats are asked for, weights but the first have only these; empty: all.
  std::vector<std::string> other_shapes = {};
  // Multiply-adds of a product that is measured where M is not asked for.
  double most_products = std::numeric_limits<double>::infinity();
};

// One below, at and above the borders of tiles, from those of 8 rows of x to blocks of several; what lies
// between.
std::vector<int64_t> cliff_rows(int64_t most) {
  std::set<int64_t> rows = {1, 2, 3, 4, 5, 24, 48, 96, 320, 384, 768, 1536};
  for (const int64_t border : {8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048})
    rows.insert({border - 1, border, border + 1});
  rows.erase(rows.upper_bound(most), rows.end());
  return {rows.begin(), rows.end()};
}

const Defaults& defaults_of(Device device, bool cliffs) {
  static const Defaults cuda = {
      .shapes = {"4096x4096", "14336x4096", "8192x8192", "28672x8192"},
      .dtypes = {"bf16", "f16"},
      .m = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192},
      .weights = {{"nf4", false}, {"nf4", true}, {"int4", false}, {"affine4", false}},
  };
  static const Defaults cpu = {
      .shapes = {"4096x4096", "14336x4096"},
      .dtypes = {"bf16"},
      .m = {1, 2, 4, 8, 16, 32, 128, 512},
      .weights = {{"nf4", false}, {"int4", false}},
  };
  // Odd, small and narrow shapes, an output head, layers.
  static const Defaults cliffs_cuda = {
      .shapes = {"4099x4099", "4098x4098", "4096x4100", "4097x4096", "1024x1024", "2048x2048", "1536x2048",
                 "256x4096", "4096x256", "128256x4096"},
      .models = {"llama-8b"},
      .dtypes = {"bf16"},
      .m = cliff_rows(2049),
      .weights = {{"nf4", false}, {"int4", false}, {"affine4", false, "32"}, {"nf4", true}},
      .other_shapes = {"4099x4099", "llama-8b o"},
      .most_products = 0x1p36,
  };
  static const Defaults cliffs_cpu = {
      .shapes = {"1024x1024", "1027x1027"},
      .dtypes = {"bf16", "f32"},
      .m = cliff_rows(129),
      .weights = {{"nf4", false}, {"int4", false}},
  };
  const bool is_cpu = device.kind == DeviceKind::cpu;
  if (cliffs) return is_cpu ? cliffs_cpu : cliffs_cuda;
  return is_cpu ? cpu : cuda;
}
template <class T>
const std::vector<T>& given_or(const std::vector<T>& given, const std::vector<T>& defaults) {
  return given.empty() ? defaults : given;
}

struct Shape {
  std::string name;
  int64_t n, k;
};
std::string extents(int64_t n, int64_t k) { return fmt::format("{}x{}", n, k); }

// The linear layers of models: queries, keys and values are one weight, and so are gate and up.
struct Model {
  const char* name;
  int64_t hidden, heads, kv_heads, intermediate;  // 128 columns a head
};
constexpr Model kModels[] = {
    {"llama-8b", 4096, 32, 8, 14336}, {"llama-32b", 5120, 40, 8, 27648}, {"llama-70b", 8192, 64, 8, 28672}};

void add_layers(const std::string& name, std::vector<Shape>& shapes) {
  std::string known;
  for (const Model& model : kModels) {
    known += fmt::format("{}{}", known.empty() ? "" : ", ", model.name);
    if (name != model.name) continue;
    const int64_t hidden = model.hidden, of_heads = 128 * model.heads, of_kv = 128 * model.kv_heads;
    shapes.push_back({name + " qkv", of_heads + 2 * of_kv, hidden});
    shapes.push_back({name + " o", hidden, of_heads});
    shapes.push_back({name + " gate_up", 2 * model.intermediate, hidden});
    shapes.push_back({name + " down", hidden, model.intermediate});
    return;
  }
  throw Error(ErrorCode::usage, fmt::format("--model: expected one of {}, got '{}'", known, printable(name)));
}

Shape parse_shape(const std::string& text) {
  int64_t n = 0, k = 0;
  int end = 0;
  // NOLINTNEXTLINE(cert-err34-c): what does not fit is not positive
  if (std::sscanf(text.c_str(), "%9ldx%9ld%n", &n, &k, &end) != 2 ||
      static_cast<size_t>(end) != text.size() || n <= 0 || k <= 0)
    throw Error(
        ErrorCode::usage,
        fmt::format("--shape: expected NxK, two positive numbers below 10^9, got '{}'", printable(text)));
  return {extents(n, k), n, k};
}

std::vector<Shape> shapes_of(const BenchArguments& arguments, const Defaults& defaults) {
  std::vector<Shape> shapes;
  for (const std::string& text : arguments.shapes) shapes.push_back(parse_shape(text));
  for (const std::string& model : arguments.models) add_layers(model, shapes);
  if (!shapes.empty()) return shapes;
  for (const std::string& text : defaults.shapes) shapes.push_back(parse_shape(text));
  for (const std::string& model : defaults.models) add_layers(model, shapes);
  return shapes;
}

std::vector<QuantSpec> specs_of(const BenchArguments& arguments, const Defaults& defaults) {
  std::vector<QuantSpec> specs;
  const auto add = [&](const std::string& name, bool double_quant, const char* default_group_size) {
    QuantSpec spec;
    spec.format = find_format(name).format;
    if (spec.format == Format::lut4)
      throw Error(ErrorCode::usage, "--format: lut4 is not measured: its kernels are those of nf4");
    spec.asymmetric = arguments.asymmetric;
    spec.double_quant = double_quant;
    const FormatInfo& format = find_format(name);
    spec.scale_dtype = double_quant                    ? DType::f32
                       : arguments.scale_dtype.empty() ? format.scale_dtype.value_or(DType::f16)
                                                       : parse_dtype(arguments.scale_dtype);
    std::vector<std::string> group_sizes = arguments.group_sizes;
    if (group_sizes.empty())
      group_sizes = {format.group_size != 0 ? std::to_string(format.group_size)
                     : default_group_size   ? default_group_size
                     : format.bits == 8 || format.kind == FormatKind::integer ? "128"
                                                                              : "64"};
    for (const std::string& text : group_sizes) {
      const GroupSize group = parse_group_size(text);
      spec.granularity = group.granularity;
      if (group.granularity == Granularity::group) spec.group_size = group.size;
      check_spec(spec);
      specs.push_back(spec);
    }
  };
  for (const std::string& name : arguments.formats) add(name, arguments.double_quant, nullptr);
  if (!specs.empty()) return specs;
  if (arguments.double_quant || arguments.asymmetric)
    throw Error(ErrorCode::usage, "--double-quant and --asymmetric: --format must say of which");
  for (const auto& [format, double_quant, group_size] : defaults.weights)
    add(format, double_quant, group_size);
  return specs;
}

// Those of a weight follow each other.
std::vector<QgemmBenchCase> cases_of(const BenchArguments& arguments, const Defaults& defaults) {
  std::vector<QgemmBenchCase> cases;
  const std::vector<QuantSpec> specs = specs_of(arguments, defaults);
  const QgemmMath math = parse_qgemm_math(arguments.math);
  const auto& others = defaults.other_shapes;
  const bool all_shapes =
      others.empty() || !arguments.shapes.empty() || !arguments.models.empty() || !arguments.formats.empty();
  for (const Shape& shape : shapes_of(arguments, defaults))
    for (const QuantSpec& spec : specs) {
      if (!all_shapes && spec != specs[0] && std::ranges::find(others, shape.name) == others.end()) continue;
      for (const std::string& dtype : given_or(arguments.dtypes, defaults.dtypes))
        for (const bool transposed : {false, true}) {
          if (arguments.direction == (transposed ? "forward" : "transposed")) continue;
          if (transposed && math == QgemmMath::int8 && arguments.direction == "both")
            continue;  // there is none
          for (const int64_t rows : given_or(arguments.m, defaults.m)) {
            const double products =
                static_cast<double>(rows) * static_cast<double>(shape.n) * static_cast<double>(shape.k);
            if (arguments.m.empty() && products > defaults.most_products) continue;
            QgemmDescriptor descriptor;
            descriptor.spec = spec;
            descriptor.m = rows;
            descriptor.n = shape.n;
            descriptor.k = shape.k;
            descriptor.transposed = transposed;
            descriptor.dtype = parse_dtype(dtype);
            descriptor.math = math;
            descriptor.variant = arguments.variant;
            descriptor.packed = arguments.view.empty();
            if (!descriptor.packed) descriptor.layout = parse_layout(arguments.view);
            check_descriptor(descriptor);
            cases.push_back({shape.name, descriptor, arguments.lora});
          }
        }
    }
  return cases;
}

const char* direction_of(const QgemmDescriptor& descriptor) {
  return descriptor.transposed ? "transposed" : "forward";
}
Json case_json(const QgemmBenchCase& test) {
  const QgemmDescriptor& d = test.descriptor;
  return {{"shape", test.shape},
          {"n", d.n},
          {"k", d.k},
          {"m", d.m},
          {"direction", direction_of(d)},
          {"dtype", to_string(d.dtype)},
          {"math", to_string(d.math)},
          {"spec", spec_json(d.spec)}};
}

// Ratios of a row to others: to the same product forward, and to the same with one row of x, or with one row
// fewer, where they were measured before it.
class Compared {
 public:
  void add(const QgemmBenchRow& row) {
    us_[key(row, row.test.descriptor.transposed, row.test.descriptor.m)] = row.plain_us;
  }
  double of_forward(const QgemmBenchRow& row) const {
    const QgemmDescriptor& d = row.test.descriptor;
    return d.transposed ? us(key(row, false, d.m)) / row.plain_us : QgemmBenchRow::kNone;
  }
  double times_one_row(const QgemmBenchRow& row) const { return times(row, 1); }
  double times_one_fewer(const QgemmBenchRow& row) const { return times(row, row.test.descriptor.m - 1); }

 private:
  using Key = std::tuple<int64_t, int64_t, std::string, DType, bool, int64_t>;
  static Key key(const QgemmBenchRow& row, bool transposed, int64_t m) {
    const QgemmDescriptor& d = row.test.descriptor;
    return {d.n, d.k, weight_text(d.spec), d.dtype, transposed, m};
  }
  double times(const QgemmBenchRow& row, int64_t m) const {
    return row.plain_us / us(key(row, row.test.descriptor.transposed, m));
  }
  double us(const Key& key) const {
    const auto found = us_.find(key);
    return found == us_.end() ? QgemmBenchRow::kNone : found->second;
  }
  std::map<Key, double> us_;
};

double flops_of(const QgemmBenchRow& row) {
  const QgemmDescriptor& d = row.test.descriptor;
  return 2e6 * static_cast<double>(d.m) * static_cast<double>(d.n) * static_cast<double>(d.k) / row.plain_us;
}
// NaN where the machine does not have it.
double share_of_rate(const QgemmBenchRow& row, std::string_view name) {
  for (const QgemmBenchRate& rate : row.rates)
    if (rate.name == name) return flops_of(row) / rate.flops;
  return QgemmBenchRow::kNone;
}

std::vector<BenchColumn> columns_of(const QgemmBenchRow& row, const Compared& compared, Device device) {
  const QgemmDescriptor& d = row.test.descriptor;
  const auto us = [](double value) { return bench_text(value, "{:.2f}"); };
  const auto ratio = [](double value) { return bench_text(value, "{:.3f}"); };
  const auto times = [](double value) { return bench_text(value, "{:.2f}"); };
  std::vector<BenchColumn> columns = {
      {"shape (n x k)", -18, row.test.shape}, {"weight", -13, weight_text(d.spec)},
      {"x, y", -4, to_string(d.dtype)},       {"direction", -10, direction_of(d)},
      {"M", 4, std::to_string(d.m)},          {"kernel", -21, row.sku.kernel.empty() ? "-" : row.sku.kernel},
      {"plain", 9, us(row.plain_us)},         {"spread", 6, bench_percent(row.plain_spread)},
  };
  const auto add = [&](const char* title, int width, std::string text) {
    columns.push_back({title, width, std::move(text)});
  };
  if (device.kind == DeviceKind::cuda) add("chained", 8, us(row.chained_us));
  add("read", 8, us(row.read_us));
  add("r/p", 5, ratio(row.read_us / row.plain_us));
  if (device.kind == DeviceKind::cuda) {
    add("r/c", 5, ratio(row.read_us / row.chained_us));
    add("cuBLAS", 8, us(row.cublas_us));
    add("c/p", 5, times(row.cublas_us / row.plain_us));
  } else {
    add("p/p1", 6, times(compared.times_one_row(row)));
    add("fma", 5, ratio(share_of_rate(row, "fma")));
    add("dot", 5, ratio(share_of_rate(row, "bf16_dot")));
    add("amx", 5, ratio(share_of_rate(row, "amx_bf16")));
  }
  add("f/p", 5, ratio(row.floor_us / row.plain_us));
  if (device.kind == DeviceKind::cuda)
    add("f/c", 5, ratio(row.floor_us / row.chained_us));
  else
    add("fw/p", 5, times(compared.of_forward(row)));
  add("error", -1,
      bench_text(row.error, "{:.1e}") +
          (row.correct() ? "" : fmt::format(" WRONG: must be at most {:.0e}", row.error_limit)));
  return columns;
}
std::string title_of(const QgemmBenchCase& test) {
  const QgemmDescriptor& d = test.descriptor;
  return fmt::format("{} {}{} {}{} {} M {}", test.shape, weight_text(d.spec),
                     d.packed ? "" : fmt::format(" {}", to_string(d.layout)), to_string(d.dtype),
                     d.math == QgemmMath::automatic ? "" : fmt::format(" {}", to_string(d.math)),
                     direction_of(d), d.m);
}

// What all rows have.
Json times_json(const QgemmBenchRow& row, const char* ceiling, double ceiling_us, const std::string& device) {
  Json json = {{"op", "qgemm"}, {"problem", title_of(row.test)}, {"device", device}};
  json.update(case_json(row.test));
  json["kernel"] = row.sku.kernel;
  json["backend"] = row.sku.backend;
  json["failure"] = row.problem;
  json["median_us"] = bench_number(row.plain_us);
  json["spread"] = bench_number(row.plain_spread);
  json["ceiling"] = ceiling;
  json["ceiling_us"] = bench_number(ceiling_us);
  json["share"] = bench_number(ceiling_us / row.plain_us);
  json["weight_bytes"] = row.weight_bytes;
  json["plain_us"] = bench_number(row.plain_us);
  json["read_us"] = bench_number(row.read_us);
  json["cublas_us"] = bench_number(row.cublas_us);
  return json;
}

Json row_json(const QgemmBenchRow& row, const Compared& compared, const std::string& device) {
  Json json = times_json(row, "floor", row.floor_us, device);
  json["chained_us"] = bench_number(row.chained_us);
  json["read_chained_us"] = bench_number(row.read_chained_us);
  json["read_of_plain"] = bench_number(row.read_us / row.plain_us);
  json["read_of_chained"] = bench_number(row.read_us / row.chained_us);
  json["forward_of_plain"] = bench_number(compared.of_forward(row));
  json["plain_of_one_row"] = bench_number(compared.times_one_row(row));
  json["cublas_of_plain"] = bench_number(row.cublas_us / row.plain_us);
  json["cublas_of_chained"] = bench_number(row.cublas_us / row.chained_us);
  json["lora"] = row.test.lora;
  json["lora_us"] = bench_number(row.lora_us);
  json["lora_of_plain"] = bench_number(row.lora_us / row.plain_us);
  json["cublas_flops"] = bench_number(row.cublas_flops);
  json["rates"] = Json::array();
  for (const QgemmBenchRate& rate : row.rates)
    json["rates"].push_back(
        {{"name", rate.name}, {"flops", rate.flops}, {"share", bench_number(share_of_rate(row, rate.name))}});
  json["floor_us"] = bench_number(row.floor_us);
  json["floor_of_plain"] = bench_number(row.floor_us / row.plain_us);
  json["floor_of_chained"] = bench_number(row.floor_us / row.chained_us);
  json["error"] = bench_number(row.error);
  json["error_limit"] = row.error_limit;
  json["correct"] = row.correct();
  return json;
}

void explain(Device device, const std::vector<QgemmBenchCase>& cases, std::string& text, Json& document) {
  Json results = Json::array();
  for (const QgemmBenchCase& test : cases) {
    const QgemmDescriptor& d = test.descriptor;
    text += title_of(test) + "\n";
    Json variants = Json::array();
    bool is_chosen = false;
    for (const QgemmChoice& choice : explain_qgemm(device, d)) {
      const bool takes = choice.reason.empty();
      text += fmt::format("  {:<22} {}{}\n", choice.variant,
                          !takes      ? choice.reason
                          : is_chosen ? "would take it"
                                      : "is chosen",
                          choice.packs ? ", packs the view first" : "");
      is_chosen |= takes;
      variants.push_back({{"variant", choice.variant}, {"reason", choice.reason}, {"packs", choice.packs}});
    }
    if (!is_chosen) text += "  none\n";
    Json json = case_json(test);
    json["layout"] = d.packed ? Json(nullptr) : Json(to_string(d.layout));
    json["variants"] = std::move(variants);
    results.push_back(std::move(json));
  }
  document["cases"] = std::move(results);
}

// What the columns are.
std::string explain_columns(Device device) {
  if (device.kind == DeviceKind::cpu)
    return "Times are microseconds. read: only reading the packed weight. p/p1: plain / plain of one\n"
           "row of x. fma, dot, amx: share of the rate of multiply-adds in registers. f: the longer of\n"
           "read and the best of these. fw/p: forward / plain.\n";
  return "Times are microseconds. read: only reading the packed weight. c/p: cuBLAS / plain.\n"
         "f: the longer of read and the time of as many multiply-adds at the best rate of cuBLAS.\n";
}

// Lines are printed as they come: who stops it early has what there is.
void measure(Device device, const BenchArguments& arguments, const std::vector<QgemmBenchCase>& cases,
             bool print, Json& document) {
  const auto say = [&](const std::string& text) {
    if (print) write_stdout(text);
  };
  say(describe_bench_device(device, arguments, document) + explain_columns(device));
  document["rows"] = Json::array();
  Compared compared;
  say(bench_line(columns_of(QgemmBenchRow{}, compared, device), true));
  int num_wrong = 0;
  bench_qgemm(device, cases, {arguments.quick, arguments.num_threads}, [&](const QgemmBenchRow& row) {
    compared.add(row);
    say(bench_line(columns_of(row, compared, device), false));
    if (row.test.lora > 0)
      say(fmt::format("  with a low-rank adapter of rank {}: {}, {} of plain\n", row.test.lora,
                      bench_text(row.lora_us, "{:.2f}"), bench_text(row.lora_us / row.plain_us, "{:.2f}")));
    if (!row.problem.empty()) say("  " + row.problem + "\n");
    document["rows"].push_back(row_json(row, compared, document["device"]));
    if (!row.sku.kernel.empty() && !row.correct()) ++num_wrong;
    return !is_cancelled();
  });
  if (num_wrong > 0)
    throw Error(ErrorCode::verify, fmt::format("the values of {} of {} cases are wrong or were not checked",
                                               num_wrong, cases.size()));
}

// ---- Cliffs: the same at many M and odd shapes, by times alone

// What a product may take: the time of a dense one, or of reading the weight at 0.7 of the rate of a bare
// read, whichever is longer.
double goal_of(const QgemmBenchRow& row) { return std::fmax(row.cublas_us, row.read_us / 0.7); }

std::vector<BenchColumn> cliff_columns(const QgemmBenchRow& row, const Compared& compared) {
  const QgemmDescriptor& d = row.test.descriptor;
  const auto us = [](double value) { return bench_text(value, "{:.2f}"); };
  return {{"shape (n x k)", -18, row.test.shape},
          {"weight", -14, weight_text(d.spec)},
          {"x, y", -4, to_string(d.dtype)},
          {"direction", -10, direction_of(d)},
          {"M", 4, std::to_string(d.m)},
          {"kernel", -21, row.sku.kernel.empty() ? "-" : row.sku.kernel},
          {"plain", 9, us(row.plain_us)},
          {"spread", 6, bench_percent(row.plain_spread)},
          {"read", 8, us(row.read_us)},
          {"cuBLAS", 8, us(row.cublas_us)},
          {"p/goal", 6, us(row.plain_us / goal_of(row))},
          {"jump", 5, us(compared.times_one_fewer(row))}};
}

// The worst of some rows, by a ratio that may be NaN: not measured.
struct Worst {
  double ratio = QgemmBenchRow::kNone;
  std::string problem;
  void add(double value, const QgemmBenchRow& row) {
    if (std::isnan(value) || value <= ratio) return;
    ratio = value;
    problem = title_of(row.test);
  }
};

// Of rows that were measured.
struct CliffSummary {
  static constexpr int64_t kManyRows = 128;
  static constexpr double kWithin = 1.15;

  int num_many = 0, num_within = 0;  // with kManyRows and more rows of x; within kWithin of the goal
  Worst of_many, jump;

  void add(const QgemmBenchRow& row, const Compared& compared) {
    if (row.test.descriptor.m >= kManyRows && std::isfinite(row.plain_us)) {
      const double ratio = row.plain_us / goal_of(row);
      ++num_many;
      num_within += ratio <= kWithin;
      of_many.add(ratio, row);
    }
    jump.add(compared.times_one_fewer(row), row);
  }
  std::string text() const {
    const auto of = [](const Worst& worst) {
      return worst.problem.empty() ? "-" : fmt::format("{:.2f} at {}", worst.ratio, worst.problem);
    };
    return summary_line("M >= 128", fmt::format("{} of {} rows within {} of the goal", bench_percent(share()),
                                                num_many, kWithin)) +
           summary_line("worst", of(of_many)) + summary_line("worst jump", of(jump));
  }
  Json json() const {
    return {{"rows", num_many},
            {"within", num_within},
            {"share_within", bench_number(share())},
            {"worst", bench_number(of_many.ratio)},
            {"worst_problem", of_many.problem},
            {"worst_jump", bench_number(jump.ratio)},
            {"worst_jump_problem", jump.problem}};
  }

 private:
  double share() const {
    return num_many == 0 ? QgemmBenchRow::kNone : static_cast<double>(num_within) / num_many;
  }
};

void measure_cliffs(Device device, const BenchArguments& arguments, const std::vector<QgemmBenchCase>& cases,
                    bool print, Json& document) {
  const auto say = [&](const std::string& text) {
    if (print) write_stdout(text);
  };
  say(describe_bench_device(device, arguments, document) +
      "Times are microseconds. read: only reading the packed weight. goal: the longer of cuBLAS and\n"
      "read / 0.7. jump: plain / plain of one row of x fewer.\n");
  document["rows"] = Json::array();
  Compared compared;
  CliffSummary summary;
  int num_failed = 0;
  say(bench_line(cliff_columns({}, compared), true));
  bench_qgemm(device, cases, {.quick = true, .num_threads = arguments.num_threads, .times_only = true},
              [&](const QgemmBenchRow& row) {
                compared.add(row);
                summary.add(row, compared);
                say(bench_line(cliff_columns(row, compared), false));
                if (!row.problem.empty()) say("  " + row.problem + "\n");
                num_failed += !row.problem.empty();
                Json json = times_json(row, "goal", goal_of(row), document["device"]);
                json["plain_of_goal"] = bench_number(row.plain_us / goal_of(row));
                json["jump"] = bench_number(compared.times_one_fewer(row));
                document["rows"].push_back(std::move(json));
                return !is_cancelled();
              });
  document["summary"] = summary.json();
  say(summary.text());
  if (num_failed > 0)
    throw Error(ErrorCode::device, fmt::format("{} of {} cases were not measured", num_failed, cases.size()));
}

}  // namespace

std::vector<QgemmBenchCase> cases_of_qgemm(const BenchArguments& arguments,
                                           const std::vector<std::string>& shapes,
                                           const std::vector<int64_t>& m) {
  return cases_of(
      arguments,
      {.shapes = shapes, .dtypes = {"bf16"}, .m = m, .weights = {{"nf4", false}, {"int4", false}}});
}

void run_qgemm_bench(Device device, const BenchArguments& arguments, bool print, std::string& text,
                     Json& document) {
  if (!arguments.view.empty() && !arguments.explain)
    throw Error(ErrorCode::usage, "--view: only with --explain");
  if (arguments.experts == 0 && (arguments.top_k > 1 || arguments.skew > 0 || arguments.y != "slots"))
    throw Error(ErrorCode::usage, "--top-k, --skew and --y: only with --experts");
  if (arguments.experts > 0) {
    if (arguments.cliffs || arguments.explain || arguments.lora > 0)
      throw Error(ErrorCode::usage, "--experts: not with --cliffs, --explain and --lora");
    if (arguments.top_k > arguments.experts)
      throw Error(ErrorCode::usage, fmt::format("--top-k: at most as many as --experts, got {} of {}",
                                                arguments.top_k, arguments.experts));
    if (arguments.y == "swiglu" && arguments.direction != "forward")
      throw Error(ErrorCode::usage, "--y swiglu: only with --direction forward");
    return run_grouped_bench(device, arguments, print, document);
  }
  if (arguments.cliffs && arguments.lora > 0) throw Error(ErrorCode::usage, "--lora: not with --cliffs");
  const std::vector<QgemmBenchCase> cases = cases_of(arguments, defaults_of(device, arguments.cliffs));
  if (arguments.explain)
    explain(device, cases, text, document);
  else if (arguments.cliffs)
    measure_cliffs(device, arguments, cases, print, document);
  else
    measure(device, arguments, cases, print, document);
}

}  // namespace halfbyte::cli
