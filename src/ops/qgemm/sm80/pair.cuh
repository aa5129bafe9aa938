// qgemm_sm80, phase 1: what a kernel is compiled for, and two neighbours along the sum in the type of the
// products.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/mma.cuh"
#include "ops/qgemm/sm80/sm80_args.h"
#include "ops/qgemm/weight/experts.cuh"
#include "ops/qgemm/weight/finish.cuh"
#include "ops/qgemm/weight/pairs.cuh"
#include "ops/qgemm/weight/parts.cuh"
#include "ops/qgemm/weight/scales.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

constexpr int kThreads = kQgemmSm80Threads, kUnits = kQgemmSm80Units;
constexpr int kUnitBytes = kUnitRows * kUnitCols * kBits / 8;

// Whether f32 is multiplied as tf32. Else it is split: x lies there as three matrices of its parts.
constexpr bool kTf32 = sizeof(Memory) == 4 && !kSplit;
constexpr int kXParts = kSplit ? 3 : 1;
using XMemory = Select<kSplit, u16, Memory>;

// How scales are stored, and with them all parameters of a group of the 32 rows of a unit.
template <int parameter_bytes, bool double_quant>
struct Scales {
  static constexpr int kParameterBytes = parameter_bytes;
  static constexpr bool kDoubleQuant = double_quant;
  static constexpr int kScaleBytes = double_quant ? 1 : kParameterBytes;
  static constexpr int kBiasBytes = kAffine ? kParameterBytes : 0;
  static constexpr int kGroupBytes = kUnitRows * (kScaleBytes + kAsymmetric + kBiasBytes);
  static constexpr QgemmSm80Stage kStage =
      qgemm_sm80_stage(kBits, kScaleBytes, kAsymmetric, kBiasBytes, double_quant, kUnitGroups, kTokens,
                       kXParts * sizeof(XMemory), kExperts, HALFBYTE_DEVICE_ARCH / 10);
  static_assert(kStage.stages >= 2);
};
// Those of kStored. A rare kernel, which has no kStored, takes from kStage what has nothing to do with
// scales: codes, x, the table.
using KnownScales = Scales<kStored.parameter_bytes, kStored.double_quant>;
constexpr QgemmSm80Stage kStage = KnownScales::kStage;

// How the weight and x are stored: constants or, in a rare kernel, arguments.
struct KnownTraits {
  static constexpr QgemmSm80Stored stored = kStored;
  static constexpr int map_bytes = kStage.map_bytes, stage_bytes = kStage.bytes(), stages = kStage.stages;
  __device__ __forceinline__ explicit KnownTraits(const QgemmSm80Args&) {}
};
struct GivenTraits {
  const QgemmSm80Stored& stored;
  int map_bytes, stage_bytes, stages;
  __device__ __forceinline__ explicit GivenTraits(const QgemmSm80Args& args)
      : stored(args.stored), map_bytes(args.map_bytes), stage_bytes(args.stage_bytes), stages(args.stages) {}
};
using Traits = Select<kRare, GivenTraits, KnownTraits>;

// Calls body(Scales()) with those of the weight: in a rare kernel by two branches, the same for all threads.
template <class Body>
__device__ __forceinline__ void with_scales(const QgemmSm80Args& args, Body&& body) {
  if constexpr (!kRare) {
    body(KnownScales());
  } else if (args.stored.parameter_bytes == 4) {
    if (!kAffine && args.stored.double_quant)  // affine formats have none
      body(Scales<4, true>());
    else
      body(Scales<4, false>());
  } else {
    body(Scales<2, false>());
  }
}

// A warp has 32 features, two tiles of 16, and all tokens of the tile, kTokenTiles times 8: so no weight is
// decoded twice in a block.
constexpr bool kWide = kTokens == kQgemmSm80WideTokens;
constexpr int kTokenTiles = kTokens / 8;
static_assert(kQgemmSm80Features == kThreads);
// Whether the scale goes into the weight.
constexpr bool kScaledWeight = kTransposed || kTf32 || kWide;
// Steps of 16 along the sum that are decoded at once: within a group, or a strip, and as registers allow.
constexpr int kDeepest = kTransposed || kTf32 || kSplit || kTokens == 32 ? 2 : 4;
constexpr int kDeep = min(kDeepest, kTransposed ? 4 : 4 / kUnitGroups);

// One block has all registers.
constexpr int kBlocks = qgemm_sm80_blocks(kTokens, sizeof(Memory) == 4, kTransposed, kAffine, kUnitGroups,
                                          HALFBYTE_DEVICE_ARCH / 10);
constexpr bool kRoomy = kBlocks == 1;
// Between two branches, for the scheduler to mix: more would take more registers.
constexpr int kTilesTogether = kTokens == 64 ? 2 : 1;

// Of experts: the rows of the tokens of the tile, of x and of y; below 0: none.
struct TokenRows {
  i32 x[kTokens], y[kTokens];
};

extern __shared__ Words4 shared_words[];
__device__ __forceinline__ u8* shared_bytes() { return reinterpret_cast<u8*>(shared_words); }
__device__ __forceinline__ float* shared_map() {
  return reinterpret_cast<float*>(shared_bytes() + kStage.table_bytes);
}

