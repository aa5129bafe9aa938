// How each tool stores quantized weights. A layout is one row of a table: what it can hold, how its codes
// are packed, which tensors it writes, and how it finds them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "halfbyte/ops.hpp"
#include "io/buffer.h"

namespace halfbyte::io {

// What a stored tensor is to a quantized weight.
enum class Role : uint8_t {
  codes,
  scales,  // u8 where they are quantized in turn (double quantization)
  zeros,
  biases,
  scales_absmax,  // double quantization: one value for 256 scales
  constant,       // all bytes follow from the description of the weight, the global scale among it
};

struct Part {
  Role role;
  std::string name;
  std::string dtype;  // as safetensors spells it
  std::vector<int64_t> shape;
  std::string content = {};  // of a constant; repeated where it is shorter than the tensor
};

// Of gptq and awq: what the config and the tensors of a model say of how its words are meant.
struct WordForm {
  bool planar = false;  // gptq: the low bits of 32 codes, then their high bits, each in words of their own
  bool zeros_less_one = false;   // gptq, version 1: zero points are stored less 1
  bool has_zeros = true;         // a tensor of zero points, of symmetric weights too
  bool has_group_index = false;  // gptq: a tensor with the group of each column
  std::vector<int32_t> order =
      {};  // act-order: the stored column of each native one, whose groups are in order
};

// Everything about a quantized weight but its codes and scales.
struct QuantizedWeight {
  std::string name;
  std::vector<int64_t> shape;  // of the dense weight; at least one extent
  DType dtype = DType::f32;    // of the dense weight
  Layout layout = Layout::halfbyte;
  QuantSpec spec;
  std::optional<Encoding> encoding = {};  // how the codes were chosen, where that is known
  float scales_offset = 0;                // double quantization
  int64_t scale_rows = 1;   // rows of a matrix for which a scale of a group is stored once: of fp8 in blocks
  bool e5m2_codes = false;  // fp8, read only: decode_block() decodes these, not dequantize()
  // fp8, read only: F8_E8M0 or U8, of stored scales that are powers of two; those of `spec` are f32.
  std::string exponents = {};
  bool scales_of_module = false;       // layout fp8, read only: P.scale are those of P.weight
  float global_scale = 1;              // of formats that have one
  float global_reciprocal = 1;         // likewise: as stored, by layouts that store its reciprocal
  std::vector<float> scales_map = {};  // double quantization: 256 values; empty: double_quant_map()
  std::string codes_dtype = "U8";      // bitsandbytes can store the bytes of the codes as floats
  bool experts4bit = false;            // bitsandbytes: the tensors of the module Experts4bit
  WordForm words = {};                 // gptq, awq
  std::string note = {};               // as in Weight
  std::vector<std::string> others =
      {};  // tensors that belong to it and do not decode it: scales of activations

  int64_t cols() const { return shape.back(); }
  int64_t rows() const;  // product of the leading extents
  QuantShape quant_shape() const { return halfbyte::quant_shape(spec, rows(), cols()); }
};

// What layouts find in a checkpoint.
struct FoundWeights {
  std::vector<QuantizedWeight> weights;
  // Tensors of codes of a layout, in a form that it does not read, and why; they become foreign.
  std::map<std::string, std::string> not_read;
};

// Which dtypes the scales and biases of a layout have.
enum class ScaleDTypes : uint8_t { f32, f16, of_weight, any };

// Where codes are: in the rows of the weight, or in columns of words (io/columnwise.h).
enum class Packing : uint8_t { rows, gptq, awq };

struct LayoutInfo {
  Layout layout;
  const char* name;
  // What it can hold. The first entry of a list is the default; an empty list allows everything and
  // leaves the default to the format.
  std::vector<Format> formats = {};
  bool asymmetric = false;
  bool double_quant = false;
  std::vector<Granularity> granularities = {};
  std::vector<int64_t> group_sizes = {};
  int64_t default_group_size = 64;
  // Of fp8, where it has others than those above. Groups are then blocks of 128 rows, too, and may be short.
  std::vector<Granularity> fp8_granularities = {};
  bool whole_groups = false;                // a row is a multiple of the group size
  int64_t min_cols = 0;                     // a row has at least so many elements
  std::vector<ScaleRule> scale_rules = {};  // with a zero point it is always minmax
  ScaleDTypes scale_dtypes = ScaleDTypes::any;
  CodeScale code_scale = CodeScale::stored;
  bool many_specs = true;            // weights of a model may differ: files or config say the spec of each
  std::vector<Format> sources = {};  // models are published in these: `quantize` decodes their weights
  bool turns_conv1d =
      false;  // a Conv1D [in, out] is held as the linear layer [out, in] that readers make of it
  bool turns_experts = false;  // experts [E, in, out] of a tensor are held as [E, out, in]
  bool apart = false;          // readers look for a matrix for each expert
  // How what it stores differs from the native layout (QuantShape).
  Packing packing = Packing::rows;
  bool high_nibble_first = false;
  int64_t row_align_bytes = 1;        // rows of codes are padded to it with zero bits
  bool packs_zeros = false;           // zero points like codes, in words of 32 bits along the rows
  bool zero_scale_is_eps = false;     // the scale of an all-zero group is the epsilon of its dtype
  bool global_is_reciprocal = false;  // the reciprocal of the global scale is stored

