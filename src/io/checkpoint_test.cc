// Reading, quantizing, verifying, dequantizing and comparing checkpoints, and everything that is refused.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "core/checks.h"
#include "core/format.h"
#include "halfbyte/ops.hpp"
#include "halfbyte/output.hpp"
#include "halfbyte/verify.hpp"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/columnwise.h"
#include "io/config.h"
#include "io/safetensors.h"
#include "io/test_directory.h"
#include "io/verify.h"

namespace halfbyte {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct StoredValues {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

int64_t product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  return n;
}

std::vector<std::byte> to_bytes(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(size_of(dtype)));
  io::convert_elements(reinterpret_cast<const std::byte*>(values.data()), DType::f32,
                       static_cast<int64_t>(values.size()), bytes.data(), dtype);
  return bytes;
}

StoredValues make_tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                         std::vector<float> values) {
  return {name, io::dtype_to_safetensors(dtype), shape, to_bytes(values, dtype)};
}

// Normal values; some groups are zero, constant or of one sign.
StoredValues random_tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                           unsigned seed = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> values(static_cast<size_t>(product(shape)));
  for (float& value : values) value = normal(rng);
  for (size_t i = 64; i < std::min<size_t>(values.size(), 128); ++i) values[i] = 0;
  for (size_t i = 192; i < std::min<size_t>(values.size(), 256); ++i) values[i] = 0.5f;
  for (size_t i = 256; i < std::min<size_t>(values.size(), 320); ++i) values[i] = -std::abs(values[i]);
  return make_tensor(name, dtype, shape, values);
}

void write_model(const fs::path& path, const std::vector<StoredValues>& tensors,
                 const io::Metadata& metadata = {}) {
  std::vector<StoredTensor> stored;
  for (const StoredValues& tensor : tensors)
    stored.push_back({tensor.name, tensor.dtype, tensor.shape, "", 0, 0});
  const io::SafetensorsLayout layout = io::lay_out_safetensors(stored, metadata);
  std::string text = layout.prefix;
  text.resize(layout.file_bytes);
  for (const StoredTensor& place : stored)
    for (const StoredValues& tensor : tensors)
      if (tensor.name == place.name && !tensor.bytes.empty())
        std::memcpy(text.data() + place.offset, tensor.bytes.data(), tensor.bytes.size());
  write_file(path, text);
}

std::string index_of(const std::vector<std::pair<std::string, std::string>>& weight_map) {
  json index = {{"metadata", {{"total_size", 1}, {"note", "kept"}}}, {"weight_map", json::object()}};
  for (const auto& [name, file] : weight_map) index["weight_map"][name] = file;
  return index.dump();
}

std::vector<std::byte> decode_all(const Checkpoint& checkpoint, const std::string& name, DType dtype) {
  const Weight* weight = checkpoint.find(name);
  if (weight == nullptr) throw std::runtime_error("no weight " + name);
  const int64_t n = product(weight->shape);
  std::vector<std::byte> out(static_cast<size_t>(n * size_of(dtype)));
  checkpoint.decode(*weight, 0, n, dtype, out.data());
  return out;
}

// What the operations give for the whole tensor at once. Of fp8 in blocks of 128 x 128, block by block.
QuantizedTensor quantize_for(const StoredValues& tensor, const WeightReport& report, Layout layout) {
  std::vector<std::byte> x = tensor.bytes;
  const DType source = *io::dtype_from_safetensors(tensor.dtype);
  QuantizedTensor q = quantize({x.data(), source, tensor.shape, {}, {}}, report.spec, report.encoding);
  if (io::scale_rows_of(io::layout_info(layout), report.spec) == 1) return q;
  const int64_t size = size_of(source), rows = tensor.shape[tensor.shape.size() - 2],
                cols = tensor.shape.back(), groups = (cols + 127) / 128;
  QuantSpec spec = report.spec;
  spec.granularity = Granularity::tensor;
  for (int64_t top = 0; top < q.rows(); top += std::min<int64_t>(128, rows - top % rows))
    for (int64_t left = 0; left < cols; left += 128) {
      const int64_t height = std::min<int64_t>(128, rows - top % rows),
                    width = std::min<int64_t>(128, cols - left);
      std::vector<std::byte> block(static_cast<size_t>(height * width * size));
      for (int64_t row = 0; row < height; ++row)
        std::memcpy(block.data() + row * width * size, x.data() + ((top + row) * cols + left) * size,
                    static_cast<size_t>(width * size));
      const QuantizedTensor own =
          quantize({block.data(), source, {height, width}, {}, {}}, spec, report.encoding);
      const int64_t scale_size = own.scales.num_bytes();
      for (int64_t row = 0; row < height; ++row) {
        std::memcpy(q.codes.data() + (top + row) * cols + left, own.codes.data() + row * width,
                    static_cast<size_t>(width));
        std::memcpy(q.scales.data() + ((top + row) * groups + left / 128) * scale_size, own.scales.data(),
                    static_cast<size_t>(scale_size));
      }
    }
  return q;
}
std::vector<std::byte> expected_values(const StoredValues& tensor, const WeightReport& report, DType dtype,
                                       Layout layout = Layout::halfbyte) {
  const QuantizedTensor q = quantize_for(tensor, report, layout);
  std::vector<std::byte> y(static_cast<size_t>(product(tensor.shape) * size_of(dtype)));
  dequantize(q, {y.data(), dtype, tensor.shape, {}, {}});
  return y;
}

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    // In memory where possible: every output is synced.
    const fs::path base = fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path();
    std::string pattern = (base / "halfbyte-checkpoint-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp");
    dir_ = pattern;
  }
  ~CheckpointTest() override { fs::remove_all(dir_); }

  std::string path(const std::string& name) const { return (dir_ / name).string(); }
  // Writes "in.safetensors".
  std::string write_input(const std::vector<StoredValues>& tensors, const io::Metadata& metadata = {}) {
    write_model(dir_ / "in.safetensors", tensors, metadata);
    return path("in.safetensors");
  }
  // A directory "model" of two shards with all that belongs to it.
  std::string write_model_directory() {
    fs::create_directories(dir_ / "model/sub");
    write_model(dir_ / "model/model-00001-of-00002.safetensors",
                {random_tensor("model.embed_tokens.weight", DType::bf16, {32, 256}),
                 random_tensor("model.layers.0.mlp.up_proj.weight", DType::bf16, {24, 256}),
                 random_tensor("model.layers.0.input_layernorm.weight", DType::bf16, {256})},
                {{"format", "pt"}, {"origin", "test"}});
    write_model(dir_ / "model/model-00002-of-00002.safetensors",
                {random_tensor("model.layers.1.mlp.up_proj.weight", DType::bf16, {24, 256}),
                 random_tensor("model.layers.1.mlp.gate.weight", DType::bf16, {8, 256}),
                 random_tensor("lm_head.weight", DType::bf16, {32, 256})});
    write_file(dir_ / "model/model.safetensors.index.json",
               index_of({{"model.embed_tokens.weight", "model-00001-of-00002.safetensors"},
                         {"model.layers.0.mlp.up_proj.weight", "model-00001-of-00002.safetensors"},
                         {"model.layers.0.input_layernorm.weight", "model-00001-of-00002.safetensors"},
                         {"model.layers.1.mlp.up_proj.weight", "model-00002-of-00002.safetensors"},
                         {"model.layers.1.mlp.gate.weight", "model-00002-of-00002.safetensors"},
                         {"lm_head.weight", "model-00002-of-00002.safetensors"}}));
    write_file(dir_ / "model/config.json", kConfig);
    write_file(dir_ / "model/tokenizer.json", "{}");
    write_file(dir_ / "model/sub/code.py", "pass");
    write_file(dir_ / "model/pytorch_model.bin", "old");
    write_file(dir_ / "model/consolidated.safetensors", "other");
    fs::create_directories(dir_ / "model/.cache");
    write_file(dir_ / "model/.cache/x", "hidden");
    return path("model");
  }
  // Files that a run leaves behind beside `kept`.
  std::vector<std::string> names() const {
    std::vector<std::string> list;
    for (const auto& entry : fs::directory_iterator(dir_)) list.push_back(entry.path().filename().string());
    std::ranges::sort(list);
    return list;
  }

  static constexpr const char* kConfig =
      R"({"model_type": "llama", "dtype": "bfloat16", "rms_norm_eps": 1e-05})";
  fs::path dir_;
};

QuantizeOptions options_for(Format format, std::optional<Layout> layout = {}) {
  QuantizeOptions options;
  options.format = format;
  options.layout = layout;
  if (format == Format::lut4)
    options.table = {-7, -5, -3.5f, -3, -2.25f, -2, -1, -0.125f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return options;
}

struct Case {
  QuantizeOptions options;
  std::vector<int64_t> shape;
};

// gpt-oss has experts only, and the transpose of them: it has tests of its own.
std::vector<const io::LayoutInfo*> layouts_of_matrices() {
  std::vector<const io::LayoutInfo*> layouts;
  for (const io::LayoutInfo* layout : io::all_layouts())
    if (!layout->turns_experts) layouts.push_back(layout);
  return layouts;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const std::vector<std::vector<int64_t>> any = {{1, 1}, {3, 129}, {7, 64}, {33, 200}, {1, 4097}, {9, 5}};
  const auto add = [&](const QuantizeOptions& options, const std::vector<std::vector<int64_t>>& shapes) {
    for (const auto& shape : shapes) cases.push_back({options, shape});
  };
  for (const Format format : {Format::nf4, Format::fp4})
    for (const int64_t size : {32, 64, 4096})
      for (const bool double_quant : {false, true}) {
        QuantizeOptions options = options_for(format, Layout::bitsandbytes);
        options.group_size = size;
        options.double_quant = double_quant;
        add(options, any);
      }
  for (const Format format : {Format::int4, Format::int8})
    for (const bool asymmetric : {false, true}) {
      QuantizeOptions options = options_for(format, Layout::compressed_tensors);
      options.asymmetric = asymmetric;
      add(options, {{1, 128}, {7, 256}, {33, 384}});
      options.group_size = 8;
      add(options, {{9, 24}, {16, 8}});
      options.group_size.reset();
      options.granularity = Granularity::channel;
      add(options, {{3, 129}, {7, 5}, {17, 200}});
      if (!asymmetric) options.scale_rule = ScaleRule::absmax;
      add(options, {{5, 77}});
    }
  for (const Format format : {Format::affine2, Format::affine3, Format::affine4, Format::affine5,
                              Format::affine6, Format::affine8}) {
    QuantizeOptions options = options_for(format, Layout::mlx);
    for (const int64_t size : {32, 64, 128}) {
      options.group_size = size;
      add(options, {{1, 128}, {7, 256}, {33, 384}});
    }
    options.scale_rule = ScaleRule::minmax;
    add(options, {{9, 256}});
  }
  for (const Layout layout : {Layout::gptq, Layout::awq})
    for (const Format format : {Format::int2, Format::int3, Format::int4, Format::int8})
      for (const bool asymmetric : {false, true}) {
        if (layout == Layout::awq && format != Format::int4) continue;
        QuantizeOptions options = options_for(format, layout);
        options.asymmetric = asymmetric;
        add(options, {{32, 256}, {96, 384}});
        options.group_size = 32;
        add(options, {{64, 96}});
        options.group_size.reset();
        options.granularity = Granularity::channel;
        add(options, {{32, 160}});
      }
  for (const FormatInfo& format : all_formats())
    for (const Granularity granularity :
         {Granularity::group, Granularity::channel, Granularity::tensor, Granularity::flat}) {
      if (format.scale_dtype && granularity != Granularity::group) continue;
      QuantizeOptions options = options_for(format.format, Layout::halfbyte);
      options.granularity = granularity;
      add(options, any);
      if (format.scale_dtype) continue;
      if (format.kind == FormatKind::integer) {
        options.asymmetric = true;
        add(options, {{7, 65}, {3, 1}});
        options.asymmetric = false;
        options.scale_rule = ScaleRule::signed_max;
        add(options, {{7, 65}});
        options.scale_rule.reset();
      }
      if (format.kind != FormatKind::affine) {
        options.double_quant = true;
        add(options, {{33, 200}, {3, 5}});
        options.double_quant = false;
      }
      if (granularity == Granularity::group) {
        options.group_size = 48;
        options.scale_dtype = DType::bf16;
        add(options, {{7, 100}});
      }
    }
  for (const auto& granularity : {Granularity::channel, Granularity::tensor, Granularity::group}) {
    QuantizeOptions options = options_for(Format::fp8, Layout::compressed_tensors);
    options.granularity = granularity;
    add(options, {{33, 200}, {7, 64}, {300, 140}});
  }
  add(options_for(Format::fp8, Layout::fp8), {{33, 200}, {7, 64}, {257, 384}});
  for (const io::LayoutInfo* layout : layouts_of_matrices())
    for (const FormatInfo& format : all_formats())
      if (layout->formats.empty() ||
          std::ranges::find(layout->formats, format.format) != layout->formats.end())
        add(options_for(format.format, layout->layout),
            {{layout->packing == io::Packing::rows ? 4 : 32, 256}});  // words of rows
  return cases;
}

TEST(Layouts, AreListedWithTheirWords) {
  const auto layouts = io::all_layouts();
  for (const io::LayoutInfo* layout : layouts) {
    EXPECT_STREQ(to_string(layout->layout), layout->name);
    EXPECT_EQ(parse_layout(layout->name), layout->layout);
  }
  EXPECT_THROW(to_string(static_cast<Layout>(layouts.size())), Error) << "all_layouts() lacks a layout";
}

TEST_F(CheckpointTest, RoundTripEveryLayoutFormatGranularityAndShape) {
  for (const Case& c : all_cases())
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      const StoredValues tensor = random_tensor("a.weight", dtype, c.shape);
      const std::string input = write_input({tensor});
      QuantizeOptions options = c.options;
      options.force = true;
      options.num_threads = 1;
      const CheckpointReport report = quantize_checkpoint(input, path("out"), options);
      ASSERT_EQ(report.num_quantized, 1);
      const WeightReport& weight = report.weights[0];
      SCOPED_TRACE(fmt::format(
          "{} {} {} group {} asymmetric {} double {} of {} [{}]", to_string(*report.layout),
          info(weight.spec.format).name, to_string(weight.spec.granularity), weight.spec.group_size,
          weight.spec.asymmetric, weight.spec.double_quant, to_string(dtype), fmt::join(c.shape, ", ")));
      EXPECT_TRUE(weight.measured);
      EXPECT_EQ(report.output_bytes, weight.output_bytes);

      const Checkpoint written = Checkpoint::open(path("out"));
      ASSERT_EQ(written.weights().size(), 1u);
      EXPECT_EQ(written.weights()[0].name, "a.weight");
      EXPECT_EQ(written.weights()[0].shape, c.shape);
      EXPECT_EQ(written.weights()[0].dtype, dtype);
      EXPECT_EQ(written.weights()[0].layout, report.layout);
      EXPECT_EQ(written.weights()[0].num_bytes, weight.output_bytes);
      EXPECT_EQ(written.weights()[0].spec.format, weight.spec.format);
      EXPECT_EQ(bits_per_weight(written.weights()[0]), weight.bits_per_weight);
      for (const DType out : {DType::f32, dtype})
        ASSERT_EQ(decode_all(written, "a.weight", out), expected_values(tensor, weight, out, *report.layout));
    }
}

TEST_F(CheckpointTest, DecodesAnyRange) {
  for (const Case& c : all_cases()) {
    if (c.shape != std::vector<int64_t>{33, 200} && c.shape != std::vector<int64_t>{33, 384} &&
        c.shape != std::vector<int64_t>{96, 384})
      continue;
    const std::string input = write_input({random_tensor("a.weight", DType::bf16, c.shape)});
    QuantizeOptions options = c.options;
    options.force = true;
    options.verify = false;
    quantize_checkpoint(input, path("out"), options);
    const Checkpoint written = Checkpoint::open(path("out"));
    const std::vector<std::byte> all = decode_all(written, "a.weight", DType::f32);
    const int64_t n = product(c.shape);
    std::mt19937 rng(7);
    for (int i = 0; i < 20; ++i) {
      const int64_t begin = std::uniform_int_distribution<int64_t>(0, n)(rng);
      const int64_t count = std::uniform_int_distribution<int64_t>(0, n - begin)(rng);
      std::vector<float> part(static_cast<size_t>(count));
      written.decode(*written.find("a.weight"), begin, count, DType::f32, part.data());
      ASSERT_EQ(std::memcmp(part.data(), all.data() + begin * 4, static_cast<size_t>(count * 4)), 0)
          << info(c.options.format).name << " [" << begin << ", +" << count << ")";
    }
  }
}

