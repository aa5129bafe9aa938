// Outputs that a run had to leave: another goes on with them, or leaves them alone, or removes them.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <map>
#include <random>

#include "halfbyte/checkpoint.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/output.hpp"
#include "io/test_directory.h"

namespace halfbyte {
namespace {

namespace fs = std::filesystem;

constexpr int kLayers = 4;

Tensor random_matrix(int64_t rows, int64_t cols, unsigned seed, float scale = 0.02f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, scale);
  Tensor tensor({}, DType::f32, {rows, cols});
  auto* const x = reinterpret_cast<float*>(tensor.data());
  for (int64_t i = 0; i < rows * cols; ++i) x[i] = normal(rng);
  return tensor;
}

class Resume : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_ / name; }

  // A model of a file for each of four layers. One weight of the second has NaN, one of the third values that
  // need scales beyond f16.
  std::string make_model(bool has_nan = true) {
    WriterOptions options;
    options.shard_bytes = 1;
    options.config = R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"})";
    CheckpointWriter writer(path("model"), options);
    for (unsigned layer = 0; layer < kLayers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      Tensor q = random_matrix(64, 128, 10 * layer), up = random_matrix(96, 128, 10 * layer + 1);
      if (has_nan && layer == 1) reinterpret_cast<float*>(q.data())[5] = std::nanf("");
      if (layer == 2) up = random_matrix(96, 128, 3, 1e7f);
      writer.set(prefix + "self_attn.q_proj.weight", std::move(q));
      writer.set(prefix + "mlp.up_proj.weight", std::move(up));
    }
    writer.finish();
    write_file(path("model/tokenizer.json"), "{}");
    return path("model");
  }

  std::map<std::string, std::string> content(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(path(name)))
      if (entry.is_regular_file())
        files[fs::relative(entry.path(), path(name)).string()] = read_file(entry.path().string());
    return files;
  }
  // Of what is unfinished.
  std::string unfinished() const {
    for (const std::string& name : dir_.names())
      if (name.starts_with(".out.halfbyte-")) return path(name);
    return "";
  }

  // Cancels when the file of this number is synced, or what is beside them copied. A file that takes long to
  // sync is reported again; the next one has another length.
  static ProgressFunction cancel_at(int file) {
    return [file, count = 0, last = std::pair<std::string, uint64_t>()](const Progress& progress) mutable {
      const std::pair<std::string, uint64_t> now(progress.phase, progress.total_bytes);
      if ((now.first == "sync" || now.first == "copy") && now != last) {
        ++count;
        last = now;
      }
      return count <= file;
    };
  }

  template <class Options, class Run>
  void check(Options options, const Run& run) {
    const CheckpointReport expected = run("want", options);
    for (const bool force : {false, true})
      for (int complete = 0; complete <= kCount; ++complete) {
        options.force = force;
        if (force) fs::copy(path("want"), path("out"), fs::copy_options::recursive);
        options.unfinished = Unfinished::keep;
        options.progress = cancel_at(complete);
        expect_error(ErrorCode::cancelled, "cancelled", [&] { run("out", options); });
        const bool left = !unfinished().empty();
        options.progress = {};
        options.unfinished = Unfinished::resume;
        const CheckpointReport report = run("out", options);
        EXPECT_EQ(report.num_resumed_files, left ? std::min(complete, kCount) : 0);
        EXPECT_EQ(content("out"), content("want"));
        expect_equal(report, expected);
        EXPECT_EQ(unfinished(), "");
        fs::remove_all(path("out"));
      }
  }
  static constexpr int kCount = 2 * kLayers;  // files

  static void expect_equal(const CheckpointReport& a, const CheckpointReport& b) {
    EXPECT_EQ(a.num_quantized, b.num_quantized);
    EXPECT_EQ(a.output_bytes, b.output_bytes);
    ASSERT_EQ(a.weights.size(), b.weights.size());
    for (size_t i = 0; i < a.weights.size(); ++i) {
      const WeightReport &x = a.weights[i], &y = b.weights[i];
      EXPECT_EQ(x.name, y.name);
      EXPECT_EQ(x.reason, y.reason);
      EXPECT_EQ(x.note, y.note) << x.name;
      EXPECT_TRUE(x.spec == y.spec && x.quantized == y.quantized) << x.name;
      EXPECT_EQ(x.measured, y.measured);
      EXPECT_EQ(x.max_error, y.max_error);
      EXPECT_EQ(x.max_error_index, y.max_error_index);
      EXPECT_EQ(x.relative_rmse, y.relative_rmse);
      EXPECT_EQ(x.snr_db, y.snr_db);
      EXPECT_EQ(x.output_bytes, y.output_bytes);
    }
  }

  TestDirectory dir_;
};

QuantizeOptions resume_options(Format format) {
  QuantizeOptions options;
  options.format = format;
  options.nonfinite = NonFinite::keep_dense;
  options.num_threads = 2;
  return options;
}

