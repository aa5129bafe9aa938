// Decodes a packed weight to f32. Include after highway.h, inside a file that foreach_target.h compiles.
#if defined(HALFBYTE_OPS_QGEMM_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFBYTE_OPS_QGEMM_DECODE_INL_H_
#undef HALFBYTE_OPS_QGEMM_DECODE_INL_H_
#else
#define HALFBYTE_OPS_QGEMM_DECODE_INL_H_
#endif

#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/units.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

using Tag = hn::CappedTag<float, 16>;
using Floats = hn::Vec<Tag>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(Tag()));

constexpr int kRows = formats::kUnitRows, kCols = formats::kUnitCols;

// f32, f16 or bf16 in memory to n floats; n is a multiple of kLanes.
template <class E>
HWY_INLINE void convert(const void* from, int64_t n, float* to) {
  const auto* memory = static_cast<const typename E::Memory*>(from);
  for (int64_t i = 0; i < n; i += kLanes) hn::StoreU(E::load(Tag(), memory + i), Tag(), to + i);
}

// Numbers of E4M3, of which NaN stays NaN, by way of f16, which has 2^-8 times their value: `factor` is 2^8
// or a multiple of it.
HWY_INLINE Floats e4m3_floats(hn::Vec<hn::Rebind<uint8_t, Tag>> bytes, Floats factor) {
  const hn::Rebind<int16_t, Tag> d;
  const auto magnitude = hn::Set(d, int16_t{0x3F80});
  const auto wide = hn::PromoteTo(d, hn::BitCast(hn::Rebind<int8_t, Tag>(), bytes));
  const auto value = hn::And(hn::ShiftLeft<7>(wide), hn::Set(d, static_cast<int16_t>(0xBF80)));
  const auto is_nan = hn::Eq(hn::And(value, magnitude), magnitude);
  const auto half = hn::IfThenElse(is_nan, hn::Set(d, int16_t{0x7E00}), value);
  return hn::Mul(hn::PromoteTo(Tag(), hn::BitCast(hn::Rebind<hwy::float16_t, Tag>(), half)), factor);
}

// Whether what stands for a code of 4 bits, or another code, is not all that the scale is multiplied with.
inline bool is_shifted(const formats::Codec& codec) {
  return codec.bits != 4 || codec.asymmetric || codec.kind == formats::Kind::affine;
}
// What stands for a code of 4 bits: a weight is value * scale or (value - offset) * scale + bias.
inline float value_of_code(const formats::Codec& codec, int code) {
  if (codec.kind == formats::Kind::table) return codec.book.values[code];
  return static_cast<float>(is_shifted(codec) ? code : code + codec.q_min);
}

// Of the 32 rows of a unit, for each part of its columns.
struct UnitParameters {
  int parts;  // 1, 2 or, where codes have 4 bits, 4
  // Of part p and row r at p * kRows + r; where there are four, at 4 * r + p.
  alignas(64) float scales[4 * kRows];
  // Only where is_shifted.
  alignas(64) float offsets[4 * kRows];  // 0 for affine formats
  alignas(64) float biases[4 * kRows];   // 0 for the others
};

class ParameterLoader {
 public:
  // units: of find_units.
  ParameterLoader(const QgemmProblem& problem, const QgemmTensors& tensors, const UnitPlace* units)
      : layout_(problem.weight),
        codec_(problem.codec),
        memory_(static_cast<const uint8_t*>(tensors.weight)),
        units_(units) {
    const int64_t parameters = layout_.groups * kRows;
    const int offset_bytes = layout_.has_biases ? layout_.bias_bytes : 1;
    global_scale_ = codec_.scale_type == formats::ScaleType::e4m3
                        ? *reinterpret_cast<const float*>(memory_ + layout_.global_scale)
                        : 1;
    scales_per_strip_ = layout_.inlined ? layout_.strip_bytes : parameters * layout_.scale_bytes;
    offsets_per_strip_ = layout_.inlined ? layout_.strip_bytes : parameters * offset_bytes;
  }

  const uint8_t* codes(int64_t strip, int64_t unit) const {
    return memory_ + units_[unit].codes + strip * layout_.strip_bytes;
  }

