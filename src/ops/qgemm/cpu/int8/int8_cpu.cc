// `qgemm_int8`: forward products with `math = int8`, see weight/int8.h. Units of the weight are decoded to
// bytes in blocks that stay in the first-level cache: four columns of 16 rows, or as many as a vector has,
// lie across the lanes. They are multiplied there with four columns of a row of x, which are broadcast, and
// summed as integers: by vpdpbusd (AVX3_DL), vpmaddubsw (AVX2, AVX3) or smull (NEON), or by tiles (AVX3_DL
// with AMX).
//
// Integers are exact, and what is rounded is rounded in one order, so that every target, number of threads
// and the scalar reference give the same bytes.
#define HWY_WANT_AVX3_DL  // one more copy, for AVX-512 with byte permutes and products of bytes
#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "core/plan_device.h"
#include "cpu/parallel.h"
#include "ops/qgemm/cpu/int8/int8_tiles.h"
#include "ops/qgemm/weight/int8.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/qgemm/cpu/int8/int8_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "ops/qgemm/weight/decode-inl.h"
#include "ops/qgemm/weight/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

constexpr int64_t kBatch = 64;       // rows of x that a decoded unit is used for
constexpr int64_t kAhead = 8192;     // bytes of the weight that are fetched ahead
constexpr int kChunks = kCols / 4;   // of four columns
constexpr int kBlocks = kLanes / 4;  // of 128 bits of a vector
// Rows of x of a panel: with two vectors of rows of the weight their sums are 16 of 32, or 8 of 16 registers.
constexpr int kPanel = HALFBYTE_AVX512 || HWY_ARCH_ARM_A64 ? 8 : 4;
constexpr int64_t panel_rows(int64_t left) {
  return left >= kPanel ? kPanel : left <= 4 ? left : (left + 1) / 2 * 2;
}

// Into the second-level cache: fetched into the first, one row of x took 1.8 times as long.
HWY_INLINE void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// ---- 1. Sums of four products

using IntTag = hn::RebindToSigned<Tag>;
using Ints = hn::Vec<IntTag>;
using Bytes = hn::Repartition<uint8_t, Tag>;
using Wide = hn::RebindToUnsigned<Tag>;

// Whether values of weights are unsigned: signed ones then have 128 added.
constexpr bool kUnsigned = HALFBYTE_VBMI;

// kSmall: values are 0 to 15; else -128 to 127, or 0 to 255 where kUnsigned.
template <bool kSmall>
struct ByteDots {
  // What is made of a vector of weights once for many of x.
  struct Weights {
    Words values, magnitudes;
  };
  static HWY_INLINE Weights prepare(Words values) {
#if HWY_ARCH_X86 && !HALFBYTE_VBMI
    if constexpr (!kSmall)
      return {values, hn::BitCast(Wide(), hn::Abs(hn::BitCast(hn::RebindToSigned<Bytes>(), values)))};
#endif
    return {values, values};
  }
  // Each lane of `sum` plus the products of its four bytes.
  static HWY_INLINE Ints add(Ints sum, const Weights& w, Words x) {
#if HALFBYTE_VBMI
    // CPUs of this target have it, but Highway 1.0 does not tell the compiler.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(w.values.raw), "v"(x.raw));
    return sum;
#elif HALFBYTE_AVX512
    __m512i signed_x = x.raw;
    if constexpr (!kSmall)
      signed_x =
          _mm512_mask_sub_epi8(signed_x, _mm512_movepi8_mask(w.values.raw), _mm512_setzero_si512(), signed_x);
    const __m512i pairs = _mm512_maddubs_epi16(w.magnitudes.raw, signed_x);  // below 2^15
    return hn::Add(sum, Ints{_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))});
#elif HWY_ARCH_X86
    __m256i signed_x = x.raw;
    if constexpr (!kSmall) signed_x = _mm256_sign_epi8(signed_x, w.values.raw);
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitudes.raw, signed_x);
    return hn::Add(sum, Ints{_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))});
#else
    const int8x16_t a = vreinterpretq_s8_u32(w.values.raw), b = vreinterpretq_s8_u32(x.raw);
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return Ints{vpadalq_s16(sum.raw, vpaddq_s16(low, high))};
#endif
  }
};

// Sums of few products. Of small values, 8 at most, where pairs of 16 bits hold them; they are widened at the
// end.
template <bool kSmall>
struct FewDots {
  static constexpr bool kPairs = kSmall && HWY_ARCH_X86 && !HALFBYTE_VBMI;
  using D = ByteDots<kSmall>;
  using Pairs = hn::Repartition<int16_t, Tag>;

