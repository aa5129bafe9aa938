// Units of a packed weight as tiles of bf16, for variants whose products are of bf16 on AVX-512 and AMX.
//
// A unit (32 rows by 64 columns) becomes four tiles of 16 lines of 32 values, 2 KB for each `j`:
//   forward     tile [j][i], line r: row 16 i + r; 16 pairs of columns, those that forward_column() says. So
//               a tile is the first operand of a product of tiles, the activations [16 pairs][16 m] the
//               second.
//   transposed  tile [j][i], line a: rows 2a and 2a + 1, which are summed; for each of 16 columns, those that
//               transposed_column() says, the pair of them. So a tile is the second operand, the activations
//               [16 m][32 rows] the first.
// Codes of up to 6 bits are looked up in a table of each row that has scale and bias in it; those of 8 bits
// are converted. Weights below 2^-126 become 0, as the instructions that round have it. Bit streams give the
// order of columns of 8 bits.
#pragma once

#ifndef __clang__  // GCC 12 takes vectors that are undefined on purpose for mistakes
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/units.h"

// Of functions that run only where CpuFeatures::avx512_bf16 holds.
#define HALFBYTE_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")))

namespace halfbyte {

inline constexpr int kTileLines = 16, kTileValues = 32;
struct alignas(64) Bf16Tile {
  uint16_t lines[kTileLines][kTileValues];
};

// Columns of a unit: of value `i` (0, 1) of pair `pair` of tiles j of the forward product. Of 4 bits a pair
// is a word of vectors j and 2 + j; of 8 bits two neighbours in vectors 2j and 2j + 1, one behind the other.
constexpr int forward_column(int bits, int j, int pair, int i) {
  constexpr auto kOrder4 = column_order(4), kOrder8 = column_order(8);
  const int of4 = 16 * (2 * i + j) + pair, of8 = 32 * j + 2 * pair + i;
  return bits == 4 ? kOrder4[static_cast<size_t>(of4)] : kOrder8[static_cast<size_t>(of8)];
}
// ... of pair `pair` of tile [j][i] of the transposed product: for 4 bits too, as those of 8 bits lie.
constexpr int transposed_column(int j, int i, int pair) {
  constexpr auto kOrder8 = column_order(8);
  const int of8 = 16 * (2 * j + i) + pair;
  return kOrder8[static_cast<size_t>(of8)];
}

// Why there is no decoder for the weight of a problem; empty if there is.
inline std::string refuse_bf16_decode(const QgemmProblem& problem) {
  if (!problem.packed) return "the weight must be packed";
  if (problem.dtype != DType::bf16)
    return fmt::format("dtype must be bf16, got {}", to_string(problem.dtype));
  const int64_t group = problem.weight.group;
  const bool is_row = problem.weight.groups <= 1 && !problem.weight.inlined;
  if (!is_row && group != 32 && group % formats::kUnitCols != 0 && (group != 16 || problem.codec.bits != 4))
    return fmt::format("groups must be rows, 16 (of 4 bits), 32 or a multiple of 64 columns, got {}", group);
  if (problem.k > INT32_MAX) return fmt::format("k must be at most {}, got {}", INT32_MAX, problem.k);
  // Each row would have a table of 64 weights for 64 products or more: decoding to f32 takes 0.7 of the time.
  if (problem.transposed && problem.codec.bits == 6 && problem.weight.has_biases && problem.m <= 4)
    return fmt::format("m must be above 4 for transposed products of 6 bits with biases, got {}", problem.m);
  return {};
}

// 16 numbers of E4M3, exactly; NaN stays NaN.
HALFBYTE_AVX512 inline __m512 convert_e4m3(__m128i bytes) {
  // The bits of an f16 of 2^-8 times the value.
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                        _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
  const __m128i magnitude = _mm_set1_epi8(0x7F);
  const __mmask16 is_nan = _mm_cmpeq_epi8_mask(_mm_and_si128(bytes, magnitude), magnitude);
  return _mm512_mask_mov_ps(_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256)), is_nan,
                            _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
}
// The same of 64, as bytes of bf16, which are exact, too: those of a magnitude are looked up apart.
struct E4m3Bytes {
  alignas(64) uint8_t low[128], high[128];