// Several blocks: larger than kBlockElements, in rows that a block does not divide.
TEST_F(CheckpointTest, LargeTensorsAreTheSameForEveryNumberOfThreads) {
  const StoredValues tensor = random_tensor("a.weight", DType::bf16, {1512, 2048});
  const std::string input = write_input({tensor, random_tensor("b.norm.weight", DType::bf16, {3, 799'999})});
  std::vector<QuantizeOptions> runs = {options_for(Format::nf4),
                                       options_for(Format::int4),
                                       options_for(Format::affine3),
                                       options_for(Format::int5),
                                       options_for(Format::int4, Layout::gptq),
                                       options_for(Format::int4, Layout::awq)};
  runs[0].double_quant = true;
  runs[1].asymmetric = true;
  runs[3].granularity = Granularity::tensor;
  for (QuantizeOptions& options : runs) {
    options.force = true;
    std::string first;
    WeightReport first_report;
    for (const int threads : {1, 2, 16}) {
      options.num_threads = threads;
      const CheckpointReport report = quantize_checkpoint(input, path("out"), options);
      const std::string bytes = read_file(path("out"));
      const WeightReport& weight = report.weights[0];
      if (first.empty()) {
        first = bytes;
        first_report = weight;
        EXPECT_EQ(decode_all(Checkpoint::open(path("out")), "a.weight", DType::f32),
                  expected_values(tensor, weight, DType::f32));
      }
      EXPECT_TRUE(bytes == first) << info(options.format).name << ", " << threads << " threads";
      EXPECT_EQ(weight.relative_rmse, first_report.relative_rmse);
      EXPECT_EQ(weight.max_error, first_report.max_error);
      EXPECT_EQ(weight.max_error_index, first_report.max_error_index);
    }
  }
}

TEST_F(CheckpointTest, ReportsTheError) {
  const StoredValues tensor = random_tensor("a.weight", DType::f32, {64, 256});
  const std::string input = write_input({tensor});
  const CheckpointReport report = quantize_checkpoint(input, path("out"), options_for(Format::nf4));
  const std::vector<std::byte> decoded = decode_all(Checkpoint::open(path("out")), "a.weight", DType::f32);
  double error2 = 0, source2 = 0, largest = 0;
  int64_t index = 0;
  for (int64_t i = 0; i < 64 * 256; ++i) {
    float x, y;
    std::memcpy(&x, tensor.bytes.data() + i * 4, 4);
    std::memcpy(&y, decoded.data() + i * 4, 4);
    const double error = static_cast<double>(y) - static_cast<double>(x);
    error2 += error * error;
    source2 += static_cast<double>(x) * static_cast<double>(x);
    if (std::abs(error) > largest) largest = std::abs(error), index = i;
  }
  EXPECT_EQ(report.weights[0].max_error, largest);
  EXPECT_EQ(report.weights[0].max_error_index, index);
  EXPECT_NEAR(report.weights[0].relative_rmse, std::sqrt(error2 / source2), 1e-12);
  EXPECT_NEAR(report.weights[0].snr_db, -10 * std::log10(error2 / source2), 1e-9);
  EXPECT_EQ(report.weights[0].bits_per_weight,
            8 * static_cast<double>(report.weights[0].output_bytes) / (64 * 256));

  const std::vector<CompareRow> rows = compare_checkpoints(input, path("out"));
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].max_error, largest);
  EXPECT_EQ(rows[0].max_error_index, index);
  EXPECT_NEAR(rows[0].relative_rmse, std::sqrt(error2 / source2), 1e-12);
}

// ---- Bytes that the libraries of the layouts give (executed, see docs/formats.md)

std::string hex_of(const Checkpoint& checkpoint, const std::string& name) {
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (tensor.name != name) continue;
    std::vector<std::byte> bytes(tensor.num_bytes);
    checkpoint.read(tensor, 0, bytes);
    std::string hex;
    for (const std::byte byte : bytes) hex += fmt::format("{:02x}", static_cast<int>(byte));
    return hex;
  }
  return "no tensor " + name;
}

const std::vector<float> kSmall = {0.1f, -0.2f, 0.3f,  -0.4f, 0.5f,   -0.6f,
                                   0.7f, -0.8f, 0.05f, 0,     -0.33f, 0.66f};

TEST_F(CheckpointTest, BytesOfBitsandbytes) {
  const std::string input =
      write_input({make_tensor("a.weight", DType::f32, {2, 6}, kSmall),
                   make_tensor("b.weight", DType::f32, {1, 5}, {kSmall.begin(), kSmall.begin() + 5})});
  quantize_checkpoint(input, path("nf4"), options_for(Format::nf4));
  const Checkpoint nf4 = Checkpoint::open(path("nf4"));
  EXPECT_EQ(hex_of(nf4, "a.weight"), "94b2d1f0873e");
  EXPECT_EQ(hex_of(nf4, "a.weight.absmax"), "cdcc4c3f");
  EXPECT_EQ(hex_of(nf4, "b.weight"), "93d1f7");
  EXPECT_EQ(nf4.impl().read_text(*nf4.impl().find("a.weight.quant_state.bitsandbytes__nf4")),
            R"({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 6]})");
  quantize_checkpoint(input, path("fp4"), options_for(Format::fp4));
  EXPECT_EQ(hex_of(Checkpoint::open(path("fp4")), "a.weight"), "6f4d2a3b10c2");

  QuantizeOptions nested = options_for(Format::nf4);
  nested.double_quant = true;
  std::vector<float> scaled;
  for (const float absmax : {0.8f, 0.5f, 0.9f, 0.6f}) scaled.insert(scaled.end(), 64, absmax);
  quantize_checkpoint(write_input({make_tensor("a.weight", DType::f32, {4, 64}, scaled)}), path("nested"),
                      nested);
  const Checkpoint written = Checkpoint::open(path("nested"));
  EXPECT_EQ(hex_of(written, "a.weight.absmax"), "db00ff23");
  const auto state =
      json::parse(written.impl().read_text(*written.impl().find("a.weight.quant_state.bitsandbytes__nf4")));
  EXPECT_EQ(state["nested_offset"].get<double>(),
            static_cast<double>(written.impl().quantized[0].weight.scales_offset));
  EXPECT_NEAR(state["nested_offset"].get<double>(), 0.7, 1e-6);
}

TEST_F(CheckpointTest, BytesOfCompressedTensors) {
  const std::string input = write_input({make_tensor(
      "a.weight", DType::f32, {2, 8},
      {0.7f, -0.8f, 0.05f, 0, -0.33f, 0.66f, 0.12f, -0.5f, 0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f})});
  QuantizeOptions options = options_for(Format::int4);
  options.group_size = 8;
  quantize_checkpoint(input, path("symmetric"), options);
  const Checkpoint symmetric = Checkpoint::open(path("symmetric"));
  EXPECT_EQ(hex_of(symmetric, "a.weight_packed"), "0f88e539a9cbedff");
  EXPECT_EQ(hex_of(symmetric, "a.weight_shape"), "02000000000000000800000000000000");
  options.asymmetric = true;
  quantize_checkpoint(input, path("asymmetric"), options);
  const Checkpoint asymmetric = Checkpoint::open(path("asymmetric"));
  EXPECT_EQ(hex_of(asymmetric, "a.weight_packed"), "0f88f5394286b9fd");
  EXPECT_EQ(hex_of(asymmetric, "a.weight_zero_point"), "08000000");
}

// Of a weight whose native parts are these, the bytes of a part as the layout stores it; and that they come
// back.
std::string stored_hex(const io::QuantizedWeight& weight, io::Role role, std::vector<std::byte> native) {
  const io::Block block = io::block_at(weight, 0, product(weight.shape));
  EXPECT_EQ(native.size(), static_cast<size_t>(io::native_bytes(weight, block, role)));
  const std::vector<std::byte> given = native;
  io::Buffer scratch;
  const std::span<const std::byte> stored = io::to_stored(weight, block, role, native.data(), scratch);
  EXPECT_EQ(stored.size(), io::stored_range(weight, block, role).num_bytes());
  std::vector<std::byte> back(given.size());
  io::to_native(weight, block, role, stored.data(), back.data());
  EXPECT_TRUE(back == given);
  std::string hex;
  for (const std::byte byte : stored) hex += fmt::format("{:02x}", static_cast<int>(byte));
  return hex;
}

TEST_F(CheckpointTest, BytesOfGptqAndAwq) {
  QuantSpec spec{.format = Format::int4, .asymmetric = true, .granularity = Granularity::channel};
  spec.scale_dtype = DType::f16;
  io::QuantizedWeight weight = io::written_weight("a.weight", {8, 8}, DType::f16, Layout::gptq, spec);
  // Of output n and input k: (8 k + n) % 16; two in a byte.
  std::vector<std::byte> codes;
  for (int n = 0; n < 8; ++n)
    for (int k = 0; k < 8; k += 2)
      codes.push_back(static_cast<std::byte>((8 * k + n) % 16 | (8 * (k + 1) + n) % 16 << 4));
  EXPECT_EQ(stored_hex(weight, io::Role::codes, codes),
            "8080808091919191a2a2a2a2b3b3b3b3c4c4c4c4d5d5d5d5e6e6e6e6f7f7f7f7");
  std::vector<std::byte> zeros;
  for (const int zero : {0, 1, 8, 15, 3, 4, 5, 6}) zeros.push_back(static_cast<std::byte>(zero));
  EXPECT_EQ(stored_hex(weight, io::Role::zeros, zeros), "10f84365");
  weight.words.zeros_less_one = true;
  expect_error(ErrorCode::bad_input, "row 0 has a zero point of 0",
               [&] { stored_hex(weight, io::Role::zeros, zeros); });
  zeros[0] = std::byte{2};
  EXPECT_EQ(stored_hex(weight, io::Role::zeros, zeros), "01e73254");
  EXPECT_EQ(io::columnwise_zero_words(weight, 7), std::vector<uint32_t>{0x77777777});

  weight.layout = Layout::awq;
  weight.words = {};
  std::vector<std::byte> rows;  // row n has code n
  for (int n = 0; n < 8; ++n) rows.insert(rows.end(), 4, static_cast<std::byte>(n * 17));
  std::string hex;
  for (int k = 0; k < 8; ++k) hex += "20643175";
  EXPECT_EQ(stored_hex(weight, io::Role::codes, rows), hex);
}

// Planar words and columns in another order: only read from files, but written as well.
TEST_F(CheckpointTest, WordsOfEveryFormComeBack) {
  std::mt19937 rng(5);
  for (const Format format :
       {Format::int2, Format::int3, Format::int4, Format::int5, Format::int6, Format::int8})
    for (const bool planar : {false, true})
      for (const bool ordered : {false, true}) {
        QuantSpec spec{.format = format, .asymmetric = true, .group_size = 48};
        spec.scale_dtype = DType::f16;
        io::QuantizedWeight weight =
            io::written_weight("a.weight", {64, 160}, DType::f16, Layout::gptq, spec);
        weight.words.planar = planar;
        if (ordered) {
          weight.words.order.resize(160);
          for (size_t i = 0; i < 160; ++i) weight.words.order[i] = static_cast<int32_t>(i);
          std::ranges::shuffle(weight.words.order, rng);
        }
        const io::Block block = io::block_at(weight, 0, 64 * 160);
        ASSERT_EQ(block.count, 64 * 160);
        const int bits = info(format).bits;
        for (const io::Role role : {io::Role::codes, io::Role::scales, io::Role::zeros}) {
          std::vector<std::byte> native(static_cast<size_t>(io::native_bytes(weight, block, role)));
          for (std::byte& byte : native)
            byte = static_cast<std::byte>(role == io::Role::zeros ? rng() % (1u << bits) : rng() % 256);
          SCOPED_TRACE(fmt::format("{} planar {} ordered {}", info(format).name, planar, ordered));
          stored_hex(weight, role, native);
        }
      }
}

TEST_F(CheckpointTest, CompressedTensorsPadsWithZeroBitsAndWritesEpsForZeroGroups) {
  std::vector<float> values(2 * 9, 0.0f);
  values[0] = 7;
  const std::string input = write_input({make_tensor("a.weight", DType::bf16, {2, 9}, values)});
  QuantizeOptions options = options_for(Format::int4);
  options.granularity = Granularity::channel;
  options.scale_rule = ScaleRule::absmax;
  quantize_checkpoint(input, path("out"), options);
  const Checkpoint written = Checkpoint::open(path("out"));
  EXPECT_EQ(hex_of(written, "a.weight_packed"),
            "8f88888808000000"
            "8888888808000000");
  EXPECT_EQ(hex_of(written, "a.weight_scale"),
            "803f"
            "003c");  // 1, 2^-7
}

TEST_F(CheckpointTest, BytesOfMlx) {
  std::vector<float> values;
  for (int i = 0; i < 32; ++i) values.push_back(static_cast<float>(i - 10) / 16);
  const std::string input = write_input({make_tensor("a.weight", DType::f32, {1, 32}, values)});
  QuantizeOptions options = options_for(Format::affine4);
  options.group_size = 32;
  quantize_checkpoint(input, path("4"), options);
  const Checkpoint four = Checkpoint::open(path("4"));
  EXPECT_EQ(hex_of(four, "a.weight"), "efdecdbcabaa99887766554433221100");
  EXPECT_EQ(hex_of(four, "a.biases"), "0000a83f");
  options.format = Format::affine3;
  quantize_checkpoint(input, path("3"), options);
  EXPECT_EQ(hex_of(Checkpoint::open(path("3")), "a.weight"), "ff6fdb6d5b92dc36494a1200");
}

// ---- Directories

// Experts of two shards become one tensor; a router has bits of its own; what mlx-lm does not load is left
// out.
TEST_F(CheckpointTest, ModelOfMlxLm) {
  fs::create_directories(dir_ / "moe");
  const std::string layer = "model.layers.0.mlp.";
  std::vector<StoredValues> tensors{
      random_tensor("model.embed_tokens.weight", DType::bf16, {64, 128}, 1),
      random_tensor(layer + "experts.1.up_proj.weight", DType::bf16, {32, 128}, 2),
      random_tensor(layer + "experts.0.up_proj.weight", DType::bf16, {32, 128}, 3),
      random_tensor(layer + "gate.weight", DType::bf16, {2, 128}, 4),
      random_tensor("lm_head.weight", DType::bf16, {64, 128}, 5),
  };
  write_model(dir_ / "moe/model.safetensors", tensors);
  write_file(dir_ / "moe/config.json", R"({"model_type": "qwen3_moe", "tie_word_embeddings": true})");
  QuantizeOptions options = options_for(Format::affine4, Layout::mlx);
  options.group_size = 32;
  const CheckpointReport report = quantize_checkpoint(path("moe"), path("out"), options);
  EXPECT_EQ(report.num_quantized, 3);
  EXPECT_EQ(report.weights.size(), 3U);
  EXPECT_EQ(report.left_out, (std::vector<std::string>{"lm_head.weight"}));
  const Checkpoint written = Checkpoint::open(path("out")), source = Checkpoint::open(path("moe"));
  EXPECT_EQ(written.find("lm_head.weight"), nullptr);
  const Weight& router = *written.find(layer + "gate.weight");
  EXPECT_EQ(router.spec.format, Format::affine8);
  EXPECT_EQ(router.spec.group_size, 64);
  const Weight& experts = *written.find(layer + "switch_mlp.up_proj.weight");
  EXPECT_EQ(experts.shape, (std::vector<int64_t>{2, 32, 128}));
  EXPECT_EQ(experts.spec.format, Format::affine4);

  // The same, of experts that came stacked.
  StoredValues stacked = tensors[2];
  stacked.name = layer + "switch_mlp.up_proj.weight";
  stacked.shape = {2, 32, 128};
  stacked.bytes.insert(stacked.bytes.end(), tensors[1].bytes.begin(), tensors[1].bytes.end());
  fs::create_directories(dir_ / "stacked");
  write_model(dir_ / "stacked/model.safetensors", {tensors[0], stacked});
  write_file(dir_ / "stacked/config.json", R"({"model_type": "qwen3_moe", "tie_word_embeddings": true})");
  quantize_checkpoint(path("stacked"), path("other"), options);
  EXPECT_TRUE(decode_all(written, experts.name, DType::f32) ==
              decode_all(Checkpoint::open(path("other")), experts.name, DType::f32));

  options.keep_embeddings = true;
  options.dry_run = true;
  EXPECT_EQ(quantize_checkpoint(path("moe"), "", options).num_quantized, 2);

  // Norms that mlx-lm adds 1 to: 1 + 2^-8 is 1 in bf16, and 1 + 3 * 2^-8 is 1 + 2^-6.
  options.dry_run = false;
  tensors.push_back(make_tensor("model.norm.weight", DType::bf16, {3}, {0.5F, 0x1p-8F, 0x3p-8F}));
  fs::create_directories(dir_ / "next");
  write_model(dir_ / "next/model.safetensors", tensors);
  write_file(dir_ / "next/config.json", R"({"model_type": "qwen3_next", "tie_word_embeddings": true})");
  quantize_checkpoint(path("next"), path("next-out"), options);
  EXPECT_EQ(hex_of(Checkpoint::open(path("next-out")), "model.norm.weight"), "c03f803f823f");

  write_file(dir_ / "next/config.json", R"({"model_type": "falcon_h1"})");
  EXPECT_THROW(quantize_checkpoint(path("next"), path("refused"), options), Error);
}

TEST_F(CheckpointTest, DirectoryAndBack) {
  const std::string input = write_model_directory();
  for (const io::LayoutInfo* layout : layouts_of_matrices()) {
    const std::string name = layout->name;
    const Format format = layout->formats.empty() ? Format::int6 : layout->formats.back();
    QuantizeOptions options = options_for(format, layout->layout);
    options.reader = Reader::none;  // which of the weights a reader wants is not tested here
    const CheckpointReport report = quantize_checkpoint(input, path(name), options);
    SCOPED_TRACE(name);
    EXPECT_EQ(report.num_quantized, 2);
    EXPECT_EQ(report.copied_files, (std::vector<std::string>{"sub/code.py", "tokenizer.json"}));
    EXPECT_EQ(report.skipped_files,
              (std::vector<std::string>{".cache/", "consolidated.safetensors", "pytorch_model.bin"}));
    EXPECT_EQ(read_file(dir_ / name / "sub/code.py"), "pass");
    EXPECT_FALSE(fs::exists(dir_ / name / "pytorch_model.bin"));
    EXPECT_FALSE(fs::exists(dir_ / name / ".cache"));

    const json index = json::parse(read_file(dir_ / name / "model.safetensors.index.json"));
    const Checkpoint written = Checkpoint::open(path(name));  // checks the weight map
    EXPECT_EQ(index["metadata"]["note"], "kept");
    EXPECT_EQ(index["metadata"]["total_size"], report.output_bytes);
    EXPECT_TRUE(written.find("model.layers.0.mlp.up_proj.weight")->layout.has_value());
    EXPECT_FALSE(written.find("model.layers.1.mlp.gate.weight")->layout.has_value());
    EXPECT_FALSE(written.find("lm_head.weight")->layout.has_value());

    const CheckpointReport back = dequantize_checkpoint(path(name), path(name + "-back"), {});
    EXPECT_EQ(back.num_quantized, 2);
    EXPECT_EQ(back.layout, report.layout);
    EXPECT_EQ(json::parse(read_file(dir_ / (name + "-back") / "config.json")), json::parse(kConfig));
    const Checkpoint dense = Checkpoint::open(path(name + "-back")), source = Checkpoint::open(input);
    ASSERT_EQ(dense.tensors().size(), source.tensors().size());
    for (size_t i = 0; i < source.weights().size(); ++i) {
      const Weight &a = source.weights()[i], &b = dense.weights()[i];
      EXPECT_EQ(a.name, b.name);
      EXPECT_EQ(a.shape, b.shape);
      EXPECT_EQ(a.dtype, b.dtype);
      EXPECT_EQ(source.impl().tensors[static_cast<size_t>(a.parts[0])].file,
                dense.impl().tensors[static_cast<size_t>(b.parts[0])].file);
      EXPECT_EQ(decode_all(written, a.name, DType::bf16), decode_all(dense, a.name, DType::bf16));
    }
    for (const CompareRow& row : compare_checkpoints(path(name), path(name + "-back"))) {
      EXPECT_EQ(row.problem, "");
      EXPECT_GT(row.snr_db, 40);
    }
  }
}

TEST_F(CheckpointTest, Configs) {
  const std::string input = write_model_directory();
  QuantizeOptions options = options_for(Format::nf4);
  options.double_quant = true;
  quantize_checkpoint(input, path("nf4"), options);
  EXPECT_EQ(json::parse(read_file(dir_ / "nf4/config.json"))["quantization_config"], json::parse(R"({
    "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": true, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp.gate"]})"));
  quantize_checkpoint(input, path("int4"), options_for(Format::int4));
  const json int4 = json::parse(read_file(dir_ / "int4/config.json"));
  EXPECT_EQ(int4["quantization_config"], json::parse(R"({
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "model.layers.1.mlp.gate"], "config_groups": {"group_0": {"targets": ["Linear"],
    "input_activations": null, "output_activations": null, "weights": {"num_bits": 4, "type": "int", "symmetric": true,
    "strategy": "group", "group_size": 128, "dynamic": false}}}})"));
  EXPECT_EQ(int4["rms_norm_eps"], 1e-05);
  quantize_checkpoint(input, path("mlx"), options_for(Format::affine4));
  const json mlx = json::parse(read_file(dir_ / "mlx/config.json"));
  EXPECT_EQ(mlx["quantization"], json::parse(R"({"group_size": 64, "bits": 4, "mode": "affine"})"));
  EXPECT_EQ(mlx["quantization_config"], mlx["quantization"]);
  quantize_checkpoint(input, path("int6"), options_for(Format::int6));
  EXPECT_EQ(
      json::parse(read_file(dir_ / "int6/config.json"))["quantization_config"],
      json::parse(R"({"quant_method": "halfbyte", "version": 1, "format": "int6", "granularity": "group",
                            "group_size": 64})"));
  DequantizeOptions to_f16;
  to_f16.dtype = DType::f16;
  dequantize_checkpoint(path("int6"), path("f16"), to_f16);
  EXPECT_EQ(json::parse(read_file(dir_ / "f16/config.json"))["dtype"], "float16");
  EXPECT_EQ(Checkpoint::open(path("f16")).find("model.layers.0.mlp.up_proj.weight")->dtype, DType::f16);

  // Everything that is quantized leaves lm_head out of the skipped modules.
  options.include = {"proj", "lm_head"};
  quantize_checkpoint(input, path("all"), options);
  EXPECT_EQ(json::parse(read_file(dir_ / "all/config.json"))["quantization_config"]["llm_int8_skip_modules"],
            json::parse(R"(["model.layers.1.mlp.gate"])"));
}

