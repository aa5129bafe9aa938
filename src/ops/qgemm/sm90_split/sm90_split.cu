// f32: y = x . W^T, or x . W, of a packed weight, on tensor cores: sm_90a. x is split into three parts of
// bf16, which have all its bits. Forward, what a code stands for is one part, where bf16 holds it, or is
// split, too, and the scale of a group is applied to its sums. Transposed, it is applied to x before x is
// split, for the columns of each group anew, if codes are one part and groups have 64 columns or more. Else,
// and of affine formats, the scaled weight is split: then one that is not finite makes NaN. Of one part,
// three products make one of f32, of three six; what is left out is below 2^-23 of the whole.
//
// The weight is operand A, from registers: features are its rows, forward, or its columns. The parts of x are
// operand B, in shared memory, whose columns are tokens. Tensor cores cut off the bits that a sum has no room
// for. So few products are summed there, the small ones first, before sums are added up as f32.
//
// A warpgroup of its own keeps a ring of stages full. Four others have 64 features each: while
// one decodes, the tensor cores multiply for others. Words and fragments: as qgemm_sm90_large has them.
#include "ops/qgemm/sm90_split/sm90_split_args.h"

#include "ops/qgemm/weight/f32_table.cuh"
#include "ops/qgemm/weight/finish.cuh"
#include "ops/qgemm/weight/pairs.cuh"
#include "ops/qgemm/weight/parts.cuh"
#include "ops/qgemm/weight/ring.cuh"
#include "ops/qgemm/weight/scales.cuh"
#include "ops/qgemm/weight/table.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using Args = QgemmSm90SplitArgs;
constexpr int kTokens = kTiling.tokens, kStages = kTiling.stages;
constexpr bool kScalesX = kTiling.scaled > 0;
constexpr int kMultipliers = kSplitMultipliers, kCopiers = 2;  // kCopiers: warps
constexpr int kScaleBytes = kParameterBytes, kSecondBytes = kAsymmetric ? 1 : kAffine ? kParameterBytes : 0;
static_assert(kTiling.parameter_bytes == kScaleBytes + kSecondBytes);
constexpr int kGroups = kTiling.slot().groups();
constexpr int kSlotBytes = kTiling.slot().num_bytes(), kUnitBytes = kTiling.slot().code_bytes();
static_assert(kParts == 1 || kParts == kSplitXParts);
static_assert(!kScalesSums || !(kTransposed || kAffine));
static_assert(!kScalesX || (kTransposed && !kAffine && kParts == 1 && kGroups == 1));
// Of a unit, 64 of what is summed: chunks that are summed on tensor cores, of so many matrix instructions for
// a product of two parts. They have one scale, where sums are scaled, and no more than registers hold.
constexpr int kFewestChunks = kParts == 1 ? 1 : kTokens == 64 && (kAffine || kScalesSums) ? 4 : 2;
constexpr int kChunks = max(kFewestChunks, kScalesSums ? kGroups : 1);
constexpr int kSteps = 4 / kChunks;
constexpr int kSums = kTokens / 2;  // of a thread
// Whether warpgroups start their products one after the other, so that not all of them decode at once: with
// fewer products it takes longer, as where they wait for scaled x.
constexpr bool kTakesTurns = !kScalesX && (kTokens == 64 || (kTokens == 32 && kParts == 1));
// Few tokens: a matrix instruction has as its columns those of all parts of x that meet a part of the weight.
constexpr bool kJoint = kTokens == 16;
using Place = RingPlace<kStages>;
using Registers = DealtRegisters<kMultipliers / 128>;

struct Tile {
  int features, token;  // features: its number; token: the first one
  int part, first_stage, last_stage;

  __device__ __forceinline__ explicit Tile(const Args& args) {
    const int index = static_cast<int>(blockIdx.x), rest = index / args.feature_tiles;
    features = index % args.feature_tiles;
    token = rest % args.token_tiles * kTokens;
    part = rest / args.token_tiles;
    first_stage = part * args.part_stages;
    last_stage = min(first_stage + args.part_stages, args.stages);
  }
  __device__ __forceinline__ int tokens(const Args& args) const { return min(kTokens, args.m - token); }
};