TEST_F(Resume, quantize) {
  const std::string model = make_model();
  const auto run = [&](const char* to, const QuantizeOptions& options) {
    return quantize_checkpoint(model, path(to), options);
  };
  for (const Format format : {Format::nf4, Format::int4, Format::nvfp4}) {  // f16 scales of int4 become f32
    SCOPED_TRACE(info(format).name);
    QuantizeOptions options = resume_options(format);
    if (format == Format::int4) options.layout = Layout::halfbyte;
    if (format == Format::int4) options.group_size = 64;
    options.double_quant = format == Format::nf4;
    check(options, run);
    fs::remove_all(path("want"));
  }
}

TEST_F(Resume, dequantize_and_convert) {
  const std::string model = make_model(/*has_nan=*/false);
  QuantizeOptions options = resume_options(Format::int4);
  options.layout = Layout::halfbyte;
  options.group_size = 64;
  options.shard_bytes = 1;
  quantize_checkpoint(model, path("int4"), options);
  check(DequantizeOptions{}, [&](const char* to, const DequantizeOptions& with) {
    return dequantize_checkpoint(path("int4"), path(to), with);
  });
  fs::remove_all(path("want"));
  ConvertOptions convert;
  convert.layout = Layout::mlx;
  convert.requantize = true;
  convert.force_layout = true;
  check(convert, [&](const char* to, const ConvertOptions& with) {
    return convert_checkpoint(path("int4"), path(to), with);
  });
}

// What a program has given is made for files that are missing only.
TEST_F(Resume, writer) {
  int made = 0;
  const auto run = [&](const char* to, Unfinished unfinished, ProgressFunction progress,
                       const char* identity) {
    WriterOptions options;
    options.shard_bytes = 1;
    options.identity = identity;
    options.unfinished = unfinished;
    options.progress = std::move(progress);
    CheckpointWriter writer(path(to), options);
    QuantSpec spec;
    spec.format = Format::nf4;
    spec.group_size = 64;
    made = 0;
    for (unsigned i = 0; i < kCount; ++i) {
      QuantizedTensor form;
      form.spec = spec;
      form.shape = {64, 128};
      writer.set("w" + std::to_string(i), form, [&made, spec, i](WeightReport& report) {
        ++made;
        report.note = "the note of " + std::to_string(i);
        const Tensor x = random_matrix(64, 128, i);
        return quantize({x.data(), DType::f32, {64, 128}, {}, {}}, spec);
      });
    }
    return writer.finish();
  };
  const CheckpointReport expected = run("want", Unfinished::keep, {}, "test 1");
  EXPECT_EQ(made, kCount);
  const auto interrupt = [&](const char* identity) {
    // The writer reports no phase of syncing.
    const auto cancel = [&](const Progress&) { return made <= 5; };
    expect_error(ErrorCode::cancelled, "", [&] { run("out", Unfinished::keep, cancel, identity); });
  };
  interrupt("");
  EXPECT_EQ(unfinished(), "");
  interrupt("test 1");
  ASSERT_NE(unfinished(), "");
  expect_error(ErrorCode::usage, "operation is test 1 there and test 2 here",
               [&] { run("out", Unfinished::resume, {}, "test 2"); });
  const CheckpointReport report = run("out", Unfinished::resume, {}, "test 1");
  EXPECT_GE(report.num_resumed_files, 3);
  EXPECT_EQ(made, kCount - report.num_resumed_files);
  EXPECT_EQ(content("out"), content("want"));
  expect_equal(report, expected);
}

TEST_F(Resume, is_left_alone_or_discarded) {
  const std::string model = make_model();
  QuantizeOptions options = resume_options(Format::nf4);
  options.progress = cancel_at(3);
  expect_error(ErrorCode::cancelled, "(3 of 8 files are complete and kept",
               [&] { quantize_checkpoint(model, path("out"), options); });
  const std::string left = unfinished();
  options.progress = {};
  quantize_checkpoint(model, path("out"), options);
  const auto leftovers = remove_leftovers(path("out"));
  ASSERT_EQ(leftovers.size(), 1u);
  EXPECT_EQ(leftovers[0].path, left);
  EXPECT_TRUE(leftovers[0].unfinished);
  EXPECT_NE(leftovers[0].why_kept.find("unfinished"), std::string::npos);

  options.unfinished = Unfinished::discard;
  options.force = true;
  quantize_checkpoint(model, path("out"), options);
  EXPECT_EQ(dir_.names(), (std::vector<std::string>{"model", "out"}));
}