TEST_F(CheckpointTest, Metadata) {
  const auto metadata = [&](const std::string& name) {
    return Checkpoint::open(path(name)).impl().files[0].metadata;
  };
  const StoredValues tensor = random_tensor("a.weight", DType::bf16, {4, 64});
  const std::string input = write_input({tensor}, {{"origin", "x"}});
  quantize_checkpoint(input, path("nf4"), options_for(Format::nf4));
  EXPECT_EQ(metadata("nf4"), (io::Metadata{{"origin", "x"}, {"format", "pt"}}));
  quantize_checkpoint(input, path("mlx"), options_for(Format::affine4));
  EXPECT_EQ(metadata("mlx"),
            (io::Metadata{{"origin", "x"},
                          {"format", "mlx"},
                          {"quantization", R"({"group_size":64,"bits":4,"mode":"affine"})"}}));
  dequantize_checkpoint(path("mlx"), path("dense"), {});
  EXPECT_EQ(metadata("dense"), (io::Metadata{{"origin", "x"}, {"format", "pt"}}));
}

// ---- What is selected

TEST_F(CheckpointTest, SelectsLinearWeights) {
  std::vector<StoredValues> tensors;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape,
                       DType dtype = DType::bf16) { tensors.push_back(random_tensor(name, dtype, shape)); };
  const std::vector<std::string> selected = {
      "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight",
      "encoder.layer.0.output.dense.weight", "model.layers.0.mlp.experts.down_proj"};
  for (const std::string& name : selected)
    add(name, name.ends_with("weight") ? std::vector<int64_t>{4, 64} : std::vector<int64_t>{2, 4, 64});
  for (const std::string name :
       {"model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight", "output.weight",
        "shared.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.router.weight",
        "model.norm.weight", "decoder.relative_attention_bias.weight", "lora_A.default",
        "model.experts.bias"})
    add(name, {4, 64});
  add("model.layers.0.input_layernorm.bias", {64});
  add("conv.weight", {2, 2, 64});
  add("f64.weight", {2, 64}, DType::f64);
  add("empty.weight", {0, 64});
  add(std::string(1100, 'a') + ".weight", {4, 64});
  const std::string input = write_input(tensors);
  QuantizeOptions options = options_for(Format::nf4);
  options.dry_run = true;
  const auto quantized = [&] {
    std::vector<std::string> names;
    for (const WeightReport& weight : quantize_checkpoint(input, "", options).weights)
      if (weight.quantized) names.push_back(weight.name);
    return names;
  };
  std::vector<std::string> sorted = selected;
  std::ranges::sort(sorted);
  EXPECT_EQ(quantized(), sorted);
  options.exclude = {"gate_proj", "^encoder"};
  EXPECT_EQ(quantized(), (std::vector<std::string>{"model.layers.0.mlp.experts.down_proj",
                                                   "model.layers.0.self_attn.q_proj.weight"}));
  options.exclude.clear();
  options.include = {"lora_A", "lm_head", "empty"};
  EXPECT_EQ(quantized(), (std::vector<std::string>{"lm_head.weight", "lora_A.default"}));
  for (const WeightReport& weight : quantize_checkpoint(input, "", options).weights) {
    const std::string reason = weight.quantized                ? ""
                               : weight.name == "empty.weight" ? "empty"
                                                               : "not selected";
    EXPECT_EQ(weight.reason, reason) << weight.name;
  }
  // The same without the file.
  options.layout = Layout::halfbyte;
  const Checkpoint checkpoint = Checkpoint::open(input);
  for (const std::vector<std::string>& include : {options.include, std::vector<std::string>()}) {
    options.include = include;
    std::vector<std::string> reasons;
    for (const WeightReport& weight : quantize_checkpoint(input, "", options).weights)
      reasons.push_back(weight.reason);
    EXPECT_EQ(dense_reasons("", checkpoint.weights(), options), reasons);
  }
  options.layout = {};
  options.include = {"f64"};
  expect_error(ErrorCode::usage, "\"f64.weight\", which is F64", [&] { quantized(); });
  options.include = {"nothing"};
  expect_error(ErrorCode::usage, "nothing to quantize", [&] { quantized(); });
  options.include = {"["};
  expect_error(ErrorCode::usage, "include: \"[\" is not a regular expression", [&] { quantized(); });
  options.include = {};
  options.exclude = {"("};
  expect_error(ErrorCode::usage, "exclude: \"(\" is not a regular expression", [&] { quantized(); });
  EXPECT_EQ(names(), (std::vector<std::string>{"in.safetensors"}));  // dry runs write nothing
}

TEST_F(CheckpointTest, ExpertsOfThreeDimensions) {
  // 9 rows: words of zero points must not run from one expert into the next.
  const StoredValues tensor = random_tensor("mlp.experts.gate_up_proj", DType::bf16, {3, 9, 256});
  const std::string input = write_input({tensor});
  QuantizeOptions asymmetric = options_for(Format::int4);
  asymmetric.asymmetric = true;
  for (const QuantizeOptions& options : {options_for(Format::nf4), options_for(Format::int4), asymmetric,
                                         options_for(Format::affine4), options_for(Format::int3)}) {
    const std::string output = path(fmt::format("{}{}", info(options.format).name, options.asymmetric));
    const CheckpointReport report = quantize_checkpoint(input, output, options);
    const Checkpoint written = Checkpoint::open(output);
    // MLX has no name for a weight that is not called so.
    const std::string name = report.layout == Layout::mlx ? tensor.name + ".weight" : tensor.name;
    ASSERT_NE(written.find(name), nullptr);
    EXPECT_EQ(written.find(name)->shape, tensor.shape);
    EXPECT_EQ(decode_all(written, name, DType::f32), expected_values(tensor, report.weights[0], DType::f32));
  }
  const Checkpoint packed = Checkpoint::open(path("int4true"));
  EXPECT_EQ(packed.impl().find("mlp.experts.gate_up_proj_zero_point")->shape,
            (std::vector<int64_t>{3, 2, 2}));
}

// ---- What is refused

TEST_F(CheckpointTest, LayoutsRefuseWhatTheyCannotSay) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {4, 128})});
  const auto refused = [&](const char* text, Format format, std::optional<Layout> layout, const auto& set) {
    QuantizeOptions options = options_for(format, layout);
    set(options);
    expect_error(ErrorCode::usage, text, [&] { quantize_checkpoint(input, path("out"), options); });
  };
  const auto none = [](QuantizeOptions&) {};
  refused("layout mlx: format must be affine2 or", Format::nf4, Layout::mlx, none);
  refused("layout bitsandbytes: format must be nf4 or fp4, got int4", Format::int4, Layout::bitsandbytes,
          none);
  refused("layout compressed-tensors: format must be int4 or int8 or nvfp4 or mxfp4 or fp8, got int3",
          Format::int3, Layout::compressed_tensors, none);
  refused("layout mlx: group size must be 32 or 64 or 128, got 48", Format::affine4, {},
          [](auto& o) { o.group_size = 48; });
  refused("layout bitsandbytes: group size must be", Format::nf4, {}, [](auto& o) { o.group_size = 16; });
  refused("layout bitsandbytes: granularity must be flat, got channel", Format::nf4, {},
          [](auto& o) { o.granularity = Granularity::channel; });
  refused("layout compressed-tensors: granularity must be group or channel, got tensor", Format::int4, {},
          [](auto& o) { o.granularity = Granularity::tensor; });
  refused("layout compressed-tensors: scale dtype must be that of the weights, which is bf16, got f32",
          Format::int4, {}, [](auto& o) { o.scale_dtype = DType::f32; });
  refused("layout bitsandbytes: scale dtype must be f32, got f16", Format::nf4, {},
          [](auto& o) { o.scale_dtype = DType::f16; });
  refused("layout halfbyte: scale dtype must be", Format::int3, {},
          [](auto& o) { o.scale_dtype = DType::f64; });
  refused("layout compressed-tensors: scale rule must be half-range or absmax, got minmax", Format::int4, {},
          [](auto& o) { o.scale_rule = ScaleRule::minmax; });
  for (const Layout layout : {Layout::compressed_tensors, Layout::gptq, Layout::awq})
    refused("scale rule signed-max makes negative scales, which its readers are not known to take",
            Format::int4, layout, [](auto& o) { o.scale_rule = ScaleRule::signed_max; });
  refused("layout gptq: format must be int4 or int2 or int3 or int8, got int5", Format::int5, Layout::gptq,
          none);
  refused("layout awq: format must be int4, got int8", Format::int8, Layout::awq, none);
  refused("layout gptq: scale dtype must be f16, got f32", Format::int4, Layout::gptq,
          [](auto& o) { o.scale_dtype = DType::f32; });
  refused("layout compressed-tensors: double quantization must be off", Format::int4, {},
          [](auto& o) { o.double_quant = true; });
  refused("layout bitsandbytes: has no zero points", Format::nf4, {}, [](auto& o) { o.asymmetric = true; });
  refused("does not fit format", Format::int4, {},
          [](auto& o) { o.asymmetric = true, o.scale_rule = ScaleRule::absmax; });
  refused("group size 64 does not go with granularity channel", Format::int3, {},
          [](auto& o) { o.granularity = Granularity::channel, o.group_size = 64; });
  refused("group_size must be positive, got 0", Format::int3, {}, [](auto& o) { o.group_size = 0; });
  refused("num_threads must not be negative", Format::nf4, {}, [](auto& o) { o.num_threads = -1; });
  EXPECT_EQ(names(), (std::vector<std::string>{"in.safetensors"}));
}