// ---- 1. The ring is filled: by one lane each.

// Unit `i` of a stage: its strip, and its number in there. Behind the last strip and the last unit these once
// more: x is zero there, or y has no such feature.
__device__ __forceinline__ int strip_of(const Args& args, const Tile& tile, int stage, int i) {
  return min(kTransposed ? stage * 2 + i % 2 : tile.features * kSplitUnits + i, args.strips - 1);
}
__device__ __forceinline__ int unit_of(const Args& args, const Tile& tile, int stage, int i) {
  return min(kTransposed ? tile.features * (kSplitUnits / 2) + i / 2 : stage, args.units - 1);
}

template <class F>
__device__ __forceinline__ void each_stage(const Tile& tile, Barrier* empty, const F& copy) {
  Place place;
  for (int stage = tile.first_stage; stage < tile.last_stage; ++stage, place.advance()) {
    wait(empty + place.stage, place.parity ^ 1);
    copy(stage, place.stage);
  }
}

__device__ __forceinline__ void copy_units(const Args& args, const Tile& tile, u8* shared, Barrier* full,
                                           Barrier* empty) {
  constexpr int kPerBlock = kTiling.slot().units_per_block();
  each_stage(tile, empty, [&](int stage, int place) {
    Barrier* const here = full + place;
    arrive_expecting(here, kTiling.weight_bytes());
    u8* to = shared + kTiling.unit_offset() + place * kTiling.weight_bytes();
#pragma unroll
    for (int i = 0; i < kSplitUnits; ++i, to += kSlotBytes) {
      const int strip = strip_of(args, tile, stage, i), unit = unit_of(args, tile, stage, i);
      const u8* const block =
          args.weight + strip * args.strip_bytes + i64{unit / kPerBlock} * args.block_bytes;
      copy_bulk(to, block + unit % kPerBlock * kUnitBytes, kTiling.slot().joint() ? kSlotBytes : kUnitBytes,
                here);
      if constexpr (kGroup == 0) {
        constexpr int kScales = kUnitRows * kScaleBytes, kSeconds = kUnitRows * kSecondBytes;
        copy_bulk(to + kUnitBytes, args.weight + args.scales + i64{strip} * kScales, kScales, here);
        if constexpr (kSeconds != 0)
          copy_bulk(to + kUnitBytes + kScales, args.weight + args.seconds + i64{strip} * kSeconds, kSeconds,
                    here);
      } else if constexpr (!kTiling.slot().joint()) {
        copy_bulk(to + kUnitBytes, block + kPerBlock * kUnitBytes, kTiling.slot().group_bytes(), here);
      }
    }
  });
}

__device__ __forceinline__ void copy_x(const Args& args, const Tile& tile, u8* shared, Barrier* full,
                                       Barrier* empty) {
  wait_for_earlier();
  const int tokens = tile.tokens(args);
  const TensorMap* const x = tokens < kTokens ? &args.last_x : &args.x;
  constexpr int kBoxes = kScalesX ? 2 : kSplitXParts;
  each_stage(tile, empty, [&](int stage, int place) {
    arrive_expecting(full + place, static_cast<u32>(kBoxes * tokens * 128));
#pragma unroll
    for (int i = 0; i < kBoxes; ++i)
      load_tile(shared + kTiling.x_offset() + place * kTiling.x_bytes() + i * kTiling.part_bytes(), x,
                (kScalesX ? 0 : i * args.m) + tile.token,
                kScalesX ? (2 * stage + i) * 64 : stage * kSplitStage, full + place);
  });
}

// ---- 2. Operand A

// Of two neighbouring rows of the weight, in a group.
struct RowParameters {
  float scale[2], zero[2], bias[2];
};

// (word & mask) | bits, by one instruction: of two immediates the compiler makes two.
__device__ __forceinline__ u32 select_bits(u32 word, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(word), "r"(mask), "r"(bits));
  return d;
}

