// qgemm_sm90_transposed, phase 3 for few tokens: a warp multiplies its stages by mma().
#pragma once

#include "cuda/device/mma.cuh"
#include "ops/qgemm/sm90_transposed/parameters.cuh"
#include "ops/qgemm/sm90_transposed/words.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Few tokens: a warp multiplies a stage, all columns of the tile, by mma(). Lane (g, t') has t = g % 4 of
// unit g / 4, or of half g / 4 of the one unit. Block b of 16 rows of A: columns 8b and up of those.
//
// The k of 16 rows of a strip are in the order that costs least: rows 2a and 2a + 8 are a pair, as their
// codes, in two words, become the nibbles of a byte by two instructions for four such bytes.
class WarpProduct {
 public:
  static constexpr int kBlocks = 4 * kUnits, kTokenTiles = kTokens / 8;

  __device__ __forceinline__ WarpProduct(const QgemmSm90TransposedArgs& args, const u8* shared, int, int lane,
                                         u32 rank)
      : table_lane_(pair_table_lane(lane, rank)), lane_(lane) {
    const int high = lane >> 4, t = lane >> 2 & 3, quad_lane = lane & 3;
    constexpr int kUnitsPerBlock = kTiling.units_per_block();
    const int unit = kUnits == 2 ? high : 0, half = kUnits == 2 ? 0 : high;
    at_ = unit / kUnitsPerBlock * kTiling.block_bytes() + unit % kUnitsPerBlock * kTiling.unit_bytes() +
          code_place(2 * quad_lane, half * 32 + 2 * t, kBits).byte;
    const u32 chunk = static_cast<u32>((lane & 7) * kStrips * 64 + (lane >> 3) * 16);
    box_at_ = static_cast<int>(kStrips == 1 ? swizzle_64(chunk) : swizzle_128(chunk));
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
#pragma unroll
      for (int q = 0; q < 4; ++q)
        parameters_[i][q] = Parameters(args, shared, unit, i % kGroups + half * kHalfGroups, i / kGroups,
                                       2 * quad_lane + q * 8);
    }
  }

  __device__ __forceinline__ void set_tile(int tile, int first_strip) {
#pragma unroll
    for (auto& block : sums_)
#pragma unroll
      for (auto& tile_sums : block)
#pragma unroll
        for (float& sum : tile_sums) sum = 0;
#pragma unroll
    for (auto& set : parameters_)
#pragma unroll
      for (Parameters& parameters : set) parameters.set_tile(tile, first_strip);
    load_ahead();
  }

  // Adds the products of a stage. What it holds is read before, so that it is filled again meanwhile:
  // refill(stage, whether this lane starts copies).
  template <class F>
  __device__ __forceinline__ void multiply(const Stream& stream, int stage, const F& refill) {
    Words<kWords> words[kStrips][kChunks][4];
    load_words(words, stream, stage);
    ParameterPairs pairs[kSets][2][2];  // of the even and the odd rows of 16
    load_parameters(pairs, stream, stage);
    u32 b[kStrips][2][kTokenTiles][2];
    load_x(b, stream, stage);
    __syncwarp();
    refill(stage, lane_ == 0);
    load_ahead();
    multiply_loaded(words, pairs, b);
  }
  __device__ __forceinline__ void finish() {}

  // Number `at` of a cluster's block `rank`, which has its share of the blocks of rows. Threads side by side
  // have what lies side by side.
  static constexpr int kOdd = 64;
  __device__ static __forceinline__ SumPlace place(int at, int rank, int cluster) {
    const int lane = at % 32, r = at / 32 % 2, tile = at / 64 % kTokenTiles, g = lane / 4;
    const int block = at / (64 * kTokenTiles) + (cluster == 2 ? rank * kBlocks / 2 : 0);
    return {block * kTiling.block_words() + (tile * 4 + r) * 32 + lane, tile * 8 + lane % 4 * 2 + r,
            g / 4 * 16 * kUnits + block * 4 + g % 4};
  }
  static constexpr int kTeamWords = kBlocks * kTiling.block_words();
  __device__ __forceinline__ void store(float* exchange, int team) const {
    each_sum(0, kBlocks, [&](int block, int r, float sum) {
      exchange[(team * kBlocks + block) * kTiling.block_words() + r * 32 + lane_] = sum;
    });
  }
  // f(block, r, sum) of some blocks.
  template <class F>
  __device__ __forceinline__ void each_sum(int first, int count, const F& f) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int r = 0; r < 4 * kTokenTiles; ++r) f(i, r, sums_[first + i][r / 4][r % 4]);
    }
  }

 private:
  // Words of a lane that lie together, for kCols times 16 columns; 8-bit codes of two units come in two
  // chunks.
  static constexpr int kWords = kBits == 8 ? 4 : 2 * kUnits, kCols = kBits == 8 ? 2 : kWords;
  static constexpr int kChunks = 2 * kUnits / kCols;
  // Of parameters of a lane: a set for each group of its columns, half of a unit or all of one, and strip.
  static constexpr int kHalfGroups = kGroup == 16 ? 2 : kGroup == 32 ? 1 : 0;
  static constexpr int kGroups = max(kHalfGroups * kUnits, 1), kSets = kGroups * kStrips;

  // ---- What a stage holds, to registers

  __device__ __forceinline__ void load_words(Words<kWords> (&words)[kStrips][kChunks][4],
                                             const Stream& stream, int stage) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const u8* const from = stream.slot(stage, strip) + at_;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
        for (int q = 0; q < 4; ++q)
          words[strip][chunk][q] =
              *reinterpret_cast<const Words<kWords>*>(from + chunk * kTileBytes + q * 4 * 64);
    }
  }
  __device__ __forceinline__ void load_parameters(ParameterPairs (&pairs)[kSets][2][2], const Stream& stream,
                                                  int stage) const {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RowParameters low = parameters_[set][2 * i].load(stream.slot(stage, 0));
        const RowParameters high = parameters_[set][2 * i + 1].load(stream.slot(stage, 0));
        pairs[set][i][0] = pair_rows(low, 0, high, 0);
        pairs[set][i][1] = pair_rows(low, 1, high, 1);
      }
    }
  }
  // Fragments of operand B, their k in the order of the codes.
  __device__ __forceinline__ void load_x(u32 (&b)[kStrips][2][kTokenTiles][2], const Stream& stream,
                                         int stage) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        u32 x[4];
        load_matrices(x, stream.box_bytes(stage) + tile * kStrips * 512 + (box_at_ ^ strip * 64));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          b[strip][i][tile][0] = permute(x[2 * i], x[2 * i + 1], 0x5410);
          b[strip][i][tile][1] = permute(x[2 * i], x[2 * i + 1], 0x7632);
        }
      }
    }
  }
  __device__ __forceinline__ void load_ahead() {
#pragma unroll
    for (auto& set : parameters_)
#pragma unroll
      for (Parameters& parameters : set) parameters.load_ahead();
  }

  // ---- Products

  __device__ __forceinline__ void multiply_loaded(const Words<kWords> (&words)[kStrips][kChunks][4],
                                                  const ParameterPairs (&pairs)[kSets][2][2],
                                                  const u32 (&b)[kStrips][2][kTokenTiles][2]) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 16 rows of the weight