TEST_F(CheckpointTest, ShapesThatDoNotFit) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {4, 128}),
                                         random_tensor("b.weight", DType::bf16, {4, 100}),
                                         random_tensor("c.weight", DType::bf16, {4, 4})});
  QuantizeOptions options = options_for(Format::int4);
  expect_error(ErrorCode::bad_input,
               "2 of the selected weights cannot be quantized: \"b.weight\", \"c.weight\" (layout "
               "compressed-tensors: 100 columns are not a multiple of the group size 128)",
               [&] { quantize_checkpoint(input, path("out"), options); });
  options.fallback_dense = true;
  const CheckpointReport report = quantize_checkpoint(input, path("out"), options);
  EXPECT_EQ(report.num_quantized, 1);
  EXPECT_EQ(report.weights[1].reason,
            "fallback: layout compressed-tensors: 100 columns are not a multiple of the group size 128");
  EXPECT_FALSE(Checkpoint::open(path("out")).find("b.weight")->layout.has_value());
  options.granularity = Granularity::channel;
  options.force = true;
  EXPECT_EQ(quantize_checkpoint(input, path("out"), options).num_quantized, 2);
  options.include = {"c.weight"};
  expect_error(ErrorCode::usage, "4 columns are fewer than 5",
               [&] { quantize_checkpoint(input, path("out"), options); });
}

// Of x_i = (i - 20) / 16, as compressed-tensors 0.18 writes it.
TEST_F(CheckpointTest, BytesOfBlockFloats) {
  std::vector<float> values;
  for (int i = 0; i < 32; ++i) values.push_back(static_cast<float>(i - 20) / 16);
  const std::string input = write_input({make_tensor("a.weight", DType::f32, {1, 32}, values)});
  quantize_checkpoint(input, path("nvfp4"), options_for(Format::nvfp4));
  const Checkpoint nvfp4 = Checkpoint::open(path("nvfp4"));
  EXPECT_EQ(hex_of(nvfp4, "a.weight_packed"), "ffffeeeededdccbcbc9a103254657677");
  EXPECT_EQ(hex_of(nvfp4, "a.weight_scale"), "7e77");
  EXPECT_EQ(hex_of(nvfp4, "a.weight_global_scale"), "66660645");
  quantize_checkpoint(input, path("modelopt"), options_for(Format::nvfp4, Layout::modelopt));
  const Checkpoint modelopt = Checkpoint::open(path("modelopt"));
  EXPECT_EQ(hex_of(modelopt, "a.weight"), "ffffeeeededdccbcbc9a103254657677");
  EXPECT_EQ(hex_of(modelopt, "a.weight_scale"), "7e77");
  EXPECT_EQ(hex_of(modelopt, "a.weight_scale_2"), "3dcff339");
  quantize_checkpoint(input, path("mxfp4"), options_for(Format::mxfp4));
  const Checkpoint mxfp4 = Checkpoint::open(path("mxfp4"));
  EXPECT_EQ(hex_of(mxfp4, "a.weight_packed"), "eeeeeededdccccabaa89002122434454");
  EXPECT_EQ(hex_of(mxfp4, "a.weight_scale"), "7d");
}

// The forms of other tools that are only read, by hand: E4M3 has 0x38 for 1, 0x3c for 1.5, 0xc0 for -2 and
// 0x01 for 2^-9; E2M1 has 1 for 0.5, 3 for 1.5, 7 for 6 and 9 for -0.5, the first of two in the low half of a
// byte. Exponents are 2^(byte - 127).
TEST_F(CheckpointTest, FloatsOfOthersByHand) {
  const auto bytes_of = [](std::vector<int> values, size_t count, int rest) {
    std::vector<std::byte> bytes(count, static_cast<std::byte>(rest));
    for (size_t i = 0; i < values.size(); ++i) bytes[i] = static_cast<std::byte>(values[i]);
    return bytes;
  };
  struct Form {
    const char* what;
    StoredValues codes, scales;
    Layout layout;
    QuantSpec spec;
    std::vector<float> first;  // four values
    float last;
  };
  const QuantSpec mxfp4{.format = Format::mxfp4, .group_size = 32, .scale_dtype = DType::f8_e8m0},
      nvfp4{.format = Format::nvfp4, .group_size = 16, .scale_dtype = DType::f8_e4m3},
      mxfp8{.format = Format::fp8, .group_size = 32}, blocks{.format = Format::fp8, .group_size = 128};
  const std::vector<int> e4m3 = {0x38, 0x3c, 0xc0, 0x01}, e2m1 = {0x31, 0x97};
  const std::vector<float> f8 = {1, 1.5f, -2, 0x1p-9f}, f4 = {0.5f, 1.5f, 6, -0.5f};
  const auto times = [](std::vector<float> values, float scale) {
    for (float& value : values) value *= scale;
    return values;
  };
  const std::vector<Form> forms = {
      {"DeepSeek-V4, blocks",
       {"a.weight", "F8_E4M3", {2, 64}, bytes_of(e4m3, 128, 0x38)},
       {"a.scale", "F8_E8M0", {1, 1}, bytes_of({130}, 1, 0)},
       Layout::fp8,
       blocks,
       times(f8, 8),
       8},
      {"DeepSeek-V4, F32",
       {"a.weight", "F8_E4M3", {2, 64}, bytes_of(e4m3, 128, 0x38)},
       {"a.scale", "F32", {1, 1}, to_bytes({0.75f}, DType::f32)},
       Layout::fp8,
       blocks,
       times(f8, 0.75f),
       0.75f},
      {"DeepSeek-V4, rows",
       {"a.weight", "F8_E4M3", {2, 64}, bytes_of(e4m3, 128, 0x38)},
       {"a.scale", "F8_E8M0", {2, 2}, bytes_of({126, 1, 2, 254}, 4, 0)},
       Layout::fp8,
       mxfp8,
       times(f8, 0.5f),
       0x1p127f},
      {"DeepSeek-V4, experts",
       {"a.weight", "I8", {2, 32}, bytes_of(e2m1, 64, 0x22)},
       {"a.scale", "F8_E8M0", {2, 2}, bytes_of({129, 1, 2, 0}, 4, 0)},
       Layout::fp8,
       mxfp4,
       times(f4, 4),
       0x1p-127f},
      {"mxfp8-quantized",
       {"a.weight", "F8_E4M3", {2, 64}, bytes_of(e4m3, 128, 0x38)},
       {"a.weight_scale", "U8", {2, 2}, bytes_of({126, 1, 2, 0}, 4, 0)},
       Layout::compressed_tensors,
       mxfp8,
       times(f8, 0.5f),
       0x1p-127f},
      {"mxfp8 of SGLang",
       {"a.weight", "F8_E4M3", {2, 64}, bytes_of(e4m3, 128, 0x38)},
       {"a.weight_scale_inv", "U8", {2, 2}, bytes_of({126, 1, 2, 128}, 4, 0)},
       Layout::fp8,
       mxfp8,
       times(f8, 0.5f),
       2},
      {"mlx mxfp8",
       {"a.weight", "U32", {2, 16}, bytes_of(e4m3, 128, 0x38)},
       {"a.scales", "U8", {2, 2}, bytes_of({126, 1, 2, 128}, 4, 0)},
       Layout::mlx,
       mxfp8,
       times(f8, 0.5f),
       2},
      {"mlx mxfp4",
       {"a.weight", "U32", {2, 8}, bytes_of(e2m1, 64, 0x22)},
       {"a.scales", "U8", {2, 2}, bytes_of({126, 1, 2, 128}, 4, 0)},
       Layout::mlx,
       mxfp4,
       times(f4, 0.5f),
       2},
      {"mlx nvfp4",
       {"a.weight", "U32", {2, 8}, bytes_of(e2m1, 64, 0x22)},
       {"a.scales", "U8", {2, 4}, bytes_of({0x3c, 1, 2, 3, 4, 5, 6, 0x40}, 8, 0)},
       Layout::mlx,
       nvfp4,
       times(f4, 1.5f),
       2},
  };
  for (const Form& form : forms) {
    SCOPED_TRACE(form.what);
    write_model(path("in"), {form.codes, form.scales});
    const Checkpoint checkpoint = Checkpoint::open(path("in"));
    ASSERT_EQ(checkpoint.weights().size(), 1u);
    const Weight& weight = checkpoint.weights()[0];
    EXPECT_EQ(weight.name, "a.weight");
    EXPECT_EQ(weight.layout, form.layout);
    EXPECT_EQ(weight.shape, (std::vector<int64_t>{2, 64}));
    EXPECT_EQ(weight.spec, form.spec);
    EXPECT_EQ(weight.parts.size(), 2u);
    const std::vector<std::byte> bytes = decode_all(checkpoint, "a.weight", DType::f32);
    std::vector<float> values(128);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    EXPECT_EQ(std::vector(values.begin(), values.begin() + 4), form.first);
    EXPECT_EQ(values.back(), form.last);
    const QuantizedTensor loaded = load_weight(checkpoint, "a.weight");
    std::vector<float> again(128);
    dequantize(loaded, {again.data(), DType::f32, {2, 64}, {}, {}});
    EXPECT_EQ(again, values);
    EXPECT_TRUE(verify_checkpoint(path("in")).empty());
  }
}

// Weights of one product share the global scale; blocks of a weight are as the whole.
TEST_F(CheckpointTest, GlobalScalesAreShared) {
  std::vector<StoredValues> tensors;
  for (const char* name : {"q_proj", "k_proj", "o_proj"}) {
    StoredValues tensor = random_tensor(fmt::format("model.layers.0.self_attn.{}.weight", name), DType::bf16,
                                        {1300, 256}, static_cast<unsigned>(tensors.size()));
    const float largest = tensors.empty() ? 3.0f : 1.0f;
    io::convert_elements(reinterpret_cast<const std::byte*>(&largest), DType::f32, 1,
                         tensor.bytes.data() + tensor.bytes.size() - 2, DType::bf16);
    tensors.push_back(tensor);
  }
  const std::string input = write_input(tensors);
  quantize_checkpoint(input, path("out"), options_for(Format::nvfp4));
  const Checkpoint out = Checkpoint::open(path("out"));
  const auto value = [](const Tensor& scale) { return *reinterpret_cast<const float*>(scale.data()); };
  const auto global = [&](const std::string& name) {
    return value(load_weight(out, "model.layers.0.self_attn." + name + ".weight").global_scale);
  };
  EXPECT_EQ(global("q_proj"), 896);
  EXPECT_EQ(global("k_proj"), 896);
  EXPECT_EQ(global("o_proj"), 2688);
  const QuantSpec spec{.format = Format::nvfp4, .group_size = 16, .scale_dtype = DType::f8_e4m3};
  const QuantizedTensor whole = quantize_weight(Checkpoint::open(input), tensors[2].name, spec);
  const QuantizedTensor stored = load_weight(out, tensors[2].name);
  const auto same = [](const Tensor& a, const Tensor& b) {
    return a.num_bytes() == b.num_bytes() &&
           std::memcmp(a.data(), b.data(), static_cast<size_t>(a.num_bytes())) == 0;
  };
  EXPECT_TRUE(same(whole.codes, stored.codes));
  EXPECT_TRUE(same(whole.scales, stored.scales));
  EXPECT_TRUE(same(whole.global_scale, stored.global_scale));
}

// Whatever a file holds, reading it ends with values or with BAD_INPUT.
TEST_F(CheckpointTest, BlockFloatsSurviveEveryTruncationAndFlippedBit) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {2, 32})});
  const auto survives = [&](const std::string& bytes) {
    write_file(dir_ / "damaged", bytes);
    try {
      verify_checkpoint(path("damaged"));
      const Checkpoint checkpoint = Checkpoint::open(path("damaged"));
      for (const Weight& weight : checkpoint.weights()) {
        if (!weight.dtype || !is_floating(*weight.dtype)) continue;
        std::vector<float> values(static_cast<size_t>(product(weight.shape)));
        checkpoint.decode(weight, 0, std::ssize(values), DType::f32, values.data());
      }
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_input) << error.what();
      return false;
    }
  };
  for (const auto& [format, layout] :
       {std::pair(Format::nvfp4, Layout::compressed_tensors),
        std::pair(Format::mxfp4, Layout::compressed_tensors), std::pair(Format::nvfp4, Layout::modelopt),
        std::pair(Format::nvfp4, Layout::halfbyte)}) {
    const std::string output = path(fmt::format("{}-{}", info(format).name, to_string(layout)));
    quantize_checkpoint(input, output, options_for(format, layout));
    const std::string bytes = read_file(output);
    EXPECT_TRUE(survives(bytes));
    for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(survives(bytes.substr(0, size)));
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      std::string flipped = bytes;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      survives(flipped);
    }
  }
}

TEST_F(CheckpointTest, QuantizedInputIsRefused) {
  const StoredValues tensor = random_tensor("a.weight", DType::bf16, {4, 128});
  const std::string input = write_input({tensor});
  for (const Format format : {Format::nf4, Format::affine4, Format::int3}) {
    const std::string output = path(info(format).name);
    quantize_checkpoint(input, output, options_for(format));
    expect_error(ErrorCode::bad_input, "weight \"a.weight\" is already quantized",
                 [&] { quantize_checkpoint(output, path("again"), options_for(Format::nf4)); });
  }
  for (StoredValues extra : {StoredValues{"b.qweight", "I32", {1}, {}}, StoredValues{"b.SCB", "F32", {1}, {}},
                             StoredValues{"b.weight_scale_inv", "F32", {1}, {}},
                             StoredValues{"b.weight", "F8_E4M3", {2, 2}, {}}}) {
    extra.bytes.resize(4);
    write_input({tensor, extra});
    expect_error(ErrorCode::bad_input, "is already quantized (",
                 [&] { quantize_checkpoint(input, path("again"), options_for(Format::nf4)); });
  }
  const std::string model = write_model_directory();
  write_file(dir_ / "model/config.json", R"({"quantization_config": {"quant_method": "fp8"}})");
  expect_error(ErrorCode::bad_input, "already quantized (fp8; from config.json)",
               [&] { quantize_checkpoint(model, path("again"), options_for(Format::nf4)); });
  write_file(dir_ / "model/config.json", R"({"quantization_config": null})");
  EXPECT_EQ(quantize_checkpoint(model, path("again"), options_for(Format::nf4)).num_quantized, 2);
  write_file(dir_ / "model/config.json", R"({"a": 1, "a": 2})");
  expect_error(ErrorCode::bad_input, "config.json: duplicate key \"a\"",
               [&] { quantize_checkpoint(model, path("more"), options_for(Format::nf4)); });
  write_input({tensor});
  expect_error(ErrorCode::bad_input, "has no quantized weights",
               [&] { dequantize_checkpoint(input, path("dense"), {}); });
}

TEST_F(CheckpointTest, NonFiniteWeights) {
  std::vector<float> values(256, 0.5f);
  values[70] = std::numeric_limits<float>::quiet_NaN();
  values[200] = std::numeric_limits<float>::infinity();
  const StoredValues good = random_tensor("good.weight", DType::f32, {4, 64});
  const StoredValues bad = make_tensor("bad.weight", DType::f32, {4, 64}, values);
  const std::string input = write_input({good, bad});
  for (const Format format : {Format::nf4, Format::affine4, Format::int3}) {
    QuantizeOptions options = options_for(format);
    if (format == Format::int3) options.granularity = Granularity::tensor;
    expect_error(ErrorCode::bad_input, "\"bad.weight\" (non-finite: 2 elements, the first at index 70)",
                 [&] { quantize_checkpoint(input, path("out"), options); });
    EXPECT_EQ(names(), (std::vector<std::string>{"in.safetensors"}));
    options.nonfinite = NonFinite::keep_dense;
    const CheckpointReport report = quantize_checkpoint(input, path("out"), options);
    EXPECT_EQ(report.num_quantized, 1);
    EXPECT_EQ(report.weights[0].reason, "non-finite: 2 elements, the first at index 70");
    EXPECT_EQ(hex_of(Checkpoint::open(path("out")), "bad.weight"),
              hex_of(Checkpoint::open(input), "bad.weight"));
    EXPECT_TRUE(Checkpoint::open(path("out")).find("good.weight")->layout.has_value());
    fs::remove(path("out"));
  }
}