  static HWY_INLINE Ints add(Ints sum, const typename D::Weights& w, Words x) {
#if HALFBYTE_AVX512 && !HALFBYTE_VBMI
    if constexpr (kPairs) return Ints{_mm512_add_epi16(sum.raw, _mm512_maddubs_epi16(w.values.raw, x.raw))};
#elif HWY_ARCH_X86 && !HALFBYTE_VBMI
    if constexpr (kPairs) return Ints{_mm256_add_epi16(sum.raw, _mm256_maddubs_epi16(w.values.raw, x.raw))};
#endif
    return D::add(sum, w, x);
  }
  static HWY_INLINE Ints widen(Ints sum) {
#if HALFBYTE_AVX512 && !HALFBYTE_VBMI
    if constexpr (kPairs) return Ints{_mm512_madd_epi16(sum.raw, _mm512_set1_epi16(1))};
#elif HWY_ARCH_X86 && !HALFBYTE_VBMI
    if constexpr (kPairs) return Ints{_mm256_madd_epi16(sum.raw, _mm256_set1_epi16(1))};
#endif
    return sum;
  }
};

// Adds to `sums` the products of R rows of x with two vectors of rows of the weight, over `num` chunks.
template <int R, bool kSmall>
HWY_INLINE void add_chunks(const uint8_t* HWY_RESTRICT w, const int8_t* HWY_RESTRICT x, int num,
                           Ints (&sums)[R][2]) {
  using D = ByteDots<kSmall>;
  for (int chunk = 0; chunk < num; ++chunk, w += 4 * kRows, x += 4) {
    const auto* const words = reinterpret_cast<const uint32_t*>(w);
    const typename D::Weights first = D::prepare(hn::Load(Wide(), words)),
                              second = D::prepare(hn::Load(Wide(), words + kLanes));
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      uint32_t bytes;
      std::memcpy(&bytes, x + r * kCols, 4);
      const Words columns = hn::Set(Wide(), bytes);
      sums[r][0] = D::add(sums[r][0], first, columns);
      sums[r][1] = D::add(sums[r][1], second, columns);
    }
  }
}

// ---- 2. Codes to bytes

// Sources have quad(codes, row, i, to): of rows row to row + 3 of a unit, with blocks i / 4 and following;
// block b of to[d] has, for each of the rows, four columns, which are chunk(b + i / 4, d).

// To dwords of each row across the rows, in every block of 128 bits.
HWY_INLINE void transpose_blocks(const Words (&rows)[4], Words (&to)[4]) {
  const hn::Repartition<uint64_t, Tag> d64;
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(Wide(), rows[0], rows[1])),
             low23 = hn::BitCast(d64, hn::InterleaveLower(Wide(), rows[2], rows[3])),
             high01 = hn::BitCast(d64, hn::InterleaveUpper(Wide(), rows[0], rows[1])),
             high23 = hn::BitCast(d64, hn::InterleaveUpper(Wide(), rows[2], rows[3]));
  to[0] = hn::BitCast(Wide(), hn::InterleaveLower(d64, low01, low23));
  to[1] = hn::BitCast(Wide(), hn::InterleaveUpper(d64, low01, low23));
  to[2] = hn::BitCast(Wide(), hn::InterleaveLower(d64, high01, high23));
  to[3] = hn::BitCast(Wide(), hn::InterleaveUpper(d64, high01, high23));
}

// Of fragments, chunk(b, d) is the columns 16 d + 2 b, 16 d + 2 b + 1 and those 8 behind these.
constexpr int fragment_chunk(int block, int dword) { return 4 * dword + block; }

// 4 bits.
template <bool kTable>
class NibbleBytes {
 public:
  static constexpr bool kSmall = !kTable;
  static constexpr int chunk(int block, int dword) { return fragment_chunk(block, dword); }
  explicit NibbleBytes(const formats::Codec& codec) {
    const Int8Table table = kTable ? int8_table(codec) : Int8Table();
    for (size_t i = 0; i < 64; ++i) {
      const int value = kTable ? table.values[i % 16] + (kUnsigned ? 128 : 0) : static_cast<int>(i % 16);
      values_[i] = static_cast<uint8_t>(value);
    }
#if HALFBYTE_VBMI
    for (uint32_t exchange = 0; exchange < 2; ++exchange)
      for (uint32_t d = 0; d < 4; ++d)
        for (uint32_t i = 0; i < 16; ++i)
          order_[exchange][d][i] = ((i / 4) ^ (2 * exchange)) * 4 + d + (i % 2) * 16;
#endif
  }

#if HALFBYTE_VBMI
  // A word has of each of two pairs of columns a byte of the first row of its line and one of the second.
  // Words of both lines are put together twice; of these 8 bytes, the low half of a block takes the nibbles
  // of the first line and the high half those of the second.
  HWY_INLINE void quad(const uint8_t* codes, int row, int, Words (&to)[4]) const {
    const uint8_t* const lines = codes + row / 2 * kFragmentLine;
    fetch(lines + kAhead);
    fetch(lines + kAhead + kFragmentLine);
    const __m512i first = _mm512_loadu_si512(lines), second = _mm512_loadu_si512(lines + kFragmentLine);
    const __m512i nibbles = _mm512_set4_epi64(0x3C'38'2C'28'34'30'24'20, 0x1C'18'0C'08'14'10'04'00,
                                              0x3C'38'2C'28'34'30'24'20, 0x1C'18'0C'08'14'10'04'00);
    // Of lines 2 and 3 of 4 the halves are the other way round.
    const int exchange = formats::packed_slot(row / 2, 0) % 4 * 4;
    HWY_UNROLL(4)
    for (int d = 0; d < 4; ++d) {
      const __m512i words =
          _mm512_permutex2var_epi32(first, _mm512_load_si512(order_[exchange / 8][d]), second);
      const __m512i spread = _mm512_multishift_epi64_epi8(nibbles, words);
      if constexpr (kTable)
        to[d] = Words{_mm512_permutexvar_epi8(spread, _mm512_load_si512(values_))};
      else
        to[d] = Words{_mm512_and_si512(spread, _mm512_set1_epi8(15))};
    }
  }