#pragma unroll
          for (int j = 0; j < kCols; ++j) {  // 16 columns
            const int col = chunk * kCols + j, set = strip * kGroups + col * kGroups / (2 * kUnits);
            u32 a[2][4];
            load_codes(a, words[strip][chunk][2 * i], words[strip][chunk][2 * i + 1], j);
#pragma unroll
            for (int second = 0; second < 2; ++second) {
#pragma unroll
              for (int r = 0; r < 4; ++r) a[second][r] = weight_pair(a[second][r], pairs[set][i][r / 2]);
#pragma unroll
              for (int tile = 0; tile < kTokenTiles; ++tile)
                mma(Element(), sums_[2 * col + second][tile], a[second], b[strip][i][tile]);
            }
          }
        }
      }
    }
  }

  // The values of 16 columns, number j of the words.
  __device__ __forceinline__ void load_codes(u32 (&a)[2][4], const Words<kWords>& low,
                                             const Words<kWords>& high, int j) const {
    if constexpr (kBits == 4) {
      // Bytes of an even column of row 2a, of row 2a + 1, and the same of the second columns; then of odd
      // columns.
      const u32 even = select_bits(0x0F0F0F0Fu, low.word[j], high.word[j] << 4);
      const u32 odd = select_bits(0x0F0F0F0Fu, low.word[j] >> 4, high.word[j]);
      a[0][0] = look_up_pair<0>(even, table_lane_);
      a[0][1] = look_up_pair<0>(odd, table_lane_);
      a[0][2] = look_up_pair<1>(even, table_lane_);
      a[0][3] = look_up_pair<1>(odd, table_lane_);
      a[1][0] = look_up_pair<2>(even, table_lane_);
      a[1][1] = look_up_pair<2>(odd, table_lane_);
      a[1][2] = look_up_pair<3>(even, table_lane_);
      a[1][3] = look_up_pair<3>(odd, table_lane_);
    } else {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const u32 l = low.word[2 * j + second], h = high.word[2 * j + second];
        a[second][0] = byte_values<0, 0>(l, h);
        a[second][1] = byte_values<1, 1>(l, h);
        a[second][2] = byte_values<2, 2>(l, h);
        a[second][3] = byte_values<3, 3>(l, h);
      }
    }
  }

  u32 table_lane_;
  int lane_, at_, box_at_;
  Parameters parameters_[kSets][4];
  float sums_[kBlocks][kTokenTiles][4];
};

#endif

}  // namespace halfbyte::device