  static const E4m3Bytes& table() {
    static const E4m3Bytes bytes = [] {
      E4m3Bytes of;
      for (int i = 0; i < 128; ++i) {
        const uint16_t bits = formats::to_bf16(formats::e4m3_to_f32(static_cast<uint8_t>(i)));
        of.low[i] = static_cast<uint8_t>(bits);
        of.high[i] = static_cast<uint8_t>(bits >> 8);
      }
      return of;
    }();
    return bytes;
  }
};
class E4m3Lookup {
 public:
  HALFBYTE_AVX512 E4m3Lookup() {
    const E4m3Bytes& bytes = E4m3Bytes::table();
    for (int i = 0; i < 2; ++i) {
      low_[i] = _mm512_load_si512(bytes.low + 64 * i);
      high_[i] = _mm512_load_si512(bytes.high + 64 * i);
    }
  }
  [[gnu::always_inline]] HALFBYTE_AVX512 void look_up(__m512i codes, __m512i& low, __m512i& high) const {
    low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high_[0], codes, high_[1]), codes,
                                     _mm512_set1_epi8(-128), 0xF8);  // and the sign
  }

 private:
  __m512i low_[2], high_[2];
};
// 16 scales of one byte, as formats/convert.h has them; without the global scale.
HALFBYTE_AVX512 inline __m512 load_byte_scales(const void* scales, formats::ScaleType type) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(scales));
  if (type == formats::ScaleType::e4m3) return convert_e4m3(bytes);
  const __m512i bits = _mm512_cvtepu8_epi32(bytes);
  const __m512i value = _mm512_mask_mov_epi32(
      _mm512_slli_epi32(bits, 23), _mm512_testn_epi32_mask(bits, bits), _mm512_set1_epi32(0x00400000));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(
      value, _mm512_cmpeq_epi32_mask(bits, _mm512_set1_epi32(0xFF)), _mm512_set1_epi32(0x7FC00000)));
}
// The same of 64 scales, as bytes of bf16, which are exact, too.
HALFBYTE_AVX512 inline void look_up_byte_scales(__m512i bytes, formats::ScaleType type, __m512i& low,
                                                __m512i& high) {
  if (type == formats::ScaleType::e4m3) return E4m3Lookup().look_up(bytes, low, high);
  const __mmask64 is_special =  // 2^-127, which is subnormal, and NaN
      _mm512_testn_epi8_mask(bytes, bytes) | _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(-1));
  low = _mm512_and_si512(_mm512_slli_epi16(bytes, 7), _mm512_set1_epi8(-128));
  low = _mm512_mask_add_epi8(low, is_special, low, _mm512_set1_epi8(0x40));
  high = _mm512_and_si512(_mm512_srli_epi16(bytes, 1), _mm512_set1_epi8(0x7F));
}
// What sums are multiplied by when they are complete: the reciprocal of the global scale, where there is one.
inline float global_factor(const QgemmProblem& problem, const QgemmTensors& tensors) {
  if (problem.codec.scale_type != formats::ScaleType::e4m3) return 1;
  float global = 0;
  std::memcpy(&global, static_cast<const uint8_t*>(tensors.weight) + problem.weight.global_scale,
              sizeof global);
  return 1 / global;
}

