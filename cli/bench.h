// What the measurements of the tool share: arguments, tables and reports.
#pragma once

#include <string>
#include <vector>

#include "command.h"
#include "halfbyte/bench.hpp"
#include "halfbyte/device.hpp"

namespace halfbyte::cli {

// As typed; words are checked when the command runs.
struct BenchArguments {
  std::vector<std::string> ops;
  std::vector<std::string> formats, dtypes;
  std::string filter, directory = "/dev/shm";
  double limit_ms = 0;
  std::string device = "cuda";
  int num_threads = 0;
  bool quick = false, list = false;
  // qgemm
  std::vector<std::string> shapes, models, group_sizes;
  std::vector<int64_t> m;
  int64_t lora = 0, experts = 0, top_k = 1;
  double skew = 0;
  std::string direction = "both", y = "slots", math = "auto";
  std::string scale_dtype, variant, view;
  bool double_quant = false, asymmetric = false, explain = false, cliffs = false;
};

// A table whose lines are printed as they come.
struct BenchColumn {
  const char* title;
  int width;  // negative: to the left
  std::string text;
};
std::string bench_line(const std::vector<BenchColumn>& columns, bool title);

// Numbers that were not measured are null, and "-".
Json bench_number(double value);
std::string bench_text(double value, const char* format);
std::string bench_percent(double part);

// What is measured, for people and in the document.
std::string describe_bench_device(Device device, const BenchArguments& arguments, Json& document);

void run_qgemm_bench(Device device, const BenchArguments& arguments, bool print, std::string& text,
                     Json& document);

}  // namespace halfbyte::cli
