// Products with packed weights by mma.sync, of any shape, forward and transposed.
//
// The weight is operand A: its rows (forward) or columns (transposed) are the rows of the matrix instruction,
// the features, and rows of x its columns, the tokens. A block makes kQgemmSm80Features features of kTokens
// tokens. Steps of 64 along the sum come by asynchronous copies: units as they lie in the weight, so that the
// words of a lane are its fragments, and x in rows whose 16-byte chunks are swizzled.
//
// Forward, each group of columns is summed by itself and its scale applied to the sum. Transposed, where a
// sum runs across groups, the scale goes into the weight. So it does for f32, which is multiplied as tf32,
// and for many tokens, where sums that are not interrupted matter more than what it takes to scale a weight.
#include "cuda/device/mma.cuh"
#include "ops/qgemm/sm80/sm80.cuh"
#include "ops/qgemm/weight/pairs.cuh"
#include "ops/qgemm/weight/values.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

constexpr int kBits = kCodec.bits, kThreads = kQgemmSm80Threads, kUnits = kQgemmSm80Units;
constexpr bool kZeros = kCodec.asymmetric, kBiases = kCodec.kind == Kind::affine;
constexpr int kScaleBytes = kDoubleQuant ? 1 : scale_bytes(kCodec.scale_type);
constexpr int kBiasBytes = kBiases ? scale_bytes(kCodec.scale_type) : 0;
constexpr QgemmSm80Stage kStage =
    qgemm_sm80_stage(kBits, kScaleBytes, kZeros, kBiasBytes, kDoubleQuant, kUnitGroups, kTokens,
                     sizeof(Memory), HALFBYTE_DEVICE_ARCH / 10);
static_assert(kStage.stages >= 2);

// A block of the packed weight; kGroup: columns of a group, 0 where parameters have sections of their own.
constexpr int kUnitBytes = kUnitRows * kUnitCols * kBits / 8;
constexpr int kUnitsPerBlock = max(kGroup, kUnitCols) / kUnitCols;
constexpr int kGroupsPerBlock = kGroup == 32 ? 2 : 1;
constexpr int kBlockCodeBytes = kUnitsPerBlock * kUnitBytes;
constexpr int kGroupBytes = kUnitRows * (kScaleBytes + kZeros + kBiasBytes);
constexpr int kBlockBytes = kBlockCodeBytes + (kGroup > 0 ? kGroupsPerBlock * kGroupBytes : 0);

// A warp has kWarpBlocks times 32 features, two tiles of 16 each, and kTokenTiles times 8 tokens.
constexpr bool kWide = kTokens == kQgemmSm80WideTokens;
constexpr int kWarpBlocks = kWide ? 2 : 1;
constexpr int kFeatureWarps = kQgemmSm80Features / 32 / kWarpBlocks;
constexpr int kTokenTiles = min(kTokens, 64) / 8;
// Whether the scale goes into the weight.
constexpr bool kTf32 = sizeof(Memory) == 4, kScaledWeight = kTransposed || kTf32 || kWide;
// Steps of 16 along the sum that are decoded at once: within a group, or a strip, and as registers allow.
constexpr int kDeepest = kTransposed || kTf32 || kTokens == 32 ? 2 : 4;
constexpr int kDeep = min(kDeepest, kTransposed ? 4 : 4 / kUnitGroups);

// One block has all registers.
constexpr bool kRoomy = qgemm_sm80_blocks(kTokens, sizeof(Memory)) == 1;
// Between two branches, for the scheduler to mix: more would take more registers.
constexpr int kTilesTogether = kTokens == 64 ? 2 : 1;

extern __shared__ Words4 shared_words[];
__device__ __forceinline__ u8* shared_bytes() { return reinterpret_cast<u8*>(shared_words); }
__device__ __forceinline__ float* shared_map() {
  return reinterpret_cast<float*>(shared_bytes() + kStage.table_bytes);
}

// ---- Two neighbours along the sum, in the type of the products

using Pair = Select<kTf32, FloatPair, u32>;

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
constexpr Pair kOnes = same_pair(Element(), 1), kMinusZeros = same_pair(Element(), -0.0f);

// See weight/pairs.cuh.
template <int kFirst, int kSecond>
__device__ __forceinline__ FloatPair byte_pair(F32, u32 word) {
  return {byte_value<kFirst>(word), byte_value<kSecond>(word)};
}

