// qgemm_sm80, phase 2: copies of a step to shared memory.
#pragma once

#include "ops/qgemm/sm80/pair.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// The block of a unit of a strip, and the unit within it: of 32 bits, as what is in memory has fewer units.
__device__ __forceinline__ i64 block_of(i64 unit, int shift) { return static_cast<u32>(unit) >> shift; }
__device__ __forceinline__ i64 unit_of_block(i64 unit, int shift) {
  return static_cast<u32>(unit) & ((1u << shift) - 1);
}

// Group `group` of unit q: 32 scales, then 32 zero points or biases, then 32 absmax.
template <class S>
__device__ __forceinline__ int params_place(S, int q, int group) {
  return kStage.code_bytes + kStage.x_bytes + (q * kUnitGroups + group) * S::kStage.param_bytes;
}
template <class S>
__device__ __forceinline__ u8* params_of(S, u8* stage, int q, int group) {
  return stage + params_place(S(), q, group);
}

// Where a 16-byte chunk of x lies: what a warp reads together does not meet in a bank.
constexpr int kXPartBytes = kTokens * kQgemmSm80Step * sizeof(XMemory);
constexpr int kChunkElements = 16 / sizeof(XMemory), kRowChunks = kQgemmSm80Step / kChunkElements;
__device__ __forceinline__ u32 x_chunk(int token, int chunk) {
  const int swizzle = kTf32 ? token % 4 * 2 : token % 8;
  return static_cast<u32>((token * kRowChunks + (chunk ^ swizzle)) * 16);
}

// What a block makes: a tile of features for some tokens, over the steps of a split. Blocks that run at the
// same time share what they read, if tiles are taken band by band of some tiles of tokens.
struct Tile {
  i64 first_token, tile, split;
  int num_tokens, expert;  // no tokens: there is no such tile; expert: where it is no number of one, none
  const u8* weight;

  __device__ __forceinline__ explicit Tile(const QgemmSm80Args& args) {
    if constexpr (kExperts) {
      find(args);
      return;
    }
    constexpr u32 kBand = 8;  // of 32 bits, as y has fewer tiles
    const u32 block = static_cast<u32>(block_index()), features = static_cast<u32>(args.feature_tiles),
              tokens = static_cast<u32>(args.token_tiles);
    const u32 in_split = block % (features * tokens);
    const u32 first = in_split / (kBand * features) * kBand, in_band = in_split - first * features;
    const u32 height = min(kBand, tokens - first);
    split = block / (features * tokens);
    tile = in_band / height;
    first_token = i64{first + in_band % height} * kTokens;
    num_tokens = static_cast<int>(min<i64>(args.m - first_token, kTokens));
    expert = 0;
    weight = args.weight;
  }

 private:
  // Tiles of features of the same tokens follow each other.
  __device__ __forceinline__ void find(const QgemmSm80Args& args) {
    const u32 features = static_cast<u32>(args.feature_tiles), tiles = static_cast<u32>(args.token_tiles);
    const u32 block = static_cast<u32>(block_index()), number = block / features;
    const ExpertTile of = find_expert_tile<kTokens>(args.experts, static_cast<i32>(number % tiles));
    split = number / tiles;
    tile = block % features;
    first_token = of.first;
    num_tokens = of.count;
    expert = of.expert;
    weight = args.weight + (of.expert < args.experts.num ? of.expert : 0) * args.experts.weight_bytes;
  }
};

// What a thread copies in each step: of codes, parameters and x every kThreads-th 16 bytes. Where registers
// allow, addresses of the first step come once; those of others differ by what is the same for all threads.
class Copies : protected Traits {
 public:
  __device__ __forceinline__ Copies(const QgemmSm80Args& args, const Tile& at, const TokenRows* rows)
      : Traits(args),
        args_(args),
        tile_(at.tile),
        first_token_(at.first_token),
        weight_(at.weight),
        rows_(rows),
        num_tokens_(at.num_tokens) {
    left_ = static_cast<int>(
        min<i64>(kTransposed ? args.units_per_strip - first_unit() : args.strips - first_strip(), kUnits));
    if constexpr (kRoomy) {
      codes_ = code_address(thread_, 0);
      x_ = x_address(thread_, 0);
    }
    with_scales(args, [&](auto kind) {
      if (is_inlined() && kParamsAhead<decltype(kind)>) params_ = param_address(Param(kind, thread_), 0);
    });
  }