// 16 scales or biases, as they are stored.
[[gnu::always_inline]] HALFBYTE_AVX512 inline __m512 load_parameters(const void* parameters,
                                                                     formats::ScaleType type) {
  if (type == formats::ScaleType::f32) return _mm512_loadu_ps(parameters);
  if (formats::scale_bytes(type) == 1) return load_byte_scales(parameters, type);
  const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(parameters));
  if (type == formats::ScaleType::f16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Where a block's parameters begin that are inlined (PackedLayout::parameter).
inline int64_t inlined_parameters(const formats::PackedLayout& p, int64_t strip, int64_t block) {
  return strip * p.strip_bytes + block * p.block_bytes + p.block_code_bytes;
}

// Where the parameters of a group of the 32 rows of a strip are in the packed weight.
struct GroupPlaces {
  int64_t scales, zeros, biases;

  GroupPlaces(const formats::PackedLayout& p, int64_t strip, int64_t group) {
    const int64_t row = strip * formats::kUnitRows;
    if (!p.inlined) {
      scales = p.scale(row, group), zeros = p.zero(row, group), biases = p.bias(row, group);
      return;
    }
    // Without divisions, which take as long as several lines of codes: blocks have 4, 2 or 1 groups.
    const int log_groups = p.group == 16 ? 2 : p.group == 32 ? 1 : 0, num_groups = 1 << log_groups;
    const int64_t block = group >> log_groups, first = (group & (num_groups - 1)) * formats::kUnitRows;
    const int64_t begin = inlined_parameters(p, strip, block),
                  behind = begin + num_groups * formats::kUnitRows * p.scale_bytes;
    scales = begin + first * p.scale_bytes;
    zeros = behind + first;
    biases = behind + first * p.bias_bytes;
  }
};

// Parameters of a group of the 32 rows of a strip, as f32.
struct GroupParameters {
  alignas(64) float scales[formats::kUnitRows] = {};
  alignas(64) float biases[formats::kUnitRows] = {};   // 0 where the format has none
  alignas(64) float offsets[formats::kUnitRows] = {};  // the code that stands for 0; tables, affine: 0

  // As they are stored. Scales beyond the weight are 0, so padding decodes to zeros.
  HALFBYTE_AVX512 void load(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t strip,
                            int64_t group) {
    const formats::PackedLayout& p = problem.weight;
    const formats::Codec& codec = problem.codec;
    const auto* memory = static_cast<const uint8_t*>(tensors.weight);
    const GroupPlaces places(p, strip, group);
    const uint8_t* const at = memory + places.scales;
    for (int i = 0; i < formats::kUnitRows; i += 16) {
      _mm512_store_ps(scales + i,
                      problem.double_quant
                          ? nested_scales(p, memory, at + i, strip * formats::kUnitRows + i, group)
                          : load_parameters(at + i * p.scale_bytes, codec.scale_type));
      if (p.has_biases)
        _mm512_store_ps(biases + i,
                        load_parameters(memory + places.biases + i * p.bias_bytes, codec.scale_type));
      if (codec.kind == formats::Kind::table) continue;
      const float zero = codec.kind == formats::Kind::integer ? static_cast<float>(-codec.q_min) : 0;
      _mm512_store_ps(offsets + i, codec.asymmetric
                                       ? _mm512_cvtepi32_ps(load_bytes(memory + places.zeros + i))
                                       : _mm512_set1_ps(zero));
    }
  }

  // Scales alone, as they are stored from `at` on, of `bytes` each.
  [[gnu::always_inline]] HALFBYTE_AVX512 void load_scales(const uint8_t* at, int bytes,
                                                          formats::ScaleType type) {
    for (int i = 0; i < formats::kUnitRows; i += 16)
      _mm512_store_ps(scales + i, load_parameters(at + i * bytes, type));
  }

  HALFBYTE_AVX512 void round_to_bf16(bool has_biases) {
    for (float* values : {scales, biases}) {
      for (int i = 0; i < formats::kUnitRows; i += 16) {
        const auto rounded = _mm512_cvtneps_pbh(_mm512_load_ps(values + i));
        _mm512_store_ps(values + i, load_parameters(&rounded, formats::ScaleType::bf16));
      }
      if (!has_biases) return;
    }
  }

 private:
  HALFBYTE_AVX512 static __m512i load_bytes(const uint8_t* bytes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  // Double-quantized scales of 16 rows.
  HALFBYTE_AVX512 static __m512 nested_scales(const formats::PackedLayout& p, const uint8_t* memory,
                                              const uint8_t* codes, int64_t row, int64_t group) {
    const int64_t num_rows = group < p.groups ? formats::clamp<int64_t>(p.n - row, 0, 16) : 0;
    const auto valid = static_cast<__mmask16>((1u << num_rows) - 1);
    const int64_t first = row * p.groups + group;  // scales have an absmax for each 256
    const __m512i rows = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i numbers =
        _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first % 256)),
                         _mm512_mullo_epi32(rows, _mm512_set1_epi32(static_cast<int>(p.groups))));
    const __m512 zero = _mm512_setzero_ps();
    const __m512 absmax = _mm512_mask_i32gather_ps(zero, valid, _mm512_srli_epi32(numbers, 8),
                                                   memory + p.absmax + first / 256 * 4, 4);
    const __m512 mapped = _mm512_mask_i32gather_ps(zero, valid, load_bytes(codes), memory + p.map, 4);
    float offset = 0;
    std::memcpy(&offset, memory + p.offset, sizeof offset);
    return _mm512_maskz_add_ps(valid, _mm512_mul_ps(mapped, absmax), _mm512_set1_ps(offset));
  }
};

