// halfbyte compare A B
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "halfbyte/checkpoint.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"

namespace halfbyte::cli {

namespace {

struct CompareArguments {
  std::string a, b;
  ComputeArguments compute;
};

Json row_json(const CompareRow& row) {
  Json json = {{"name", row.name}, {"problem", row.problem}};
  if (row.problem.empty()) {
    json["max_error"] = row.max_error;
    json["max_error_index"] = row.max_error_index;
    json["relative_rmse"] = row.relative_rmse;
    json["snr_db"] = row.snr_db;
  }
  return json;
}

void run(const CompareArguments& arguments, std::string& text, Json& document) {
  document["a"] = arguments.a;
  document["b"] = arguments.b;
  check_cpu(arguments.compute.device, "compare");
  std::vector<CompareRow> rows;
  {
    ProgressBar progress(arguments.compute.progress == "auto");
    rows = compare_checkpoints(arguments.a, arguments.b, arguments.compute.num_threads, progress.function());
  }

  Table table(
      {{"name"}, {"max error", Align::right}, {"relative RMSE", Align::right}, {"SNR dB", Align::right}});
  Json rows_json = Json::array();
  std::string problems;
  int64_t num_problems = 0, num_exact = 0, num_inexact = 0;
  const double infinity = std::numeric_limits<double>::infinity();
  double worst_snr_db = infinity, sum_snr_db = 0;
  for (const CompareRow& row : rows) {
    rows_json.push_back(row_json(row));
    if (!row.problem.empty()) {
      ++num_problems;
      problems += fmt::format("{}: {}\n", printable(row.name), printable(row.problem));
      continue;
    }
    worst_snr_db = std::min(worst_snr_db, row.snr_db);
    if (row.snr_db == infinity) {
      ++num_exact;
    } else {
      ++num_inexact;
      sum_snr_db += row.snr_db;
    }
    table.add_row({printable(row.name), fmt::format("{:.4g}", row.max_error),
                   fmt::format("{:.4g}", row.relative_rmse), format_snr(row.snr_db)});
  }
  // Of the inexact weights: one exact weight would make it infinite.
  const double mean_snr_db = num_inexact > 0 ? sum_snr_db / static_cast<double>(num_inexact) : infinity;

  if (!problems.empty()) text += problems + "\n";
  if (!table.empty()) text += table.text() + "\n";
  text += summary_line("compared",
                       fmt::format("{} weights, {} of them exact", num_exact + num_inexact, num_exact));
  const auto snr = [&](double snr_db) {
    if (num_exact + num_inexact == 0) return std::string("-");
    return format_snr(snr_db) + (snr_db < infinity ? " dB" : "");
  };
  text += summary_line("worst SNR", snr(worst_snr_db));
  text += summary_line("mean SNR", snr(mean_snr_db));
  text += summary_line("problems", fmt::format("{}", num_problems));
  text += summary_line("device", "cpu");

  document["device"] = "cpu";
  document["rows"] = std::move(rows_json);
  document["num_compared"] = num_exact + num_inexact;
  document["num_exact"] = num_exact;
  document["num_problems"] = num_problems;
  document["worst_snr_db"] = worst_snr_db;
  document["mean_snr_db"] = mean_snr_db;
  if (num_problems > 0)
    throw Error(ErrorCode::verify,
                fmt::format("compare: {} of {} weights could not be compared", num_problems, rows.size()));
}

}  // namespace

void add_compare_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<CompareArguments>();
  CLI::App& sub =
      *app.add_subcommand("compare", "Compare the decoded weights of two checkpoints, worst first");
  sub.add_option("A", arguments->a, "The reference: a .safetensors file or a model directory")
      ->required()
      ->option_text("REQUIRED");
  sub.add_option("B", arguments->b, "The checkpoint to compare with A")->required()->option_text("REQUIRED");
  add_compute_options(sub, arguments->compute);
  sub.get_option("--device")->description("auto (default) or cpu: compare runs on the CPU only");
  add_report_options(sub, command);
  sub.callback([arguments, &command] {
    command.name = "compare";
    command.run = [arguments](std::string& text, Json& document) { run(*arguments, text, document); };
  });
}

}  // namespace halfbyte::cli