  __device__ __forceinline__ void load_weight(u8* stage, i64 step) const {
    load_codes(stage, step);
    with_scales(args_, [&](auto kind) {
      load_params(kind, stage, step);
      if (kind.kDoubleQuant) load_absmax(kind, stage, step);
    });
  }

  __device__ __forceinline__ void load_x(u8* stage, i64 step) const {
    constexpr int kPassTokens = kThreads / kRowChunks;
    const i64 left =
        args_.x_stride - step * kQgemmSm80Step - thread_ % kRowChunks * kChunkElements;  // columns
#pragma unroll
    for (int part = 0; part < kXParts; ++part) {
#pragma unroll kRoomy ? kUnits : 1
      for (int first = 0; first < kTokens; first += kPassTokens) {
        const int i = first * kRowChunks + thread_, token = i / kRowChunks;
        if (kTokens < kPassTokens && token >= kTokens) break;
        const bool valid = token < num_tokens_ && left > 0;
        const i64 moved = step * kQgemmSm80Step + first * args_.x_stride;
        const XMemory* const address =
            (kRoomy && !kExperts ? x_ + moved : x_address(i, step)) + part * args_.x_part;
        copy_async_or_zero(stage + kStage.code_bytes + part * kXPartBytes + x_chunk(token, i % kRowChunks),
                           valid ? address : static_cast<const XMemory*>(args_.x), valid);
      }
    }
  }

 protected:
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

  // Whether parameters lie behind the codes of their block: those of a common affine weight always do.
  __device__ __forceinline__ bool is_inlined() const { return (kAffine && !kRare) || args_.inlined; }

  // Where unit `unit` of a strip begins, and its block.
  __device__ __forceinline__ i64 block_offset(i64 unit) const {
    return block_of(unit, args_.block_shift) * args_.block_bytes;
  }
  __device__ __forceinline__ i64 unit_offset(i64 unit) const {
    return block_offset(unit) + unit_of_block(unit, args_.block_shift) * kUnitBytes;
  }

  // Of copy i of a step.
  __device__ __forceinline__ const u8* code_address(int i, i64 step) const {
    const int q = i / kCodeChunks;
    return weight() + (first_strip() + strip_of_step(step) + strip_of(q)) * args_.strip_bytes +
           unit_offset(first_unit() + unit_of_step(step) + unit_of(q)) + i % kCodeChunks * 16;
  }
  __device__ __forceinline__ const XMemory* x_address(int i, i64 step) const {
    return static_cast<const XMemory*>(args_.x) + row_of_x(i / kRowChunks) * args_.x_stride +
           step * kQgemmSm80Step + i % kRowChunks * kChunkElements;
  }
  __device__ __forceinline__ i64 row_of_x(int token) const {
    if constexpr (kExperts)
      return rows_->x[token];
    else
      return first_token_ + token;
  }
  __device__ __forceinline__ const u8* weight() const { return kExperts ? weight_ : args_.weight; }

  __device__ __forceinline__ void load_codes(u8* stage, i64 step) const {
    const i64 moved = strip_of_step(step) * args_.strip_bytes + unit_offset(unit_of_step(step));
#pragma unroll kRoomy ? kUnits : 1
    for (int first = 0; first < kUnits; first += kThreads / kCodeChunks) {
      const int i = first * kCodeChunks + thread_;
      const bool valid = is_valid(step, i / kCodeChunks);
      const u8* const from =
          kRoomy ? codes_ + moved + strip_of(first) * args_.strip_bytes + unit_offset(unit_of(first))
                 : code_address(i, step);
      copy_async_or_zero(stage + i * 16, valid ? from : weight(), valid);
    }
  }