// Where codes of half a row of a unit lie that is a bit stream, in the order of columns of 8 bits: the two
// bytes that each begins in, and its bit there.
struct StreamPlaces {
  alignas(64) uint8_t bytes[64] = {};
  alignas(64) uint16_t shifts[32] = {};

  explicit constexpr StreamPlaces(int bits) {
    constexpr auto kOrder = column_order(8);
    for (size_t i = 0; i < 32; ++i) {
      const int bit = kOrder[i] * bits;
      bytes[2 * i] = static_cast<uint8_t>(bit / 8);
      bytes[2 * i + 1] = static_cast<uint8_t>(bit / 8 + 1);
      shifts[i] = static_cast<uint16_t>(bit % 8);
    }
  }
};
template <int kBits>
inline constexpr StreamPlaces kStreamPlaces{kBits};

// Codes of 2, 3, 5 or 6 bits of half a row of a unit: to words of 16 bits, in the order of columns of 8 bits.
// Of their bits those above the code's are of others.
class StreamWords {
 public:
  HALFBYTE_AVX512 explicit StreamWords(int bits) : bits_(bits) {
    const StreamPlaces& places = bits == 2   ? kStreamPlaces<2>
                                 : bits == 3 ? kStreamPlaces<3>
                                 : bits == 5 ? kStreamPlaces<5>
                                             : kStreamPlaces<6>;
    bytes_ = _mm512_load_si512(places.bytes);
    shifts_ = _mm512_load_si512(places.shifts);
    mask_ = static_cast<__mmask32>((uint64_t{1} << half_bytes()) - 1);
  }

  int half_bytes() const { return 4 * bits_; }
  // Of row `row` of the unit whose codes begin at `codes`.
  const uint8_t* at(const uint8_t* codes, int row, int half) const {
    return codes + (2 * row + half) * half_bytes();
  }
  [[gnu::always_inline]] HALFBYTE_AVX512 __m512i load(const uint8_t* at) const {
    const __m256i codes = _mm256_maskz_loadu_epi8(mask_, at);
    return _mm512_srlv_epi16(_mm512_permutexvar_epi8(bytes_, _mm512_castsi256_si512(codes)), shifts_);
  }

 private:
  int bits_;
  __mmask32 mask_;
  __m512i bytes_, shifts_;
};