// The table of pairs: a row of 128 bytes for each byte of codes, full of copies, so that the lanes that
// shared memory serves at a time do not meet in a bank.
__device__ __forceinline__ void build_table(int thread) {
  constexpr int kCopies = 128 / sizeof(Pair);
#pragma unroll 4
  for (int i = thread; i < kStage.table_bytes / static_cast<int>(sizeof(Pair)); i += kThreads) {
    const Memory first = kCodeValues.values[i / kCopies & 15], second = kCodeValues.values[i / kCopies >> 4];
    reinterpret_cast<Pair*>(shared_words)[i] =
        make_pair(Element(), load(Element(), first), load(Element(), second));
  }
}
__device__ __forceinline__ void load_shared(u32& pair, u32 address) {
  asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
}
__device__ __forceinline__ void load_shared(FloatPair& pair, u32 address) {
  asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.first), "=f"(pair.second) : "r"(address));
}
// `table`: the lane's entry of row 0, an address of shared memory. A permute and a multiplication, which
// compilers would make three instructions of.
template <int kByte>
__device__ __forceinline__ Pair look_up(u32 word, u32 table) {
  Pair pair;
  load_shared(pair, table + __byte_perm(word, 0, 0x4440 | kByte) * 128);
  return pair;
}

// Of two steps of 8 the first has the pairs 2t, 2t + 1 of the 16, the second 2t + 8, 2t + 9: any order will
// do.
__device__ __forceinline__ void mma(F32, float (&d)[4], const FloatPair (&a)[4], const FloatPair (&b)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    mma_tf32(d, {a[2 * i].first, a[2 * i + 1].first, a[2 * i].second, a[2 * i + 1].second},
             {b[i].first, b[i].second});
}
__device__ __forceinline__ u32 rounded_pair(u32 pair) { return pair; }
__device__ __forceinline__ FloatPair rounded_pair(const FloatPair& pair) {
  return {to_tf32(pair.first), to_tf32(pair.second)};
}

// ---- Copies of a step

// Where unit `unit` of a strip begins, and its block.
__device__ __forceinline__ constexpr i64 block_offset(i64 unit) {
  return unit / kUnitsPerBlock * kBlockBytes;
}
__device__ __forceinline__ constexpr i64 unit_offset(i64 unit) {
  return block_offset(unit) + unit % kUnitsPerBlock * kUnitBytes;
}

// Group `group` of unit q: 32 scales, then 32 zero points or biases, then 32 absmax.
__device__ __forceinline__ u8* params_of(u8* stage, int q, int group) {
  return stage + kStage.code_bytes + kStage.x_bytes + (q * kUnitGroups + group) * kStage.param_bytes;
}

// Where a 16-byte chunk of x lies: what a warp reads together does not meet in a bank.
constexpr int kChunkElements = 16 / sizeof(Memory), kRowChunks = kQgemmSm80Step / kChunkElements;
__device__ __forceinline__ u32 x_chunk(int token, int chunk) {
  const int swizzle = kTf32 ? token % 4 * 2 : token % 8;
  return static_cast<u32>((token * kRowChunks + (chunk ^ swizzle)) * 16);
}
__device__ __forceinline__ u32 element_bits(u16 x) { return x; }
__device__ __forceinline__ u32 element_bits(float x) { return bit_cast<u32>(x); }

// What a thread copies in each step: of codes, parameters and x every kThreads-th 16 bytes. Where registers
// allow, addresses of the first step come once; those of others differ by what is the same for all threads.
class Copies {
 public:
  __device__ __forceinline__ Copies(const QgemmSm80Args& args, i64 tile, i64 first_token)
      : args_(args), tile_(tile), first_token_(first_token) {
    left_ = static_cast<int>(
        min<i64>(kTransposed ? args.units_per_strip - first_unit() : args.strips - first_strip(), kUnits));
    num_tokens_ = static_cast<int>(min<i64>(args.m - first_token, kTokens));
    if constexpr (kRoomy) {
      codes_ = code_address(thread_, 0);
      x_ = x_address(thread_, 0);
    }
    if constexpr (kParamsAhead) params_ = param_address(Param(thread_), 0);
  }

  __device__ __forceinline__ void load_weight(u8* stage, i64 step) const {
    load_codes(stage, step);
    load_params(stage, step);
    if (kDoubleQuant) load_absmax(stage, step);
  }

