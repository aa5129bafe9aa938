// halfbyte bench qgemm --experts E
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "bench.h"
#include "bench_qgemm.h"
#include "halfbyte/error.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"
#include "report.h"

namespace halfbyte::cli {

namespace {

// As an expert of Qwen3-30B-A3B has them: gate and up as one, and down.
const std::vector<std::string> kShapes = {"1536x2048", "2048x768"};
const std::vector<int64_t> kTokens = {1, 4, 16, 64, 256, 1024, 4096};

std::vector<QgemmGroupedBenchCase> cases_of(const BenchArguments& arguments) {
  std::vector<QgemmGroupedBenchCase> cases;
  for (const QgemmBenchCase& one : cases_of_qgemm(arguments, kShapes, kTokens)) {
    const QgemmDescriptor& d = one.descriptor;
    QgemmGroupedDescriptor grouped{.spec = d.spec,
                                   .num_experts = arguments.experts,
                                   .m = d.m,
                                   .n = d.n,
                                   .k = d.k,
                                   .transposed = d.transposed,
                                   .dtype = d.dtype};
    grouped.rows = ExpertRows::indices;
    grouped.top_k = arguments.top_k;
    grouped.variant = d.variant;
    grouped.swiglu = arguments.y == "swiglu";
    grouped.sum_slots = grouped.routing_weights = arguments.y == "sum";
    check_descriptor(grouped);
    cases.push_back({fmt::format("E{} top {}, {}{}", arguments.experts, arguments.top_k, one.shape,
                                 arguments.y == "slots" ? "" : " " + arguments.y),
                     grouped, arguments.skew});
  }
  return cases;
}

std::vector<BenchColumn> columns_of(const QgemmGroupedBenchRow& row) {
  const QgemmGroupedDescriptor& d = row.test.descriptor;
  const auto us = [](double value) { return bench_text(value, "{:.2f}"); };
  const auto ratio = [](double value) { return bench_text(value, "{:.3f}"); };
  return {{"experts, n x k", -28, row.test.name},
          {"weight", -13, weight_text(d.spec)},
          {"x, y", -4, to_string(d.dtype)},
          {"direction", -10, d.transposed ? "transposed" : "forward"},
          {"tokens", 6, std::to_string(d.m)},
          {"used", 6, fmt::format("{:.1f}", row.experts)},
          {"kernel", -16, row.sku.kernel.empty() ? "-" : row.sku.kernel},
          {"plain", 9, us(row.plain_us)},
          {"spread", 6, bench_percent(row.plain_spread)},
          {"read", 8, us(row.read_us)},
          {"r/p", 5, ratio(row.read_us / row.plain_us)},
          {"TFLOP/s", 7, bench_text(row.flops / row.plain_us * 1e-6, "{:.1f}")},
          {"loop", 9, us(row.loop_us)},
          {"l/p", 5, bench_text(row.loop_us / row.plain_us, "{:.2f}")},
          {"route", 6, us(row.route_us)}};
}

Json row_json(const QgemmGroupedBenchRow& row, const Json& device) {
  const QgemmGroupedDescriptor& d = row.test.descriptor;
  Json json = {{"op", "qgemm_grouped"},
               {"problem", fmt::format("{} {} {} {} tokens", row.test.name, weight_text(d.spec),
                                       d.transposed ? "transposed" : "forward", d.m)},
               {"device", device},
               {"experts", d.num_experts},
               {"top_k", d.top_k},
               {"skew", row.test.skew},
               {"y", d.swiglu      ? "swiglu"
                     : d.sum_slots ? "sum"
                                   : "slots"},
               {"n", d.n},
               {"k", d.k},
               {"m", d.m},
               {"direction", d.transposed ? "transposed" : "forward"},
               {"dtype", to_string(d.dtype)},
               {"spec", spec_json(d.spec)},
               {"kernel", row.sku.kernel},
               {"backend", row.sku.backend},
               {"failure", row.problem},
               {"used_experts", row.experts},
               {"weight_bytes", row.weight_bytes},
               {"flops", row.flops}};
  json["median_us"] = bench_number(row.plain_us);
  json["spread"] = bench_number(row.plain_spread);
  json["ceiling"] = "read";
  json["ceiling_us"] = bench_number(row.read_us);
  json["share"] = bench_number(row.read_us / row.plain_us);
  json["loop_us"] = bench_number(row.loop_us);
  json["route_us"] = bench_number(row.route_us);
  return json;
}

}  // namespace

void run_grouped_bench(Device device, const BenchArguments& arguments, bool print, Json& document) {
  const std::vector<QgemmGroupedBenchCase> cases = cases_of(arguments);
  const auto say = [&](const std::string& text) {
    if (print) write_stdout(text);
  };
  say(describe_bench_device(device, arguments, document) +
      "Times are microseconds. used: experts that have rows, on average. read: only reading their packed\n"
      "weights. loop: a product with one weight for each of them. route: sorting the slots, not in plain.\n");
  document["rows"] = Json::array();
  say(bench_line(columns_of(QgemmGroupedBenchRow{}), true));
  int num_failed = 0;
  bench_qgemm_grouped(device, cases, {arguments.quick, arguments.num_threads},
                      [&](const QgemmGroupedBenchRow& row) {
                        say(bench_line(columns_of(row), false));
                        if (!row.problem.empty()) say("  " + row.problem + "\n");
                        num_failed += !row.problem.empty();
                        document["rows"].push_back(row_json(row, document["device"]));
                        return !is_cancelled();
                      });
  if (num_failed > 0)
    throw Error(ErrorCode::device, fmt::format("{} of {} cases were not measured", num_failed, cases.size()));
}

}  // namespace halfbyte::cli
