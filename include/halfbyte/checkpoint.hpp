// Checkpoints: safetensors files and Hugging Face model directories, dense or quantized, in the layouts of
// several tools. The command line tool uses only this interface for checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "halfbyte/error.hpp"
#include "halfbyte/format.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/process_group.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// What an output is to load in (docs/compatibility.md). Readers hold modules, not tensors: which of them may
// be quantized, and under which names, differs.
enum class Reader : uint8_t { transformers_5, transformers_4, vllm, mlx_lm, none };
HALFBYTE_API const char* to_string(Reader reader);  // "transformers-5", "mlx-lm", ...
// "transformers" is the newest.
HALFBYTE_API Reader parse_reader(std::string_view word);

// How layout bitsandbytes stores the experts of a layer (docs/formats.md). The bytes of codes and scales are
// the same, and so are all values.
enum class ExpertForm : uint8_t {
  per_expert,   // a matrix for each expert and projection
  parametrize,  // of a projection one tensor [E, out, in], as bitsandbytes.nn.parametrize has it
  experts4bit,  // the same in the tensors of the module Experts4bit
};
HALFBYTE_API const char* to_string(ExpertForm form);  // "per-expert", "parametrize", "experts4bit"
HALFBYTE_API ExpertForm parse_expert_form(std::string_view word);

// One tensor as stored in a safetensors file.
struct StoredTensor {
  std::string name;
  std::string dtype;  // as the file spells it: "BF16", "U8", "F8_E4M3", ...
  std::vector<int64_t> shape;
  std::string file;     // name of the file within the directory (or of the file itself)
  uint64_t offset = 0;  // bytes from the start of the file
  uint64_t num_bytes = 0;
};

// One weight as a model sees it: a dense tensor, or the parts of a quantized one.
struct Weight {
  std::string name;            // "model.layers.0.mlp.up_proj.weight"
  std::vector<int64_t> shape;  // logical: of the dense weight, [in, out] for a Conv1D
  // Dense: as stored; unset if DType does not have it. Quantized: the dtype that the weight had before.
  std::optional<DType> dtype;
  std::optional<Layout> layout;  // set iff quantized
  QuantSpec spec;                // where quantized
  std::vector<int> parts;        // indices into Checkpoint::tensors(); a dense weight has one
  uint64_t num_bytes = 0;        // of all parts
  // Where the tensor belongs to a ForeignQuantization: its method.
  std::string foreign = {};
  // What is unusual in how a quantized weight is stored: "act-order" (of gptq: groups of columns that are not
  // neighbours), "Experts4bit" (of bitsandbytes), or what its config says wrong. Empty: nothing.
  std::string note = {};
  // Rows of a matrix for which the scale of a group is stored once: of fp8 in blocks more than 1.
  int64_t scale_rows = 1;
};

// Quantization by another tool in a form that is recognised and not read. Its tensors are weights as stored,
// and nothing can be computed from them.
struct ForeignQuantization {
  std::string method;  // "fp8", "gptq" in forms that are not read, "int8", "llm.int8", "nvfp4", "mxfp4", ...:
                       // a word of that tool where it is not known
  std::string layout;  // whose tensors they are: "compressed-tensors", "modelopt", "mlx", ...; empty
                       // where several tools store it in this way
  std::string source;  // what says so: "config.json", "tensors", ...
  // Of the config, with the words of its tool, or of the shapes of the first weight. The values are JSON
  // texts; where parts of the model differ, lists.
  std::vector<std::pair<std::string, std::string>> parameters;
  int64_t num_weights = 0;  // that were found
  std::string example;      // the codes of the first one
  std::string advice;       // how to make the model dense
};

struct Progress {
  const char* phase;  // "open", "plan", "measure", "quantize", "dequantize", "write", "verify", "compare",
                      // "sync", "check", "copy"
  uint64_t done_bytes;
  uint64_t total_bytes;  // 0: not known
};
// Called from any thread, one call at a time, about twenty times a second, and once more right
// before the output appears. Return false to cancel: the operation throws Error(cancelled) and leaves no
// output.
using ProgressFunction = std::function<bool(const Progress&)>;