// Of 64 features those of fragment rows g and, the next one, g + 8 of a warp.
__device__ __forceinline__ int feature_of(int warp, int g) {
  return kTransposed ? warp / 2 * 32 + g / 4 * 16 + g / 2 % 2 * 8 + warp % 2 * 4 + g % 2 * 2
                     : 16 * warp + 2 * g;
}

// Of each byte of codes of 4 bits the parts of both values: 32 copies, one a lane, of the first two in a row
// of 256 bytes, and of the third, behind all of these, in one of 128.
__device__ __forceinline__ void build_parts_table(const float (&values)[16], int thread) {
  static_assert(kMultipliers == 512);
  const int entry = thread / 2, half = thread % 2;  // of the copies
  const Parts<3> parts = split_pair({values[entry & 15], values[entry >> 4]});
  const u32 first = kFloatTableAddress + static_cast<u32>(entry * 256 + half * 128),
            third = kFloatTableAddress + static_cast<u32>(65536 + entry * 128 + half * 64);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %1, %2};" ::"r"(first + (i + thread) % 8 * 16),
                 "r"(parts.part[0]), "r"(parts.part[1])
                 : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(third + (i + thread) % 4 * 16),
                 "r"(parts.part[2])
                 : "memory");
}

// Of a lane: where what it needs of a stage lies.
class Operand {
 public:
  __device__ __forceinline__ Operand(int column, int warp, int lane) {
    const int g = lane / 4, t = lane % 4, pair = column * 2 * kSlotBytes;  // of units: two strips
    table_lane_ = static_cast<u32>(lane * (kScalesSums && kParts == 1 ? 4 : 8));
    if constexpr (kTransposed) {
      slot_ = pair;
      codes_ = pair + code_place(2 * t, feature_of(warp, g), kBits).byte / 4 * 4;
      row_ = 2 * t;
      group_ = feature_of(warp, g) * kGroups / kUnitCols;
      even_ = kScalesX ? g / 2 % 2 == 0 ? 0x4140u : 0x4342u : pair_selector(g / 2 % 2 * 2);
      odd_ = pair_selector(g / 2 % 2 * 2 + 1);
    } else {
      const int a = 8 * (warp % 2) + g;
      slot_ = pair + warp / 2 * kSlotBytes;
      codes_ = slot_ + packed_slot(a, t) * 16;
      row_ = 2 * a;
    }
  }