TEST_F(CheckpointTest, ScalesThatF16CannotHold) {
  std::vector<float> large(256, 3e6f), small(256, 1e-7f);
  const StoredValues good = random_tensor("good.weight", DType::f32, {4, 64});
  const StoredValues a = make_tensor("large.weight", DType::f32, {4, 64}, large),
                     b = make_tensor("small.weight", DType::f32, {4, 64}, small);
  const std::string input = write_input({good, a, b});
  QuantizeOptions options = options_for(Format::int5);
  const CheckpointReport report = quantize_checkpoint(input, path("out"), options);
  for (const WeightReport& weight : report.weights) {
    const bool wide = weight.name != "good.weight";
    EXPECT_EQ(weight.note, wide ? "scales in f32: f16 cannot hold them" : "");
    EXPECT_EQ(weight.spec.scale_dtype, wide ? DType::f32 : DType::f16);
    EXPECT_TRUE(weight.measured);
  }
  EXPECT_EQ(decode_all(Checkpoint::open(path("out")), "small.weight", DType::f32),
            expected_values(b, report.weights[2], DType::f32));
  options.force = true;
  options.scale_dtype = DType::f16;
  expect_error(ErrorCode::bad_input, "cannot quantize \"large.weight\" (f16 cannot hold 4 scales)",
               [&] { quantize_checkpoint(input, path("out"), options); });
  options.fallback_dense = true;
  const CheckpointReport f16 = quantize_checkpoint(input, path("out"), options);
  EXPECT_EQ(f16.num_quantized, 2);
  EXPECT_EQ(f16.weights[1].reason, "fallback: f16 cannot hold 4 scales");
  EXPECT_EQ(f16.weights[2].note, "4 scales keep fewer than 8 significant bits in f16");
}

TEST_F(CheckpointTest, OutputPaths) {
  const std::string model = write_model_directory();
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {4, 64})});
  QuantizeOptions options = options_for(Format::nf4);
  options.force = true;
  expect_error(ErrorCode::usage, "is the input", [&] { quantize_checkpoint(input, input, options); });
  expect_error(ErrorCode::usage, "is the input",
               [&] { quantize_checkpoint(model, path("model/../model/"), options); });
  fs::create_symlink("in.safetensors", path("link"));
  expect_error(ErrorCode::usage, "is the input", [&] { quantize_checkpoint(input, path("link"), options); });
  EXPECT_EQ(quantize_checkpoint(path("link"), path("out"), options).num_quantized,
            1);  // an input may be a link
  expect_error(ErrorCode::usage, "inside of the input",
               [&] { quantize_checkpoint(model, model + "/out", options); });
  expect_error(ErrorCode::usage, "inside of the output",
               [&] { quantize_checkpoint(model, dir_.string(), options); });
  expect_error(ErrorCode::io, "", [&] { quantize_checkpoint(input, path("missing/out"), options); });
  expect_error(ErrorCode::usage, "empty", [&] { quantize_checkpoint(input, "", options); });
  options.force = false;
  expect_error(ErrorCode::exists, "out", [&] { quantize_checkpoint(input, path("out"), options); });
  fs::create_directory(path("dir"));
  expect_error(ErrorCode::exists, "dir", [&] { quantize_checkpoint(model, path("dir"), options); });
  options.force = true;
  EXPECT_EQ(quantize_checkpoint(model, path("dir"), options).num_quantized, 2);
  fs::create_symlink("/etc/passwd", model + "/notes.txt");
  expect_error(ErrorCode::bad_input, "is a link",
               [&] { quantize_checkpoint(model, path("linked"), options); });
  for (const std::string& name : names()) EXPECT_FALSE(name.starts_with('.')) << name;
}

TEST_F(CheckpointTest, TensorNamesThatClash) {
  const StoredValues weight = random_tensor("a.weight", DType::bf16, {4, 64});
  const std::string input = write_input({weight, random_tensor("a.weight.absmax", DType::f32, {4}),
                                         random_tensor("a.scales", DType::f32, {4})});
  expect_error(ErrorCode::bad_input, "would write tensor \"a.weight.absmax\"",
               [&] { quantize_checkpoint(input, path("out"), options_for(Format::nf4)); });
  expect_error(ErrorCode::bad_input, "would write tensor \"a.scales\"",
               [&] { quantize_checkpoint(input, path("out"), options_for(Format::affine4)); });
}

// Up to the moment before the output appears: when its last file, config.json, is there already.
TEST_F(CheckpointTest, CancelAtTheLastMoment) {
  const std::string model = write_model_directory();
  const auto is_written = [&] {
    for (const auto& entry : fs::directory_iterator(dir_))
      if (entry.path().filename().string().starts_with(".") &&
          fs::exists(entry.path() / "output/config.json"))
        return true;
    return false;
  };
  QuantizeOptions options = options_for(Format::nf4);
  options.progress = [&](const Progress&) { return !is_written(); };
  expect_error(ErrorCode::cancelled, "2 of 2 files are complete",
               [&] { quantize_checkpoint(model, path("out"), options); });
  remove_leftovers(path("out"), /*discards=*/true);
  EXPECT_EQ(names(), (std::vector<std::string>{"model"}));
  // A single file: it is complete, but for its name.
  bool synced = false;
  options.progress = [&](const Progress& progress) {
    const bool last = synced && progress.phase == std::string("sync");
    synced |= progress.phase == std::string("sync");
    return !last;
  };
  const std::string shard = model + "/model-00001-of-00002.safetensors";
  expect_error(ErrorCode::cancelled, "sync", [&] { quantize_checkpoint(shard, path("out"), options); });
  EXPECT_EQ(names(), (std::vector<std::string>{"model"}));
}

// A file whose header takes so long to read that the caller is asked meanwhile.
void write_many_tensors(const std::string& path) {
  std::string header = "{";
  for (int i = 0; i < 20'000; ++i)
    header += fmt::format(R"("t{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}},)", i);
  header.back() = '}';
  const uint64_t length = header.size();
  write_file(path, std::string(reinterpret_cast<const char*>(&length), sizeof length) + header);
}

TEST_F(CheckpointTest, CancelWhileItIsOpened) {
  const std::string input = path("many.safetensors");
  write_many_tensors(input);
  const auto cancel = [](const Progress& progress) { return progress.phase != std::string("open"); };
  QuantizeOptions options = options_for(Format::nf4);
  options.progress = cancel;
  expect_error(ErrorCode::cancelled, "open", [&] { Checkpoint::open(input, cancel); });
  expect_error(ErrorCode::cancelled, "open", [&] { quantize_checkpoint(input, path("out"), options); });
  expect_error(ErrorCode::cancelled, "open", [&] { compare_checkpoints(input, input, 0, cancel); });
}

TEST_F(CheckpointTest, OpenNoticesAChange) {
  const std::string input = path("many.safetensors");
  write_many_tensors(input);
  const auto touch = [&](const Progress&) {
    ::chmod(input.c_str(), 0600);
    return true;
  };
  expect_error(ErrorCode::bad_input, "changed while reading", [&] { Checkpoint::open(input, touch); });
}

// Gigabytes may be on the way to the disk then. Of a file, two calls bring it there.
TEST_F(CheckpointTest, CancelWhileFilesAreSynced) {
  const std::string model = write_model_directory();
  write_file(dir_ / "model/tokenizer.model", "side file");
  const std::string shard = model + "/model-00001-of-00002.safetensors";
  constexpr int kOfShards = 2 * 2;
  for (const auto& [input, last] : {std::pair(shard, 1), std::pair(model, 1 + kOfShards)}) {
    std::atomic<int> calls = 0;
    before_sync_range = [&] {
      ++calls;
      std::this_thread::sleep_for(std::chrono::milliseconds(60));  // longer than between two reports
    };
    QuantizeOptions options = options_for(Format::nf4);
    options.progress = [&, last = last](const Progress&) { return calls < last; };
    expect_error(ErrorCode::cancelled, "cancelled",
                 [&, input = input] { quantize_checkpoint(input, path("out"), options); });
    EXPECT_EQ(calls, last);
    before_sync_range = {};
    remove_leftovers(path("out"), /*discards=*/true);
    EXPECT_EQ(names(), (std::vector<std::string>{"model"}));
  }
}

// Hours of work must not end for want of space that was known at the start.
TEST_F(CheckpointTest, SpaceOfAllFilesIsReservedFirst) {
  const std::string model = write_model_directory();
  write_file(dir_ / "model/tokenizer.model", std::string(300000, 't'));
  fs::create_directory(dir_ / "small");
  if (::mount("tmpfs", path("small").c_str(), "tmpfs", 0, "size=256k") != 0)
    GTEST_SKIP() << "mount needs a privileged user";
  QuantizeOptions options = options_for(Format::nf4);
  options.progress = [](const Progress& progress) {
    EXPECT_STREQ(progress.phase, "plan");
    return true;
  };
  expect_error(ErrorCode::io, "no space", [&] { quantize_checkpoint(model, path("small/out"), options); });
  EXPECT_TRUE(fs::is_empty(dir_ / "small"));
  ::umount2(path("small").c_str(), MNT_DETACH);
}

TEST_F(CheckpointTest, CompareNoticesAChange) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {4, 64})});
  const std::string other = path("other.safetensors");
  fs::copy(input, other);
  const auto touch = [&](const Progress&) {
    ::chmod(other.c_str(), 0600);
    return true;
  };
  expect_error(ErrorCode::bad_input, "changed while reading",
               [&] { compare_checkpoints(input, other, 0, touch); });
}

TEST_F(CheckpointTest, CancelLeavesNothingButWhatIsUnfinished) {
  const std::string model = write_model_directory();
  write_file(dir_ / "model/tokenizer.model", std::string(size_t{9} << 20, 't'));
  for (const char* phase : {"plan", "quantize", "verify", "sync", "copy"}) {
    QuantizeOptions options = options_for(Format::nf4);
    bool seen = false;
    options.progress = [&](const Progress& progress) {
      EXPECT_LE(progress.done_bytes, progress.total_bytes);
      seen |= progress.phase == std::string(phase);
      return !seen;
    };
    expect_error(ErrorCode::cancelled, phase, [&] { quantize_checkpoint(model, path("out"), options); });
    for (const Leftover& leftover : remove_leftovers(path("out"), /*discards=*/true))
      EXPECT_TRUE(leftover.unfinished);
    EXPECT_EQ(names(), (std::vector<std::string>{"model"}));
  }
  quantize_checkpoint(model, path("out"), options_for(Format::nf4));
  DequantizeOptions options;
  options.progress = [](const Progress&) { return false; };
  expect_error(ErrorCode::cancelled, "plan",
               [&] { dequantize_checkpoint(path("out"), path("dense"), options); });
  expect_error(ErrorCode::cancelled, "compare",
               [&] { compare_checkpoints(model, path("out"), 0, options.progress); });
  EXPECT_EQ(names(), (std::vector<std::string>{"model", "out"}));
}

// ---- Verification

// Every damage to the bytes of codes, and to the leading bytes of scales and zero points, must be found.
TEST_F(CheckpointTest, VerifyFindsDamage) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {16, 256}, 3),
                                         random_tensor("b.norm.weight", DType::bf16, {3, 7})});
  const Checkpoint source = Checkpoint::open(input);
  const io::OutputWeight weight = io::whole_weight(source.weights()[0], 0),
                         norm = io::whole_weight(source.weights()[1], 1);
  std::vector<QuantizeOptions> runs = {
      options_for(Format::nf4),     options_for(Format::nf4),  options_for(Format::fp4),
      options_for(Format::int4),    options_for(Format::int4), options_for(Format::affine4),
      options_for(Format::affine2), options_for(Format::int5), options_for(Format::lut4)};
  runs[1].double_quant = true;
  runs[4].asymmetric = true;
  for (const Layout layout : {Layout::gptq, Layout::awq})
    for (const bool asymmetric : {false, true}) {
      runs.push_back(options_for(Format::int4, layout));
      runs.back().asymmetric = asymmetric;
    }
  for (QuantizeOptions& options : runs) {
    options.force = true;
    options.verify = false;
    const CheckpointReport wrote = quantize_checkpoint(input, path("out"), options);
    const std::string good = read_file(path("out"));
    const Checkpoint written = Checkpoint::open(path("out"));
    io::QuantizedWeight quantized = written.impl().quantized.at(0).weight;
    quantized.encoding = wrote.weights[0].encoding;
    const auto verify = [&] {
      WeightReport report;
      const io::VerifyItem items[] = {{&weight, &quantized, &report}, {&norm, nullptr, nullptr}};
      io::ProgressReporter reporter({});
      io::ProgressPhase progress(reporter, "verify", 1);
      const io::VerifyFile file[] = {{path("out"), {std::begin(items), std::end(items)}}};
      io::verify_files(source.impl(), file, 1, progress);
    };
    verify();
    int64_t num_missed = 0, num_tried = 0;
    for (const StoredTensor& tensor : written.tensors()) {
      const bool is_scale = tensor.name.ends_with("scales") || tensor.name.ends_with("scale") ||
                            tensor.name.ends_with("biases") || tensor.name.ends_with("absmax");
      const size_t step = is_scale && tensor.dtype != "U8" ? tensor.dtype == "F32" ? 4 : 2 : 1;
      for (uint64_t i = step - 1; i < tensor.num_bytes; i += step) {
        std::string bad = good;
        bad[tensor.offset + i] = static_cast<char>(bad[tensor.offset + i] ^ 0x42);
        write_file(path("out"), bad);
        ++num_tried;
        try {
          verify();
          ++num_missed;
        } catch (const Error& error) {
          EXPECT_EQ(to_string(error.code()), std::string("VERIFY")) << error.what();
        }
      }
    }
    // What stays: the scale of a group of zeros, the sign of a zero, padding.
    EXPECT_LE(num_missed, num_tried / 20)
        << info(options.format).name << options.double_quant << options.asymmetric;
  }
}

// Where the description of an output weight says that the elements are, and nowhere else.
TEST_F(CheckpointTest, VerifyOfWeightsMadeOfOthers) {
  const int64_t half = 37, cols = 2090;
  const StoredValues fused = random_tensor("fused", DType::bf16, {2, 2 * half, cols}, 3),
                     turned = random_tensor("turned", DType::bf16, {600, cols, 2}, 5);
  const Checkpoint source = Checkpoint::open(write_input({fused, turned}));
  const std::vector<io::OutputWeight> weights = {
      {"experts.weight", {half, cols}, {{0, (2 * half + 1) * cols, half, 2 * cols, 1}}},
      {"experts.weight",
       {2, half, cols},
       {{0, half * cols, half, cols, 1}, {0, 2 * half * cols, half, cols, 1}}},
      {"experts.weight", {1, 600 * cols}, {{1, 0, 1, 1, 2}}},
      {"experts.weight", {cols, 600}, {{1, 1, cols, 2, 2 * cols}}}};
  for (const io::OutputWeight& weight : weights) {
    const std::vector<std::byte>& from = weight.sources.front().weight == 0 ? fused.bytes : turned.bytes;
    StoredValues dense = {weight.name, "BF16", weight.shape, {}};
    for (const io::SourceRows& rows : weight.sources)
      for (int64_t row = 0; row < rows.num_rows; ++row)
        for (int64_t column = 0; column < weight.cols(); ++column) {
          const auto* at = from.data() + 2 * (rows.first + row * rows.row_stride + column * rows.col_stride);
          dense.bytes.insert(dense.bytes.end(), at, at + 2);
        }
    write_model(path("dense"), {dense});
    io::OutputWeight wrong = weight;
    int64_t& first = wrong.sources.back().first;
    first = first == 0 ? 1 : first - 1;
    const auto verify = [&](const io::OutputWeight& made_of, const io::QuantizedWeight* quantized) {
      WeightReport report;
      io::ProgressReporter reporter({});
      io::ProgressPhase progress(reporter, "verify", 1);
      // Of two files, the second may be wrong.
      std::vector<io::VerifyFile> files = {{path("dense"), {{&weight, nullptr, nullptr}}}};
      files.push_back({path(quantized ? "out" : "dense"), {{&made_of, quantized, &report}}});
      io::verify_files(source.impl(), files, 2, progress);
    };
    verify(weight, nullptr);
    expect_error(ErrorCode::verify, "differs from the input", [&] { verify(wrong, nullptr); });
    for (const Format format : {Format::nf4, Format::int4}) {
      QuantizeOptions options = options_for(format);
      options.force = true;
      options.include = {".*"};
      if (format == Format::int4) options.granularity = Granularity::channel;
      quantize_checkpoint(path("dense"), path("out"), options);
      const Checkpoint written = Checkpoint::open(path("out"));
      verify(weight, &written.impl().quantized.at(0).weight);
      expect_error(ErrorCode::verify, "not the nearest level",
                   [&] { verify(wrong, &written.impl().quantized.at(0).weight); });
    }
  }
}

