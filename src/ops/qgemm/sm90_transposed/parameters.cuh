// qgemm_sm90_transposed, phase 2: the parameters that a lane needs of a stage.
#pragma once

#include "ops/qgemm/sm90_transposed/stream.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The parameters of two rows, `row` (even) and the next of strip `strip` of a step, in one group: number
// `group`, where there are several, of unit `unit`.
class Parameters {
 public:
  Parameters() = default;
  __device__ __forceinline__ Parameters(const QgemmSm90TransposedArgs& args, const u8* shared, int unit,
                                        int group, int strip, int row)
      : args_(&args),
        map_(reinterpret_cast<const float*>(shared + kTiling.map())),
        unit_(unit),
        group_(kTiling.groups_per_block() > 1 ? group : 0),
        strip_(strip),
        row_(row) {
    if constexpr (kDoubleQuant) offset_ = *reinterpret_cast<const float*>(args.weight + args.offset);
  }

  // Double quantization: the absmax of a step's scales comes from global memory, one step ahead. A step of
  // all teams has a multiple of 256 rows: their scales have whole absmax.
  __device__ __forceinline__ void set_tile(int tile, int first_strip) {
    if constexpr (kDoubleQuant) {
      i64 group = 0;
      if constexpr (kGroup != 0)
        group = min<i64>((static_cast<i64>(tile) * kUnits + unit_) * kUnitCols / kGroupSize + group_,
                         args_->groups - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const i64 row = (first_strip + strip_) * kUnitRows + row_ + i;
        block_[i] = static_cast<u32>(static_cast<u64>(row * args_->groups + group) / 256);
      }
    }
  }
  __device__ __forceinline__ void load_ahead() {
    if constexpr (kDoubleQuant) {
      constexpr u32 kBlocks = kTeams * kStrips * kUnitRows / 256;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Rows of the padding have no absmax, and what comes then does not matter.
        absmax_[i] = load_early(reinterpret_cast<const float*>(args_->weight + args_->absmax) +
                                min(block_[i], args_->absmax_count - 1));
        block_[i] += kBlocks * static_cast<u32>(args_->groups);
      }
    }
  }

  // `slot`: of strip 0.
  __device__ __forceinline__ RowParameters load(const u8* slot) const {
    constexpr int kUnitsPerBlock = kTiling.units_per_block(), kScales = kUnitRows * kScaleBytes;
    const u8* const block = slot + strip_ * kTiling.slot_bytes() +
                            unit_ / kUnitsPerBlock * kTiling.block_bytes() + kTiling.code_bytes();
    const u8* const scale = block + group_ * kScales + row_ * kScaleBytes;
    RowParameters rows;
    if constexpr (kDoubleQuant) {
      const u16 codes = *reinterpret_cast<const u16*>(scale);
      rows.scale[0] = map_[codes & 0xFF] * absmax_[0] + offset_;
      rows.scale[1] = map_[codes >> 8] * absmax_[1] + offset_;
    } else {
      load_scales<kParameterBytes>(rows.scale, scale, has_bf16_scales(*args_));
    }
    const u8* const second =
        block + kTiling.groups_per_block() * kScales + (group_ * kUnitRows + row_) * kSecondBytes;
    if constexpr (kAsymmetric) {
      const u16 zeros = *reinterpret_cast<const u16*>(second);
      rows.zero[0] = static_cast<float>(zeros & 0xFF);
      rows.zero[1] = static_cast<float>(zeros >> 8);
    }
    if constexpr (kAffine) load_scales<kParameterBytes>(rows.bias, second, has_bf16_scales(*args_));
    return rows;
  }

 private:
  const QgemmSm90TransposedArgs* args_ = nullptr;
  const float* map_ = nullptr;
  int unit_ = 0, group_ = 0, strip_ = 0, row_ = 0;
  u32 block_[2] = {};
  float absmax_[2] = {}, offset_ = 0;
};

#endif

}  // namespace halfbyte::device