  __device__ __forceinline__ void load_x(u8* stage, i64 step) const {
    constexpr int kPassTokens = kThreads / kRowChunks;
    const i64 left =
        args_.in_cols - step * kQgemmSm80Step - thread_ % kRowChunks * kChunkElements;  // columns
#pragma unroll kRoomy ? kUnits : 1
    for (int first = 0; first < kTokens; first += kPassTokens) {
      const int i = first * kRowChunks + thread_, token = i / kRowChunks;
      if (kTokens < kPassTokens && token >= kTokens) break;
      const bool valid = token < num_tokens_ && left > 0;
      const i64 moved = step * kQgemmSm80Step + first * args_.in_cols;
      const Memory* const address = kRoomy ? x_ + moved : x_address(i, step);
      const Memory* const from = valid ? address : static_cast<const Memory*>(args_.x);
      u8* const to = stage + kStage.code_bytes + x_chunk(token, i % kRowChunks);
      if (kAligned) {
        copy_async_or_zero(to, from, valid);
      } else {
        Words4 chunk = {};
#pragma unroll
        for (int j = 0; j < kChunkElements; ++j)
          if (valid && j < left)
            chunk.word[j * 4 / kChunkElements] |= element_bits(from[j]) << (kTf32 ? 0 : j % 2 * 16);
        *reinterpret_cast<Words4*>(to) = chunk;
      }
    }
  }

 private:
  static constexpr int kCodeChunks = kUnitBytes / 16;  // of a unit
  // Unit q of a step: of strip q of the tile; transposed, of the first or second strip of the step, four
  // units of each.
  static __device__ __forceinline__ constexpr int strip_of(int q) { return kTransposed ? q / 4 : q; }
  static __device__ __forceinline__ constexpr int unit_of(int q) { return kTransposed ? q % 4 : 0; }
  static __device__ __forceinline__ i64 strip_of_step(i64 step) { return kTransposed ? step * 2 : 0; }
  static __device__ __forceinline__ i64 unit_of_step(i64 step) { return kTransposed ? 0 : step; }
  __device__ __forceinline__ i64 first_strip() const { return kTransposed ? 0 : tile_ * kUnits; }
  __device__ __forceinline__ i64 first_unit() const { return kTransposed ? tile_ * 4 : 0; }
  __device__ __forceinline__ bool is_valid(i64 step, int q) const {
    return kTransposed ? unit_of(q) < left_ && strip_of_step(step) + strip_of(q) < args_.strips : q < left_;
  }

  // Of copy i of a step.
  __device__ __forceinline__ const u8* code_address(int i, i64 step) const {
    const int q = i / kCodeChunks;
    return args_.weight + (first_strip() + strip_of_step(step) + strip_of(q)) * args_.strip_bytes +
           unit_offset(first_unit() + unit_of_step(step) + unit_of(q)) + i % kCodeChunks * 16;
  }
  __device__ __forceinline__ const Memory* x_address(int i, i64 step) const {
    return static_cast<const Memory*>(args_.x) + (first_token_ + i / kRowChunks) * args_.in_cols +
           step * kQgemmSm80Step + i % kRowChunks * kChunkElements;
  }

  __device__ __forceinline__ void load_codes(u8* stage, i64 step) const {
    const i64 moved = strip_of_step(step) * args_.strip_bytes + unit_offset(unit_of_step(step));
#pragma unroll kRoomy ? kUnits : 1
    for (int first = 0; first < kUnits; first += kThreads / kCodeChunks) {
      const int i = first * kCodeChunks + thread_;
      const bool valid = is_valid(step, i / kCodeChunks);
      const u8* const from =
          kRoomy ? codes_ + moved + strip_of(first) * args_.strip_bytes + unit_offset(unit_of(first))
                 : code_address(i, step);
      copy_async_or_zero(stage + i * 16, valid ? from : args_.weight, valid);
    }
  }