// Decodes the units of a weight, one after the other: as `weight_rounded` has them, or the values of codes
// alone (`code_rounded`).
class UnitDecoder {
 public:
  HALFBYTE_AVX512 UnitDecoder(const QgemmProblem& problem, const QgemmTensors& tensors,
                              WeightRounding rounding)
      : problem_(problem),
        tensors_(tensors),
        block_units_(static_cast<uint32_t>(problem.weight.block_cols / formats::kUnitCols)),
        unit_bytes_(problem.weight.block_bytes / static_cast<int>(block_units_)),
        groups_(problem.weight.inlined ? formats::unit_groups(static_cast<int>(problem.weight.group)) : 1),
        is_floating_(problem.codec.kind == formats::Kind::floating),
        streams_(problem.codec.bits),
        has_scales_(rounding == WeightRounding::weight_rounded),
        has_biases_(has_scales_ && problem.weight.has_biases) {
    for (int i = 0; i < 64; ++i) {
      const int code = i % (1 << std::min<int>(problem.codec.bits, 6));
      code_values_[i] = problem.codec.kind == formats::Kind::table
                            ? formats::bf16_to_f32(formats::to_bf16(problem.codec.book.values[code]))
                            : static_cast<float>(code);
    }
  }

  // Makes ready to decode a unit.
  HALFBYTE_AVX512 void select(int64_t strip, int64_t unit) {
    // Where PackedLayout::unit() has it, without divisions of 64 bits, which take as long as several lines.
    const formats::PackedLayout& p = problem_.weight;
    const uint32_t block = static_cast<uint32_t>(unit) / block_units_,
                   place = static_cast<uint32_t>(unit) % block_units_;
    codes_ = static_cast<const uint8_t*>(tensors_.weight) + strip * p.strip_bytes +
             int64_t{block} * p.block_bytes +
             place * (formats::kUnitRows * formats::kUnitCols / 8) * static_cast<uint32_t>(p.bits);
    if (group_ >= 0 && !has_scales_ && !problem_.codec.asymmetric) return;  // every group is the same
    const int64_t group = p.groups == 1 ? 0
                                        : static_cast<uint32_t>(unit) * uint32_t{formats::kUnitCols} /
                                              static_cast<uint32_t>(p.group);
    if (group == group_ && strip == strip_) return;
    strip_ = strip;
    group_ = group;
    for (int i = 0; i < groups_; ++i) {
      GroupParameters& parameters = parameters_[i];
      parameters.load(problem_, tensors_, strip, group + i);
      if (has_scales_)
        parameters.round_to_bf16(has_biases_);
      else
        std::fill_n(parameters.scales, formats::kUnitRows, 1.0F);
      if (problem_.codec.bits == 8 && !is_floating_)
        for (float& offset : parameters.offsets) offset += kMagic;
    }
    if (problem_.codec.bits == 8) return;
    if (problem_.codec.bits != 4) return make_stream_tables();
    const __m512 values = _mm512_load_ps(code_values_);
    const int groups = groups_;  // known not to change in the loop
    const bool has_biases = has_biases_;
    for (int row = 0; row < formats::kUnitRows; ++row)
      for (int i = 0; i < groups; i += 2) {
        const __m512 first = weights(values, parameters_[i], row, has_biases);
        const __m512 second = groups > 1 ? weights(values, parameters_[i + 1], row, has_biases) : first;
        store(tables_[row] + 16 * i, _mm512_cvtne2ps_pbh(second, first));
      }
  }

  // Of what lies `distance` bytes behind the selected unit, as much as a unit with its parameters takes, or
  // one of several parts of it: to the second-level cache, which has more requests under way than the first.
  void prefetch(int64_t distance, int part = 0, int num_parts = 1) const {
    for (int i = part * 64; i < unit_bytes_; i += num_parts * 64)
      __builtin_prefetch(codes_ + distance + i, 0, 2);
  }

  // Quarters [begin, end) of the selected unit: lines 4 * begin and on, of 16; a line has rows 2 * line and
  // 2 * line + 1. first: tiles [0][0..1], second: tiles [1][0..1].
  template <bool kTransposed>
  HALFBYTE_AVX512 void decode(int begin, int end, Bf16Tile* first, Bf16Tile* second) const {
    if (problem_.codec.bits == 8) return decode_quarters8<kTransposed>(begin, end, first, second);
    if (problem_.codec.bits != 4) return decode_streams<kTransposed>(begin, end, first, second);
    for (int quarter = begin; quarter < end; ++quarter)
      if (!has_scales_ && codes_have_one_table(problem_))
        decode_quarter<kTransposed, 1, true>(quarter, first, second);
      else if (groups_ == 4)
        decode_quarter<kTransposed, 4, false>(quarter, first, second);
      else if (groups_ == 2)
        decode_quarter<kTransposed, 2, false>(quarter, first, second);
      else
        decode_quarter<kTransposed, 1, false>(quarter, first, second);
  }