TEST_F(CheckpointTest, FilesOfWeightsMadeOfOthers) {
  const Checkpoint source = Checkpoint::open(write_model_directory());
  const auto rows_of = [&](const std::string& name) {
    const auto index = static_cast<size_t>(source.find(name) - source.weights().data());
    return io::whole_weight(source.weights()[index], index).sources.front();
  };
  const io::SourceRows up0 = rows_of("model.layers.0.mlp.up_proj.weight"),
                       up1 = rows_of("model.layers.1.mlp.up_proj.weight"), head = rows_of("lm_head.weight");
  const io::OutputWeight stacked{"stacked", {2, 24, 256}, {up1, up0}}, last{"last", {32, 256}, {head}};
  const io::OutputWeight* const weights[] = {&last, &stacked};
  const uint64_t num_bytes[] = {100, 200};
  // The first file is not needed: its only weight went to the second.
  const io::OutputFiles files = io::output_files(source.impl(), weights, num_bytes, 0);
  EXPECT_EQ(files.names, (std::vector<std::string>{"model-00002-of-00002.safetensors"}));
  EXPECT_EQ(files.weights, (std::vector<std::vector<size_t>>{{0, 1}}));
  EXPECT_EQ(files.sources, (std::vector<std::vector<size_t>>{{1, 0}}));
  EXPECT_TRUE(files.has_index);
  const io::OutputFiles shards = io::output_files(source.impl(), weights, num_bytes, 250);
  EXPECT_EQ(shards.weights, (std::vector<std::vector<size_t>>{{0}, {1}}));
  EXPECT_EQ(shards.sources, (std::vector<std::vector<size_t>>{{1}, {1, 0}}));
}

// No format, scale or magnitude makes it fail on what was written right.
TEST_F(CheckpointTest, VerifyAcceptsEveryMagnitude) {
  std::mt19937 rng(11);
  const auto magnitudes = [&](const std::vector<int64_t>& shape, int kind) {
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-149, 100);
    std::vector<float> values(static_cast<size_t>(product(shape)));
    int group_exponent = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      if (i % 32 == 0) group_exponent = exponent(rng);
      const int e = kind == 0 ? group_exponent : kind == 1 ? exponent(rng) : -20;
      values[i] = std::ldexp(normal(rng), e);
      if (kind == 2) values[i] += static_cast<float>(group_exponent);  // far from zero, close to each other
    }
    return values;
  };
  for (const Case& c : all_cases())
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (int kind = 0; kind < 3; ++kind) {
        std::vector<float> values = magnitudes(c.shape, kind);
        if (dtype == DType::f16)
          for (float& value : values) value = std::clamp(value, -65504.0f, 65504.0f);
        QuantizeOptions options = c.options;
        options.force = true;
        options.num_threads = 1;
        const std::string input = write_input(
            {make_tensor("a.weight", dtype, c.shape, values), random_tensor("b.weight", dtype, c.shape)});
        try {
          quantize_checkpoint(input, path("out"), options);
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("cannot hold"), std::string::npos)
              << error.what() << "\n  " << info(options.format).name << " kind " << kind << " rule "
              << (options.scale_rule ? to_string(*options.scale_rule) : "default") << " double_quant "
              << options.double_quant << " of " << to_string(dtype);
        }
      }
}

// ---- Reading what others wrote

TEST_F(CheckpointTest, PartsMustFitTogether) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {4, 128})});
  for (const Format format : {Format::nf4, Format::int4, Format::affine4, Format::int3}) {
    const std::string output = path(info(format).name);
    quantize_checkpoint(input, output, options_for(format));
    std::vector<StoredValues> tensors;
    const Checkpoint written = Checkpoint::open(output);
    for (const StoredTensor& stored : written.tensors()) {
      tensors.push_back({stored.name, stored.dtype, stored.shape, std::vector<std::byte>(stored.num_bytes)});
      written.read(stored, 0, tensors.back().bytes);
    }
    const io::Metadata metadata = written.impl().files[0].metadata;
    for (size_t i = 0; i < tensors.size(); ++i) {
      SCOPED_TRACE(tensors[i].name);
      // Without one of them: not a quantized weight, or an error, but never another weight.
      std::vector<StoredValues> fewer = tensors;
      fewer.erase(fewer.begin() + static_cast<int64_t>(i));
      write_model(path("damaged"), fewer, metadata);
      try {
        const Checkpoint opened = Checkpoint::open(path("damaged"));
        for (const Weight& weight : opened.weights()) EXPECT_FALSE(weight.layout.has_value());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::bad_input) << error.what();
      }
      // With one row more.
      std::vector<StoredValues> larger = tensors;
      larger[i].bytes.resize(larger[i].bytes.size() * 2);
      larger[i].shape[0] *= 2;
      write_model(path("damaged"), larger, metadata);
      if (tensors[i].name.find("quant_s") == std::string::npos)
        expect_error(ErrorCode::bad_input, "a.", [&] { Checkpoint::open(path("damaged")); });
      // Of another dtype of the same size.
      std::vector<StoredValues> other = tensors;
      other[i].dtype = tensors[i].dtype == "U8"     ? "I8"
                       : tensors[i].dtype == "BF16" ? "I16"
                       : tensors[i].dtype == "I64"  ? "F64"
                                                    : "U16";
      if (other[i].dtype == "U16") other[i].shape.back() *= 2;
      write_model(path("damaged"), other, metadata);
      try {
        const Checkpoint opened = Checkpoint::open(path("damaged"));
        for (const Weight& weight : opened.weights()) EXPECT_FALSE(weight.layout.has_value());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::bad_input) << error.what();
      }
    }
  }
}

TEST_F(CheckpointTest, MlxNeedsToBeToldItsGrid) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {4, 128})});
  quantize_checkpoint(input, path("mlx"), options_for(Format::affine4));
  std::vector<StoredValues> tensors;
  const Checkpoint written = Checkpoint::open(path("mlx"));
  for (const StoredTensor& stored : written.tensors()) {
    tensors.push_back({stored.name, stored.dtype, stored.shape, std::vector<std::byte>(stored.num_bytes)});
    written.read(stored, 0, tensors.back().bytes);
  }
  fs::create_directory(path("model"));
  write_model(path("model/model.safetensors"), tensors);
  expect_error(ErrorCode::bad_input, "config.json", [&] { Checkpoint::open(path("model")); });
  write_file(path("model/config.json"), R"({"quantization": {"group_size": 64, "bits": 4}})");
  EXPECT_EQ(Checkpoint::open(path("model")).weights()[0].spec.group_size, 64);
  write_file(path("model/config.json"),
             R"({"quantization": {"group_size": 32, "bits": 3, "a": {"group_size": 64, "bits": 4}}})");
  EXPECT_EQ(Checkpoint::open(path("model")).weights()[0].spec.format, Format::affine4);
  write_file(path("model/config.json"), R"({"quantization": {"group_size": 32, "bits": 4}})");
  expect_error(ErrorCode::bad_input, "does not fit weight \"a.weight\"",
               [&] { Checkpoint::open(path("model")); });
  write_file(path("model/config.json"), R"({"quantization": {"group_size": 64, "bits": 7}})");
  expect_error(ErrorCode::bad_input, "7 bits", [&] { Checkpoint::open(path("model")); });
}

TEST_F(CheckpointTest, BitsandbytesStatesOfOthers) {
  const StoredValues tensor = random_tensor("a.weight", DType::bf16, {4, 64});
  quantize_checkpoint(write_input({tensor}), path("out"), options_for(Format::nf4));
  const Checkpoint written = Checkpoint::open(path("out"));
  std::vector<StoredValues> tensors;
  for (const StoredTensor& stored : written.tensors()) {
    tensors.push_back({stored.name, stored.dtype, stored.shape, std::vector<std::byte>(stored.num_bytes)});
    written.read(stored, 0, tensors.back().bytes);
  }
  const auto with_state = [&](const std::string& text) {
    std::vector<StoredValues> changed = tensors;
    for (StoredValues& t : changed)
      if (t.name.find("quant_state") != std::string::npos) {
        t.bytes.assign(reinterpret_cast<const std::byte*>(text.data()),
                       reinterpret_cast<const std::byte*>(text.data()) + text.size());
        t.shape = {static_cast<int64_t>(text.size())};
      }
    write_model(path("state"), changed);
    return Checkpoint::open(path("state"));
  };
  const auto ok = R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[4,64]}   )";
  EXPECT_EQ(decode_all(with_state(ok), "a.weight", DType::f32), decode_all(written, "a.weight", DType::f32));
  for (const auto& [state, text] : std::vector<std::pair<std::string, std::string>>{
           {"", "not valid JSON"},
           {"[]", "expected an object"},
           {R"({"quant_type":"fp4","blocksize":64,"dtype":"bfloat16","shape":[4,64]})",
            "differs from the name"},
           {R"({"quant_type":"nf4","blocksize":48,"dtype":"bfloat16","shape":[4,64]})",
            "\"blocksize\" must be one of"},
           {R"({"quant_type":"nf4","blocksize":64,"dtype":"int8","shape":[4,64]})", "\"dtype\" must be"},
           {R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16"})", "no \"shape\""},
           {R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[4,-64]})", "impossible shape"},
           {R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[]})", "impossible shape"},
           {R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[4611686018427387904,4]})",
            "impossible shape"},
           {R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[1e3,4]})",
            "must hold integers"},
           {R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[8,64]})",
            "does not fit weight"},
           {R"({"quant_type":"nf4","quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[4,64]})",
            "duplicate key"}})
    expect_error(ErrorCode::bad_input, text, [&] { with_state(state); });

  // The same bytes under a floating dtype, as sharded training stores them.
  for (StoredValues& t : tensors)
    if (t.name == "a.weight") t.dtype = "BF16", t.shape = {64, 1};
  write_model(path("storage"), tensors);
  EXPECT_EQ(decode_all(Checkpoint::open(path("storage")), "a.weight", DType::f32),
            decode_all(written, "a.weight", DType::f32));
}

// bitsandbytes puts a linear layer [out, in] in the place of a Conv1D [in, out] of GPT-2, and saves that.
TEST_F(CheckpointTest, BitsandbytesOfConv1D) {
  const std::vector<StoredValues> linear = {
      random_tensor("transformer.h.0.attn.c_attn.weight", DType::bf16, {150, 50}, 1),
      random_tensor("transformer.h.0.attn.c_proj.weight", DType::bf16, {50, 50}, 2),
      random_tensor("transformer.h.0.mlp.c_fc.weight", DType::bf16, {4001, 301}, 3)};
  const auto turn = [](const std::vector<std::byte>& from, int64_t rows, int64_t cols, int64_t size) {
    std::vector<std::byte> to(from.size());
    for (int64_t i = 0; i < rows * cols; ++i)
      std::memcpy(to.data() + (i % cols * rows + i / cols) * size, from.data() + i * size,
                  static_cast<size_t>(size));
    return to;
  };
  std::vector<StoredValues> conv1d = linear;
  for (StoredValues& tensor : conv1d) {
    tensor.bytes = turn(tensor.bytes, tensor.shape[0], tensor.shape[1], 2);
    std::swap(tensor.shape[0], tensor.shape[1]);
  }
  for (const char* name : {"linear", "dense"}) fs::create_directories(dir_ / name);
  write_model(dir_ / "linear/model.safetensors", linear);
  write_file(dir_ / "linear/config.json", R"({"model_type": "none"})");
  write_model(dir_ / "dense/model.safetensors", conv1d);
  write_file(dir_ / "dense/config.json", R"({"model_type": "gpt2"})");
  QuantizeOptions options = options_for(Format::nf4);
  options.include = {"c_"};
  quantize_checkpoint(path("linear"), path("save"), options);
  // The same save, of a model whose layers are linear ones, and of GPT-2.
  fs::copy(dir_ / "save", dir_ / "other");
  json config = json::parse(read_file(dir_ / "save/config.json"));
  config["model_type"] = "gpt2";
  write_file(dir_ / "save/config.json", config.dump());

  const Checkpoint save = Checkpoint::open(path("save")), other = Checkpoint::open(path("other"));
  DequantizeOptions exact;
  exact.dtype = DType::f32;
  dequantize_checkpoint(path("save"), path("back"), exact);
  const Checkpoint back = Checkpoint::open(path("back"));
  std::mt19937 rng(7);
  for (size_t i = 0; i < linear.size(); ++i) {
    const std::string& name = linear[i].name;
    SCOPED_TRACE(name);
    const std::vector<int64_t>& stored = linear[i].shape;
    EXPECT_EQ(other.find(name)->shape, stored);
    EXPECT_EQ(save.find(name)->shape, conv1d[i].shape);
    EXPECT_EQ(back.find(name)->shape, conv1d[i].shape);
    const std::vector<std::byte> all =
        turn(decode_all(other, name, DType::bf16), stored[0], stored[1], size_of(DType::bf16));
    EXPECT_TRUE(decode_all(save, name, DType::bf16) == all);
    EXPECT_TRUE(decode_all(back, name, DType::bf16) == all);
    const int64_t n = product(stored);
    for (int trial = 0; trial < 10; ++trial) {
      const int64_t begin = std::uniform_int_distribution<int64_t>(0, n)(rng);
      const int64_t count =
          std::uniform_int_distribution<int64_t>(0, std::min<int64_t>(n - begin, 1000))(rng);
      std::vector<std::byte> part(static_cast<size_t>(count * 2));
      save.decode(*save.find(name), begin, count, DType::bf16, part.data());
      EXPECT_TRUE(
          std::ranges::equal(part, std::span(all).subspan(static_cast<size_t>(begin * 2), part.size())))
          << "[" << begin << ", +" << count << ")";
    }
  }
  for (const CompareRow& row : compare_checkpoints(path("dense"), path("save"), 2)) {
    EXPECT_EQ(row.problem, "") << row.name;
    EXPECT_LT(row.relative_rmse, 0.15) << row.name;
  }
  for (const CompareRow& row : compare_checkpoints(path("back"), path("save"), 2)) {
    EXPECT_EQ(row.problem, "") << row.name;
    EXPECT_EQ(row.max_error, 0) << row.name;
  }
}