  // The fragments of step kStep of the stage at `units`, part by part.
  template <int kStep>
  __device__ __forceinline__ void decode(u32 (&a)[kParts][4], const u8* units) const {
    if constexpr (kTransposed) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const u32 word = *reinterpret_cast<const u32*>(units + codes_ + kStep / 2 * kSlotBytes +
                                                       (kStep % 2 * 2 + q) * 256);
        const u8* const slot = units + slot_ + kStep / 2 * kSlotBytes;
        const int row = row_ + kStep % 2 * 16 + q * 8;
        if constexpr (kScalesX) {
          set_codes(a[0][2 * q], a[0][2 * q + 1], word, slot, row);
          continue;
        }
        const RowParameters rows = load_parameters(slot, group_, row);
        FloatPair first, second;  // of rows 2a and 2a + 1, of either feature
        if constexpr (kBits == 4) {
          const FloatPair even = look_up_floats(word, table_lane_, even_),
                          odd = look_up_floats(word, table_lane_, odd_);
          first = {even.first, odd.first};
          second = {even.second, odd.second};
        } else {
          first = values_of<0, 2>(word);
          second = values_of<1, 3>(word);
        }
        split(a, 2 * q, scaled(first.first, rows, 0), scaled(first.second, rows, 1));
        split(a, 2 * q + 1, scaled(second.first, rows, 0), scaled(second.second, rows, 1));
      }
    } else {
      RowParameters rows;
      if constexpr (kAsymmetric || !kScalesSums) rows = load_parameters(units, kStep * kGroups / 4);
      u32 words[2];
      if constexpr (kBits == 4) {
        words[0] = words[1] = *reinterpret_cast<const u32*>(units + codes_ + kStep * 4);
      } else {
        const u64 both =
            *reinterpret_cast<const u64*>(units + codes_ + kStep / 2 * kTileBytes + kStep % 2 * 8);
        words[0] = static_cast<u32>(both);
        words[1] = static_cast<u32>(both >> 32);
      }
      set<0>(a, words[0], rows);
      set<1>(a, words[0], rows);
      set<2>(a, words[1], rows);
      set<3>(a, words[1], rows);
    }
  }

  // Forward: of the rows of the lane.
  __device__ __forceinline__ RowParameters load_parameters(const u8* units, int group) const {
    return load_parameters(units + slot_, group, row_);
  }
  // Of a row of a unit and the next one.
  static __device__ __forceinline__ RowParameters load_parameters(const u8* slot, int group, int row) {
    RowParameters rows;
    const u8* const scales = slot + kUnitBytes;
    const u8* const seconds = scales + kGroups * kUnitRows * kScaleBytes;
    const int index = group * kUnitRows + row;
    load_scales<kScaleBytes>(rows.scale, scales + index * kScaleBytes, kBf16Scales);
    if constexpr (kAsymmetric) {
      rows.zero[0] = static_cast<float>(seconds[index]);
      rows.zero[1] = static_cast<float>(seconds[index + 1]);
    }
    if constexpr (kAffine) load_scales<kScaleBytes>(rows.bias, seconds + index * kScaleBytes, kBf16Scales);
    return rows;
  }

 private:
  // The values of two bytes of a word of codes.
  template <int kFirst, int kSecond>
  static __device__ __forceinline__ FloatPair values_of(u32 word) {
    if constexpr (!kFloating) return {byte_value<kFirst>(word), byte_value<kSecond>(word)};
    const u32 pair = byte_pair<kFirst, kSecond>(BF16(), word);  // exact
    return {bit_cast<float>(pair << 16), bit_cast<float>(pair & 0xFFFF0000u)};
  }

  // Of two rows, less their zero points: the codes of the first and of the second feature.
  __device__ __forceinline__ void set_codes(u32& first, u32& second, u32 word, const u8* slot,
                                            int row) const {
    const u8* const zeros = slot + kUnitBytes + kUnitRows * kScaleBytes + row;
    if constexpr (kBits == 4) {
      // Both are added to 128, whose neighbours as bf16 are integers.
      constexpr u32 kMask = 0x000F000Fu, kAbove = pair_above_codes(BF16());
      u32 zero = kAbove + 0x00080008u;
      if constexpr (kAsymmetric) zero = __byte_perm(*reinterpret_cast<const u16*>(zeros), 0x43, 0x4140);
      const u32 codes = permute_bytes(word, 0, even_);
      first = subtract_pair(BF16(), select_bits(codes, kMask, kAbove), zero);
      second = subtract_pair(BF16(), select_bits(codes >> 4, kMask, kAbove), zero);
    } else {
      first = byte_pair<0, 2>(BF16(), word);
      second = byte_pair<1, 3>(BF16(), word);
      if constexpr (kAsymmetric) {
        const u32 zero = store_pair(BF16(), zeros[0], zeros[1]);
        first = subtract_pair(BF16(), first, zero);
        second = subtract_pair(BF16(), second, zero);
      }
    }
  }

  // As dequantize has it.
  static __device__ __forceinline__ float scaled(float value, const RowParameters& rows, int i) {
    if constexpr (kAsymmetric) value -= rows.zero[i];  // exact
    return kAffine ? __fmaf_rn(value, rows.scale[i], rows.bias[i]) : __fmul_rn(value, rows.scale[i]);
  }
  // Register r of a fragment.
  static __device__ __forceinline__ void split(u32 (&a)[kParts][4], int r, float first, float second) {
    const Parts<3> parts = cut_pair({first, second});
#pragma unroll
    for (int i = 0; i < kParts; ++i) a[i][r] = parts.part[i];
  }
  // The same from a word of codes: byte r of 4 bits, of 8 bits two bytes.
  template <int r>
  __device__ __forceinline__ void set(u32 (&a)[kParts][4], u32 word, const RowParameters& rows) const {
    constexpr int kFirst = r % 2 * 2;
    if constexpr (kScalesSums && kParts > 1) {
      look_up_parts<r>(a, word);
    } else if constexpr (kScalesSums) {
      if constexpr (kBits == 4)
        a[0][r] = look_up_pair<r>(word, table_lane_);
      else
        a[0][r] = byte_pair<kFirst, kFirst + 1>(BF16(), word);
      if constexpr (kAsymmetric)
        a[0][r] = subtract_pair(BF16(), a[0][r], same_pair(BF16(), rows.zero[r % 2]));
    } else {
      FloatPair values;
      if constexpr (kBits == 4)
        values = look_up_floats<r>(word, table_lane_);
      else
        values = values_of<kFirst, kFirst + 1>(word);
      split(a, r, scaled(values.first, rows, r % 2), scaled(values.second, rows, r % 2));
    }
  }
  // The parts of the values of byte r of a word, see build_parts_table().
  template <int r>
  __device__ __forceinline__ void look_up_parts(u32 (&a)[kParts][4], u32 word) const {
    const u32 place = permute_bytes(word, table_lane_, 0x7604 | r << 4);
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+1024];" : "=r"(a[0][r]), "=r"(a[1][r]) : "r"(place));
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(a[2][r]) : "r"(place >> 1), "n"(1024 + 65536));
  }

  int slot_, codes_;     // in a stage: the first unit and the first codes of the lane
  int row_, group_ = 0;  // of the parameters
  u32 table_lane_, even_ = 0, odd_ = 0;
};