  __device__ __forceinline__ i64 group_of(i64 unit, int group) const {
    if (!is_inlined()) return 0;
    return min(block_of(unit, args_.block_shift) * kUnitGroups + group, args_.groups - 1);
  }
  // Copy i of the parameters of a step.
  template <class S>
  struct Param {
    static constexpr int kScaleChunks = kUnitRows * S::kScaleBytes / 16,
                         kParamChunks = S::kGroupBytes / 16;  // of a group
    static constexpr int kCopies = kUnits * kUnitGroups * kParamChunks;
    int chunk, group, q;
    __device__ __forceinline__ Param(S, int i)
        : chunk(i % kParamChunks),
          group(i / kParamChunks % kUnitGroups),
          q(i / (kParamChunks * kUnitGroups)) {}
    __device__ __forceinline__ bool is_scale() const { return chunk < kScaleChunks; }
    // Bytes of one, and from the first of the group on.
    __device__ __forceinline__ int size() const {
      return is_scale() ? S::kScaleBytes : kAsymmetric ? 1 : S::kBiasBytes;
    }
    __device__ __forceinline__ int offset() const { return (is_scale() ? chunk : chunk - kScaleChunks) * 16; }
    __device__ __forceinline__ int in_block() const {  // from the parameters on, where they are inlined
      return (is_scale() ? 0 : kUnitGroups * kUnitRows * S::kScaleBytes) + group * kUnitRows * size() +
             offset();
    }
    __device__ __forceinline__ int place() const { return params_place(S(), q, group) + chunk * 16; }
  };
  // Whether their addresses are known ahead: inlined, and there are registers for it.
  template <class S>
  static constexpr bool kParamsAhead = kRoomy&& Param<S>::kCopies <= kThreads;
  template <class S>
  __device__ __forceinline__ const u8* param_address(const Param<S>& param, i64 step) const {
    const i64 strip = first_strip() + strip_of_step(step) + strip_of(param.q);
    const i64 unit = first_unit() + unit_of_step(step) + unit_of(param.q);
    if (is_inlined())
      return weight() + strip * args_.strip_bytes + block_offset(unit) +
             (u32{kUnitBytes} << args_.block_shift) + param.in_block();
    const i64 first = (strip * args_.groups + group_of(unit, param.group)) * kUnitRows;
    const i64 section = param.is_scale() ? args_.scales : kAsymmetric ? args_.zeros : args_.biases;
    return weight() + section + first * param.size() + param.offset();
  }
  template <class S>
  __device__ __forceinline__ void load_params(S, u8* stage, i64 step) const {
    const i64 moved = strip_of_step(step) * args_.strip_bytes + block_offset(unit_of_step(step));
#pragma unroll 1
    for (int i = thread_; i < Param<S>::kCopies; i += kThreads) {
      const Param param(S(), i);
      const bool valid = is_valid(step, param.q);
      const u8* const from = is_inlined() && kParamsAhead<S> ? params_ + moved : param_address(param, step);
      copy_async_or_zero(stage + param.place(), valid ? from : weight(), valid);
    }
  }
  template <class S>
  __device__ __forceinline__ void load_absmax(S, u8* stage, i64 step) const {
    const u8* const absmax = weight() + args_.absmax;
#pragma unroll 1
    for (int i = thread_; i < kUnits * kUnitGroups * kUnitRows; i += kThreads) {
      const int row = i % kUnitRows, group = i / kUnitRows % kUnitGroups, q = i / (kUnitRows * kUnitGroups);
      const i64 strip = first_strip() + strip_of_step(step) + strip_of(q);
      const i64 unit = first_unit() + unit_of_step(step) + unit_of(q);
      const i64 index = (strip * kUnitRows + row) * args_.groups + group_of(unit, group);
      copy_async(reinterpret_cast<u32*>(params_of(S(), stage, q, group) + S::kGroupBytes) + row,
                 absmax + min(index >> 8, args_.last_absmax) * 4);
    }
  }

  const QgemmSm80Args& args_;
  const int thread_ = static_cast<int>(threadIdx.x);
  i64 tile_, first_token_;
  const u8* weight_;
  const TokenRows* rows_;
  int num_tokens_;
  int left_;  // strips or, transposed, units from the first of the tile on
  const u8 *codes_ = nullptr, *params_ = nullptr;
  const XMemory* x_ = nullptr;
};