  // Scales of rows beyond the weight are 0. Of each part one row after the other, even of four.
  void load_parts(int64_t strip, int64_t unit, UnitParameters& to) const {
    const UnitPlace& place = units_[unit];
    to.parts = static_cast<int>(place.parts);
    for (size_t part = 0; part < static_cast<size_t>(place.parts); ++part) load_part(strip, place, part, to);
  }
  // In the order of UnitParameters.
  void load(int64_t strip, int64_t unit, UnitParameters& to) const {
    load_parts(strip, unit, to);
    if (to.parts < 4) return;
    order_by_rows(to.scales);
    if (!is_shifted(codec_)) return;
    order_by_rows(to.offsets);
    order_by_rows(to.biases);
  }

 private:
  void load_stored(const uint8_t* from, float* to) const {
    switch (codec_.scale_type) {
      case formats::ScaleType::f16:
        return convert<F16>(from, kRows, to);
      case formats::ScaleType::bf16:
        return convert<BF16>(from, kRows, to);
      case formats::ScaleType::e4m3:
      case formats::ScaleType::e8m0:
        return load_bytes(from, to);
      default:
        return convert<F32>(from, kRows, to);
    }
  }

  // Numbers of one byte, as formats/convert.h has them, times the reciprocal of the global scale.
  void load_bytes(const uint8_t* from, float* to) const {
    if (codec_.scale_type == formats::ScaleType::e8m0) {
      const hn::RebindToUnsigned<Tag> d;
      for (int i = 0; i < kRows; i += kLanes) {
        const auto bits = hn::PromoteTo(d, hn::LoadU(hn::Rebind<uint8_t, Tag>(), from + i));
        const auto value =
            hn::IfThenElse(hn::Eq(bits, hn::Zero(d)), hn::Set(d, 0x00400000u), hn::ShiftLeft<23>(bits));
        const auto is_nan = hn::Eq(bits, hn::Set(d, 0xFFu));
        hn::StoreU(hn::BitCast(Tag(), hn::IfThenElse(is_nan, hn::Set(d, 0x7FC00000u), value)), Tag(), to + i);
      }
      return;
    }
    const auto factor = hn::Set(Tag(), 256 / global_scale_);
    for (int i = 0; i < kRows; i += kLanes)
      hn::StoreU(e4m3_floats(hn::LoadU(hn::Rebind<uint8_t, Tag>(), from + i), factor), Tag(), to + i);
  }

  // From parts of rows to rows of four parts.
  static void order_by_rows(float* values) {
    Floats parts[4][kRows / kLanes];
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < kRows / kLanes; ++i)
        parts[part][i] = hn::Load(Tag(), values + part * kRows + i * kLanes);
    for (int i = 0; i < kRows / kLanes; ++i)
      hn::StoreInterleaved4(parts[0][i], parts[1][i], parts[2][i], parts[3][i], Tag(),
                            values + 4 * i * kLanes);
  }

  void load_part(int64_t strip, const UnitPlace& place, size_t part, UnitParameters& to) const {
    const uint8_t* scales = memory_ + place.scales[part] + strip * scales_per_strip_;
    const uint8_t* offsets = memory_ + place.offsets[part] + strip * offsets_per_strip_;
    float* const to_scales = to.scales + part * kRows;
    if (layout_.double_quant) {
      const auto* absmax = reinterpret_cast<const float*>(memory_ + layout_.absmax);
      const auto* map = reinterpret_cast<const float*>(memory_ + layout_.map);
      const float offset = *reinterpret_cast<const float*>(memory_ + layout_.offset);
      // Rows of padding have no absmax.
      const int64_t first = strip * kRows, rows = std::min<int64_t>(kRows, layout_.n - first);
      for (int64_t r = 0; r < kRows; ++r)
        to_scales[r] =
            r < rows
                ? map[scales[r]] * absmax[((first + r) * layout_.groups + place.groups[part]) / 256] + offset
                : 0;
    } else {
      load_stored(scales, to_scales);
    }
    if (!is_shifted(codec_)) return;
    float *const to_offsets = to.offsets + part * kRows, *const to_biases = to.biases + part * kRows;
    std::fill_n(to_offsets, kRows, 0.0f);
    std::fill_n(to_biases, kRows, 0.0f);
    if (layout_.has_biases)
      load_stored(offsets, to_biases);
    else
      for (int r = 0; r < kRows; ++r)
        to_offsets[r] = static_cast<float>(layout_.has_zeros                       ? offsets[r]
                                           : codec_.kind == formats::Kind::integer ? -codec_.q_min
                                                                                   : 0);
  }

  const formats::PackedLayout& layout_;
  const formats::Codec& codec_;
  const uint8_t* memory_;
  const UnitPlace* units_;
  int64_t scales_per_strip_, offsets_per_strip_;
  float global_scale_;
};