  // Whether codes of 4 bits alone stand for the same in all rows and groups; and a quarter of such a unit,
  // code-rounded, forward.
  static bool codes_have_one_table(const QgemmProblem& problem) {
    return problem.codec.bits == 4 && !problem.codec.asymmetric;
  }
  [[gnu::always_inline]] HALFBYTE_AVX512 void decode_by_one_table(int quarter, Bf16Tile* first,
                                                                  Bf16Tile* second) const {
    decode_quarter4<false, 1, true>(quarter, first, second);
  }

 private:
  static constexpr int kQuarterLines = kTileLines / 4, kTableValues = 128;
  static constexpr float kMagic = 0x1p23f;  // its last bits are a code that is added

  template <class Vector>
  HALFBYTE_AVX512 static void store(uint16_t* to, Vector values) {
    std::memcpy(to, &values, sizeof values);
  }
  // 64 bytes of codes, with the slots of t in order. swapped: of lines 2 and 3 of 4.
  [[gnu::always_inline]] HALFBYTE_AVX512 static __m512i load_line(const uint8_t* codes, int line,
                                                                  bool swapped) {
    const __m512i bytes = _mm512_loadu_si512(codes + line * 64);
    return swapped ? _mm512_shuffle_i64x2(bytes, bytes, 0x4E) : bytes;
  }
  // What codes of a row stand for, before it is rounded to bf16: the product of two bf16 is exact.
  HALFBYTE_AVX512 static __m512 weights(__m512 codes, const GroupParameters& p, int row, bool has_biases) {
    const __m512 values = _mm512_sub_ps(codes, _mm512_set1_ps(p.offsets[row]));
    const __m512 scale = _mm512_set1_ps(p.scales[row]);
    if (!has_biases) return _mm512_mul_ps(values, scale);
    // Rounded to odd: where it is not exact, the one of the two neighbours that is odd. Rounding that to bf16
    // is rounding the exact value.
    const __m512 bias = _mm512_set1_ps(p.biases[row]);
    const __m512 below =
        _mm512_fmadd_round_ps(values, scale, bias, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 above =
        _mm512_fmadd_round_ps(values, scale, bias, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __mmask16 odd = _mm512_test_epi32_mask(_mm512_castps_si512(below), _mm512_set1_epi32(1));
    return _mm512_mask_blend_ps(odd, above, below);
  }

  // The values of codes of a row, of each 16 bits. Of their bits those above 4 are not looked at, but for
  // those that say which group: word w of a line is of 16 columns w % 4.
  template <int kGroups>
  [[gnu::always_inline]] HALFBYTE_AVX512 static __m512i look_up(__m512i codes, const uint16_t* table) {
    const __m512i first = _mm512_load_si512(table);
    if (kGroups == 1) return _mm512_permutexvar_epi16(codes, first);
    const __m512i group = kGroups == 2 ? _mm512_set4_epi32(0x00100010, 0x00100010, 0, 0)
                                       : _mm512_set4_epi32(0x00300030, 0x00200020, 0x00100010, 0);
    const __m512i index =
        _mm512_ternarylogic_epi64(codes, _mm512_set1_epi16(15), group, 0xEA);  // codes & 15 | group
    if (kGroups == 2) return _mm512_permutexvar_epi16(index, first);
    return _mm512_permutex2var_epi16(first, index, _mm512_load_si512(table + 32));
  }

  // Not inlined, for each to have few addresses and constants.
  template <bool kTransposed, int kGroups, bool kOneTable>
  [[gnu::noinline]] HALFBYTE_AVX512 void decode_quarter(int quarter, Bf16Tile* first,
                                                        Bf16Tile* second) const {
    decode_quarter4<kTransposed, kGroups, kOneTable>(quarter, first, second);
  }
  template <bool kTransposed>
  [[gnu::noinline]] HALFBYTE_AVX512 void decode_quarters8(int begin, int end, Bf16Tile* first,
                                                          Bf16Tile* second) const {
    for (int line = begin * kQuarterLines; line < end * kQuarterLines; ++line) {
      decode_line8<kTransposed>(0, line, first);
      decode_line8<kTransposed>(1, line, second);
    }
  }
  template <bool kTransposed>
  [[gnu::noinline]] HALFBYTE_AVX512 void decode_streams(int begin, int end, Bf16Tile* first,
                                                        Bf16Tile* second) const {
    for (int line = begin * kQuarterLines; line < end * kQuarterLines; ++line) {
      decode_stream<kTransposed>(0, line, first);
      decode_stream<kTransposed>(1, line, second);
    }
  }

  template <bool kTransposed, int kGroups, bool kOneTable>
  [[gnu::always_inline]] HALFBYTE_AVX512 void decode_quarter4(int quarter, Bf16Tile* first,
                                                              Bf16Tile* second) const {
    const uint8_t* const codes_of_quarter = codes_ + quarter * kQuarterLines * 64;
    const uint16_t* const tables = tables_[kOneTable ? 0 : quarter * 2 * kQuarterLines];
    const int tile = kTransposed ? 0 : quarter / 2;
    const int line = kTransposed ? quarter * kQuarterLines : quarter % 2 * 2 * kQuarterLines;
    uint16_t* const to[2] = {first[tile].lines[line], second[tile].lines[line]};
    const __m512i table = _mm512_load_si512(tables);
#pragma GCC unroll 4
    for (int i = 0; i < kQuarterLines; ++i) {
      const __m512i codes = load_line(codes_of_quarter, i, (i & 2) != 0);
      const auto value = [&](int nibble) HALFBYTE_AVX512 {
        const __m512i at = _mm512_srli_epi16(codes, static_cast<unsigned>(4 * nibble));
        if constexpr (kOneTable)
          return _mm512_permutexvar_epi16(at, table);
        else
          return look_up<kGroups>(at, tables + (2 * i + nibble / 2) * kTableValues);
      };
      // Row 2 * line: even columns, odd ones; row 2 * line + 1.
      const __m512i v0 = value(0), v1 = value(1), v2 = value(2), v3 = value(3);
      for (int j = 0; j < 2; ++j) {
        const __m512i even = j == 0 ? v0 : v1, odd = j == 0 ? v2 : v3;
        if (kTransposed) {
          store(to[0] + i * kTileValues + j * kTileLines * kTileValues, _mm512_unpacklo_epi16(even, odd));
          store(to[1] + i * kTileValues + j * kTileLines * kTileValues, _mm512_unpackhi_epi16(even, odd));
        } else {
          store(to[j] + 2 * i * kTileValues, even);
          store(to[j] + (2 * i + 1) * kTileValues, odd);
        }
      }
    }
  }

  // Values repeat, as what lies above the bits of a code may be anything.
  HALFBYTE_AVX512 void make_stream_tables() {
    const int entries = problem_.codec.bits == 6 ? 64 : 32;
    for (int row = 0; row < formats::kUnitRows; ++row)
      for (int i = 0; i < groups_; ++i)
        for (int at = 0; at < entries; at += 32) {
          const __m512 first = weights(_mm512_load_ps(code_values_ + at), parameters_[i], row, has_biases_);
          const __m512 second =
              weights(_mm512_load_ps(code_values_ + at + 16), parameters_[i], row, has_biases_);
          store(tables_[row] + 64 * i + at, _mm512_cvtne2ps_pbh(second, first));
        }
  }
  // 32 columns of two rows, of a bit stream.
  template <bool kTransposed>
  HALFBYTE_AVX512 void decode_stream(int half, int line, Bf16Tile* tiles) const {
    __m512i values[2];
    for (int i = 0; i < 2; ++i) {
      const uint16_t* const table = tables_[2 * line + i] + (groups_ > 1 ? 64 * half : 0);
      const __m512i words = streams_.load(streams_.at(codes_, 2 * line + i, half)),
                    low = _mm512_load_si512(table);
      values[i] = problem_.codec.bits == 6
                      ? _mm512_permutex2var_epi16(low, words, _mm512_load_si512(table + 32))
                      : _mm512_permutexvar_epi16(words, low);
    }
    if (kTransposed) {
      const __m512i pairs = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                             7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
      for (int16_t i = 0; i < 2; ++i)
        store(tiles[i].lines[line],
              _mm512_permutex2var_epi16(
                  values[0], _mm512_add_epi16(pairs, _mm512_set1_epi16(static_cast<int16_t>(16 * i))),
                  values[1]));
    } else {
      const int i = line / 8, row = 2 * line % kTileLines;
      store(tiles[i].lines[row], values[0]);
      store(tiles[i].lines[row + 1], values[1]);
    }
  }

  // 32 columns of two rows.
  template <bool kTransposed>
  HALFBYTE_AVX512 void decode_line8(int half, int line, Bf16Tile* tiles) const {
    const __m512i codes = load_line(codes_ + half * formats::kTileBytes, line, (line & 2) != 0);
    const __m512i magic = _mm512_castps_si512(_mm512_set1_ps(kMagic)), byte = _mm512_set1_epi32(0xFF);
    __m512 values[4];  // of each byte of the words: row 2 * line: even columns, odd ones; row 2 * line + 1
    if (is_floating_) {
      __m512i low, high;
      e4m3_.look_up(codes, low, high);
      // Of the first bytes of words, in the upper halves of floats.
      const __m512i places = _mm512_add_epi32(
          _mm512_set1_epi32(0x40000000),
          _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                             _mm512_set1_epi32(0x04040000)));
      for (int i = 0; i < 4; ++i)
        values[i] = _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(
            0xCCCCCCCCCCCCCCCC, low, _mm512_add_epi8(places, _mm512_set1_epi8(static_cast<char>(i))), high));
    } else {
      for (int i = 0; i < 4; ++i)
        values[i] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
            _mm512_srli_epi32(codes, static_cast<unsigned>(8 * i)), byte, magic, 0xEA));
    }
    for (int i = 0; i < 4; ++i)
      values[i] = weights(values[i], parameters_[groups_ > 1 ? half : 0], 2 * line + i / 2, has_biases_);
    if (kTransposed) {
      const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                                  8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
      for (int i = 0; i < 2; ++i)
        store(tiles[i].lines[line],
              _mm512_permutexvar_epi16(
                  interleave, __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(values[2 + i], values[i]))));
    } else {
      const int i = line / 8, row = 2 * line % kTileLines;
      store(tiles[i].lines[row], _mm512_cvtne2ps_pbh(values[1], values[0]));
      store(tiles[i].lines[row + 1], _mm512_cvtne2ps_pbh(values[3], values[2]));
    }
  }

  const QgemmProblem& problem_;
  const QgemmTensors& tensors_;
  uint32_t block_units_;  // units of a block
  int unit_bytes_;        // of a unit, with its share of the block's parameters
  int groups_;            // of a unit
  bool is_floating_;
  E4m3Lookup e4m3_;
  StreamWords streams_;  // of 2, 3, 5 and 6 bits
  bool has_scales_, has_biases_;
  alignas(64) float code_values_[64];  // of codes of up to 6 bits, repeated
  const uint8_t* codes_ = nullptr;     // of the selected unit
  int64_t strip_ = -1, group_ = -1;    // of parameters_ and tables_
  GroupParameters parameters_[4];      // of the groups of a unit
  // bf16: of the codes of each group, 16, or for bit streams 64.
  alignas(64) uint16_t tables_[formats::kUnitRows][kTableValues];
};

}  // namespace halfbyte