 private:
  alignas(64) uint8_t values_[64];
  alignas(64) uint32_t order_[2][4][16];  // [halves exchanged][dword]
#else
  HWY_INLINE void quad(const uint8_t* codes, int row, int i, Words (&to)[4]) const {
    Words rows[4];
    HWY_UNROLL(2)
    for (int pair = 0; pair < 2; ++pair) {
      const int a = row / 2 + pair;
      const uint8_t* const line = codes + a * kFragmentLine;
      fetch(line + kAhead);
      split(load_words(line, a, i), rows[2 * pair], rows[2 * pair + 1]);
    }
    transpose_blocks(rows, to);
  }

 private:
  // Words of two rows to the values of each. A word has of each of two pairs of columns a byte of the first
  // row and one of the second.
  HWY_INLINE void split(Words words, Words& even, Words& odd) const {
    const hn::Repartition<uint16_t, Tag> d;
    const auto pairs = hn::BitCast(d, words);
    const auto low = hn::Set(d, uint16_t{0x000F}), high = hn::Set(d, uint16_t{0x0F00});
    even = value(hn::Or(hn::And(pairs, low), hn::And(hn::ShiftLeft<4>(pairs), high)));
    odd = value(hn::Or(hn::And(hn::ShiftRight<8>(pairs), low), hn::And(hn::ShiftRight<4>(pairs), high)));
  }
  template <class V>
  HWY_INLINE Words value(V codes) const {
    const auto bytes = hn::BitCast(Bytes(), codes);
    if constexpr (!kTable) return hn::BitCast(Wide(), bytes);
    return hn::BitCast(Wide(), hn::TableLookupBytes(hn::LoadDup128(Bytes(), values_), bytes));
  }
  alignas(64) uint8_t values_[64];
#endif
};

// 8 bits: 128 is subtracted, or not where kUnsigned.
class OctetBytes {
 public:
  static constexpr bool kSmall = false;
  static constexpr int chunk(int block, int dword) { return fragment_chunk(block, dword); }
  explicit OctetBytes(const formats::Codec&) {}

  HWY_INLINE void quad(const uint8_t* codes, int row, int i, Words (&to)[4]) const {
    const hn::Repartition<uint64_t, Tag> d64;
    HWY_UNROLL(2)
    for (int tile = 0; tile < 2; ++tile) {
      hn::Vec<hn::Repartition<uint64_t, Tag>> pairs[2];
      HWY_UNROLL(2)
      for (int pair = 0; pair < 2; ++pair) {
        const int a = row / 2 + pair;
        const uint8_t* const line = codes + tile * formats::kTileBytes + a * kFragmentLine;
        fetch(line + kAhead);
        // Of 16 columns the dwords of two rows, then of the 16 after them.
        alignas(16) constexpr uint8_t kOrder[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
        const auto bytes = hn::TableLookupBytes(hn::BitCast(Bytes(), load_words(line, a, i)),
                                                hn::LoadDup128(Bytes(), kOrder));
        pairs[pair] = hn::BitCast(d64, kUnsigned ? bytes : hn::Xor(bytes, hn::Set(Bytes(), uint8_t{0x80})));
      }
      to[2 * tile] = hn::BitCast(Wide(), hn::InterleaveLower(d64, pairs[0], pairs[1]));
      to[2 * tile + 1] = hn::BitCast(Wide(), hn::InterleaveUpper(d64, pairs[0], pairs[1]));
    }
  }
};

// Bit streams of 2, 3, 5 and 6 bits.
class StreamBytes {
 public:
  static constexpr bool kSmall = false;
  static constexpr int chunk(int block, int dword) { return 4 * block + dword; }
  explicit StreamBytes(const formats::Codec& codec) : bits_(codec.bits) {
    for (int i = 0; i < 64; ++i) {
      bytes_[i] = static_cast<uint8_t>(std::min(i / 8 * bits_ + i % 8, 63));
      shifts_[i] = static_cast<uint8_t>(i % 8 * bits_);
    }
  }