// A line of a unit: line_bytes(), the codes of rows 2a and 2a + 1. decode(line, ..) takes words i to i +
// kLanes of it and calls sink(vector, even, odd) with kVectors vectors of values of each of the two rows,
// which are columns (tile * kVectors + vector) * 16 + i and following of column_order. Where kScalesLast,
// decode_codes(..) calls it with what stands for the codes, which scales(parameters, row) are to be
// multiplied with.

using Words = hn::Vec<hn::RebindToUnsigned<Tag>>;
constexpr int kFragmentLine = 2 * formats::kTileBytes / kRows;

// Words i to i + kLanes of a line of 16, in the same order for all lines.
HWY_INLINE Words load_words(const uint8_t* line, int a, int i) {
  const hn::RebindToUnsigned<Tag> d;
  const auto* words = reinterpret_cast<const uint32_t*>(line);
  const int exchange = formats::packed_slot(a, 0) % 4 * 4;
  if constexpr (kLanes == 16) {
    const hn::Half<decltype(d)> dh;
    return hn::Combine(d, hn::LoadU(dh, words + (8 ^ exchange)), hn::LoadU(dh, words + exchange));
  } else {
    return hn::LoadU(d, words + (i ^ exchange));
  }
}

// Lanes of 4-bit codes that are of columns 32 and later of a unit.
HWY_INLINE hn::Mask<Tag> second_half() {
  const hn::RebindToUnsigned<Tag> d;
  return hn::RebindMask(Tag(), hn::TestBit(hn::Iota(d, 0), hn::Set(d, 2u)));
}

// The parameters of a row, for the lanes of a vector.
struct RowParameters {
  Floats scale, offset, bias;

  HWY_INLINE RowParameters(const UnitParameters& from, int part, int row)
      : scale(hn::Set(Tag(), from.scales[part * kRows + row])),
        offset(hn::Set(Tag(), from.offsets[part * kRows + row])),
        bias(hn::Set(Tag(), from.biases[part * kRows + row])) {}
  HWY_INLINE Floats value(Floats code) const { return hn::MulAdd(hn::Sub(code, offset), scale, bias); }
};

// Likewise of codes of 4 bits, where lanes have columns of several parts: lane l, which has words l, l + 4
// and so on, those of 16 columns l % 4.
struct LaneParameters {
  Floats scale, offset, bias;
  bool shifted;

  HWY_INLINE LaneParameters(const UnitParameters& from, int row, bool is_shifted)
      : scale(spread(from, from.scales, row)), offset(scale), bias(scale), shifted(is_shifted) {
    if (!shifted) return;
    offset = spread(from, from.offsets, row);
    bias = spread(from, from.biases, row);
  }
  HWY_INLINE Floats value(Floats code) const {
    return shifted ? hn::MulAdd(hn::Sub(code, offset), scale, bias) : hn::Mul(code, scale);
  }

 private:
  static HWY_INLINE Floats spread(const UnitParameters& from, const float* of, int row) {
    if (from.parts == 4) return hn::LoadDup128(Tag(), of + 4 * row);
    const Floats first = hn::Set(Tag(), of[row]);
    return from.parts == 2 ? hn::IfThenElse(second_half(), hn::Set(Tag(), of[kRows + row]), first) : first;
  }
};