  __device__ __forceinline__ i64 group_of(i64 unit, int group) const {
    const i64 col = unit * kUnitCols + group * (kUnitCols / kUnitGroups);
    return min(kGroup > 0          ? col / max(kGroup, 1)
               : args_.groups == 1 ? 0
                                   : col / args_.group,
               args_.groups - 1);
  }
  static constexpr int kScaleChunks = kUnitRows * kScaleBytes / 16,
                       kParamChunks = kGroupBytes / 16;  // of a group
  static constexpr int kParamCopies = kUnits * kUnitGroups * kParamChunks;
  // Whether their addresses are known ahead: inlined, and there are registers for it.
  static constexpr bool kParamsAhead = kGroup > 0 && kRoomy&& kParamCopies <= kThreads;
  // Copy i of those of a step.
  struct Param {
    int chunk, group, q;
    __device__ __forceinline__ explicit Param(int i)
        : chunk(i % kParamChunks),
          group(i / kParamChunks % kUnitGroups),
          q(i / (kParamChunks * kUnitGroups)) {}
    __device__ __forceinline__ bool is_scale() const { return chunk < kScaleChunks; }
    // Bytes of one, and from the first of the group on.
    __device__ __forceinline__ int size() const { return is_scale() ? kScaleBytes : kZeros ? 1 : kBiasBytes; }
    __device__ __forceinline__ int offset() const { return (is_scale() ? chunk : chunk - kScaleChunks) * 16; }
    __device__ __forceinline__ int in_block() const {  // from the parameters on, where they are inlined
      return (is_scale() ? 0 : kGroupsPerBlock * kUnitRows * kScaleBytes) + group * kUnitRows * size() +
             offset();
    }
    __device__ __forceinline__ u8* place(u8* stage) const { return params_of(stage, q, group) + chunk * 16; }
  };
  __device__ __forceinline__ const u8* param_address(const Param& param, i64 step) const {
    const i64 strip = first_strip() + strip_of_step(step) + strip_of(param.q);
    const i64 unit = first_unit() + unit_of_step(step) + unit_of(param.q);
    if (kGroup > 0)
      return args_.weight + strip * args_.strip_bytes + block_offset(unit) + kBlockCodeBytes +
             param.in_block();
    const i64 first = (strip * args_.groups + group_of(unit, param.group)) * kUnitRows;
    const i64 section = param.is_scale() ? args_.scales : kZeros ? args_.zeros : args_.biases;
    return args_.weight + section + first * param.size() + param.offset();
  }
  __device__ __forceinline__ void load_params(u8* stage, i64 step) const {
    const i64 moved = strip_of_step(step) * args_.strip_bytes + block_offset(unit_of_step(step));
#pragma unroll 1
    for (int i = thread_; i < kParamCopies; i += kThreads) {
      const Param param(i);
      const bool valid = is_valid(step, param.q);
      const u8* const from = kParamsAhead ? params_ + moved : param_address(param, step);
      copy_async_or_zero(param.place(stage), valid ? from : args_.weight, valid);
    }
  }
  __device__ __forceinline__ void load_absmax(u8* stage, i64 step) const {
    const u8* const absmax = args_.weight + args_.absmax;
#pragma unroll 1
    for (int i = thread_; i < kUnits * kUnitGroups * kUnitRows; i += kThreads) {
      const int row = i % kUnitRows, group = i / kUnitRows % kUnitGroups, q = i / (kUnitRows * kUnitGroups);
      const i64 strip = first_strip() + strip_of_step(step) + strip_of(q);
      const i64 unit = first_unit() + unit_of_step(step) + unit_of(q);
      const i64 index = (strip * kUnitRows + row) * args_.groups + group_of(unit, group);
      copy_async(reinterpret_cast<u32*>(params_of(stage, q, group) + kGroupBytes) + row,
                 absmax + min(index >> 8, args_.last_absmax) * 4);
    }
  }

  const QgemmSm80Args& args_;
  const int thread_ = static_cast<int>(threadIdx.x);
  i64 tile_, first_token_;
  int left_, num_tokens_;  // strips or, transposed, units from the first of the tile on; tokens
  const u8 *codes_ = nullptr, *params_ = nullptr;
  const Memory* x_ = nullptr;
};

// ---- Fragments

template <int n>
struct alignas(4 * n) WordsOf {
  u32 word[n];
};

struct Lane {
  int index, g, t;
  u32 table;     // see look_up()
  float offset;  // of double quantization
};

__device__ __forceinline__ float scale_at(const u8* params, int row, const Lane& lane) {
  if (!kDoubleQuant) return load_scale<float>(params, row, kCodec.scale_type);
  const float absmax = reinterpret_cast<const float*>(params + kGroupBytes)[row];
  return shared_map()[params[row]] * absmax + lane.offset;
}
__device__ __forceinline__ float bias_at(const u8* params, int row) {
  return load_scale<float>(params + kUnitRows * kScaleBytes, row, kCodec.scale_type);
}
__device__ __forceinline__ float zero_at(const u8* params, int row) {
  return static_cast<float>(params[kUnitRows * kScaleBytes + row]);
}

