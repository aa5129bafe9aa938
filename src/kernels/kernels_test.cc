// The table of kernels. What NVRTC makes of it is tested in tests/jit_compile_test.cc.
#include "kernels/kernels.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "core/format.h"
#include "io/test_directory.h"
#include "kernels/test_formula.h"

namespace halfbyte {
namespace {

constexpr const char* kTable = "-8,-7,-6,-5,-4,-3,-2,-1,0,1,2,3,4,5,6,7";

TEST(Kernels, names_are_unique_and_every_key_has_a_default) {
  std::set<std::string> names;
  for (const KernelInfo& kernel : all_kernels()) {
    SCOPED_TRACE(kernel.name);
    EXPECT_TRUE(names.insert(kernel.name).second);
    EXPECT_TRUE(kernel.description.ends_with('.'));
    std::set<std::string> keys;
    for (const KernelKey& key : kernel.keys) {
      EXPECT_TRUE(keys.insert(key.name).second) << key.name;
      EXPECT_TRUE(key.description.ends_with('.')) << key.name;
      EXPECT_TRUE(key.open || key.values.size() > 1) << key.name;
    }
    EXPECT_EQ(specialise(find_kernel(kernel.name), {}).function, kernel.name);
  }
  EXPECT_TRUE(names.contains("quantize_groups") && names.contains("dequantize"));
}

TEST(Kernels, every_embedded_kernel_has_a_row) {
  std::set<std::string_view> sources, files;
  for (const cuda::Kernel& kernel : kernel_table()) sources.insert(specialise(kernel, {}).source);
  for (const cuda::EmbeddedFile& file : cuda::embedded_files()) {
    const std::string_view name = file.name;
    files.insert(name);
    EXPECT_EQ(sources.contains(name), name.ends_with(".cu")) << name;
  }
  for (const std::string_view source : sources) EXPECT_TRUE(files.contains(source)) << source;
}

// 19 ways to encode but for tables (lut4 aside), 4 dtypes of data, of which those of 16 bits have two
// batches; 20 ways to decode, the same for all tables. Groups of mxfp4 are of one size, and nvfp4 has none
// that quantize_groups takes.
TEST(Kernels, configurations_are_all_that_the_ops_can_ask_for) {
  const auto count = [](const char* name) { return all_configurations(find_kernel(name)).size(); };
  const auto tables =
      static_cast<size_t>(std::ranges::count(all_formats(), FormatKind::table, &FormatInfo::kind)) - 1;
  const size_t ways = 19 + tables;
  EXPECT_EQ(count("quantize_groups"), (ways - 2) * (1 + 2 + 2 + 1) + 4);
  EXPECT_EQ(count("quantize_spans"), ways * 4 * 2);
  EXPECT_EQ(count("value_range"), 4u);
  EXPECT_EQ(count("dequantize"), 20u * 4 * 3);
  for (const cuda::Kernel& kernel : kernel_table()) {
    std::set<std::string> configs;
    for (const KernelConfiguration& configuration : all_configurations(kernel)) {
      EXPECT_TRUE(configs.insert(configuration.spec.config).second);
      EXPECT_EQ(configuration.spec, specialise(kernel, configuration.config));
      EXPECT_EQ(configuration.config.size(), kernel.info.keys.size());
    }
  }
  const auto some =
      all_configurations(find_kernel("value_range"), [](const std::string& key, const std::string& value) {
        return key != "dtype" || value == "f16" || value == "f64";
      });
  EXPECT_EQ(some.size(), 2u);
}

// What the codes stand for is an argument. Zero points and biases need other arithmetic.
TEST(Kernels, symmetric_codes_of_4_bits_have_the_same_kernels) {
  for (const char* name : {"qgemm_sm90_wgmma", "qgemm_sm90_mma", "qgemm_sm90_transposed", "qgemm_sm90_large",
                           "qgemm_sm90_f32", "qgemm_sm80", "qgemm_cublas_decode"}) {
    SCOPED_TRACE(name);
    const auto of = [&](KernelConfig config) {
      config.emplace_back("scale-dtype", "f16");
      return specialise(find_kernel(name), config);
    };
    for (const FormatInfo& format : all_formats())
      if ((format.kind == FormatKind::table && !format.scale_dtype) || format.format == Format::int4) {
        EXPECT_EQ(of({{"format", format.name}}), of({{"format", "nf4"}})) << format.name;
      }
    EXPECT_FALSE(of({{"format", "int4"}, {"asymmetric", "yes"}}) == of({{"format", "int4"}}));
    EXPECT_FALSE(of({{"format", "affine4"}}) == of({{"format", "int4"}}));
  }
}

TEST(Kernels, that_decide_codes_have_the_values_and_the_tie_rule_of_the_format) {
  for (const FormatInfo& format : all_formats()) {
    if (format.kind != FormatKind::table || format.format == Format::lut4) continue;
    std::string values;
    for (const float value : code_book(format.format)->values) values += fmt::format("{:a}f, ", value);
    const std::string tie = fmt::format("Tie({})", static_cast<int>(code_book(format.format)->tie));
    for (const char* name : {"quantize_groups", "quantize_spans", "fake_chunks", "lsq_rows"}) {
      if (format.format == Format::nvfp4
              ? name != std::string_view("quantize_spans")
              : format.scale_dtype && !std::string_view(name).starts_with("quantize"))
        continue;
      const std::string config = specialise(find_kernel(name), {{"format", format.name}}).config;
      EXPECT_NE(config.find(values), std::string::npos) << format.name << ": " << config;
      EXPECT_NE(config.find(tie), std::string::npos) << format.name << ": " << config;
    }
  }
}

// The table of docs/kernels.md. Where it is wrong, this prints the right one.
TEST(Kernels, the_page_has_the_counts) {
  struct Row {
    size_t sm90a = 0, others = 0;
    std::string kernels;
  };
  std::map<std::string, Row> ops;
  Row all;
  for (const cuda::Kernel& kernel : kernel_table()) {
    if (kernel.info.plain) continue;
    const size_t count = all_configurations(kernel).size();
    for (Row* row : {&ops[kernel.info.op], &all}) {
      if (kernel.is_for("sm_90a")) row->sm90a += count;
      if (kernel.is_for("sm_80")) row->others += count;
      row->kernels += fmt::format("{}`{}` {}", row->kernels.empty() ? "" : ", ", kernel.info.name, count);
    }
  }
  std::string table = "| op | for sm_90a | for others | kernels |\n|---|---|---|---|\n";
  for (const auto& [op, row] : ops)
    table += fmt::format("| `{}` | {} | {} | {} |\n", op, row.sm90a, row.others, row.kernels);
  table += fmt::format("| all | {} | {} | |\n", all.sm90a, all.others);
  std::ifstream file(HALFBYTE_SOURCE_DIR "/docs/kernels.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(page.find(table), std::string::npos) << "docs/kernels.md must have\n" << table;
}

TEST(Kernels, the_configuration_chooses) {
  const auto chosen = [](const std::string& op, const KernelConfig& config) {
    return choose_kernel(op, config).name;
  };
  std::map<std::string, std::string> by_default;
  for (const KernelInfo& kernel : all_kernels()) by_default[kernel.op] = chosen(kernel.op, {});
  EXPECT_EQ(by_default, (std::map<std::string, std::string>{{"affine_qdq", "halfbyte_affine_qdq"},
                                                            {"all_reduce", "all_reduce_lines"},
                                                            {"benchmark", "read_blocks"},
                                                            {"compute_qparams", "compute_qparams"},
                                                            {"dequantize", "halfbyte_dequantize"},
                                                            {"fake_quantize", "halfbyte_fake_quantize"},
                                                            {"observe", "halfbyte_observe"},
                                                            {"qgemm", "halfbyte_qgemm"},
                                                            {"quantize", "halfbyte_quantize"},
                                                            {"quantize_linear", "linear_elements"},
                                                            {"reorder", "reorder_codes"},
                                                            {"route", "route"},
                                                            {"workspace", "clear_workspace"}}));
  EXPECT_EQ(chosen("quantize", {{"group-size", "128"}, {"dtype", "bf16"}}), "quantize_groups");
  EXPECT_EQ(chosen("quantize", {{"group-size", "100"}}), "quantize_spans");
  EXPECT_EQ(chosen("quantize", {{"group-size", "tensor"}}), "quantize_spans");
  EXPECT_EQ(chosen("quantize", {{"unaligned", "yes"}, {"group-size", "64"}}), "quantize_spans");
  EXPECT_EQ(chosen("dequantize", {{"format", "lut4"}, {"table", kTable}}), "halfbyte_dequantize");
  EXPECT_EQ(chosen("dequantize", {{"group-size", "64"}}), "dequantize");
  EXPECT_EQ(chosen("all_reduce", {{"pieces", "yes"}}), "all_reduce_chunks");
  // Configurations of other sizes have the kernel that the key's sentence says.
  const auto spec = [](const char* kernel, const char* size) {
    return specialise(find_kernel(kernel), {{"group-size", size}});
  };
  for (const char* size : {"1", "100", "65536", "tensor"}) {
    EXPECT_EQ(spec("dequantize", size), spec("dequantize", "channel"));
    EXPECT_EQ(spec("quantize_spans", size), spec("quantize_spans", "channel"));
  }
  EXPECT_FALSE(spec("dequantize", "64") == spec("dequantize", "channel"));
}

// ---- Plain kernels

std::vector<const cuda::Kernel*> plain_kernels() {
  std::vector<const cuda::Kernel*> kernels;
  for (const cuda::Kernel& kernel : kernel_table())
    if (kernel.info.plain) kernels.push_back(&kernel);
  return kernels;
}

TEST(PlainKernels, have_a_description_and_stay_out_of_packs) {
  for (const cuda::Kernel& kernel : kernel_table()) {
    SCOPED_TRACE(kernel.info.name);
    EXPECT_EQ(kernel.info.plain, kernel.describe != nullptr);
    EXPECT_EQ(kernel.info.plain, kernel.info.name.starts_with("halfbyte_"));
    if (!kernel.info.plain)
      expect_error(ErrorCode::usage, "only plain kernels are described",
                   [&] { describe_kernel(kernel.info.name, {}); });
  }
  int64_t num_configurations = 0;
  for (const cuda::Kernel& kernel : kernel_table())
    if (!kernel.info.plain && kernel.is_for("sm_80"))
      num_configurations += static_cast<int64_t>(all_configurations(kernel).size());
  KernelPackOptions options;
  options.targets = {"sm_80"};
  EXPECT_EQ(count_pack_kernels(options), num_configurations);
}

// Of every configuration: formulas of numbers that the kernel has, which lie in its parameters.
TEST(PlainKernels, are_described_by_formulas_of_their_numbers) {
  for (const cuda::Kernel* kernel : plain_kernels()) {
    std::set<std::string> seen;
    for (const KernelConfiguration& configuration : all_configurations(*kernel)) {
      const KernelDescription description = describe_kernel(kernel->info.name, configuration.config);
      SCOPED_TRACE(kernel->info.name);
      EXPECT_EQ(description.op, kernel->info.op);
      EXPECT_EQ(description.kernel, kernel->info.name);
      EXPECT_EQ(description.config, configuration.config);
      EXPECT_GT(description.block, 0);
      FormulaNumbers ones, zeros;
      std::string names;
      for (const KernelParameter& parameter : description.parameters) {
        names += parameter.name + (parameter.is_pointer() ? "* " : " ");
        EXPECT_TRUE(parameter.description.ends_with('.')) << parameter.name;
        if (parameter.is_pointer()) continue;
        EXPECT_TRUE(parameter.access.empty() && !parameter.optional);
        ones.emplace(parameter.name, 1);
        zeros.emplace(parameter.name, parameter.name.starts_with("group") ? 1 : 0);
      }
      seen.insert(names);
      EXPECT_EQ(Formula::value(description.grid, ones), 1);
      EXPECT_EQ(Formula::value(description.grid, zeros), 1);
      for (const KernelParameter& parameter : description.parameters)
        EXPECT_TRUE(!parameter.is_pointer() || Formula::value(parameter.elements, ones) >= 0)
            << parameter.name;
    }
    EXPECT_EQ(seen.size(), 1u) << "of a kernel, every configuration has the same parameters";
  }
}

TEST(PlainKernels, are_described_as_json) {
  const std::string json = to_json(describe_kernel("halfbyte_dequantize", {{"format", "affine3"}}));
  for (const char* text :
       {"\"op\": \"dequantize\"", "\"kernel\": \"halfbyte_dequantize\"", "\"format\": \"affine3\"",
        "\"elements\": \"rows * ((cols * 3 + 7) / 8)\"", "\"shared_bytes\": \"0\""})
    EXPECT_NE(json.find(text), std::string::npos) << text << "\n" << json;
}

// The parameters are stable: the page has them, and this prints what it must have.
TEST(PlainKernels, the_page_has_their_parameters) {
  std::string list;
  for (const cuda::Kernel* kernel : plain_kernels()) {
    const KernelDescription description = describe_kernel(kernel->info.name, {});
    std::string parameters;
    for (const KernelParameter& parameter : description.parameters)
      parameters += fmt::format("{}{}{}", parameters.empty() ? "" : ", ",
                                parameter.is_pointer() ? "*" : parameter.type + " ", parameter.name);
    list += fmt::format("{}({})\n", description.kernel, parameters);
  }
  std::ifstream file(HALFBYTE_SOURCE_DIR "/docs/kernels.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(page.find(list), std::string::npos) << "docs/kernels.md must have\n" << list;
}

TEST(Kernels, errors_name_what_is_known) {
  const auto expect_usage = [](const std::string& text, const auto& body) {
    expect_error(ErrorCode::usage, text, body);
  };
  expect_usage("unknown op 'x': must be one of ", [] { choose_kernel("x", {}); });
  expect_usage("unknown kernel 'x': must be one of halfbyte_quantize, quantize_groups,",
               [] { find_kernel("x"); });
  const auto of = [](const char* kernel, const KernelConfig& config) {
    return [=] { specialise(find_kernel(kernel), config); };
  };
  expect_usage("has no key 'x': must be one of dtype", of("value_range", {{"x", "1"}}));
  expect_usage("dtype must be one of f32, f16, bf16, f64, got 'i8'", of("value_range", {{"dtype", "i8"}}));
  expect_usage("dtype is given twice", of("value_range", {{"dtype", "f16"}, {"dtype", "f16"}}));
  expect_usage("got format lut4 and no table", of("dequantize", {{"format", "lut4"}}));
  expect_usage("got format nf4 and a table", of("dequantize", {{"table", kTable}}));
  expect_usage("expected 16 values", of("dequantize", {{"format", "lut4"}, {"table", "1,2"}}));
  for (const char* size : {"", "0", "-1", "1x", "99999999999999999999", "Channel"})
    expect_usage("group-size must be", of("dequantize", {{"group-size", size}}));
  // Of several kernels, what the one that takes the most refuses.
  expect_usage("has no key 'x': must be one of format, table, asymmetric, dtype, group-size, search", [] {
    choose_kernel("quantize", {{"x", "1"}});
  });
}

}  // namespace
}  // namespace halfbyte