// ---- 3. Operand B, where x is scaled

// Warpgroups whose features share scales: a set. It has the parts of one stage or, in turn, of two.
constexpr int kSetWarpgroups = kMultipliers / 128 / max(kTiling.scaled, 1), kSetWarps = 4 * kSetWarpgroups;
constexpr int kScaledStages = kTiling.scaled_stages();
// Whether those of the next stage are written while the products of a stage are under way: with more tokens
// registers would spill, and nothing is gained.
constexpr bool kWritesAhead = kScaledStages == 2 && kTokens <= 32;

// By all warps of a set. A lane has four columns of rows of x.
class ScaledX {
 public:
  __device__ __forceinline__ ScaledX(u8* shared, int column, int warp, int lane)
      : set_(column / kSetWarpgroups),
        row_(2 * (column % kSetWarpgroups * 4 + warp) + lane / 16),
        quad_(lane % 16),
        parts_(shared + kTiling.parts_offset()) {
    slot_ = (set_ * kSetWarpgroups * 2 + quad_ / 8) * kSlotBytes;
    // See swizzle_128().
    from_ = quad_ / 8 * kTiling.part_bytes() + row_ * 128 + (quad_ % 8 ^ row_ % 8) * 16;
    to_ = row_ * 128 + (quad_ * 8 ^ row_ % 8 * 16);
  }

  // x of a stage, by the scales of its units. Rows behind its `tokens` hold anything, and are written, too.
  __device__ __forceinline__ void write(const u8* x, const u8* units, int tokens) {
    if constexpr (kScaledStages == 2) stage_ ^= 1;
    if (kTokens < kRowsAtOnce && row_ >= kTokens) return;
    const Scales scales(units + slot_, quad_ % 8 * 4);
    const u8* const from = x + from_;
    u8* const to = parts_ + place() + to_;
    u32 nans = 0;  // where the first part of one is not finite
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      FourFloats values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) values[i] = scales.times(from + (first + i) * kStep);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Parts<3> low = cut_pair(values[i].low), high = cut_pair(values[i].high);
        store(to + (first + i) * kStep, low, high);
        nans = fma_pair(BF16(), low.part[0], 0, nans);
        nans = fma_pair(BF16(), high.part[0], 0, nans);
      }
    }
    if ((nans & 0x7FFF7FFFu) != 0)