// Tile `half` of 16 rows of unit `unit` for steps chunk * kDeep and on.
__device__ __forceinline__ void forward_fragments(Pair (&a)[kDeep][4], const u8* unit, const u8* params,
                                                  int half, int chunk, const Lane& lane) {
  const u8* const slot = unit + packed_slot(8 * half + lane.g, lane.t) * 16;
  if constexpr (kBits == 4) {
    const auto words = *reinterpret_cast<const WordsOf<kDeep>*>(slot + chunk * kDeep * 4);
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      a[j][0] = look_up<0>(words.word[j], lane.table);
      a[j][1] = look_up<1>(words.word[j], lane.table);
      a[j][2] = look_up<2>(words.word[j], lane.table);
      a[j][3] = look_up<3>(words.word[j], lane.table);
    }
  } else {
    constexpr int kWide = min(kDeep, 2);  // steps in 16 bytes
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      const int step = chunk * kDeep + j;
      const auto words = *reinterpret_cast<const WordsOf<2 * kWide>*>(slot + step / 2 * 1024 +
                                                                      (kWide == 2 ? 0 : step % 2 * 8));
      const int first = kWide == 2 ? j % 2 * 2 : 0;
      a[j][0] = byte_pair<0, 1>(Element(), words.word[first]);
      a[j][1] = byte_pair<2, 3>(Element(), words.word[first]);
      a[j][2] = byte_pair<0, 1>(Element(), words.word[first + 1]);
      a[j][3] = byte_pair<2, 3>(Element(), words.word[first + 1]);
    }
  }
  const int first = 16 * half + 2 * lane.g;
  Pair zeros[2], scales[2], biases[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (kZeros) zeros[i] = same_pair(Element(), -zero_at(params, first + i));
    if (kScaledWeight) scales[i] = same_pair(Element(), scale_at(params, first + i, lane));
    biases[i] = kScaledWeight && kBiases ? same_pair(Element(), bias_at(params, first + i)) : kMinusZeros;
  }
#pragma unroll
  for (int j = 0; j < kDeep; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kZeros) a[j][i] = fma_pair(Element(), a[j][i], kOnes, zeros[i % 2]);
      if (kScaledWeight) a[j][i] = rounded_pair(fma_pair(Element(), a[j][i], scales[i % 2], biases[i % 2]));
    }
  }
}

// Rows 2 * pair and the next of half `half` of a unit: [tile][column] of this lane, see
// transposed_fragments().
__device__ __forceinline__ void load_row_pairs(Pair (&values)[2][2], const u8* unit, int pair, int half,
                                               const Lane& lane) {
  const u8* const slot = unit + packed_slot(pair, lane.g % 4) * 16;
  if constexpr (kBits == 4) {
    u32 word = *reinterpret_cast<const u32*>(slot + (2 * half + lane.g / 4) * 4);
    // From pairs of columns to pairs of rows: the high code of each even byte and the low one of the next
    // change places.
    word ^= ((word ^ word >> 4) & 0x00F000F0u) * 17;
    values[0][0] = look_up<0>(word, lane.table);
    values[0][1] = look_up<1>(word, lane.table);
    values[1][0] = look_up<2>(word, lane.table);
    values[1][1] = look_up<3>(word, lane.table);
  } else {
    const auto words = *reinterpret_cast<const WordsOf<2>*>(slot + half * 1024 + lane.g / 4 * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i][0] = byte_pair<0, 2>(Element(), words.word[i]);
      values[i][1] = byte_pair<1, 3>(Element(), words.word[i]);
    }
  }
}

// The 32 columns of half `half` of a unit, 16 a tile, for the 32 rows of its strip. Lane (g, t) has of tile i
// columns 16 (g / 4) + 2 (g % 4) + 8 i and the next, its fragments' rows g and g + 8.
__device__ __forceinline__ void transposed_fragments(Pair (&a)[2][kDeep][4], const u8* unit, const u8* params,
                                                     int half, const Lane& lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {  // half of the 16 rows
      const int pair = 8 * j + 4 * second + lane.t;
      Pair values[2][2];
      load_row_pairs(values, unit, pair, half, lane);
      const auto of_rows = [&](auto&& at) { return make_pair(Element(), at(2 * pair), at(2 * pair + 1)); };
      const Pair scales = of_rows([&](int row) { return scale_at(params, row, lane); });
      const Pair biases = kBiases ? of_rows([&](int row) { return bias_at(params, row); }) : kMinusZeros;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Pair value = values[i / 2][i % 2];
        if (kZeros)
          value = fma_pair(Element(), value, kOnes, of_rows([&](int row) { return -zero_at(params, row); }));
        a[i / 2][j][2 * second + i % 2] = rounded_pair(fma_pair(Element(), value, scales, biases));
      }
    }
  }
}

