// What the kernels of `quantize_linear` are given: shared by host and device, freestanding.
#pragma once

#include "formats/codec.h"
#include "formats/counts.h"
#include "formats/divider.h"
#include "formats/observer.h"
#include "grouped/groups_args.h"

namespace halfbyte {

// mask_gradients: backward by the mask that fake_quantize wrote.
enum class LinearOp : formats::u8 { quantize, dequantize, backward, fake_quantize, mask_gradients };
// How zero points are stored; `none`: they are 0. f32 and f64 are learned; `byte` and `nibble` have a sign or
// none. `any`: of kernels that are told by an argument.
enum class ZeroType : formats::u8 { none, i32, byte, nibble, f32, f64, any };

// The zero point that a learned one stands for. It may be out of range, and is for NaN.
template <class F>
HALFBYTE_FN int learned_zero_point(F value) {
  const F limit = static_cast<F>(1 << 24);
  return static_cast<int>(formats::round_half_even(formats::clamp(value, -limit, limit)));
}

// Zero points are any i32, and q - z and rne(x / s) + z are as if in 64 bits. With a zero point that is not
// far, both are exact in f32 wherever they decide something, and in 32 bits.
inline constexpr int kMostNear = 1 << 20;
HALFBYTE_FN bool is_far(int zero_point) { return zero_point < -kMostNear || zero_point > kMostNear; }
// rne(x / scale) + zero_point, from the rounded quotient, which is not NaN. What is beyond all codes may be
// any number beyond them, on the same side. Position: an integer of 64 bits, or where no zero point is far of
// 32.
template <class Position = formats::i64, class F>
HALFBYTE_FN Position code_position(F rounded, int zero_point) {
  const F limit = static_cast<F>(Position{1} << (sizeof(Position) == 8 ? 40 : 24));
  return static_cast<Position>(formats::clamp(rounded, -limit, limit)) + zero_point;
}
// The code of an x that is not NaN.
template <class Position = formats::i64, class F>
HALFBYTE_FN int linear_code(F x, F scale, int zero_point, int q_min, int q_max) {
  const F rounded = scale == 0 ? 0 : formats::round_half_even(x / scale);
  return static_cast<int>(
      formats::clamp<Position>(code_position<Position>(rounded, zero_point), q_min, q_max));
}
// q - zero_point, rounded once.
template <class F, class Position = formats::i64>
HALFBYTE_FN F code_distance(int q, int zero_point) {
  return static_cast<F>(static_cast<Position>(q) - zero_point);
}

HALFBYTE_FN bool is_global_scale(float value) { return value > 0 && formats::is_finite(value); }
// What scales of e4m3 that are loaded are divided by: they are none where it is none.
HALFBYTE_FN float global_scale_or_nan(float value) {
  return is_global_scale(value) ? value : formats::bit_cast<float>(0x7FC00000u);
}
// Scales of e4m3 are to be computed with a global scale. False: it is none, so that they are none either, and
// are 0.
HALFBYTE_FN bool set_global_scale(formats::Codec& codec, float value) {
  codec.global_scale = is_global_scale(value) ? value : 1;
  return is_global_scale(value);
}

// The state of an observer; null: there is none.
struct ObserverPointers {
  void* min = nullptr;  // of the type that is computed in
  void* max = nullptr;
  formats::i64* num_batches = nullptr;
};
// Takes up the range of a batch, in which -0 is +0, and gives the parameters for all that was seen. False:
// there are none, since nothing was seen or the state is not finite. `batch` becomes the range of what is
// quantized and was seen: an average need not contain the batch.
template <class F>
HALFBYTE_FN bool observe_params(const ObserverPointers& state, formats::i64 index, formats::Seen<F>& batch,
                                double history, const formats::Codec& codec,
                                formats::GroupParams<F>& params) {
  F& min = static_cast<F*>(state.min)[index];
  F& max = static_cast<F*>(state.max)[index];
  const formats::Seen<F> seen =
      formats::observed(formats::Seen<F>{min, max}, formats::Seen<F>{batch.min + 0, batch.max + 0}, history);
  min = seen.min;
  max = seen.max;
  if (seen.min <= seen.max && formats::is_finite(seen.min) && formats::is_finite(seen.max)) {
    params = formats::group_params(seen.min, seen.max, codec);
    batch = {formats::min(batch.min, seen.min), formats::max(batch.max, seen.max)};
    return true;
  }
  params = {};
  if (codec.asymmetric) params.zero_point = codec.q_min;
  return false;
}

// A table, for kernels that are not compiled for one: values ascending, an edge between each two.
struct LinearTable {
  float values[16], edges_f32[15];
  double edges_f64[15];
  float max_magnitude, of_code_0;
};

// The tensors of a run, of which an operation uses some; scales and zero points are written where they are
// computed.
struct LinearPointers {
  const void* x;
  const void* dy;
  void* codes;
  void* scales;
  void* zeros;
  void* y;
  void* mask;
};
// What all kernels need to know.
struct LinearCommon {
  LinearPointers data;
  QuantizeCounts* counts;
  bool given;  // scales and zero points: what is wrong with them counts
  formats::i32 q_min, q_max;
  formats::i32 code_min;                   // of the dtype of the codes
  formats::u32 sign_bits;                  // of all codes in a word: what tells q from q - code_min
  formats::i32 zero_sign;                  // of zero points that are bytes or nibbles: their sign bit, or 0
  formats::ScaleType scale_type;           // f32, or that of the elements
  ZeroType zero_type;                      // not `any`
  formats::Rule rule;                      // computed, without zero points: absmax or half_range
  formats::i64 zero_cols, zero_row_bytes;  // of packed zero points
  // fake_quantize, computed: see Codec; `history` as formats::observed has it.
  double eps, history;
  ObserverPointers observer;
  float* global_scale;            // of scales of e4m3: written where
  const RangeKeys* tensor_range;  // is not null, which it then is that of
  LinearTable table;              // where there is one
};

inline constexpr int kLinearThreads = 256;
// Elements of a chunk. To encode, 32 bytes: many share the work for their scale, and 16 bytes of codes are
// stored. Else 16, so that what a warp stores lies together. With a mask at least a byte of it.
HALFBYTE_FN int linear_chunk(int element_bytes, LinearOp op, bool mask) {
  const int elements = (op == LinearOp::quantize ? 32 : 16) / element_bytes;
  return mask && elements < 8 ? 8 : elements;
}
// The same where a thread has chunks one below the other.
HALFBYTE_FN int linear_columns_chunk(int element_bytes, bool mask) {
  return linear_chunk(element_bytes, LinearOp::dequantize, mask);
}

// linear_chunks: contiguous tensors whose scales belong to whole chunks. With c the number of a chunk and
// rest = c % per_outer, its scale is number c / per_outer * scale_outer + rest / per_scale. Rows of packed
// zero points are whole bytes, zero_outer of them apart.
struct LinearChunksArgs {
  LinearCommon common;
  formats::i64 num_chunks, per_outer, per_scale, scale_outer, zero_outer;
  formats::Divider outer_divider, scale_divider;  // num_chunks < 2^31
};
// Chunks a thread.
HALFBYTE_FN int linear_batch(LinearOp op) { return op == LinearOp::quantize ? 2 : 4; }

// linear_columns: contiguous tensors [bands of `group` rows, columns], of which each column of a band has a
// scale; a band at the end of `axis` rows is short. A thread has the rows of a piece in `columns / chunk`
// places.
struct LinearColumnsArgs {
  LinearCommon common;
  formats::i64 num_bands, bands_per_axis, axis, group, columns, pieces;
};
inline constexpr int kLinearRows = 16;  // of a piece

// linear_elements: anything. Items are elements, or bytes of packed codes or of a mask: row-major rows of
// code_cols.
struct LinearElementsArgs {
  LinearCommon common;
  formats::i64 num_items, axis, inner, group;
  formats::i64 code_cols, code_row_bytes;
  LinearStrides64 scale_strides, x, dy, codes, y;
};

// linear_fused: contiguous tensors [rows of `axis` chunks], groups of `group` chunks along them; parameters
// and codes in one pass.
struct LinearFusedArgs {
  LinearCommon common;
  formats::i32 num_groups, axis, group;  // fewer than 2^31 chunks
  formats::i32 team;                     // 2^team lanes share a group, unless a block does
  bool group_divides_axis;
  formats::Divider row_divider;  // by the groups of a row
};
// Groups of a team, which but for block floats has at least as many lanes: each works out the parameters of
// one.
inline constexpr int kLinearWarpBatch = 4;

// mask_gradients: dx is dy where the bit of the mask is set, else 0. A thread has a chunk of 16 bytes, or an
// element.
struct MaskGradientsArgs {
  const formats::u8* mask;
  const void* dy;
  void* dx;
  formats::i64 num_items;
  formats::i64 cols, row_bytes;  // of the mask; chunks: rows are whole bytes
};
inline constexpr int kMaskBatch = 4;  // chunks a thread

// linear_params: scales and zero points from ranges.
struct LinearParamsArgs {
  LinearCommon common;
  const RangeKeys* ranges;
  formats::i64 num_scales;
};

}  // namespace halfbyte