// What codes are decoded to: what is multiplied, but f32 where that is rounded or split once it is scaled.
using Decoded = Select<kSplit && !kScaledWeight, BF16, Element>;
using Pair = Select<sizeof(Decoded::Memory) == 4, FloatPair, u32>;

__device__ __forceinline__ FloatPair fma_pair(F32, const FloatPair& a, const FloatPair& b,
                                              const FloatPair& c) {
  return {__fmaf_rn(a.first, b.first, c.first), __fmaf_rn(a.second, b.second, c.second)};
}

__device__ __forceinline__ FloatPair make_pair(F32, float first, float second) { return {first, second}; }
template <class T>
__device__ __forceinline__ u32 make_pair(T, float first, float second) {
  return store_pair(T(), first, second);
}
HALFBYTE_FN FloatPair same_pair(F32, float x) { return {x, x}; }
constexpr Pair kOnes = same_pair(Decoded(), 1), kMinusZeros = same_pair(Decoded(), -0.0f);

// See weight/pairs.cuh.
template <int kFirst, int kSecond>
__device__ __forceinline__ FloatPair byte_pair(F32, u32 word) {
  return {byte_value<kFirst>(word), byte_value<kSecond>(word)};
}

// Pairs as they are multiplied: of the weight, and of x.
using Weights = Select<kSplit, Parts<kScaledWeight ? 3 : kCodeParts>, Pair>;
using Xs = Select<kSplit, Parts<3>, Pair>;
__device__ __forceinline__ void to_operand(u32& to, u32 pair) { to = pair; }
__device__ __forceinline__ void to_operand(FloatPair& to, const FloatPair& pair) {
  to = {to_tf32(pair.first), to_tf32(pair.second)};
}
__device__ __forceinline__ void to_operand(Parts<1>& to, u32 pair) { to.part[0] = pair; }
__device__ __forceinline__ void to_operand(Parts<3>& to, u32 pair) { to = {pair, 0, 0}; }
__device__ __forceinline__ void to_operand(Parts<3>& to, const FloatPair& pair) { to = split_pair(pair); }

// The table of pairs: a row of 128 bytes for each byte of codes, full of copies, so that the lanes that
// shared memory serves at a time do not meet in a bank. An entry is a pair, or the parts of one.
constexpr bool kPartsInTable = kSplit && !kScaledWeight && kCodeParts == 3;
using Entry = Select<kPartsInTable, Parts<3>, Pair>;
template <class T>
__device__ __forceinline__ void make_entry(T, u32& to, float first, float second) {
  to = make_pair(T(), first, second);
}
__device__ __forceinline__ void make_entry(F32, FloatPair& to, float first, float second) {
  to = {first, second};
}
__device__ __forceinline__ void make_entry(BF16, Parts<3>& to, float first, float second) {
  to = split_pair({first, second});
}
// A thread makes a row. It begins where its neighbours do not, as rows begin in the same bank.
__device__ __forceinline__ void build_table(const QgemmSm80Args& args, int thread) {
  if (kStage.table_bytes == 0) return;
  static_assert(kThreads == 256);
  struct alignas(16) Copies16 {
    Entry entries[16 / sizeof(Entry)];
  } copies;
  make_entry(Decoded(), copies.entries[0], args.values[thread & 15], args.values[thread >> 4]);
#pragma unroll
  for (Entry& entry : copies.entries) entry = copies.entries[0];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    reinterpret_cast<Copies16*>(shared_words)[thread * 8 + (i + thread) % 8] = copies;
}
__device__ __forceinline__ void load_shared(u32& pair, u32 address) {
  asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
}
__device__ __forceinline__ void load_shared(FloatPair& pair, u32 address) {
  asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.first), "=f"(pair.second) : "r"(address));
}
__device__ __forceinline__ void load_shared(Parts<3>& parts, u32 address) {
  [[maybe_unused]] u32 none;
  asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(parts.part[0]), "=r"(parts.part[1]), "=r"(parts.part[2]), "=r"(none)
      : "r"(address));
}
// `table`: the lane's entry of row 0, an address of shared memory. A permute and a multiplication, which
// compilers would make three instructions of.
template <int kByte>
__device__ __forceinline__ Entry look_up(u32 word, u32 table) {
  Entry entry;
  load_shared(entry, table + __byte_perm(word, 0, 0x4440 | kByte) * 128);
  return entry;
}

// d += a * b of the element type; of tf32 in two steps of 8. Of these the first has the pairs 2t, 2t + 1 of
// the 16, the second 2t + 8, 2t + 9: any order will do.
template <class T>
__device__ __forceinline__ void multiply_add(T, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma(T(), d, a, b);
}
__device__ __forceinline__ void multiply_add(F32, float (&d)[4], const FloatPair (&a)[4],
                                             const FloatPair (&b)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    mma_tf32(d, {a[2 * i].first, a[2 * i + 1].first, a[2 * i].second, a[2 * i + 1].second},
             {b[i].first, b[i].second});
}
template <class T, int n>
__device__ __forceinline__ void multiply_add(T, float (&d)[4], const Parts<n> (&a)[4],
                                             const Parts<3> (&b)[2]) {
  multiply_parts(d, a, b);
}

#endif

}  // namespace halfbyte::device