// Columns of operand B, the tokens of an eight, for steps of 16 from `step` on.
__device__ __forceinline__ void token_fragments(u32 (&b)[kDeep][2], const u8* x, int first_token, int step,
                                                const Lane& lane) {
#pragma unroll
  for (int i = 0; i < (kDeep + 1) / 2; ++i) {
    u32 m[4];
    load_matrices(m, x + x_chunk(first_token + lane.index % 8, (step / 2 + i) * 4 + lane.index / 8));
    if constexpr (kDeep == 1) {
      b[0][0] = step % 2 ? m[2] : m[0];
      b[0][1] = step % 2 ? m[3] : m[1];
    } else {
      b[2 * i][0] = m[0];
      b[2 * i][1] = m[1];
      b[2 * i + 1][0] = m[2];
      b[2 * i + 1][1] = m[3];
    }
  }
}
__device__ __forceinline__ void token_fragments(FloatPair (&b)[kDeep][2], const u8* x, int first_token,
                                                int step, const Lane& lane) {
#pragma unroll
  for (int j = 0; j < kDeep; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 chunk = x_chunk(first_token + lane.g, (step + j) * 4 + 2 * i + lane.t / 2);
      b[j][i] = rounded_pair(*reinterpret_cast<const FloatPair*>(x + chunk + lane.t % 2 * 8));
    }
  }
}

using Sums = float[kWarpBlocks][2][kTokenTiles][4];