TEST_F(CheckpointTest, IndexFaults) {
  const std::string model = write_model_directory();
  const std::string index_path = model + "/model.safetensors.index.json";
  const json good = json::parse(read_file(index_path));
  const auto refused = [&](const std::string& text, const std::string& index) {
    write_file(index_path, index);
    expect_error(ErrorCode::bad_input, text, [&] { Checkpoint::open(model); });
  };
  const auto changed = [&](const std::string& tensor, const json& file) {
    json index = good;
    index["weight_map"][tensor] = file;
    return index.dump();
  };
  write_model(dir_ / "outside.safetensors", {random_tensor("x.weight", DType::bf16, {2, 2})});
  for (const std::string file : {"../outside.safetensors", "/etc/passwd", "..", "", "sub/code.py"})
    refused("is not the name of a file within", changed("x.weight", file));
  refused("does not exist", changed("x.weight", "missing.safetensors"));
  refused("is a directory", changed("x.weight", "sub"));
  fs::create_symlink("../outside.safetensors", model + "/link.safetensors");
  refused("is a link", changed("x.weight", "link.safetensors"));
  fs::remove(model + "/link.safetensors");
  refused("differ by case only", changed("x.weight", "MODEL-00001-of-00002.safetensors"));
  refused("tensor \"x.weight\" is not in model-00001-of-00002.safetensors",
          changed("x.weight", "model-00001-of-00002.safetensors"));
  refused(
      "tensor \"lm_head.weight\" is listed in model-00001-of-00002.safetensors but is in "
      "model-00002-of-00002.safetensors",
      changed("lm_head.weight", "model-00001-of-00002.safetensors"));
  refused("must be a string", changed("lm_head.weight", 7));
  json index = good;
  index["weight_map"].erase("lm_head.weight");
  refused("tensor \"lm_head.weight\" of model-00002-of-00002.safetensors is not listed", index.dump());
  refused("no \"weight_map\"", "{}");
  refused("must be an object", R"({"weight_map": []})");
  refused("not valid JSON at byte", "{\"weight_map\": {},}");
  refused("duplicate key", R"({"weight_map": {"a": "x", "a": "y"}})");
  refused("NUL", std::string("{\"weight_map\": {}}\0", 19));
  refused("deeper", std::string(100, '[') + std::string(100, ']'));
  write_file(index_path, good.dump());
  write_model(model + "/model-00002-of-00002.safetensors",
              {random_tensor("model.embed_tokens.weight", DType::bf16, {2, 2})});
  expect_error(
      ErrorCode::bad_input,
      "\"model.embed_tokens.weight\" is in model-00001-of-00002.safetensors and in model-00002-of-00002",
      [&] { Checkpoint::open(model); });
  write_file(model + "/model.safetensors", "");
  expect_error(ErrorCode::bad_input, "both model.safetensors and an index", [&] { Checkpoint::open(model); });
}

TEST_F(CheckpointTest, DirectoriesWithoutIndex) {
  fs::create_directory(path("model"));
  expect_error(ErrorCode::bad_input, "has no .safetensors file", [&] { Checkpoint::open(path("model")); });
  expect_error(ErrorCode::io, "nowhere", [&] { Checkpoint::open(path("nowhere")); });
  write_model(path("model/a.safetensors"), {random_tensor("a.weight", DType::bf16, {2, 64})});
  EXPECT_EQ(Checkpoint::open(path("model")).weights().size(), 1u);
  const CheckpointReport report = quantize_checkpoint(path("model"), path("out"), options_for(Format::nf4));
  EXPECT_EQ(report.num_quantized, 1);
  EXPECT_TRUE(fs::exists(path("out/a.safetensors")));
  write_model(path("model/b.safetensors"), {random_tensor("b.weight", DType::bf16, {2, 64})});
  expect_error(ErrorCode::bad_input, "has 2 .safetensors files but no",
               [&] { Checkpoint::open(path("model")); });
  write_model(path("model/model.safetensors"), {random_tensor("c.weight", DType::bf16, {2, 64})});
  EXPECT_EQ(Checkpoint::open(path("model")).weights()[0].name, "c.weight");
}

TEST_F(CheckpointTest, Compare) {
  std::vector<float> values(128, 1.0f), changed = values, nan = values;
  changed[77] = 1.5f;
  nan[3] = std::numeric_limits<float>::quiet_NaN();
  const auto write = [&](const std::string& name, const std::vector<StoredValues>& tensors) {
    write_model(dir_ / name, tensors);
    return path(name);
  };
  const StoredValues integers{"ids", "I64", {2}, std::vector<std::byte>(16, std::byte{1})};
  StoredValues other = integers;
  other.bytes[9] = std::byte{2};
  const std::string a =
      write("a", {make_tensor("changed", DType::f32, {2, 64}, values),
                  make_tensor("equal", DType::bf16, {128}, values),
                  make_tensor("nan", DType::f32, {128}, nan), make_tensor("only_a", DType::f32, {1}, {1}),
                  make_tensor("reshaped", DType::f32, {2, 64}, values), integers});
  const std::string b =
      write("b", {make_tensor("changed", DType::f16, {2, 64}, changed),
                  make_tensor("equal", DType::f32, {128}, values), make_tensor("nan", DType::f32, {128}, nan),
                  make_tensor("only_b", DType::f32, {1}, {1}),
                  make_tensor("reshaped", DType::f32, {64, 2}, values), other});
  const std::vector<CompareRow> rows = compare_checkpoints(a, b);
  std::vector<std::string> text;
  for (const CompareRow& row : rows) text.push_back(row.name + ": " + row.problem);
  EXPECT_EQ(text, (std::vector<std::string>{"ids: bytes differ", "nan: not finite", "only_a: missing in B",
                                            "only_b: missing in A", "reshaped: shape [2, 64] against [64, 2]",
                                            "changed: ", "equal: "}));
  EXPECT_EQ(rows[5].max_error, 0.5);
  EXPECT_EQ(rows[5].max_error_index, 77);
  EXPECT_DOUBLE_EQ(rows[5].relative_rmse, std::sqrt(0.25 / 128));
  EXPECT_EQ(rows[6].snr_db, std::numeric_limits<double>::infinity());
}

TEST_F(CheckpointTest, DecodeRefusesWrongArguments) {
  const std::string input = write_input(
      {random_tensor("a.weight", DType::bf16, {2, 64}), {"ids", "I64", {1}, std::vector<std::byte>(8)}});
  const Checkpoint checkpoint = Checkpoint::open(input);
  const Weight& weight = *checkpoint.find("a.weight");
  float out[256];
  expect_error(ErrorCode::usage, "not within", [&] { checkpoint.decode(weight, 100, 29, DType::f32, out); });
  expect_error(ErrorCode::usage, "not within", [&] { checkpoint.decode(weight, -1, 2, DType::f32, out); });
  expect_error(ErrorCode::usage, "dtype must be", [&] { checkpoint.decode(weight, 0, 1, DType::i8, out); });
  expect_error(ErrorCode::usage, "is I64",
               [&] { checkpoint.decode(*checkpoint.find("ids"), 0, 1, DType::f32, out); });
  expect_error(ErrorCode::usage, "not within",
               [&] { checkpoint.read(checkpoint.tensors()[0], 1, std::as_writable_bytes(std::span(out))); });
  EXPECT_EQ(checkpoint.find("b"), nullptr);
}

// ---- Weights in and out

std::string bytes_of(const halfbyte::Tensor& part) {
  return {reinterpret_cast<const char*>(part.data()), static_cast<size_t>(part.num_bytes())};
}

halfbyte::Tensor copy_of(const halfbyte::Tensor& part) { return halfbyte::Tensor::copy_of(part.view()); }

void expect_same_parts(const QuantizedTensor& a, const QuantizedTensor& b) {
  EXPECT_EQ(a.shape, b.shape);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_TRUE(bytes_of(a.codes) == bytes_of(b.codes)) << "codes";
  EXPECT_TRUE(bytes_of(a.zeros) == bytes_of(b.zeros)) << "zeros";
  EXPECT_TRUE(bytes_of(a.biases) == bytes_of(b.biases)) << "biases";
  EXPECT_TRUE(bytes_of(a.scales) == bytes_of(b.scales)) << "scales";
  EXPECT_TRUE(bytes_of(a.scales_absmax) == bytes_of(b.scales_absmax)) << "scales_absmax";
  EXPECT_TRUE(bytes_of(a.scales_map) == bytes_of(b.scales_map)) << "scales_map";
  EXPECT_TRUE(bytes_of(a.scales_offset) == bytes_of(b.scales_offset)) << "scales_offset";
}

// A part that is loaded is the part of what is loaded, or refused likewise. Returns how many there are.
int expect_slices(const Checkpoint& checkpoint, const std::string& name, const QuantizedTensor& q) {
  int accepted = 0;
  for (int axis = 0; axis < std::ssize(q.shape); ++axis) {
    const int64_t extent = q.shape[static_cast<size_t>(axis)];
    for (const int64_t unit : {1, 8, 32, 64, 128}) {
      const int64_t begin = std::min(unit, extent), end = std::max(begin, extent / unit * unit - unit);
      for (const Slice& slice : {Slice{axis, begin, extent}, Slice{axis, 0, end}, Slice{axis, begin, end}}) {
        SCOPED_TRACE(fmt::format("axis {}: {} to {}", axis, slice.begin, slice.end));
        QuantizedTensor expected;
        try {
          expected = q.slice(slice);
        } catch (const Error&) {
          expect_error(ErrorCode::usage, "has no slice",
                       [&] { load_weight(checkpoint, name, {}, {}, slice); });
          continue;
        }
        expect_same_parts(load_weight(checkpoint, name, {}, {3}, slice), expected);
        ++accepted;
      }
    }
  }
  return accepted;
}