#pragma unroll 1
      for (int i = 0; i < kRows && row_ + i * kRowsAtOnce < tokens; ++i) {
        const FourFloats values = scales.times(from + i * kStep);
        store(to + i * kStep, split_pair(values.low), split_pair(values.high));
      }
    fence_proxy_async();
  }
  // What all of the set have written can be read, and what they have read can be written.
  __device__ __forceinline__ void meet() const {
    constexpr int kFirstBarrier = 5;  // behind those of Turns
    sync_some(kFirstBarrier + set_, kSetWarps * 32);
  }
  // Where the parts lie that were written last, in bytes from those of all sets on.
  __device__ __forceinline__ int place() const {
    return (set_ * kScaledStages + stage_) * kTiling.parts_bytes();
  }

 private:
  static constexpr int kRowsAtOnce = 2 * kSetWarps, kStep = kRowsAtOnce * 128;
  static constexpr int kRows = max(kTokens / kRowsAtOnce, 1), kAtOnce = min(kRows, 2);  // of a lane

  struct alignas(16) FourFloats {
    FloatPair low, high;
  };
  struct Scales {
    RowParameters low, high;

    __device__ __forceinline__ Scales(const u8* slot, int row)
        : low(Operand::load_parameters(slot, 0, row)), high(Operand::load_parameters(slot, 0, row + 2)) {}
    __device__ __forceinline__ FourFloats times(const u8* x) const {
      const FourFloats of = *reinterpret_cast<const FourFloats*>(x);
      return {{__fmul_rn(of.low.first, low.scale[0]), __fmul_rn(of.low.second, low.scale[1])},
              {__fmul_rn(of.high.first, high.scale[0]), __fmul_rn(of.high.second, high.scale[1])}};
    }
  };
  static __device__ __forceinline__ void store(u8* to, const Parts<3>& low, const Parts<3>& high) {
#pragma unroll
    for (int part = 0; part < kSplitXParts; ++part)
      *reinterpret_cast<u64*>(to + part * kTiling.part_bytes()) = low.part[part] | u64{high.part[part]} << 32;
  }

  int set_, stage_ = 0;  // of the parts
  int row_, quad_;       // row_: the first
  int slot_, from_, to_;
  u8* parts_;
};

// ---- 4. The products

using Fragments = u32[kSteps][kParts][4];

// The sums of a chunk on the tensor cores. Sum i is of token i / 4 * 8 + 2t + i % 2, and of the second
// feature where i & 2. `place`: where the parts of x lie, in bytes. All of a warpgroup: start(), then wait().
class Products {
 public:
  template <int kChunk>
  __device__ __forceinline__ void start(const Fragments& a, const RingTile& x, int place) {
    wgmma_fence();
    if constexpr (kJoint) {
      if constexpr (kParts == 3) {
        add<kChunk, 2, 2 * kTokens>(second_, a, x, place, 0, false);
        add<kChunk, 1, 2 * kTokens>(second_, a, x, place, 0, true);
      }
      add<kChunk, 0, 3 * kTokens>(first_, a, x, place, 0, false);
    } else {
      if constexpr (kParts == 3) {
        add<kChunk, 2, kTokens>(first_, a, x, place, 0, false);
        add<kChunk, 1, kTokens>(first_, a, x, place, 1, true);
      }
      add<kChunk, 0, kTokens>(first_, a, x, place, 2, kParts == 3);
      if constexpr (kParts == 3) add<kChunk, 1, kTokens>(first_, a, x, place, 0, true);
      add<kChunk, 0, kTokens>(first_, a, x, place, 1, true);
      add<kChunk, 0, kTokens>(first_, a, x, place, 0, true);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void wait() {
    wgmma_wait<0>();
    pin(first_);
    if constexpr (kJoint && kParts == 3) pin(second_);
  }
  __device__ __forceinline__ float sum(int i) const {
    if constexpr (!kJoint) return first_[i];
    const float small = first_[kSums + i] + first_[2 * kSums + i];
    if constexpr (kParts == 1) return first_[i] + small;
    return first_[i] + (small + (second_[i] + second_[kSums + i]));
  }

 private:
  // The products of part kPart of the weight and columns of x from its part x_part on: to `sums`, or added.
  template <int kChunk, int kPart, int kColumns>
  static __device__ __forceinline__ void add(float (&sums)[kColumns / 2], const Fragments& a,
                                             const RingTile& x, int place, int x_part, bool adds) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma<Major::k>(BF16(), sums, a[step][kPart],
                      x.at((place + x_part * kTiling.part_bytes()) / 16 + (kChunk * kSteps + step) * 2),
                      adds || step > 0);
  }

  // Joint: with the first part of the weight those of all parts of x; with the others, of the first two.
  float first_[(kJoint ? 3 : 1) * kSums];
  float second_[(kJoint && kParts == 3 ? 2 : 1) * kSums];
};

// Warpgroups start the products of a chunk one after the other.
class Turns {
 public:
  __device__ __forceinline__ explicit Turns(int column) : column_(column) {}
  // `first`, `last`: the chunk, of a tile.
  __device__ __forceinline__ void wait(bool first) const {
    if (kTakesTurns && !(first && column_ == 0)) sync_some(kFirstBarrier + column_, kThreads);
  }
  __device__ __forceinline__ void pass(bool last) const {
    if (kTakesTurns && !(last && column_ == kWarpgroups - 1))
      arrive_some(kFirstBarrier + (column_ + 1) % kWarpgroups, kThreads);
  }