  HWY_INLINE void quad(const uint8_t* codes, int row, int i, Words (&to)[4]) const {
    Words rows[4];
    for (int r = 0; r < 4; ++r) rows[r] = load(codes + (row + r) * 8 * bits_, i);
    transpose_blocks(rows, to);
  }

 private:
#if HALFBYTE_VBMI
  HWY_INLINE Words load(const uint8_t* codes, int) const {
    fetch(codes + kAhead);
    const __m512i stream = _mm512_maskz_loadu_epi8(~__mmask64{0} >> (64 - 8 * bits_), codes);
    const __m512i groups = _mm512_permutexvar_epi8(_mm512_load_si512(bytes_), stream);
    return Words{_mm512_and_si512(_mm512_multishift_epi64_epi8(_mm512_load_si512(shifts_), groups),
                                  _mm512_set1_epi8(static_cast<char>((1 << bits_) - 1)))};
  }
#else
  // The 8 bytes that are read end behind the codes of the weight by less than the scales that are there.
  HWY_INLINE Words load(const uint8_t* codes, int i) const {
    fetch(codes + kAhead);
    alignas(64) uint64_t groups[kLanes / 2];
    for (int group = 0; group < kLanes / 2; ++group) {
      uint64_t stream, bytes = 0;
      std::memcpy(&stream, codes + (i / 2 + group) * bits_, 8);
      for (int code = 0; code < 8; ++code)
        bytes |= (stream >> shifts_[code] & ((1u << bits_) - 1)) << 8 * code;
      groups[group] = bytes;
    }
    return hn::BitCast(Wide(), hn::Load(hn::Repartition<uint64_t, Tag>(), groups));
  }
#endif
  const int bits_;
  alignas(64) uint8_t bytes_[64], shifts_[64];
};

#if HALFBYTE_AVX512
template <int kOrder>
HWY_INLINE Words shuffle(Words a, Words b) {
  return Words{_mm512_shuffle_i32x4(a.raw, b.raw, kOrder)};
}
#endif

// The sums of the blocks of vectors of four rows: block q of the result is that of vectors[q].
HWY_INLINE Words sum_blocks(const Words (&vectors)[kBlocks]) {
  if constexpr (kBlocks == 1) {
    return vectors[0];
  } else if constexpr (kBlocks == 2) {
    return hn::Add(hn::ConcatLowerLower(Wide(), vectors[1], vectors[0]),
                   hn::ConcatUpperUpper(Wide(), vectors[1], vectors[0]));
  } else {
#if HALFBYTE_AVX512
    const Words of01 = hn::Add(shuffle<0x44>(vectors[0], vectors[1]), shuffle<0xEE>(vectors[0], vectors[1])),
                of23 = hn::Add(shuffle<0x44>(vectors[2], vectors[3]), shuffle<0xEE>(vectors[2], vectors[3]));
    return hn::Add(shuffle<0x88>(of01, of23), shuffle<0xDD>(of01, of23));
#endif
  }
}

// The values of a unit: of chunk c and row r at to + (c * kRows + r) * 4.
template <class Source>
HWY_NOINLINE void decode_bytes(const Source& source, const uint8_t* codes, uint8_t* to) {
  const auto put = [&](int row, int block, int dword, Words values) HWY_ATTR {
    hn::Store(values, Wide(), reinterpret_cast<uint32_t*>(to) + Source::chunk(block, dword) * kRows + row);
  };
  for (int row = 0; row < kRows; row += kLanes)
    for (int i = 0; i < 16; i += kLanes) {
      Words quads[kBlocks][4];
      HWY_UNROLL(4)
      for (int q = 0; q < kBlocks; ++q) source.quad(codes, row + 4 * q, i, quads[q]);
      HWY_UNROLL(4)
      for (int dword = 0; dword < 4; ++dword) {
        if constexpr (kBlocks == 1) {
          put(row, i / 4, dword, quads[0][dword]);
        } else if constexpr (kBlocks == 2) {
          put(row, i / 4, dword, hn::ConcatLowerLower(Wide(), quads[1][dword], quads[0][dword]));
          put(row, i / 4 + 1, dword, hn::ConcatUpperUpper(Wide(), quads[1][dword], quads[0][dword]));
        } else {
#if HALFBYTE_AVX512
          const Words low01 = shuffle<0x44>(quads[0][dword], quads[1][dword]),
                      low23 = shuffle<0x44>(quads[2][dword], quads[3][dword]),
                      high01 = shuffle<0xEE>(quads[0][dword], quads[1][dword]),
                      high23 = shuffle<0xEE>(quads[2][dword], quads[3][dword]);
          put(row, 0, dword, shuffle<0x88>(low01, low23));
          put(row, 1, dword, shuffle<0xDD>(low01, low23));
          put(row, 2, dword, shuffle<0x88>(high01, high23));
          put(row, 3, dword, shuffle<0xDD>(high01, high23));
#endif
        }
      }
    }
}

// ---- 3. S of the parts of a unit

// [part][row of x of a panel][row of the weight], without what zero points take away. Of tiles there is one
// part of more rows.
struct PartSums {
  alignas(64) int32_t of[4 * kPanel][kRows];
};

// Of decoded bytes and rows of x, kCols apart.
template <int R, bool kSmall>
HWY_NOINLINE void sum_panel(const uint8_t* w, const int8_t* x, int parts, PartSums& to) {
  const int chunks = kChunks / parts;
  for (int first = 0; first < kRows; first += 2 * kLanes)
    for (int part = 0; part < parts; ++part) {
      Ints sums[R][2];
      HWY_UNROLL(8)
      for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = hn::Zero(IntTag());
      add_chunks<R, kSmall>(w + (part * chunks * kRows + first) * 4, x + part * chunks * 4, chunks, sums);
      HWY_UNROLL(8)
      for (int r = 0; r < R; ++r) {
        hn::Store(sums[r][0], IntTag(), to.of[part * kPanel + r] + first);
        hn::Store(sums[r][1], IntTag(), to.of[part * kPanel + r] + first + kLanes);
      }
    }
}

// Few rows: codes are multiplied as they are decoded, four rows of the weight in each block of 128 bits. Rows
// of x are 4 * kCols apart, their chunks four times each.
constexpr int kFewRows = 4;
template <int R, int kParts, class Source>
HWY_NOINLINE void sum_few(const Source& source, const uint8_t* codes, const int8_t* x, PartSums& to) {
  using D = FewDots<Source::kSmall>;
  for (int row = 0; row < kRows; row += kLanes) {
    Words sums[kParts][R][kBlocks];
    HWY_UNROLL(4)
    for (int q = 0; q < kBlocks; ++q) {
      Ints products[kParts][R];
      HWY_UNROLL(4)
      for (int part = 0; part < kParts; ++part) {
        HWY_UNROLL(4)
        for (int r = 0; r < R; ++r) products[part][r] = hn::Zero(IntTag());
      }
      HWY_UNROLL(4)
      for (int i = 0; i < 16; i += kLanes) {
        Words columns[4];
        source.quad(codes, row + 4 * q, i, columns);
        HWY_UNROLL(4)
        for (int d = 0; d < 4; ++d) {
          const auto weights = D::D::prepare(columns[d]);
          HWY_UNROLL(4)
          for (int r = 0; r < R; ++r) {
            Ints& sum = products[d * kParts / 4][r];
            const auto* const at = reinterpret_cast<const uint32_t*>(x + (4 * r * kCols + d * kCols));
            sum = D::add(sum, weights, hn::Load(Wide(), at + i));
          }
        }
      }
      HWY_UNROLL(4)
      for (int part = 0; part < kParts; ++part) {
        HWY_UNROLL(4)
        for (int r = 0; r < R; ++r) sums[part][r][q] = hn::BitCast(Wide(), D::widen(products[part][r]));
      }
    }
    HWY_UNROLL(4)
    for (int part = 0; part < kParts; ++part) {
      HWY_UNROLL(4)
      for (int r = 0; r < R; ++r)
        hn::Store(hn::BitCast(IntTag(), sum_blocks(sums[part][r])), IntTag(), to.of[part * kPanel + r] + row);
    }
  }
}

// ---- 4. Products

// x as 8 bits, in the order of chunks: [unit][row][column], and its scales (with the unit of the table of
// values) and sums of parts: [unit][row], [unit][part][row].
struct RoundedX {
  int8_t* values;
  float* scales;
  int32_t* sums;
  int64_t rows;  // padded
};

class Int8Product {
 public:
  Int8Product(const QgemmProblem& problem, const QgemmTensors& tensors, void* workspace)
      : problem_(problem),
        tensors_(tensors),
        units_(ceil_div(problem.k, kCols)),
        strips_(ceil_div(problem.n, kRows)),
        few_(is_few(problem)),
        tiles_(kUnsigned && problem.m > kPanel ? int8_tiles() : nullptr),
        places_(static_cast<UnitPlace*>(workspace)),
        parameters_(problem, tensors, places_) {
    x_.rows = 0;
    for (int64_t left = problem.m; left > 0; left -= kPanel) x_.rows += panel_rows(left);
    if (tiles_ != nullptr) x_.rows = ceil_div(problem.m, kXRows) * kXRows;
    x_.values = reinterpret_cast<int8_t*>(places_ + units_);
    x_.scales = reinterpret_cast<float*>(x_of(units_, 0));
    x_.sums = reinterpret_cast<int32_t*>(x_.scales + units_ * x_.rows);
  }