// Adds a step. The warp begins with block `warp_feature` of 32 features and token `warp_token` of the tile,
// and has `tokens` tokens.
__device__ __forceinline__ void multiply(Sums& sums, u8* stage, int warp_feature, int warp_token, int tokens,
                                         const Lane& lane) {
#pragma unroll
  for (int chunk = 0; chunk < 4 / kDeep; ++chunk) {
    Pair a[2][kDeep][4];
    float scales[2][2], biases[2][2];  // of sums
    if constexpr (kTransposed) {
      const int q = chunk * 4 + warp_feature / 2, half = warp_feature % 2;
      const int group = kUnitGroups == 1 ? 0 : kUnitGroups == 2 ? half : 2 * half + lane.g / 4;
      transposed_fragments(a, stage + q * kUnitBytes, params_of(stage, q, group), half, lane);
    } else {
      const u8* const params = params_of(stage, warp_feature, chunk * kDeep * kUnitGroups / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        forward_fragments(a[half], stage + warp_feature * kUnitBytes, params, half, chunk, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (kScaledWeight) continue;
          const int row = 16 * half + 2 * lane.g + i;
          scales[half][i] = scale_at(params, row, lane);
          biases[half][i] = kBiases ? bias_at(params, row) : 0;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      if (tile % kTilesTogether == 0 && tile * 8 >= tokens) break;
      Pair b[kDeep][2];
      token_fragments(b, stage + kStage.code_bytes, warp_token + tile * 8, chunk * kDeep, lane);
      float x_sums[4] = {};  // of the tokens 2t and 2t + 1 over the group
      if (kBiases && !kScaledWeight) {
        const Pair ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
        for (int j = 0; j < kDeep; ++j) mma(Element(), x_sums, ones, b[j]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&sum)[4] = sums[0][half][tile];
        if constexpr (kScaledWeight) {
#pragma unroll
          for (int j = 0; j < kDeep; ++j) mma(Element(), sum, a[half][j], b[j]);
        } else {
          float group_sum[4] = {};
#pragma unroll
          for (int j = 0; j < kDeep; ++j) mma(Element(), group_sum, a[half][j], b[j]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[i] = __fmaf_rn(scales[half][i / 2], group_sum[i], sum[i]);
            if (kBiases) sum[i] = __fmaf_rn(biases[half][i / 2], x_sums[i], sum[i]);
          }
        }
      }
    }
  }
}

// ---- Many tokens: 64 features and 64 tokens a warp

// Of the two weights of a word of a fragment.
struct Factors {
  Pair scale, added, minus_zero;
};
__device__ __forceinline__ Factors load_factors(const u8* params, int first_row, int second_row,
                                                const Lane& lane) {
  const auto both = [&](auto&& at) { return make_pair(Element(), at(first_row), at(second_row)); };
  Factors f = {both([&](int row) { return scale_at(params, row, lane); }), kMinusZeros, kMinusZeros};
  if (kBiases) f.added = both([&](int row) { return bias_at(params, row); });
  if (kZeros) f.minus_zero = both([&](int row) { return -zero_at(params, row); });
  return f;
}
__device__ __forceinline__ Pair scaled(Pair value, const Factors& f) {
  if (kZeros) value = fma_pair(Element(), value, kOnes, f.minus_zero);
  return fma_pair(Element(), value, f.scale, f.added);
}

// Fragments of the weight for the four tiles of 16 features of a warp, for one 16 of a step after the other.
class WideWeight {
 public:
  __device__ __forceinline__ WideWeight(u8* stage, int warp_feature, const Lane& lane)
      : stage_(stage), warp_feature_(warp_feature), lane_(lane) {}

  // Those number `step`, 0 to 3: in order, as some of what is loaded serves several.
  __device__ __forceinline__ void load(Pair (&a)[4][4], int step) {
    if constexpr (kTransposed)
      load_transposed(a, step / 2, step % 2);
    else
      load_forward(a, step);
  }

 private:
  __device__ __forceinline__ void load_forward(Pair (&a)[4][4], int step) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int feature = warp_feature_ + tile / 2, row = 16 * (tile % 2) + 2 * lane_.g;
      const u8* const slot =
          stage_ + feature * kUnitBytes + packed_slot(8 * (tile % 2) + lane_.g, lane_.t) * 16;
      if (kBits == 4 && step == 0) words_[tile] = *reinterpret_cast<const Words4*>(slot);
      if (step * kUnitGroups % 4 == 0) {
        const u8* const params = params_of(stage_, feature, step * kUnitGroups / 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) factors_[tile][i] = load_factors(params, row + i, row + i, lane_);
      }
      if constexpr (kBits == 4) {
        const u32 word = words_[tile].word[step];
        a[tile][0] = look_up<0>(word, lane_.table);
        a[tile][1] = look_up<1>(word, lane_.table);
        a[tile][2] = look_up<2>(word, lane_.table);
        a[tile][3] = look_up<3>(word, lane_.table);
      } else {
        const auto words = *reinterpret_cast<const WordsOf<2>*>(slot + step / 2 * kTileBytes + step % 2 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[tile][2 * i] = byte_pair<0, 1>(Element(), words.word[i]);
          a[tile][2 * i + 1] = byte_pair<2, 3>(Element(), words.word[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a[tile][i] = scaled(a[tile][i], factors_[tile][i % 2]);
    }
  }

  // As transposed_fragments(), of rows 16 * j and up of a strip.
  __device__ __forceinline__ void load_transposed(Pair (&a)[4][4], int strip, int j) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int feature = warp_feature_ + block, q = strip * 4 + feature / 2, half = feature % 2;
      const int group = kUnitGroups == 1 ? 0 : kUnitGroups == 2 ? half : 2 * half + lane_.g / 4;
      const u8* const params = params_of(stage_, q, group);
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int pair = 8 * j + 4 * second + lane_.t;
        Pair values[2][2];
        load_row_pairs(values, stage_ + q * kUnitBytes, pair, half, lane_);
        const Factors factors = load_factors(params, 2 * pair, 2 * pair + 1, lane_);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[2 * block + i / 2][2 * second + i % 2] = scaled(values[i / 2][i % 2], factors);
      }
    }
  }

  u8* stage_;
  int warp_feature_;
  const Lane& lane_;
  Words4 words_[4];  // of each tile, the four steps of 4-bit codes
  Factors factors_[4][2];
};

// Adds a step, as multiply(). The weight of the next 16 is decoded while these are multiplied; not that of
// 8-bit codes, which needs no table. Unrolled as far as registers allow.
template <class T>
__device__ __forceinline__ void multiply_wide(T element, Sums& sums, u8* stage, int warp_feature,
                                              int warp_token, const Lane& lane) {
  WideWeight weight(stage, warp_feature, lane);
  constexpr int kAhead = kBits == 4 ? 1 : 0;
  Pair a[1 + kAhead][4][4];
  if (kAhead == 1) weight.load(a[0], 0);
  const u8* const x = stage + kStage.code_bytes;
  const int token = warp_token + lane.index / 16 * 8 + lane.index % 8, chunk = lane.index / 8 % 2;
#pragma unroll kBits == 8 ? 1 : kTransposed&& kDoubleQuant ? 2 : 4
  for (int step = 0; step < 4; ++step) {
    if (step + kAhead < 4) weight.load(a[(step + kAhead) % (1 + kAhead)], step + kAhead);
#pragma unroll
    for (int tiles = 0; tiles < kTokenTiles; tiles += 2) {
      u32 m[4];
      load_matrices(m, x + x_chunk(token + tiles * 8, step * 2 + chunk));
      const u32 b[2][2] = {{m[0], m[1]}, {m[2], m[3]}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pair(&tile)[4] = a[step % (1 + kAhead)][i];
        mma(element, sums[i / 2][i % 2][tiles], tile, b[0]);
        mma(element, sums[i / 2][i % 2][tiles + 1], tile, b[1]);
      }
    }
  }
}

#endif

extern "C" __global__ void __launch_bounds__(kQgemmSm80Threads,
                                             qgemm_sm80_blocks(kTokens, sizeof(Element::Memory)))
    qgemm_sm80(const __grid_constant__ QgemmSm80Args args) {
#if HALFBYTE_DEVICE_ARCH >= 800
  i64 block = block_index();
  const i64 first_token = block % args.token_tiles * kTokens;
  block /= args.token_tiles;
  const i64 tile = block % args.feature_tiles, split = block / args.feature_tiles;
  if (split >= args.splits) return;
  const i64 begin = split * args.steps / args.splits, end = (split + 1) * args.steps / args.splits;
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif

  u8* const stages = shared_bytes() + kStage.table_bytes + kStage.map_bytes;
  constexpr int kAhead = kStage.stages - 1;
  const Copies copies(args, tile, first_token);
  // The weight is there before earlier kernels have ended; x may not be.
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i >= end) break;
    copies.load_weight(stages + i * kStage.bytes(), begin + i);
  }
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  build_table(thread);
  const u32 table = shared_address(shared_words) + static_cast<u32>(thread * sizeof(Pair) % 128);
  Lane lane = {thread % 32, thread % 32 / 4, thread % 4, table, 0};
  if (kDoubleQuant) {
    static_assert(kThreads == 256);
    shared_map()[thread] = reinterpret_cast<const float*>(args.weight + args.map)[thread];
    lane.offset = *reinterpret_cast<const float*>(args.weight + args.offset);
  }
  wait_for_earlier();
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) copies.load_x(stages + i * kStage.bytes(), begin + i);
    commit_copies();
  }

  const int warp_feature = warp % kFeatureWarps * kWarpBlocks, warp_token = warp / kFeatureWarps * 64;
  const int tokens = static_cast<int>(min<i64>(args.m - first_token - warp_token, 64));
  Sums sums = {};
  int slot = 0;