// Formats of 8 bits. A unit is two tiles, halves of its columns. kFloating: codes are numbers of E4M3.
template <bool kFloating>
class ByteCodes {
 public:
  static constexpr int kTiles = 2, kVectors = 2;
  static constexpr bool kScalesLast = false;
  static constexpr int line_bytes() { return kFragmentLine; }
  explicit ByteCodes(const formats::Codec&) {}

  template <class Sink>
  HWY_INLINE void decode(const uint8_t* line, int a, int tile, int i, const UnitParameters& parameters,
                         Sink& sink) const {
    const int half = parameters.parts > 1 ? tile : 0;
    const RowParameters even(parameters, half, 2 * a), odd(parameters, half, 2 * a + 1);
    const Words words = load_words(line, a, i);
    sink(0, even.value(code<0>(words)), odd.value(code<16>(words)));
    sink(1, even.value(code<8>(words)), odd.value(code<24>(words)));
  }

 private:
  // A byte of each word.
  template <int kShift>
  static HWY_INLINE Floats code(Words words) {
    const hn::RebindToSigned<Tag> di;
    const hn::RebindToUnsigned<Tag> du;
    const auto bytes = hn::And(hn::ShiftRight<kShift>(words), hn::Set(du, 255u));
    if constexpr (kFloating)
      return e4m3_floats(hn::TruncateTo(hn::Rebind<uint8_t, Tag>(), bytes), hn::Set(Tag(), 256.0f));
    else
      return hn::ConvertTo(Tag(), hn::BitCast(di, bytes));
  }
};

// Formats of 2, 3, 5 and 6 bits: 16 codes, which are 2 * bits bytes, make a vector of 16.
class StreamCodes {
 public:
  static constexpr int kTiles = 1, kVectors = 4;
  static constexpr bool kScalesLast = false;
  int line_bytes() const { return 2 * row_bytes_; }
  explicit StreamCodes(const formats::Codec& codec)
      : vector_bytes_(2 * codec.bits), row_bytes_(kVectors * vector_bytes_), mask_((1u << codec.bits) - 1) {
    for (int code = 0; code < 16; ++code) {
      const int bit = code * codec.bits;
      shifts_[code] = static_cast<uint32_t>(bit % 8);
      for (int byte = 0; byte < 4; ++byte)
        bytes_[4 * code + byte] = byte < 2 ? static_cast<uint8_t>(bit / 8 + byte) : kNone;
    }
  }

  template <class Sink>
  HWY_INLINE void decode(const uint8_t* line, int a, int, int i, const UnitParameters& parameters,
                         Sink& sink) const {
    HWY_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      const int of = parameters.parts > 1 ? half : 0;
      const RowParameters even(parameters, of, 2 * a), odd(parameters, of, 2 * a + 1);
      HWY_UNROLL(2)
      for (int vector = 2 * half; vector < 2 * half + 2; ++vector) {
        const uint8_t* const codes = line + vector * vector_bytes_;
        sink(vector, even.value(load(codes, i)), odd.value(load(codes + row_bytes_, i)));
      }
    }
  }

 private:
  static constexpr uint8_t kNone = 0x80;  // a byte of 0

  // Codes i to i + kLanes of a vector of 16. The 16 bytes that are read end behind the codes of the weight by
  // less than the 32 scales that are there.
  HWY_INLINE Floats load(const uint8_t* codes, int i) const {
    const hn::RebindToUnsigned<Tag> d;
    const hn::Repartition<uint8_t, Tag> d8;
    const auto pairs = hn::TableLookupBytesOr0(hn::LoadDup128(d8, codes), hn::Load(d8, bytes_ + 4 * i));
    const auto shifted = hn::Shr(hn::BitCast(d, pairs), hn::Load(d, shifts_ + i));
    return hn::ConvertTo(Tag(), hn::BitCast(hn::RebindToSigned<Tag>(), hn::And(shifted, hn::Set(d, mask_))));
  }

  const int vector_bytes_, row_bytes_;
  const uint32_t mask_;
  alignas(64) uint8_t bytes_[64];  // of each code the two bytes that it is in
  alignas(64) uint32_t shifts_[16];
};

#if HALFBYTE_AVX512