  static int64_t workspace_bytes(const QgemmProblem& problem) {
    const int64_t units = ceil_div(problem.k, kCols), rows = problem.m + kXRows;
    const int64_t copies = is_few(problem) ? 4 : 1;
    return units * (static_cast<int64_t>(sizeof(UnitPlace)) + rows * (copies * kCols + 4 + 4 * 4));
  }

  void run() {
    find_units(problem_.weight, places_);
    const formats::Codec& codec = problem_.codec;
    if (codec.kind == formats::Kind::table)
      run_codes(NibbleBytes<true>(codec), int8_table(codec).unit, kUnsigned ? 128 : 0);
    else if (codec.bits == 4)
      run_codes(NibbleBytes<false>(codec), 1, zero_of_all());
    else if (codec.bits == 8)
      run_codes(OctetBytes(codec), 1, zero_of_all() - kOctetZero);
    else
      run_codes(StreamBytes(codec), 1, zero_of_all());
  }

 private:
  static constexpr int kOctetZero = kUnsigned ? 0 : 128;
  static constexpr int kXRows = Int8Tiles::kXRows;
  static_assert(kXRows >= kPanel && kXRows <= 4 * kPanel && kBatch % kXRows == 0);

  static bool is_few(const QgemmProblem& problem) {
    return formats::in_fragments(problem.codec.bits) && problem.m <= kFewRows;
  }