// What was quantized comes in with the parts that quantize() makes, and goes out with the bytes that it had.
TEST_F(CheckpointTest, WeightsOfEveryLayoutComeInAndGoOut) {
  int num_slices = 0;
  for (Case c : all_cases()) {
    for (const bool experts : {false, true}) {
      if (experts && c.shape != std::vector<int64_t>{7, 64} && c.shape != std::vector<int64_t>{7, 256} &&
          c.shape != std::vector<int64_t>{33, 200} && c.shape != std::vector<int64_t>{17, 200})
        continue;
      if (experts) c.shape.insert(c.shape.begin(), 3);
      StoredValues tensor = random_tensor("a.experts.weight", DType::bf16, c.shape);
      const std::string input = write_input({tensor, random_tensor("norm.weight", DType::f32, {7})});
      QuantizeOptions options = c.options;
      options.include = {"experts"};
      options.force = true;
      options.num_threads = 1;
      const CheckpointReport report = quantize_checkpoint(input, path("out"), options);
      const WeightReport& weight = report.weights[0];
      SCOPED_TRACE(fmt::format("{} {} {} group {} asymmetric {} double {} [{}]", to_string(*report.layout),
                               info(weight.spec.format).name, to_string(weight.spec.granularity),
                               weight.spec.group_size, weight.spec.asymmetric, weight.spec.double_quant,
                               fmt::join(c.shape, ", ")));

      const QuantizedTensor loaded = load_weight(Checkpoint::open(path("out")), "a.experts.weight");
      QuantizedTensor expected = quantize_for(tensor, weight, *report.layout);
      if (io::layout_info(*report.layout).zero_scale_is_eps) {  // zero scales are not stored
        std::vector<float> a(static_cast<size_t>(product(c.shape))), b(a.size());
        dequantize(loaded, {a.data(), DType::f32, c.shape, {}, {}});
        dequantize(expected, {b.data(), DType::f32, c.shape, {}, {}});
        EXPECT_EQ(a, b);
        expected.scales = loaded.scales;
      } else {
        EXPECT_TRUE(loaded.spec == weight.spec);
      }
      expect_same_parts(loaded, expected);
      num_slices += expect_slices(Checkpoint::open(path("out")), "a.experts.weight", loaded);

      CheckpointWriter writer(path("again"), {.layout = *report.layout, .base = input, .force = true});
      writer.set("a.experts.weight", loaded);
      const CheckpointReport written = writer.finish();
      EXPECT_TRUE(read_file(path("again")) == read_file(path("out")));
      EXPECT_EQ(written.num_quantized, 1);
      EXPECT_EQ(written.output_bytes, report.output_bytes);
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(num_slices, 1000);
}

// All files of two directories.
void expect_same_directory(const fs::path& a, const fs::path& b) {
  std::vector<std::string> names[2];
  for (int i = 0; i < 2; ++i) {
    for (const auto& entry : fs::recursive_directory_iterator(i == 0 ? a : b))
      if (entry.is_regular_file()) names[i].push_back(fs::relative(entry.path(), i == 0 ? a : b));
    std::ranges::sort(names[i]);
  }
  EXPECT_EQ(names[0], names[1]);
  for (const std::string& name : names[0]) EXPECT_TRUE(read_file(a / name) == read_file(b / name)) << name;
}

TEST_F(CheckpointTest, DenseWeightsAreQuantizedWhileTheyAreRead) {
  const StoredValues tensor = random_tensor("a.weight", DType::bf16, {3, 211, 1001}, 7);  // several blocks
  const StoredValues bad =
      make_tensor("bad.weight", DType::f32, {2, 64}, std::vector<float>(128, std::nanf("")));
  const Checkpoint checkpoint = Checkpoint::open(write_input({tensor, bad}));
  std::vector<std::byte> bytes = tensor.bytes;
  const ConstTensorView x{bytes.data(), DType::bf16, {3, 211, 1001}};
  for (const QuantSpec& spec :
       {QuantSpec{.format = Format::nf4},
        QuantSpec{.format = Format::int3, .asymmetric = true, .group_size = 128},
        QuantSpec{.format = Format::affine4, .granularity = Granularity::channel, .scale_dtype = DType::bf16},
        QuantSpec{.format = Format::int8, .granularity = Granularity::tensor},
        QuantSpec{.format = Format::fp4, .granularity = Granularity::flat, .group_size = 32}})
    for (const int num_threads : {1, 3}) {
      const QuantizedTensor q = quantize_weight(checkpoint, "a.weight", spec, {}, {}, {num_threads});
      expect_same_parts(q, quantize(x, spec));
      EXPECT_TRUE(q.spec == spec && q.encoding->scale_rule == default_scale_rule(spec));
    }
  expect_error(ErrorCode::bad_input,
               "weight \"bad.weight\" has elements that are not finite, the first at index 0",
               [&] { quantize_weight(checkpoint, "bad.weight", {}); });
  expect_error(ErrorCode::usage, "has no weight \"b\"", [&] { quantize_weight(checkpoint, "b", {}); });
  expect_error(ErrorCode::usage, "spec.double_quant must be false",
               [&] { quantize_weight(checkpoint, "a.weight", {.double_quant = true}); });
}

TEST_F(CheckpointTest, ModelsAreWrittenAsTheyWereQuantized) {
  const std::string model = write_model_directory();
  for (const io::LayoutInfo* layout : layouts_of_matrices()) {
    SCOPED_TRACE(layout->name);
    const Format format = layout->formats.empty() ? Format::int5 : layout->formats.back();
    for (const uint64_t shard_bytes : {uint64_t{0}, uint64_t{8000}}) {
      QuantizeOptions options = options_for(format, layout->layout);
      options.force = true;
      options.shard_bytes = shard_bytes;
      const CheckpointReport report = quantize_checkpoint(model, path("out"), options);
      const Checkpoint out = Checkpoint::open(path("out"));
      // Made from the dense model, and from the output itself: all of it is given, or one weight.
      for (const std::string& base : {model, path("out")})
        for (const bool all : {true, false}) {
          if (!all && base == model) continue;
          CheckpointWriter writer(
              path("again"),
              {.layout = layout->layout, .base = base, .force = true, .shard_bytes = shard_bytes});
          bool any = false;
          for (const Weight& weight : out.weights())
            if (weight.layout && (all || !any)) {
              const QuantizedTensor q = load_weight(out, weight.name);
              if (any) {
                writer.set(weight.name, q, [q] { return q; });
              } else {
                writer.set(weight.name, q);
              }
              any = true;
            }
          const CheckpointReport written = writer.finish();
          EXPECT_EQ(written.num_quantized, report.num_quantized);
          EXPECT_EQ(written.readers.size(), report.readers.size());
          expect_same_directory(path("again"), path("out"));
        }
    }
  }
}

// From its layout to halfbyte's and back: no code and no scale changes.
TEST_F(CheckpointTest, WeightsMoveBetweenLayouts) {
  const std::string model = write_model_directory();
  const auto move = [&](const std::string& from, const std::string& to, Layout layout) {
    const Checkpoint checkpoint = Checkpoint::open(path(from));
    CheckpointWriter writer(path(to), {.layout = layout, .base = path(from), .force = true});
    for (const Weight& weight : checkpoint.weights())
      if (weight.layout) writer.set(weight.name, load_weight(checkpoint, weight.name));
    return writer.finish().num_quantized;
  };
  for (const io::LayoutInfo* layout : layouts_of_matrices()) {
    SCOPED_TRACE(layout->name);
    for (const bool special : {false, true}) {  // double quantization, zero points
      QuantizeOptions options =
          options_for(layout->formats.empty() ? Format::int6 : layout->formats.front(), layout->layout);
      options.force = true;
      options.double_quant = special && layout->double_quant;
      options.asymmetric = special && layout->asymmetric;
      const CheckpointReport report = quantize_checkpoint(model, path("out"), options);
      EXPECT_EQ(move("out", "own", Layout::halfbyte), report.num_quantized);
      EXPECT_EQ(move("own", "again", layout->layout), report.num_quantized);
      expect_same_directory(path("again"), path("out"));
      for (const CompareRow& row : compare_checkpoints(path("out"), path("own"))) {
        EXPECT_EQ(row.problem, "") << row.name;
        EXPECT_EQ(row.max_error, 0) << row.name;
      }
    }
  }
}

// Values that were trained, found by an observer or converted reach the file.
TEST_F(CheckpointTest, GivenScalesComeBack) {
  const std::string model = write_model_directory();
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  for (const io::LayoutInfo* layout : layouts_of_matrices()) {
    SCOPED_TRACE(layout->name);
    if (layout->layout == Layout::fp8) continue;  // one scale of another row would be lost
    QuantizeOptions options =
        options_for(layout->formats.empty() ? Format::int4 : layout->formats.front(), layout->layout);
    options.asymmetric = layout->asymmetric;
    options.force = true;
    quantize_checkpoint(model, path("out"), options);
    QuantizedTensor q = load_weight(Checkpoint::open(path("out")), name);
    q.codes = copy_of(q.codes);
    q.codes.data()[5] ^= std::byte{1};
    q.scales = copy_of(q.scales);
    const auto type = scale_type(q.spec.scale_dtype);
    formats::store_scale(q.scales.data(), 3, 1.5f * formats::load_scale<float>(q.scales.data(), 3, type),
                         type);
    if (q.zeros.num_elements() > 0) {
      q.zeros = copy_of(q.zeros);
      q.zeros.data()[2] = std::byte{11};
    }
    CheckpointWriter writer(path("again"), {.layout = layout->layout, .base = path("out"), .force = true});
    writer.set(name, q);
    std::vector<float> norm(256, 0.25f);
    writer.set("model.layers.0.input_layernorm.weight",
               halfbyte::Tensor::copy_of({norm.data(), DType::f32, {256}, {}, {}}));
    writer.finish();
    const Checkpoint again = Checkpoint::open(path("again"));
    expect_same_parts(load_weight(again, name), q);
    EXPECT_EQ(read_file(path("again/config.json")), read_file(path("out/config.json")));
    EXPECT_TRUE(decode_all(again, "model.layers.0.mlp.up_proj.weight", DType::f32) ==
                decode_all(Checkpoint::open(path("out")), "model.layers.0.mlp.up_proj.weight", DType::f32));
    const std::vector<std::byte> stored =
        decode_all(again, "model.layers.0.input_layernorm.weight", DType::f32);
    EXPECT_EQ(0, std::memcmp(stored.data(), norm.data(), stored.size()));
  }
}

// Held as the transpose of what the model has.
TEST_F(CheckpointTest, ExpertsOfGptOss) {
  const std::string name = "model.layers.0.mlp.experts.gate_up_proj";
  const StoredValues tensor = random_tensor(name, DType::bf16, {3, 64, 10});
  const std::string input = write_input({tensor, random_tensor("norm.weight", DType::f32, {7})});
  const CheckpointReport report =
      quantize_checkpoint(input, path("out"), options_for(Format::mxfp4, Layout::gpt_oss));
  EXPECT_EQ(report.num_quantized, 1);
  const Checkpoint out = Checkpoint::open(path("out"));
  EXPECT_EQ(out.find(name)->shape, tensor.shape);
  EXPECT_EQ(out.find(name)->dtype, DType::bf16);
  const QuantizedTensor q = load_weight(out, name);
  EXPECT_EQ(q.shape, (std::vector<int64_t>{3, 10, 64}));
  std::vector<float> stored(3 * 10 * 64), model(stored.size());
  dequantize(q, {stored.data(), DType::f32, {3, 10, 64}, {}, {}});
  for (size_t e = 0; e < 3; ++e)
    for (size_t row = 0; row < 10; ++row)
      for (size_t col = 0; col < 64; ++col)
        model[(e * 64 + col) * 10 + row] = stored[(e * 10 + row) * 64 + col];
  std::mt19937 rng(7);
  for (int i = 0; i < 50; ++i) {
    const int64_t begin = std::uniform_int_distribution<int64_t>(0, 1920)(rng);
    const int64_t count = std::uniform_int_distribution<int64_t>(0, 1920 - begin)(rng);
    std::vector<float> part(static_cast<size_t>(count));
    out.decode(*out.find(name), begin, count, DType::f32, part.data());
    ASSERT_TRUE(std::ranges::equal(part, std::span(model).subspan(static_cast<size_t>(begin), part.size())))
        << begin << " " << count;
  }
  CheckpointWriter writer(path("again"), {.layout = Layout::gpt_oss, .base = input});
  writer.set(name, q);
  writer.finish();
  EXPECT_TRUE(read_file(path("again")) == read_file(path("out")));
}

TEST_F(CheckpointTest, WeightsOfTheBaseAreLeftOut) {
  const std::string model = write_model_directory();
  const std::string gone = "model.layers.0.mlp.up_proj.weight", beside = "model.layers.0.mlp.new.weight";
  CheckpointWriter writer(path("out"), {.layout = Layout::halfbyte, .base = model});
  writer.leave_out(gone);
  writer.leave_out("no such weight");
  std::vector<float> values(4, 0.5f);
  const TensorView view{values.data(), DType::f32, {2, 2}, {}, {}};
  writer.set(beside, halfbyte::Tensor::copy_of(view));
  writer.finish();
  const Checkpoint base = Checkpoint::open(model), out = Checkpoint::open(path("out"));
  EXPECT_EQ(out.weights().size(), base.weights().size());
  EXPECT_EQ(out.find(gone), nullptr);
  ASSERT_NE(out.find(beside), nullptr);
  const auto file_of = [](const Checkpoint& checkpoint, const std::string& name) {
    return checkpoint.tensors()[static_cast<size_t>(checkpoint.find(name)->parts.front())].file;
  };
  EXPECT_EQ(file_of(out, beside), file_of(base, gone));  // which is the next by name
}

// The index of an element that is not finite is that of the weight, not of its blocks.
TEST_F(CheckpointTest, NonFiniteElementsOfBlocksAreFound) {
  std::vector<float> values(300 * 200, 0.5f);
  values[270 * 200 + 131] = std::nanf("");
  const std::string input = write_input({make_tensor("a.weight", DType::f32, {300, 200}, values)});
  expect_error(ErrorCode::bad_input,
               fmt::format("non-finite: 1 elements, the first at index {}", 270 * 200 + 131),
               [&] { quantize_checkpoint(input, path("out"), options_for(Format::fp8, Layout::fp8)); });
}

TEST_F(CheckpointTest, ACheckpointIsMadeFromNothing) {
  const StoredValues x = random_tensor("x", DType::f32, {6, 128});
  std::vector<std::byte> bytes = x.bytes;
  const TensorView view{bytes.data(), DType::f32, {6, 128}, {}, {}};
  const QuantizedTensor q = quantize(view, {.format = Format::affine4});
  for (const std::string& to : {path("one.safetensors"), path("many")}) {
    const bool directory = to == path("many");
    WriterOptions options{.layout = Layout::mlx};
    if (directory) options.config = kConfig, options.shard_bytes = 1000;
    CheckpointWriter writer(to, options);
    writer.set("model.layers.0.mlp.up_proj.weight", q);
    writer.set("model.norm.weight", halfbyte::Tensor::copy_of(view));
    const CheckpointReport report = writer.finish();
    EXPECT_EQ(report.num_quantized, 1);
    EXPECT_THROW(writer.finish(), Error);
    const Checkpoint back = Checkpoint::open(to);
    EXPECT_EQ(back.is_directory(), directory);
    expect_same_parts(load_weight(back, "model.layers.0.mlp.up_proj.weight"), q);
    EXPECT_TRUE(decode_all(back, "model.norm.weight", DType::f32) == bytes);
  }
  EXPECT_EQ(json::parse(read_file(path("many/config.json")))["quantization"]["bits"], 4);
}

TEST_F(CheckpointTest, WhatALayoutCannotHoldIsRefusedByName) {
  const auto weight = [](const QuantSpec& spec, const std::vector<int64_t>& shape) {
    std::vector<float> x(static_cast<size_t>(product(shape)), 0.5f);
    return quantize({x.data(), DType::f32, shape, {}, {}}, spec);
  };
  const auto refused = [&](Layout layout, const QuantizedTensor& q, const std::string& text) {
    CheckpointWriter writer(path("out"), {.layout = layout});
    expect_error(ErrorCode::usage, "weight \"w\": layout " + text, [&] { writer.set("w", q); });
  };
  const QuantSpec affine{.format = Format::affine4}, nf4{.granularity = Granularity::flat};
  refused(Layout::mlx, weight(nf4, {4, 64}), "mlx: format must be");
  refused(Layout::mlx, weight({.format = Format::affine4, .group_size = 16}, {4, 64}),
          "mlx: group size must be");
  refused(Layout::mlx, weight(affine, {4, 100}), "mlx: 100 columns are not a multiple");
  refused(Layout::mlx, weight(affine, {64}), "mlx: a weight has 2 to 3 axes, got 1");
  refused(Layout::bitsandbytes, weight({}, {4, 64}), "bitsandbytes: granularity must be flat, got group");
  refused(Layout::bitsandbytes,
          weight({.granularity = Granularity::flat, .scale_dtype = DType::f16}, {4, 64}),
          "bitsandbytes: scale dtype must be f32");
  refused(Layout::compressed_tensors,
          weight({.format = Format::int4, .granularity = Granularity::tensor}, {4, 64}),
          "compressed-tensors: granularity must be");
  refused(Layout::compressed_tensors, weight({.format = Format::int3}, {4, 64}),
          "compressed-tensors: format must");
  refused(Layout::halfbyte, QuantizedTensor({.scale_dtype = DType::f64}, {4, 64}, DType::f32),
          "halfbyte: scale dtype must be");
  refused(Layout::gpt_oss,
          weight({.format = Format::mxfp4, .group_size = 32, .scale_dtype = DType::f8_e8m0}, {4, 64}),
          "gpt-oss: holds experts in one tensor of three axes");
  QuantizedTensor q = weight({.format = Format::fp8, .group_size = 128}, {4, 128});
  reinterpret_cast<float*>(q.scales.data())[1] *= 2;
  refused(Layout::fp8, q, "fp8: has a scale for a group of 128 rows, in which they differ");
  q = weight({.granularity = Granularity::flat, .double_quant = true}, {4, 64});
  q.scales_map = halfbyte::Tensor({}, DType::f32, {256});
  std::memset(q.scales_map.data(), 0, 1024);
  refused(Layout::halfbyte, q, "halfbyte: its scales have a map of their own");
  q = weight(affine, {4, 64});
  q.biases = {};
  CheckpointWriter writer(path("out"), {.layout = Layout::mlx});
  expect_error(ErrorCode::usage, "weight \"w\": parts: biases must be 4 elements",
               [&] { writer.set("w", q); });

  // What is found when it is written leaves no output.
  const auto fails = [&](ErrorCode code, const std::string& text, WriterOptions options, const auto& fill) {
    options.layout = Layout::compressed_tensors;
    expect_error(code, text, [&] {
      CheckpointWriter failing(path("out"), options);
      fill(failing);
      failing.finish();
    });
    EXPECT_FALSE(fs::exists(path("out")));
  };
  const QuantSpec int4{.format = Format::int4, .asymmetric = true};
  fails(ErrorCode::bad_input, "weight \"w\": scale 2 is not finite", {}, [&](CheckpointWriter& to) {
    QuantizedTensor bad = weight(int4, {4, 64});
    reinterpret_cast<float*>(bad.scales.data())[2] = std::numeric_limits<float>::quiet_NaN();
    to.set("w", bad);
  });
  fails(ErrorCode::bad_input, "weight \"w\": zero point 1 is 16, not a code of 4 bits", {},
        [&](CheckpointWriter& to) {
          QuantizedTensor bad = weight(int4, {4, 64});
          bad.zeros.data()[1] = std::byte{16};
          to.set("w", bad);
        });
  fails(ErrorCode::usage, "\"w\" was made of another spec", {}, [&](CheckpointWriter& to) {
    to.set("w", weight(int4, {4, 64}), [&] { return weight(int4, {8, 64}); });
  });
  fails(ErrorCode::usage, "but \"w\" has another than \"v\"", {.config = "{}"}, [&](CheckpointWriter& to) {
    to.set("v", weight(int4, {4, 64}));
    to.set("w", weight({.format = Format::int8}, {4, 64}));
  });
  const std::string model = write_model_directory();
  quantize_checkpoint(model, path("quantized"), options_for(Format::nf4));
  fails(ErrorCode::bad_input, "is quantized in layout bitsandbytes, and was not given",
        {.base = path("quantized")}, [&](CheckpointWriter& to) {
          to.set("w", weight(int4, {4, 64}));
        });
  fails(ErrorCode::usage, "the input", {.base = path("quantized")}, [&](CheckpointWriter& to) {
    to = CheckpointWriter(path("quantized"), {.layout = Layout::bitsandbytes, .base = path("quantized")});
  });
  expect_error(ErrorCode::usage, "has no weight \"w\"", [&] { load_weight(Checkpoint::open(model), "w"); });
  expect_error(ErrorCode::usage, "\"lm_head.weight\" is dense",
               [&] { load_weight(Checkpoint::open(model), "lm_head.weight"); });
}

// Whoever stores the bytes of codes as floats gives the same weight.
TEST_F(CheckpointTest, CodesStoredAsFloatsComeIn) {
  const std::string input = write_input({random_tensor("a.weight", DType::bf16, {64, 128})});
  QuantizeOptions options = options_for(Format::nf4);
  options.double_quant = true;
  quantize_checkpoint(input, path("out"), options);
  const Checkpoint out = Checkpoint::open(path("out"));
  std::vector<StoredValues> tensors;
  for (const StoredTensor& stored : out.tensors()) {
    StoredValues& tensor = tensors.emplace_back(stored.name, stored.dtype, stored.shape);
    tensor.bytes.resize(stored.num_bytes);
    out.read(stored, 0, tensor.bytes);
    if (stored.name == "a.weight") tensor.dtype = "F32", tensor.shape = {1024, 1};
  }
  write_model(path("floats"), tensors);
  const QuantizedTensor q = load_weight(Checkpoint::open(path("floats")), "a.weight");
  expect_same_parts(q, load_weight(out, "a.weight"));
  CheckpointWriter writer(path("again"), {.layout = Layout::bitsandbytes, .base = input});
  writer.set("a.weight", q);
  writer.finish();
  EXPECT_TRUE(read_file(path("again")) == read_file(path("out")));
}

// Patterns that take a backtracking matcher time exponential in the name, or its stack.
TEST(Patterns, CostNoMoreThanTheirSizeAndThatOfTheName) {
  const auto reason = [](const std::string& pattern, const std::string& name) {
    Weight weight;
    weight.name = name;
    weight.shape = {2, 64};
    weight.dtype = DType::bf16;
    QuantizeOptions options;
    options.include = {pattern};
    return dense_reasons("", std::span(&weight, 1), options).front();
  };
  EXPECT_EQ(reason("(x+x+)+y", std::string(1024, 'x')), "not selected");
  EXPECT_EQ(reason("(((a*)*)*)*b", std::string(1024, 'a')), "not selected");
  EXPECT_EQ(reason("(a?){500}$", std::string(500, 'a')), "");
  // They are searched for, and anchors are those of the name.
  EXPECT_EQ(reason("p_p", "a.up_proj"), "");
  EXPECT_EQ(reason("up|^down", "a.up_proj"), "");
  EXPECT_EQ(reason("^up", "a.up_proj"), "not selected");
  EXPECT_EQ(reason("up$|^a\\.", "b.up_proj"), "not selected");
  EXPECT_EQ(reason("o\\b", "a\nb.o.weight"), "");
  for (const std::string pattern : {"(a)\\1", "\\2222222222222222222222", "a)|(b", "(", "a{2", "[", "\\",
                                    "(a{90}){91}", "a{99999}", "(a{1,99}){0,99}"})
    expect_error(ErrorCode::usage, "include: ", [&] { reason(pattern, "a.up_proj"); });
  expect_error(ErrorCode::usage, "at most 4096 bytes", [&] { reason(std::string(4097, 'a'), "a"); });
}

}  // namespace
}  // namespace halfbyte