class Checkpoint {
 public:
  // `path` is a .safetensors file, or a directory with model.safetensors or with an index and shards.
  // Validates every header, and checks that the parts of each quantized weight fit together. Throws
  // Error(bad_input), naming file, tensor or byte, and Error(io). `progress` is called only while headers of
  // many tensors are read.
  HALFBYTE_API static Checkpoint open(const std::string& path, const ProgressFunction& progress = {});
  HALFBYTE_API Checkpoint(Checkpoint&&) noexcept;
  HALFBYTE_API Checkpoint& operator=(Checkpoint&&) noexcept;
  HALFBYTE_API ~Checkpoint();

  HALFBYTE_API bool is_directory() const;
  HALFBYTE_API std::span<const StoredTensor> tensors() const;
  HALFBYTE_API std::span<const Weight> weights() const;          // sorted by name
  HALFBYTE_API const Weight* find(std::string_view name) const;  // null if there is none
  HALFBYTE_API std::span<const ForeignQuantization> foreign() const;
  // Raw bytes [offset, offset + bytes.size()) of a stored tensor. Thread safe.
  HALFBYTE_API void read(const StoredTensor& tensor, uint64_t offset, std::span<std::byte> bytes) const;
  // Elements [begin, begin + count) of the row-major weight, decoded to `dtype` (f32, f16, bf16,
  // f64). Thread safe; uses the calling thread only.
  HALFBYTE_API void decode(const Weight& weight, int64_t begin, int64_t count, DType dtype, void* out) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The parts of a quantized weight, from every layout, exactly: a QuantizedTensor of the spec, with the
// padding of the native layout. Its shape is [out, in] of the layer, also of a Conv1D, whose Weight::shape is
// the reverse. Throws Error(usage) if no weight has the name, naming it, or if it is dense: see decode.
// Error(bad_input) where the file does not have what its header says. Waits for execution.stream.
//
// `slice`: only a part along an axis of that shape, QuantizedTensor::slice of the whole, for tensor
// parallelism: of axis 0 the outputs, of axis 1 the inputs of a layer. With little memory besides; of axis 0
// only its part of the file is read. Throws as QuantizedTensor::slice.
HALFBYTE_API QuantizedTensor load_weight(const Checkpoint& checkpoint, std::string_view name,
                                         Device device = {}, Execution execution = {},
                                         const std::optional<Slice>& slice = {});

// A dense weight, quantized while it is read, in blocks of rows: what quantize() makes of the whole, with
// little memory besides. Its shape is that of the file. Throws Error(usage) if no weight has the name, if it
// is quantized or of a dtype that quantize does not take, and as check_spec; spec.double_quant must be false.
// Error(bad_input), naming the weight, where it is not finite or spec.scale_dtype cannot hold a scale. Waits
// for execution.stream.
HALFBYTE_API QuantizedTensor quantize_weight(const Checkpoint& checkpoint, std::string_view name,
                                             const QuantSpec& spec, const Encoding& encoding = {},
                                             Device device = {}, Execution execution = {});

enum class NonFinite : uint8_t { error, keep_dense };

// An output of several files that a run had to leave is unfinished: the files that are complete, and a
// journal of them, stay beside its path, hidden (docs/output.md). What the next run with this output does
// with it. It is gone on with only by the same operation with the same options, of the same input: else
// Error(usage) names the difference. The result is what a run without interruption writes, to the byte.
// Error(exists) where a run still uses it. Without an unfinished output all three are the same.
enum class Unfinished : uint8_t {
  keep,     // leaves it alone, and begins anew
  resume,   // checks its complete files, and writes what is missing
  discard,  // removes it, and begins anew
};

// An option that is not set has the default of the layout (docs/formats.md).
struct QuantizeOptions {
  Format format = Format::nf4;
  bool asymmetric = false;
  bool double_quant = false;
  std::array<float, 16> table = {};             // lut4 only
  std::optional<Layout> layout = {};            // default by format
  std::optional<Granularity> granularity = {};  // group, channel or tensor
  std::optional<int64_t> group_size = {};       // with Granularity::group (or when only this is set)
  std::optional<ScaleRule> scale_rule = {};
  std::optional<DType> scale_dtype = {};
  bool search = false;  // Encoding::search, of all weights
  // With search: a .safetensors file with the importance of the input channels of each weight that is
  // quantized, F32 [columns of the weight], under the name that the weight has in the report. Empty: all
  // count alike.
  std::string importance = {};
  NonFinite nonfinite = NonFinite::error;
  std::vector<std::string> include = {};  // ECMAScript regular expressions searched in the names, without
                                          // back-references; where given they replace the default choice of
                                          // linear weights
  std::vector<std::string> exclude = {};
  std::optional<Reader> reader = {};  // default by layout: transformers_5, mlx_lm, or none
  bool force_layout = false;          // include may select what the reader cannot load
  bool keep_embeddings =
      false;  // reader mlx_lm: embeddings and head stay dense, which it quantizes by default
  bool fallback_dense = false;  // a selected tensor the layout cannot hold stays dense
  // Plan, measure a sample, and report only. Then `output` may be empty; otherwise what the sample becomes is
  // written beside it, in files without a name.
  bool dry_run = false;
  bool verify = true;
  bool force = false;  // replace an existing output
  Unfinished unfinished = Unfinished::keep;
  // Of a directory: the output has files of at most so many bytes of tensors, but for a larger tensor with
  // what belongs to it; 0: the files of the input. What is known only after quantizing (a weight that stays
  // dense by its values, scales in f32) can make a file larger.
  uint64_t shard_bytes = 0;
  // The devices that compute, side by side: each takes work as fast as it does it. Empty: the CPU. All give
  // the same bytes. Throws Error(device) if one cannot be used, or if its memory is too small even for small
  // blocks; nothing falls back. Verification always runs on the CPU, beside the rest where there are several
  // files and threads.
  std::vector<Device> devices = {};
  // Leaves out the CUDA devices if a measurement of a block shows that the threads that would feed them
  // compute faster. Without `devices` the CPU is meant, and beside it the first usable CUDA device, which is
  // looked for behind the measurement only: a driver starts in some tenths of a second.
  bool choose_devices = false;
  int num_threads = 0;  // of the CPU; 0: all
  ProgressFunction progress = {};
  // Processes that write the output together; null: this one alone. The report of rank 0 is whole.
  std::shared_ptr<ProcessGroup> process_group = {};
};

// What happened (or would happen) to one weight.
struct WeightReport {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype;  // of the source, as stored ("BF16")
  bool quantized = false;
  std::string reason;      // why a weight stayed dense: "embedding", "router", "excluded", "fallback: ...",
                           // "non-finite: ..."
  std::string note;        // "scales in f32: f16 cannot hold them"
  QuantSpec spec;          // where quantized
  int64_t scale_rows = 1;  // as in Weight
  Encoding encoding;       // likewise: the choices made
  uint64_t source_bytes = 0;
  uint64_t output_bytes = 0;
  double bits_per_weight = 0;  // output bits per element
  // Error of the decoded output against the source, if verified. Otherwise 0.
  bool measured = false;
  double max_error = 0;  // largest |x_hat - x|
  int64_t max_error_index = 0;
  double relative_rmse = 0;  // sqrt(sum (x_hat - x)^2 / sum x^2); 0 where both are 0
  double snr_db = 0;         // -20 log10(relative_rmse); +inf where exact
};

// Whether a reader loads an output, by the rules that are known of it.
struct ReaderVerdict {
  Reader reader;
  std::string why_not;  // empty: it does
};

struct CheckpointReport {
  std::string input, output;
  // Of quantize: the reader that the output is for, and which read the layout; the architecture that the
  // weights were selected by. Empty: config.json names none that is known, and nothing vouches for a reader.
  Reader reader = Reader::none;
  std::vector<ReaderVerdict> readers;
  std::string architecture;
  std::optional<Layout> layout;              // of the output (quantize) or the input (dequantize)
  std::vector<Device> devices = {Device{}};  // that computed
  std::string device_note;                   // why choose_devices took no CUDA device; empty: it did
  std::vector<WeightReport> weights;
  std::vector<std::string> left_out;                     // weights of the input that the reader does not load
  std::vector<std::string> copied_files, skipped_files;  // of a directory
  int64_t num_resumed_files = 0;                // files with tensors that an earlier run had completed
  uint64_t source_bytes = 0, output_bytes = 0;  // of tensors
  uint64_t quantized_source_bytes = 0;          // share = this / source_bytes
  int64_t num_quantized = 0;
  uint64_t peak_buffer_bytes = 0;  // upper bound of the working memory on the host, as planned
  // Of writing the files, of syncing them, and of verifying them: they overlap where there are several.
  double run_seconds = 0, sync_seconds = 0, verify_seconds = 0;
  // Of run_seconds, on all workers together: waiting for what they read, for what they write, and for copies
  // to CUDA devices and back; and the rest, which is computing.
  double read_seconds = 0, write_seconds = 0, copy_seconds = 0, compute_seconds = 0;
  // Of quantize and dequantize, from opening the input to the end. A dry run of quantize estimates this, and
  // the times above, from a sample that it takes (docs/scale.md); 0: it could not.
  double total_seconds = 0;
  std::string time_note;  // of a dry run: what was not measured, and why; empty: nothing
};
// What a run would have to be quicker at to be quicker: "read", "copy", "compute", "write", "verify" or
// "sync"; empty: nothing was run, nor estimated.
HALFBYTE_API const char* bottleneck(const CheckpointReport& report);

// Reads `input` and writes `output`: file -> file, directory -> directory. The output is written to a
// temporary sibling, synced and renamed; a failure leaves no output, but for an unfinished one. Unless
// options.verify is false, an independent unpacker first reads the written files back and compares them with
// the source. Memory use depends on blocks of rows (and on the scales of double-quantized weights), not on
// the model.
HALFBYTE_API CheckpointReport quantize_checkpoint(const std::string& input, const std::string& output,
                                                  const QuantizeOptions& options);

// What quantize_checkpoint does with the weights of a model in layout halfbyte, by their names, shapes and
// dtypes, where there are no files: for each why it stays dense, as WeightReport::reason; empty: it is
// quantized. `config`: the text of config.json; empty: there is none, and names decide. Of the options,
// include and exclude are looked at. Throws as quantize_checkpoint where these do not fit.
HALFBYTE_API std::vector<std::string> dense_reasons(const std::string& config,
                                                    std::span<const Weight> weights,
                                                    const QuantizeOptions& options);

struct DequantizeOptions {
  std::optional<DType> dtype = {};  // f32, f16, bf16; default: the dtype that each weight had before
  bool dry_run = false;
  bool force = false;
  Unfinished unfinished = Unfinished::keep;
  uint64_t shard_bytes = 0;          // as above
  std::vector<Device> devices = {};  // as above
  int num_threads = 0;
  ProgressFunction progress = {};
  std::shared_ptr<ProcessGroup> process_group = {};  // as above
};
// Makes every quantized weight dense, and removes from config.json what quantization had added.
// Error(bad_input) for weights of a ForeignQuantization.
HALFBYTE_API CheckpointReport dequantize_checkpoint(const std::string& input, const std::string& output,
                                                    const DequantizeOptions& options);

struct WriterOptions {
  Layout layout = Layout::halfbyte;  // of the quantized weights
  // A checkpoint: its weights that are not given, its side files and its metadata are those of the output
  // too, weights under the names and in the form that the reader wants. Its weights that are quantized in
  // another layout must all be given. It must not change before finish() is done. Empty: there is none.
  std::string base = {};
  // config.json of an output directory, without or with an entry of a quantization, which is replaced. Unset:
  // that of base.
  std::optional<std::string> config = {};
  // Of layout bitsandbytes, into a directory: weights [E, out, in] have the tensors of Experts4bit.
  bool experts4bit = false;
  std::optional<Reader> reader = {};  // as in QuantizeOptions, like all below
  bool force_layout = false;  // weights that the reader cannot load quantized are written all the same
  bool verify = true;
  bool force = false;
  // With an identity, an output of several files can be unfinished: text that says what is given, and changes
  // with it (a program, its options, its version). Empty: after an error the output is removed.
  std::string identity = {};
  Unfinished unfinished = Unfinished::keep;
  uint64_t shard_bytes = 0;
  int num_threads = 0;
  ProgressFunction progress = {};
  // As in QuantizeOptions, with an identity: every process gives the same weights, and makes those of its
  // files.
  std::shared_ptr<ProcessGroup> process_group = {};
};

// Writes a checkpoint of weights that are given: quantized ones as they are, in a layout that can hold them,
// and dense ones. The output is a directory, or one .safetensors file: what base is, or if there is none, a
// file if the name ends so. The output becomes visible with finish(), complete and verified, or not at all.
class CheckpointWriter {
 public:
  HALFBYTE_API CheckpointWriter(std::string output, WriterOptions options);
  HALFBYTE_API CheckpointWriter(CheckpointWriter&&) noexcept;
  HALFBYTE_API CheckpointWriter& operator=(CheckpointWriter&&) noexcept;
  HALFBYTE_API ~CheckpointWriter();