// The same for steps that come in order, `begin` to `end`, and zeros after these. Addresses move from step to
// step, and a number says for each before which step it must stop.
class MovingCopies : public Copies {
 public:
  __device__ __forceinline__ MovingCopies(const QgemmSm80Args& args, const Tile& at, const TokenRows* rows,
                                          i64 begin, i64 end)
      : Copies(args, at, rows), end_(end) {
    const Params param(KnownScales(), thread_);
    codes_ = code_address(thread_, begin);
    params_ = param_address(param, begin);
    x_ = kExperts ? static_cast<const XMemory*>(args.x) + begin * kQgemmSm80Step +
                        thread_ % kRowChunks * kChunkElements
                  : x_address(thread_, begin);
    if constexpr (KnownScales::kDoubleQuant) {
      const int q = thread_ / kUnitRows;
      const i64 strip = first_strip() + strip_of_step(begin) + strip_of(q);
      absmax_ = (strip * kUnitRows + thread_ % kUnitRows) * args.groups +
                (kTransposed ? group_of(first_unit() + unit_of(q), 0) : 0);
    }
    param_place_ = param.place();
    param_end_ = end_of(param.q);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) code_end_[i] = end_of(i * kPassUnits + thread_ / kCodeChunks);
    const i64 cols = args.x_stride - thread_ % kRowChunks * kChunkElements;
    x_end_ = static_cast<int>(min(end, (cols + kQgemmSm80Step - 1) / kQgemmSm80Step));
  }

  __device__ __forceinline__ void load_weight(u8* stage, i64 step) {
    const u32 to = shared_address(stage);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int q = i * kPassUnits;
      copy_async_or_zero(to + (i * kThreads + thread_) * 16,
                         codes_ + strip_of(q) * args_.strip_bytes + unit_offset(unit_of(q)),
                         static_cast<int>(step) < code_end_[i]);
    }
    if (thread_ < Params::kCopies)
      copy_async_or_zero(to + param_place_, params_, static_cast<int>(step) < param_end_);
    if constexpr (Params::kCopies > kThreads) {
      static_assert(Params::kCopies <= 2 * kThreads);
      const Params param(KnownScales(), thread_ + kThreads);
      if (thread_ < Params::kCopies - kThreads)
        copy_async_or_zero(to + param.place(), param_address(param, step), step < end_of(param.q));
    }
    if (KnownScales::kDoubleQuant) load_absmax(stage, step);
    if constexpr (kTransposed) {
      codes_ += 2 * args_.strip_bytes;
      params_ += 2 * (is_inlined() ? args_.strip_bytes : kUnitRows * Params(KnownScales(), thread_).size());
    } else {
      const bool ends_block = unit_of_block(step + 1, args_.block_shift) == 0;
      codes_ += ends_block ? args_.block_bytes - unit_offset((1 << args_.block_shift) - 1) : kUnitBytes;
      params_ += ends_block && is_inlined() ? args_.block_bytes : 0;
    }
  }

  __device__ __forceinline__ void load_x(u8* stage, i64 step) {
    const u32 to =
        shared_address(stage) + kStage.code_bytes + x_chunk(thread_ / kRowChunks, thread_ % kRowChunks);
#pragma unroll
    for (int first = 0; first < kTokens; first += kThreads / kRowChunks) {
      const int token = first + thread_ / kRowChunks;
      const bool valid = static_cast<int>(step) < x_end_ && token < num_tokens_;
      const i64 row = kExperts ? rows_->x[token] : first;
      copy_async_or_zero(to + x_chunk(first, 0), x_ + row * args_.x_stride, valid);
    }
    x_ += kQgemmSm80Step;
  }

 private:
  using Params = Param<KnownScales>;
  static constexpr int kPassUnits = kThreads / kCodeChunks, kPasses = kUnits / kPassUnits;

  // A thread has a row of a unit, whose groups are numbered from absmax_ on.
  __device__ __forceinline__ void load_absmax(u8* stage, i64 step) {
    static_assert(!KnownScales::kDoubleQuant || kUnitGroups == 1);
    static_assert(kUnits * kUnitRows == kThreads);
    u8* const to = params_of(KnownScales(), stage, thread_ / kUnitRows, 0) + KnownScales::kGroupBytes;
    const i64 group = absmax_ + (kTransposed ? 0 : group_of(step, 0));
    copy_async(reinterpret_cast<u32*>(to) + thread_ % kUnitRows,
               weight() + args_.absmax + min(group >> 8, args_.last_absmax) * 4);
    if (kTransposed) absmax_ += 2 * kUnitRows * args_.groups;
  }

  // The first step in which there is no unit q.
  __device__ __forceinline__ int end_of(int q) const {
    if constexpr (kTransposed)
      return unit_of(q) < left_ ? static_cast<int>(min(end_, (args_.strips - strip_of(q) + 1) / 2)) : 0;
    else
      return q < left_ ? static_cast<int>(end_) : 0;
  }

  i64 end_, absmax_ = 0;
  int param_place_, param_end_, code_end_[kPasses], x_end_;
};

#endif

}  // namespace halfbyte::device