#pragma unroll 1
  for (i64 next = begin + kAhead; next < end + kAhead; ++next) {
    wait_copies<kAhead - 1>();
    __syncthreads();  // the step is there, and all are done with the one before
    if (next < end) {
      u8* const stage = stages + (slot == 0 ? kAhead : slot - 1) * kStage.bytes();
      copies.load_weight(stage, next);
      copies.load_x(stage, next);
    }
    commit_copies();
    if constexpr (kWide) {
      u8* const stage = stages + slot * kStage.bytes();
      if (tokens > 0) multiply_wide(Element(), sums, stage, warp_feature, warp_token, lane);
    } else {
      multiply(sums, stages + slot * kStage.bytes(), warp_feature, warp_token, tokens, lane);
    }
    slot = slot == kAhead ? 0 : slot + 1;
  }

  // Lane (g, t) has two neighbours in a row of y, of rows 2t, 2t + 1 of every eight.
  const i64 row = first_token + warp_token + 2 * lane.t;
#pragma unroll
  for (int i = 0; i < kWarpBlocks * 2; ++i) {
    const int in_block =
        kTransposed ? 16 * (lane.g / 4) + 2 * (lane.g % 4) + 8 * (i % 2) : 16 * (i % 2) + 2 * lane.g;
    const i64 col = tile * kQgemmSm80Features + (warp_feature + i / 2) * 32 + in_block;
    if (col >= args.out_cols) continue;
    const Sums& all = sums;
    const auto each = [&](auto&& store_sums) {
#pragma unroll
      for (int j = 0; j < kTokenTiles * 2; ++j) {
        const int token = j / 2 * 8 + j % 2;
        const float(&sum)[4] = all[i / 2][i % 2][j / 2];
        if (2 * lane.t + token < tokens) store_sums(token, sum[j % 2], sum[2 + j % 2]);
      }
    };
    if (args.partials != nullptr) {
      float* const to = args.partials + (split * args.m + row) * args.out_stride + col;
      each([&](int token, float first, float second) {
        *reinterpret_cast<FloatPair*>(to + token * args.out_stride) = {first, second};
      });
    } else {
      const i64 index = row * args.out_cols + col;
      const bool two = col + 1 < args.out_cols;
      const FloatPair bias = load_bias(args, col);
      each([&](int token, float first, float second) {
        finish(args, index + token * args.out_cols, two, bias, {first, second});
      });
    }
  }
#endif
}

}  // namespace halfbyte::device