  int zero_of_all() const {
    const formats::Codec& codec = problem_.codec;
    return codec.kind == formats::Kind::integer && !codec.asymmetric ? -codec.q_min : 0;
  }

  // zero: what stands for 0 where no zero points are stored.
  template <class Source>
  void run_codes(const Source& source, float unit, int zero) {
    zero_ = zero;
    round_x(unit);
    multiply(source);
  }

  void round_x(float unit_of_values) {
    const int threads = problem_.m * problem_.k < 65536 ? 1 : problem_.num_threads;
    parallel_for(units_, 1, threads, [&](int64_t unit, int64_t, int) {
      const int64_t begin = unit * kCols, n = std::min<int64_t>(kCols, problem_.k - begin);
      alignas(64) float values[kCols] = {};
      for (int64_t row = 0; row < x_.rows; ++row) {
        if (row < problem_.m)
          load_x(problem_, tensors_, row * problem_.k + begin, n, values);
        else
          std::fill_n(values, kCols, 0.0f);
        round_row(values, unit_of_values, unit, row);
      }
    });
  }
  void round_row(const float* values, float unit_of_values, int64_t unit, int64_t row) const {
    const Wide du;
    Words most = hn::Zero(du);  // NaN is above infinity
    for (int i = 0; i < kCols; i += kLanes)
      most = hn::Max(most, hn::And(hn::BitCast(du, hn::Load(Tag(), values + i)), hn::Set(du, 0x7FFFFFFFu)));
    const Int8Scale scale = int8_scale(std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(du, most))));
    const Floats reciprocal = hn::Set(Tag(), scale.reciprocal);
    const auto valid = hn::Ne(reciprocal, hn::Zero(Tag()));
    alignas(64) int8_t rounded[kCols];
    std::array<int32_t, 4> sums{};
    for (int i = 0; i < kCols; i += kLanes) {
      const Floats quotients = hn::IfThenElseZero(valid, hn::Mul(hn::Load(Tag(), values + i), reciprocal));
      const Ints integers = hn::NearestInt(quotients);
      hn::Store(hn::DemoteTo(hn::Rebind<int8_t, Tag>(), integers), hn::Rebind<int8_t, Tag>(), rounded + i);
      sums[static_cast<size_t>(i) / 16] += hn::GetLane(hn::SumOfLanes(IntTag(), integers));
    }
    put_row(rounded, x_of(unit, row));
    x_.scales[unit * x_.rows + row] = scale.scale * unit_of_values;
    const int64_t parts = places_[unit].parts;
    for (int64_t part = 0; part < parts; ++part) {
      int32_t sum = 0;
      for (int64_t i = part * 4 / parts; i < (part + 1) * 4 / parts; ++i) sum += sums[static_cast<size_t>(i)];
      x_.sums[(unit * 4 + part) * x_.rows + row] = sum;
    }
  }
  // The columns of a unit in the order of chunks, see quad(), each chunk once or, for sum_few, four times.
  void put_row(const int8_t* values, int8_t* to) const {
    alignas(16) constexpr uint8_t kOrders[2][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                                    {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15}};
    alignas(16) constexpr uint8_t kCopies[4][16] = {
        {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3},
        {4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7},
        {8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11},
        {12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15}};
    const hn::Full128<uint8_t> d;
    const auto order = hn::Load(d, kOrders[formats::in_fragments(problem_.codec.bits)]);
    for (int i = 0; i < kCols; i += 16) {
      const auto bytes =
          hn::TableLookupBytes(hn::Load(d, reinterpret_cast<const uint8_t*>(values) + i), order);
      auto* const at = reinterpret_cast<uint8_t*>(to) + (few_ ? 4 * i : i);
      if (!few_)
        hn::Store(bytes, d, at);
      else
        for (int chunk = 0; chunk < 4; ++chunk)
          hn::Store(hn::TableLookupBytes(bytes, hn::Load(d, kCopies[chunk])), d, at + 16 * chunk);
    }
  }

  int64_t x_stride() const { return few_ ? 4 * kCols : kCols; }
  int8_t* x_of(int64_t unit, int64_t row) const { return x_.values + (unit * x_.rows + row) * x_stride(); }

  template <class Source>
  void multiply(const Source& source) const {
    const int64_t batches = ceil_div(problem_.m, kBatch),
                  units_per_block = problem_.weight.block_cols / kCols;
    parallel_for(strips_ * batches, 1, problem_.num_threads, [&](int64_t task, int64_t, int) {
      alignas(64) uint8_t w[kRows * kCols];
      alignas(64) float sums[kBatch * kRows] = {};
      const int64_t strip = task / batches, batch = task % batches * kBatch;
      const int64_t end = std::min(problem_.m, batch + kBatch);
      UnitParameters parameters;
      PartSums part_sums;
      if (tiles_ != nullptr) tiles_->begin();
      for (int64_t unit = 0; unit < units_; ++unit) {
        parameters_.load_parts(strip, unit, parameters);
        const uint8_t* const codes = parameters_.codes(strip, unit);
        if (unit % units_per_block == 0)
          for (int at = problem_.weight.block_code_bytes; at < problem_.weight.block_bytes; at += 64)
            fetch(codes + at + kAhead);
        if (few_)
          few_function<Source>(problem_.m, parameters.parts)(source, codes, x_of(unit, 0), part_sums);
        else
          decode_bytes(source, codes, w);
        const bool in_tiles = tiles_ != nullptr && parameters.parts == 1;
        if (in_tiles) tiles_->load(w);
        for (int64_t row = batch; row < end; row += in_tiles ? kXRows : kPanel) {
          const int64_t rows = in_tiles ? kXRows : panel_rows(end - row);
          if (in_tiles)
            tiles_->sum(x_of(unit, row), &part_sums.of[0][0]);
          else if (!few_)
            panel_function<Source::kSmall>(rows)(w, x_of(unit, row), parameters.parts, part_sums);
          add_sums(unit, row, std::min(rows, end - row), part_sums, parameters, sums + (row - batch) * kRows);
        }
      }
      if (tiles_ != nullptr) tiles_->end();
      for (int64_t m = batch; m < end; ++m)
        store_y(problem_, tensors_, m, strip * kRows, std::min<int64_t>(kRows, problem_.n - strip * kRows),
                sums + (m - batch) * kRows);
    });
  }

  template <bool kSmall>
  static auto panel_function(int64_t rows) {
    return rows == 1   ? sum_panel<1, kSmall>
           : rows == 2 ? sum_panel<2, kSmall>
           : rows == 3 ? sum_panel<3, kSmall>
           : rows == 4 ? sum_panel<4, kSmall>
           : rows == 6 ? sum_panel<std::min(6, kPanel), kSmall>
                       : sum_panel<kPanel, kSmall>;
  }
  template <class Source>
  static auto few_function(int64_t rows, int parts) {
    if (parts == 1) return few_function_of<1, Source>(rows);
    return parts == 2 ? few_function_of<2, Source>(rows) : few_function_of<4, Source>(rows);
  }
  template <int kParts, class Source>
  static auto few_function_of(int64_t rows) {
    return rows == 1   ? sum_few<1, kParts, Source>
           : rows == 2 ? sum_few<2, kParts, Source>
           : rows == 3 ? sum_few<3, kParts, Source>
                       : sum_few<4, kParts, Source>;
  }

  void add_sums(int64_t unit, int64_t row, int64_t rows, const PartSums& products,
                const UnitParameters& parameters, float* sums) const {
    if (problem_.weight.has_biases)
      add_sums<false, true>(unit, row, rows, products, parameters, sums);
    else if (problem_.codec.asymmetric)
      add_sums<true, false>(unit, row, rows, products, parameters, sums);
    else
      add_sums<false, false>(unit, row, rows, products, parameters, sums);
  }
  // Scales the products of rows of x with a unit, and adds them to sums[row of x][row of the weight]. kZeros:
  // zero points are stored.
  template <bool kZeros, bool kBiases>
  HWY_NOINLINE void add_sums(int64_t unit, int64_t row, int64_t rows, const PartSums& products,
                             const UnitParameters& parameters, float* sums) const {
    const float* const scales = x_.scales + unit * x_.rows + row;
    for (int part = 0; part < parameters.parts; ++part) {
      const int32_t* const sums_of_x = x_.sums + (unit * 4 + part) * x_.rows + row;
      for (int64_t r = 0; r < rows; ++r) {
        const Floats of_x = hn::Set(Tag(), scales[r]);
        const Floats sum_of_x = hn::Set(Tag(), static_cast<float>(sums_of_x[r]));
        const Ints zero_of_x = hn::Set(IntTag(), zero_ * sums_of_x[r]);
        HWY_UNROLL(8)
        for (int v = 0; v < kRows; v += kLanes) {
          const int at = part * kRows + v;
          float* const to = sums + r * kRows + v;
          const Ints product = hn::Load(IntTag(), products.of[part * kPanel + r] + v);
          const Floats exact =
              kZeros ? hn::Sub(hn::ConvertTo(Tag(), product), hn::Mul(zeros(parameters, at), sum_of_x))
                     : hn::ConvertTo(Tag(), hn::Sub(product, zero_of_x));
          const Floats scale = hn::Mul(of_x, hn::Load(Tag(), parameters.scales + at));
          Floats sum = hn::Add(hn::Load(Tag(), to), hn::Mul(scale, exact));
          if constexpr (kBiases)
            sum = hn::Add(sum, hn::Mul(hn::Mul(of_x, hn::Load(Tag(), parameters.biases + at)), sum_of_x));
          hn::Store(sum, Tag(), to);
        }
      }
    }
  }
  // Stored zero points, as values have them.
  HWY_INLINE Floats zeros(const UnitParameters& parameters, int at) const {
    const Floats stored = hn::Load(Tag(), parameters.offsets + at);
    return problem_.codec.bits == 8 ? hn::Sub(stored, hn::Set(Tag(), static_cast<float>(kOctetZero)))
                                    : stored;
  }

  const QgemmProblem& problem_;
  const QgemmTensors& tensors_;
  const int64_t units_, strips_;
  const bool few_;  // see sum_few
  const Int8Tiles* const tiles_;
  UnitPlace* const places_;
  RoundedX x_;
  const ParameterLoader parameters_;
  int zero_ = 0;
};