  // A weight of the output, in the place of that of base with this name. The object and its memory are shared
  // until finish() is done, and must not change. Throws Error(usage), naming the weight and the reason, where
  // the layout cannot hold it: format, granularity, group size, dtype of scales, double quantization, shape;
  // and where the name was given before.
  HALFBYTE_API void set(const std::string& name, QuantizedTensor weight);
  HALFBYTE_API void set(const std::string& name, Tensor dense);
  // The same for a weight that `make` returns when its file is written, so that only the weights of one file
  // are in memory. `form` has its spec, shape and dtype; parts of it are not looked at. finish() throws
  // Error(usage) if `make` returns a weight of another form, and what `make` throws.
  HALFBYTE_API void set(const std::string& name, const QuantizedTensor& form,
                        std::function<QuantizedTensor()> make);
  // `make` may set the note and the error that the report has of the weight.
  HALFBYTE_API void set(const std::string& name, const QuantizedTensor& form,
                        std::function<QuantizedTensor(WeightReport&)> make);

  // A weight of base that the output does not have. One that base does not have either is passed over.
  HALFBYTE_API void leave_out(const std::string& name);

  // Writes all; once. Error(bad_input) for scales or biases that are not finite, for zero points that are no
  // codes, and for weights of base that are neither given nor in the layout; Error(usage) where the reader
  // cannot load a weight as it was given. Unless options.verify is false, an independent unpacker reads the
  // files back: what it decodes must be what the weights decode to in f32, to the bit. Memory: blocks of
  // rows, and of one file the weights that are made and host copies of those on a CUDA device.
  HALFBYTE_API CheckpointReport finish();

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

struct ConvertOptions {
  Layout layout = Layout::halfbyte;  // of the output
  // Weights that cannot keep their codes are decoded and quantized as the layout does it. Otherwise they are
  // an error.
  bool requantize = false;
  // Of layout bitsandbytes: the form of the experts in the output. Its reader is then by default the one that
  // reads this form: transformers_4, or none. Unset: they stay as they are.
  std::optional<ExpertForm> experts = {};
  bool dry_run = false;
  std::optional<Reader> reader = {};  // as in QuantizeOptions, like all below
  bool force_layout = false;
  bool verify = true;
  bool force = false;
  Unfinished unfinished = Unfinished::keep;
  uint64_t shard_bytes = 0;
  int num_threads = 0;
  ProgressFunction progress = {};
  std::shared_ptr<ProcessGroup> process_group = {};
};
// Writes the quantized weights of `input` in another layout: the codes stay, and scales, zero points and
// biases become those that make every code decode to the same f32. Where the layout cannot hold them so,
// throws Error(bad_input) that names the first weight and what it would lose, unless options.requantize.
// Scales have the dtype of the model's weights where the layout wants it and it holds them, otherwise the one
// that they have. Experts that gpt-oss has in one tensor become a weight each in other layouts, and the
// reverse, biases too. Error(usage) for `experts` in another layout than bitsandbytes; Error(bad_input) where
// experts cannot be divided: config.json must name a known architecture whose experts are [E, out, in], gate
// first, and groups must divide rows. Other weights and files are copied. Memory: the weights of one file of
// the output. The report has the notes "requantized: ...", with the error against the decoded input.
HALFBYTE_API CheckpointReport convert_checkpoint(const std::string& input, const std::string& output,
                                                 const ConvertOptions& options);

struct CompareRow {
  std::string name;
  std::string problem;  // "missing in B", "shape [2, 3] against [2, 4]"; empty if compared
  double max_error = 0;
  int64_t max_error_index = 0;
  double relative_rmse = 0;
  double snr_db = 0;
};
// Compares the decoded weights of two checkpoints; A is the reference. Rows with a problem come first, then
// the others with the worst SNR first.
HALFBYTE_API std::vector<CompareRow> compare_checkpoints(const std::string& a, const std::string& b,
                                                         int num_threads = 0, ProgressFunction progress = {});

// Bits per element of a weight as stored.
HALFBYTE_API double bits_per_weight(const Weight& weight);

}  // namespace halfbyte