  std::vector<Part> (*parts)(const QuantizedWeight& weight);
  // Appends the weights that it recognises by their tensors.
  void (*match)(const Checkpoint::Impl& checkpoint, FoundWeights& found);
};

std::span<const LayoutInfo* const> all_layouts();
const LayoutInfo& layout_info(Layout layout);
const LayoutInfo& bitsandbytes_layout();
const LayoutInfo& compressed_tensors_layout();
const LayoutInfo& mlx_layout();
const LayoutInfo& halfbyte_layout();
const LayoutInfo& gptq_layout();
const LayoutInfo& awq_layout();
const LayoutInfo& modelopt_layout();
const LayoutInfo& fp8_layout();
const LayoutInfo& gpt_oss_layout();

// Whether the tensors of a weight do not tell its dtype: then the model's config does, or what a file that
// stands alone has in its metadata.
bool hides_dtype(const LayoutInfo& layout, Format format);

// What shares a scale of this format in the layout: the first is the default, none allows all. Of groups
// their sizes, likewise.
std::span<const Granularity> granularities_of(const LayoutInfo& layout, Format format);
std::span<const int64_t> group_sizes_of(const LayoutInfo& layout, Format format);
// QuantizedWeight::scale_rows as the layout is written.
int64_t scale_rows_of(const LayoutInfo& layout, const QuantSpec& spec);
inline constexpr int64_t kFp8Block = 128;   // rows and columns, as written
inline constexpr int64_t kMxfp8Group = 32;  // of fp8, elements of a row whose scale is a power of two
// Whether the scales of so many rows of a matrix, from its first on, are the same: then they are stored once.
bool shares_scales(const QuantizedTensor& q, int64_t scale_rows);

// A weight as the layout is written.
QuantizedWeight written_weight(std::string name, std::vector<int64_t> shape, DType dtype, Layout layout,
                               const QuantSpec& spec);

// Of nvfp4 or mxfp4 as found in a file: codes U8 [..., cols / 2], two in a byte. Error(bad_input) for no rows
// of whole groups.
QuantizedWeight block_float_weight(const Checkpoint::Impl& checkpoint, Format format, Layout layout,
                                   const std::string& name, const StoredTensor& codes);
// Of fp8, by the shapes of its tensors: a scale for all, for each row, for blocks as config.json has them or
// of 128 x 128, or for groups of a row. Scales of U8 are those of MXFP8. Nothing where they are none of
// these, or no F8_E4M3 or F8_E5M2 and scales.
std::optional<QuantizedWeight> fp8_weight(const Checkpoint::Impl& checkpoint, Layout layout,
                                          const std::string& name, const StoredTensor& codes,
                                          const StoredTensor& scales);
// MXFP8: fp8 whose scales are powers of two, for 32 elements of a row.
bool is_mxfp8(const QuantizedWeight& weight);
// Of layout fp8, the weight of such codes and scales, which are named P.weight_scale_inv, or P.scale as
// DeepSeek-V4 has them, of mxfp4 too. Nothing where they are in no form that the layout reads: rows of fp8
// have no scales of their own, but in blocks of one row and in MXFP8.
std::optional<QuantizedWeight> fp8_layout_weight(const Checkpoint::Impl& checkpoint,
                                                 const StoredTensor& codes, const StoredTensor& scales);
// Its codes and its scales, under this name.
Part fp8_codes(const QuantizedWeight& weight);
Part fp8_scales(const QuantizedWeight& weight, std::string name);
// Why its layout does not write a weight in the form that this one was read in; empty: it does.
std::string refuse_written_form(const QuantizedWeight& weight);
// Where there is a tensor of this name, it belongs to the weight.
void add_activation_scale(const Checkpoint::Impl& checkpoint, const std::string& name,
                          QuantizedWeight& weight);

// Of bitsandbytes, experts as Experts4bit has them: the name of the tensor of their scales; empty where there
// is none for a weight of this name.
std::string experts4bit_scales(const std::string& name);
// The weight of such codes and scales, which with config.json tell its shape and format. Why there is none,
// in `why_not`.
std::optional<QuantizedWeight> experts4bit_weight(const Checkpoint::Impl& checkpoint,
                                                  const StoredTensor& codes, const StoredTensor& scales,
                                                  std::string& why_not);
// `hidden_size` of the model that the weight is of, by its name and shape [E, out, in].
int64_t experts4bit_hidden_size(const QuantizedWeight& weight);
// Why a weight cannot be stored so; empty: it can.
std::string refuse_experts4bit(const QuantizedWeight& weight);

// "model.layers.0.mlp.up_proj" of "model.layers.0.mlp.up_proj.weight".
std::string module_of(const std::string& weight);
// Of layout mlx, the format of so many bits; Error(bad_input) naming the tensor.
Format mlx_format(int bits, const std::string& tensor);

// The first layout that holds the format.
const LayoutInfo& default_layout(Format format);

// The spec that the options ask for, open choices filled in, for weights of `dtype`. Error(usage) naming
// layout, rule and value where the layout does not allow one.
QuantSpec resolve_spec(const LayoutInfo& layout, const QuantizeOptions& options, DType dtype);
// How its codes are chosen, likewise.
Encoding resolve_encoding(const LayoutInfo& layout, const QuantizeOptions& options, const QuantSpec& spec);
// Why the layout cannot hold a weight of this shape; empty if it can.
std::string cannot_hold(const LayoutInfo& layout, const QuantSpec& spec, std::span<const int64_t> shape);

// The tensors of a weight. Those of scales_absmax and constants are known only with scales_offset and
// global_scale; their sizes do not depend on it.
std::vector<Part> parts_of(const QuantizedWeight& weight);

// shape[:-1] + [last]
std::vector<int64_t> with_last(std::span<const int64_t> shape, int64_t last);

// A range of a weight that can be quantized, stored and read on its own: whole rows, or (flat) whole groups
// that fill whole bytes.
struct Block {
  int64_t begin = 0, count = 0;  // elements of the row-major weight
  int64_t rows = 0, cols = 0;    // as a matrix
  int64_t first_row = 0;         // of codes (flat: 0)
  int64_t first_group = 0;
  QuantShape shape;  // of the block
};
// Large enough to hide the cost of a read, small enough for the second-level cache.
inline constexpr int64_t kBlockElements = 256 * 1024;
// At least so many, on any device, where the rows of the weight are columns of what is read or written: then
// runs are as long as a block has rows.
inline constexpr int64_t kColumnElements = 2 << 20;
int64_t preferred_elements(const QuantizedWeight& weight, int64_t otherwise);
// The block of at most max_elements, or else as small as possible, that begins where the element can be
// reached first.
Block block_at(const QuantizedWeight& weight, int64_t element, int64_t max_elements = kBlockElements);

// The bytes that a block has in the part of this role (codes, scales, zeros or biases; scales that are
// not quantized in turn): runs of one length, `stride` bytes from one to the next.
struct StoredRange {
  uint64_t offset = 0, run_bytes = 0, stride = 0;
  int64_t num_runs = 1;
  uint64_t num_bytes() const { return run_bytes * static_cast<uint64_t>(num_runs); }
};
// Calls body(offset, begin, size) for runs of bytes [offset, offset + size) of the part: those from `begin`
// on of all bytes of the range.
template <class Body>
void for_each_run(const StoredRange& range, const Body& body) {
  if (range.stride == range.run_bytes) return body(range.offset, uint64_t{0}, range.num_bytes());
  for (uint64_t run = 0; run < static_cast<uint64_t>(range.num_runs); ++run)
    body(range.offset + run * range.stride, run * range.run_bytes, range.run_bytes);
}
StoredRange stored_range(const QuantizedWeight& weight, const Block& block, Role role);
// Whether calls of the system would take longer than what they move.
inline bool has_short_runs(const StoredRange& range) {
  constexpr uint64_t kShortRun = 16 * 1024;
  return range.stride != range.run_bytes && range.num_runs > 1 && range.run_bytes < kShortRun;
}
// Bytes of the same in the native layout, and where they begin in that of the whole weight.
int64_t native_bytes(const QuantizedWeight& weight, const Block& block, Role role);
int64_t native_offset(const QuantizedWeight& weight, const Block& block, Role role);
// Converts those of a block; may change `native`, and may use `scratch` for the result.
std::span<const std::byte> to_stored(const QuantizedWeight& weight, const Block& block, Role role,
                                     std::byte* native, Buffer& scratch);
void to_native(const QuantizedWeight& weight, const Block& block, Role role, const std::byte* stored,
               std::byte* native);
// Puts decoded rows, of elements of `size` bytes, into the order of the weight's columns: they come in that
// of the native form (WordForm::order).
void restore_columns(const QuantizedWeight& weight, std::byte* elements, int64_t rows, int64_t size);
// As some layouts want it of scales that were computed: the scale of an all-zero group is no zero.
void replace_zero_scales(const QuantizedWeight& weight, int64_t num_scales, std::byte* scales);

// The part of this role (no constant) of a whole weight in the native layout.
const Tensor& part_of(const QuantizedTensor& q, Role role);

// The native form of a block.
struct NativeBuffers {
  NativeBuffers() = default;  // of the CPU
  explicit NativeBuffers(Device device)
      : codes(device), scales(device), zeros(device), biases(device), global_scale(device) {}
  Buffer codes, scales, zeros, biases, global_scale;
  Buffer& of(Role role);
};
// What quantize and dequantize work on: the mirrors of the buffers, large enough.
QuantizedView native_view(const QuantizedWeight& weight, const Block& block, NativeBuffers& buffers);
// A block of a whole weight in the native layout, without double quantization.
QuantizedView view_of(const QuantizedTensor& q, const QuantizedWeight& weight, const Block& block);
// Roles with data for each block.
std::vector<Role> block_roles(const QuantSpec& spec);

}  // namespace halfbyte::io