 private:
  static constexpr int kFirstBarrier = 1, kThreads = 256, kWarpgroups = kMultipliers / 128;
  int column_;
};

// Adds the products of a chunk of a stage, whose units are at `units`, to the sums. `wait_for_x`: once the
// weight is decoded. `meanwhile`: what is done while they are under way.
template <int kChunk, class F, class G>
__device__ __forceinline__ void multiply(float (&sums)[kSums], const Operand& operand, const u8* units,
                                         const RingTile& x, int place, const Turns& turns, bool begins,
                                         bool ends, const F& wait_for_x, const G& meanwhile) {
  Fragments a;
  operand.template decode<kChunk * kSteps>(a[0], units);
  if constexpr (kSteps > 1) operand.template decode<kChunk * kSteps + 1>(a[1], units);
  if constexpr (kSteps > 2) {
    operand.template decode<kChunk * kSteps + 2>(a[2], units);
    operand.template decode<kChunk * kSteps + 3>(a[3], units);
  }
  Products products;
  wait_for_x(a);
  turns.wait(begins && kChunk == 0);
  products.start<kChunk>(a, x, place);
  turns.pass(ends && kChunk == kChunks - 1);
  meanwhile();
  products.wait();
  [[maybe_unused]] RowParameters rows;
  if constexpr (kScalesSums) rows = operand.load_parameters(units, kChunk * kGroups / kChunks);
#pragma unroll
  for (int i = 0; i < kSums; ++i)
    sums[i] =
        kScalesSums ? __fmaf_rn(products.sum(i), rows.scale[i / 2 % 2], sums[i]) : sums[i] + products.sum(i);
}

// ---- 5. The sums become y.

__device__ __forceinline__ void store_tile(const Args& args, const Tile& tile, const float (&sums)[kSums],
                                           int column, int warp, int lane) {
  const i64 col = i64{tile.features} * kSplitFeatures + column * 64 + feature_of(warp, lane / 4);
  if (col >= args.out_cols) return;
  const float factor = global_factor(args.weight, args.global_scale);
  const bool two = col + 1 < args.out_cols;
  const FloatPair bias = args.partials == nullptr ? load_bias(args, col) : FloatPair{0, 0};
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = tile.token + j * 8 + lane % 4 * 2 + i;
      if (token >= args.m) continue;
      FloatPair pair = {sums[4 * j + i], sums[4 * j + 2 + i]};
      if constexpr (kGlobalScale) pair = {pair.first * factor, pair.second * factor};
      if (args.partials != nullptr)
        store_neighbours(F32(), args.partials + (i64{tile.part} * args.m + token) * args.partial_stride + col,
                         pair);
      else
        finish(args, token * args.out_cols + col, two, bias, pair);
    }
}

#endif