// Formats of 4 bits: a row has 16 values in a group, looked up at once.
class NibbleCodes {
 public:
  static constexpr int kTiles = 1, kVectors = 4;
  static constexpr bool kScalesLast = false;  // tables of weights are looked up
  static constexpr int line_bytes() { return kFragmentLine; }
  explicit NibbleCodes(const formats::Codec& codec) : shifted_(is_shifted(codec)) {
    for (int code = 0; code < 16; ++code) values_[code] = value_of_code(codec, code);
  }

  template <class Sink>
  HWY_INLINE void decode(const uint8_t* line, int a, int, int, const UnitParameters& parameters,
                         Sink& sink) const {
    const Words words = load_words(line, a, 0);
    if (parameters.parts == 4) {
      const Floats codes = hn::Load(Tag(), values_);
      const LaneParameters even(parameters, 2 * a, shifted_), odd(parameters, 2 * a + 1, shifted_);
      sink(0, even.value(lookup<0>(codes, words)), odd.value(lookup<8>(codes, words)));
      sink(1, even.value(lookup<4>(codes, words)), odd.value(lookup<12>(codes, words)));
      sink(2, even.value(lookup<16>(codes, words)), odd.value(lookup<24>(codes, words)));
      sink(3, even.value(lookup<20>(codes, words)), odd.value(lookup<28>(codes, words)));
      return;
    }
    const Floats even = values(parameters, 0, 2 * a), odd = values(parameters, 0, 2 * a + 1);
    if (parameters.parts == 1) {
      sink(0, lookup<0>(even, words), lookup<8>(odd, words));
      sink(1, lookup<4>(even, words), lookup<12>(odd, words));
      sink(2, lookup<16>(even, words), lookup<24>(odd, words));
      sink(3, lookup<20>(even, words), lookup<28>(odd, words));
      return;
    }
    const Floats even1 = values(parameters, 1, 2 * a), odd1 = values(parameters, 1, 2 * a + 1);
    sink(0, lookup<0>(even, even1, words), lookup<8>(odd, odd1, words));
    sink(1, lookup<4>(even, even1, words), lookup<12>(odd, odd1, words));
    sink(2, lookup<16>(even, even1, words), lookup<24>(odd, odd1, words));
    sink(3, lookup<20>(even, even1, words), lookup<28>(odd, odd1, words));
  }

 private:
  // By four bits of each word; of two tables: lanes of the second half of the columns in the second.
  template <int kShift>
  static HWY_INLINE Floats lookup(Floats table, Words words) {
    return Floats{_mm512_permutexvar_ps(hn::ShiftRight<kShift>(words).raw, table.raw)};
  }
  template <int kShift>
  static HWY_INLINE Floats lookup(Floats first, Floats second, Words words) {
    return hn::IfThenElse(second_half(), lookup<kShift>(second, words), lookup<kShift>(first, words));
  }
  HWY_INLINE Floats values(const UnitParameters& parameters, int half, int row) const {
    const Floats codes = hn::Load(Tag(), values_);
    if (shifted_) return RowParameters(parameters, half, row).value(codes);
    return hn::Mul(codes, hn::Set(Tag(), parameters.scales[half * kRows + row]));
  }

  const bool shifted_;
  alignas(64) float values_[16];
};
using TableCodes = NibbleCodes;
using SymmetricCodes = NibbleCodes;
using ShiftedCodes = NibbleCodes;

#else

// Formats of 4 bits: the kBytes upper bytes of what stands for a code are looked up apart and joined; of
// integers, which are short, two suffice.
template <int kBytes, bool kShifted>
class NibbleCodes {
 public:
  static constexpr int kTiles = 1, kVectors = 4;
  static constexpr bool kScalesLast = !kShifted;
  static constexpr int line_bytes() { return kFragmentLine; }
  explicit NibbleCodes(const formats::Codec& codec) {
    for (int code = 0; code < 16; ++code) {
      const float value = value_of_code(codec, code);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      for (int byte = 0; byte < 4; ++byte) planes_[byte][code] = static_cast<uint8_t>(bits >> 8 * byte);
    }
  }