bool HasQgemmInt8() { return true; }
int64_t QgemmInt8Bytes(const QgemmProblem& problem) { return Int8Product::workspace_bytes(problem); }
void QgemmInt8Cpu(const QgemmProblem& problem, const QgemmTensors& tensors, void* workspace) {
  Int8Product(problem, tensors, workspace).run();
}

#else  // !HALFBYTE_SIMD

bool HasQgemmInt8() { return false; }
int64_t QgemmInt8Bytes(const QgemmProblem&) { return 0; }
void QgemmInt8Cpu(const QgemmProblem&, const QgemmTensors&, void*) {}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
namespace {

HWY_EXPORT(HasQgemmInt8);
HWY_EXPORT(QgemmInt8Bytes);
HWY_EXPORT(QgemmInt8Cpu);

class Int8Kernel : public QgemmKernel {
 public:
  explicit Int8Kernel(const QgemmProblem& problem) : problem_(problem) {}
  std::string name() const override { return "qgemm_int8"; }
  std::string backend() const override { return fmt::format("cpu {}", simd_target()); }
  PrecisionGuarantee guarantee() const override { return kInt8Guarantee; }
  int64_t workspace_bytes() const override {
    return kAlignment + HWY_DYNAMIC_DISPATCH(QgemmInt8Bytes)(problem_);
  }
  void run(const QgemmTensors& tensors, void*, void* workspace) const override {
    auto* const aligned = static_cast<uint8_t*>(workspace) +
                          (kAlignment - reinterpret_cast<uintptr_t>(workspace) % kAlignment) % kAlignment;
    HWY_DYNAMIC_DISPATCH(QgemmInt8Cpu)(problem_, tensors, aligned);
  }

 private:
  static constexpr int64_t kAlignment = 64;  // of vectors in the workspace, which has 16
  QgemmProblem problem_;
};

std::string refuse(const QgemmProblem& problem) {
  if (problem.math != QgemmMath::int8)
    return fmt::format("math must be int8, got {}", to_string(problem.math));
  if (!HWY_DYNAMIC_DISPATCH(HasQgemmInt8)()) return "the CPU has none of the vectors that it is compiled for";
  if (!problem.packed) return "the weight must be packed";
  if (problem.weight.groups > 1 && problem.weight.group % 16 != 0)
    return fmt::format("groups must be multiples of 16 columns, or rows, got {}", problem.weight.group);
  return {};
}

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<Int8Kernel>(problem);
}

}  // namespace

const QgemmVariant kQgemmInt8 = {
    {"qgemm_int8", DeviceKind::cpu, &refuse, &make}, nullptr, false, false, true};

}  // namespace halfbyte
#endif  // HWY_ONCE