extern "C" __global__ void
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__launch_bounds__(kSplitThreads, 1)
#endif
    qgemm_sm90_split(const __grid_constant__ QgemmSm90SplitArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ Words4 shared_words[];
  u8* const shared = reinterpret_cast<u8*>(shared_words);
  Barrier* const full = reinterpret_cast<Barrier*>(shared + kTiling.barrier_offset());
  Barrier* const empty = full + kStages;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32,
            warp = __shfl_sync(~0u, thread / 32, 0);
  const Tile tile(args);

  let_next_start();
  const int copier = warp - kMultipliers / 32;
  start_ring<kMultipliers, kCopiers>(copier, &args.x, [&] {
    for (int stage = copier; stage < kStages; stage += kCopiers) {
      init_barrier(full + stage, 2);
      init_barrier(empty + stage, kMultipliers / 32);
    }
  });
  if (copier >= 0) {
    keep_registers<Registers::kCopy>();
    if (copier >= kCopiers || !elect_lane()) return;
    if (copier == 0)
      copy_units(args, tile, shared, full, empty);
    else
      copy_x(args, tile, shared, full, empty);
    return;
  }

  take_registers<Registers::kMultiply>();
  if constexpr (kBits == 4 && kScalesSums && kParts > 1)
    build_parts_table(args.values, thread);
  else if constexpr (kBits == 4 && kScalesSums)
    build_pair_table<kMultipliers>(args.pairs_of, thread);
  else if constexpr (kBits == 4 && !kScalesX)
    build_float_table<kMultipliers>(args.values, thread);
  wait_for_earlier();
  wait_for_ring<kMultipliers, kCopiers>();

  const Operand operand(warp / 4, warp % 4, lane);
  const RingTile x = {k_major_tile(shared + (kScalesX ? kTiling.parts_offset() : kTiling.x_offset()), 1024)};
  const Turns turns(warp / 4);
  float sums[kSums] = {};
  Place place;
  [[maybe_unused]] ScaledX scaled(shared, warp / 4, warp % 4, lane);
  const auto units_at = [&](int stage) {
    return shared + kTiling.unit_offset() + stage * kTiling.weight_bytes();
  };
  [[maybe_unused]] const auto write_parts = [&] {
    wait(full + place.stage, place.parity);
    scaled.write(shared + kTiling.x_offset() + place.stage * kTiling.x_bytes(), units_at(place.stage),
                 tile.tokens(args));
  };
  if (kWritesAhead && kScalesX && tile.first_stage < tile.last_stage) write_parts();
  for (int stage = tile.first_stage; stage < tile.last_stage; ++stage) {
    const u8* const units = units_at(place.stage);
    const bool begins = stage == tile.first_stage, ends = stage + 1 == tile.last_stage;
    const auto release = [&] {
      __syncwarp();
      if (lane == 0) arrive(empty + place.stage);
      place.advance();
    };
    if constexpr (kScalesX) {
      if constexpr (kScaledStages == 1) scaled.meet();
      if constexpr (!kWritesAhead) write_parts();
      const auto meet = [&](Fragments& a) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) pin(a[step][0]);  // decoded before
        scaled.meet();
      };
      multiply<0>(sums, operand, units, x, scaled.place(), turns, begins, ends, meet, [&] {
        release();
        if (kWritesAhead && !ends) write_parts();
      });
    } else {
      wait(full + place.stage, place.parity);
      const int at = place.stage * kTiling.x_bytes();
      const auto nothing = [](auto&...) {};
      multiply<0>(sums, operand, units, x, at, turns, begins, ends, nothing, nothing);
      if constexpr (kChunks > 1)
        multiply<1>(sums, operand, units, x, at, turns, begins, ends, nothing, nothing);
      if constexpr (kChunks > 2) {
        multiply<2>(sums, operand, units, x, at, turns, begins, ends, nothing, nothing);
        multiply<3>(sums, operand, units, x, at, turns, begins, ends, nothing, nothing);
      }
      release();
    }
  }
  store_tile(args, tile, sums, warp / 4, warp % 4, lane);
#endif
}

}  // namespace halfbyte::device