TEST_F(Resume, refuses_what_is_of_another_run) {
  const std::string model = make_model();
  const auto interrupt = [&] {
    QuantizeOptions options = resume_options(Format::nf4);
    options.progress = cancel_at(3);
    expect_error(ErrorCode::cancelled, "", [&] { quantize_checkpoint(model, path("out"), options); });
  };
  interrupt();
  const std::string left = unfinished();
  QuantizeOptions options = resume_options(Format::int4);
  options.unfinished = Unfinished::resume;
  const auto refused = [&](ErrorCode code, const std::string& text) {
    expect_error(code, text, [&] { quantize_checkpoint(model, path("out"), options); });
    EXPECT_EQ(unfinished(), left);
    EXPECT_FALSE(fs::exists(path("out")));
  };
  refused(ErrorCode::usage, "options/format is nf4 there and int4 here");
  options.format = Format::nf4;
  options.exclude = {"q_proj"};
  refused(ErrorCode::usage, "options/exclude");
  options.exclude = {};

  const int lock = ::open((left + "/lock").c_str(), O_RDWR);
  ASSERT_EQ(::flock(lock, LOCK_EX | LOCK_NB), 0);
  refused(ErrorCode::exists, "a run that has not ended uses it");
  options.unfinished = Unfinished::discard;
  quantize_checkpoint(model, path("out"), options);  // what is in use stays
  EXPECT_EQ(unfinished(), left);
  fs::remove_all(path("out"));
  options.unfinished = Unfinished::resume;
  ::close(lock);

  // It may not replace what is there, and is still there afterwards.
  fs::create_directory(path("out"));
  expect_error(ErrorCode::exists, "out", [&] { quantize_checkpoint(model, path("out"), options); });
  fs::remove(path("out"));

  const std::string shard = path("model/model-00002-of-00008.safetensors");
  const auto time = fs::last_write_time(shard);
  fs::last_write_time(shard, time + std::chrono::seconds(1));
  refused(ErrorCode::usage, "source/model-00002-of-00008.safetensors/changed");
  fs::last_write_time(shard, time);
  EXPECT_EQ(quantize_checkpoint(model, path("out"), options).num_resumed_files, 3);
}

// A run that would fail again leaves nothing.
TEST_F(Resume, not_after_bad_input) {
  const std::string model = make_model();
  QuantizeOptions options = resume_options(Format::nf4);
  options.nonfinite = NonFinite::error;
  expect_error(ErrorCode::bad_input, "non-finite", [&] { quantize_checkpoint(model, path("out"), options); });
  EXPECT_EQ(dir_.names(), (std::vector<std::string>{"model"}));
}

TEST_F(Resume, damage_is_written_again) {
  const std::string model = make_model();
  const QuantizeOptions options = resume_options(Format::nf4);
  quantize_checkpoint(model, path("want"), options);
  QuantizeOptions interrupted = options, resumed = options;
  interrupted.progress = cancel_at(4);
  resumed.unfinished = Unfinished::resume;
  expect_error(ErrorCode::cancelled, "", [&] { quantize_checkpoint(model, path("out"), interrupted); });
  const std::string left = unfinished(), journal = read_file(left + "/journal");
  fs::copy(left, path("kept"), fs::copy_options::recursive);

  const auto resume = [&](int64_t num_files) {
    EXPECT_EQ(quantize_checkpoint(model, path("out"), resumed).num_resumed_files, num_files);
    EXPECT_EQ(content("out"), content("want"));
    EXPECT_EQ(unfinished(), "");
    fs::remove_all(path("out"));
    fs::copy(path("kept"), left, fs::copy_options::recursive);
  };
  const std::string shard = left + "/output/model-00002-of-00008.safetensors";
  std::string bytes = read_file(shard);
  bytes[bytes.size() / 2] ^= 1;
  write_file(shard, bytes);
  resume(3);
  fs::resize_file(shard, bytes.size() - 1);
  resume(3);
  fs::remove(shard);
  resume(3);

  // The journal ends anywhere: the lines before it count.
  const size_t first = journal.find('\n') + 1;
  for (size_t size = first; size <= journal.size(); size += 97) {
    write_file(left + "/journal", journal.substr(0, size));
    resume(std::count(journal.begin() + static_cast<ptrdiff_t>(first),
                      journal.begin() + static_cast<ptrdiff_t>(size), '\n'));
  }
  // So do zeros, which a crash of the system can leave.
  write_file(left + "/journal", journal + std::string(4096, '\0'));
  resume(4);
  std::string flipped = journal;
  flipped[first + 60] ^= 1;
  write_file(left + "/journal", flipped);
  resume(0);
  for (const std::string& damaged : {journal.substr(0, first - 1), std::string("{}\n"), std::string()}) {
    write_file(left + "/journal", damaged);
    expect_error(ErrorCode::usage, "its journal is damaged",
                 [&] { quantize_checkpoint(model, path("out"), resumed); });
    EXPECT_EQ(unfinished(), left);
  }
}

// Nothing of one file is complete before all is.
TEST_F(Resume, one_file_is_never_unfinished) {
  const std::string model = make_model();
  QuantizeOptions options = resume_options(Format::nf4);
  options.shard_bytes = uint64_t{1} << 40;
  for (int moment = 0; moment < 2; ++moment) {
    options.progress = cancel_at(moment);
    expect_error(ErrorCode::cancelled, "", [&] { quantize_checkpoint(model, path("out"), options); });
    EXPECT_EQ(unfinished(), "");
  }
  options.progress = {};
  options.unfinished = Unfinished::resume;
  EXPECT_EQ(quantize_checkpoint(model, path("out"), options).num_resumed_files, 0);
}

}  // namespace
}  // namespace halfbyte