  template <class Sink>
  HWY_INLINE void decode(const uint8_t* line, int a, int, int i, const UnitParameters& parameters,
                         Sink& sink) const {
    const LaneParameters even(parameters, 2 * a, kShifted), odd(parameters, 2 * a + 1, kShifted);
    decode_codes(line, a, i, [&](int vector, Floats of_even, Floats of_odd) HWY_ATTR {
      sink(vector, even.value(of_even), odd.value(of_odd));
    });
  }
  template <class Sink>
  HWY_INLINE void decode_codes(const uint8_t* line, int a, int i, Sink&& sink) const {
    // Bytes of four words: of two upper bytes, those of both rows become neighbours, else those of one row.
    alignas(16) constexpr uint8_t kOrder[2][16] = {{0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15},
                                                   {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}};
    const auto bytes = hn::TableLookupBytes(hn::BitCast(Bytes(), load_words(line, a, i)),
                                            hn::LoadDup128(Bytes(), kOrder[kBytes == 4]));
    HWY_UNROLL(2)
    for (int high = 0; high < 2; ++high) {
      const auto shifted =
          high ? hn::BitCast(Bytes(), hn::ShiftRight<4>(hn::BitCast(Pairs(), bytes))) : bytes;
      const auto code = hn::And(shifted, hn::Set(Bytes(), uint8_t{15}));
      const auto b2 = plane(2, code), b3 = plane(3, code);
      const auto upper_a = hn::InterleaveLower(Bytes(), b2, b3),
                 upper_b = hn::InterleaveUpper(Bytes(), b2, b3);
      if constexpr (kBytes == 2) {
        sink(high, low_half(upper_a), high_half(upper_a));
        sink(high + 2, low_half(upper_b), high_half(upper_b));
      } else {
        const auto b0 = plane(0, code), b1 = plane(1, code);
        const auto lower_a = hn::InterleaveLower(Bytes(), b0, b1),
                   lower_b = hn::InterleaveUpper(Bytes(), b0, b1);
        sink(high, join_lower(lower_a, upper_a), join_upper(lower_a, upper_a));
        sink(high + 2, join_lower(lower_b, upper_b), join_upper(lower_b, upper_b));
      }
    }
  }
  static HWY_INLINE Floats scales(const UnitParameters& parameters, int row) {
    return LaneParameters(parameters, row, false).scale;
  }

 private:
  using Bytes = hn::Repartition<uint8_t, Tag>;
  using Pairs = hn::Repartition<uint16_t, Tag>;

  using Wide = hn::RebindToUnsigned<Tag>;

  // The upper 16 bits of floats, of which the others are 0: a shift or a mask, since shuffles are what there
  // are fewest of.
  static HWY_INLINE Floats low_half(hn::Vec<Bytes> pairs) {
    return hn::BitCast(Tag(), hn::ShiftLeft<16>(hn::BitCast(Wide(), pairs)));
  }
  static HWY_INLINE Floats high_half(hn::Vec<Bytes> pairs) {
    return hn::BitCast(Tag(), hn::And(hn::BitCast(Wide(), pairs), hn::Set(Wide(), 0xFFFF0000u)));
  }
  static HWY_INLINE Floats join_lower(hn::Vec<Bytes> lower, hn::Vec<Bytes> upper) {
    return hn::BitCast(
        Tag(), hn::InterleaveLower(Pairs(), hn::BitCast(Pairs(), lower), hn::BitCast(Pairs(), upper)));
  }
  static HWY_INLINE Floats join_upper(hn::Vec<Bytes> lower, hn::Vec<Bytes> upper) {
    return hn::BitCast(
        Tag(), hn::InterleaveUpper(Pairs(), hn::BitCast(Pairs(), lower), hn::BitCast(Pairs(), upper)));
  }
  HWY_INLINE hn::Vec<Bytes> plane(int byte, hn::Vec<Bytes> code) const {
    return hn::TableLookupBytes(hn::LoadDup128(Bytes(), planes_[byte]), code);
  }

  alignas(16) uint8_t planes_[4][16];  // byte b of what stands for code i is planes_[b][i]
};
using TableCodes = NibbleCodes<4, false>;
using SymmetricCodes = NibbleCodes<2, false>;
using ShiftedCodes = NibbleCodes<2, true>;

#endif

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HALFBYTE_OPS_QGEMM_DECODE_INL_H_
