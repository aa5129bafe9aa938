// qgemm_sm90_transposed, phase 3 for more tokens: a warpgroup multiplies its stages by wgmma().
#pragma once

#include "ops/qgemm/sm90_transposed/parameters.cuh"
#include "ops/qgemm/sm90_transposed/words.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The values of two words, a and a + 4, of 4-bit codes: of `second`, q = 0 (a) or 1 and e in [second][2 * q +
// e], the even row in the low half.
template <int n>
__device__ __forceinline__ void look_up_words(u32 (&values)[n][4], u32 first, u32 second, u32 table_lane) {
  // Bytes 0 and 2 of a word are of the even row, 1 and 3 of the odd one; their low nibbles are of the even
  // column.
  const u32 even_rows = permute(first, second, 0x6420), odd_rows = permute(first, second, 0x7531);
  const u32 even_cols = select_bits(0x0F0F0F0Fu, even_rows, odd_rows << 4);
  const u32 odd_cols = select_bits(0x0F0F0F0Fu, even_rows >> 4, odd_rows);
  values[0][0] = look_up_pair<0>(even_cols, table_lane);
  values[0][1] = look_up_pair<0>(odd_cols, table_lane);
  values[0][2] = look_up_pair<2>(even_cols, table_lane);
  values[0][3] = look_up_pair<2>(odd_cols, table_lane);
  values[n - 1][0] = look_up_pair<1>(even_cols, table_lane);
  values[n - 1][1] = look_up_pair<1>(odd_cols, table_lane);
  values[n - 1][2] = look_up_pair<3>(even_cols, table_lane);
  values[n - 1][3] = look_up_pair<3>(odd_cols, table_lane);
}

// More tokens: a warpgroup multiplies the 64 rows of a stage by wgmma(). A warp has some words of all
// columns; of two units, warps 0 and 1 have the first, 2 and 3 the other, and `second` is the block of 64
// rows of A; of one unit, warps 0 and 1 have second = 0, the others 1.
class WarpgroupProduct {
 public:
  __device__ __forceinline__ WarpgroupProduct(const QgemmSm90TransposedArgs& args, const u8* shared, int warp,
                                              int lane, u32 rank)
      : table_lane_(pair_table_lane(lane, rank)), warp_(warp), lane_(lane), is_odd_(lane / 4 % 2 == 1) {
#pragma unroll
    for (int i = 0; i < kSets; ++i)
      parameters_[i] = Parameters(args, shared, kUnits == 2 ? warp / 2 : 0, warp % 2 * kSets + i, lane / 16,
                                  lane % 16 * 2);
    const int high = warp / 2, unit = kUnits == 2 ? high : 0;
    const WordPlace place = word_place(warp % 2, lane / 4);
    constexpr int kUnitsPerBlock = kTiling.units_per_block();
    // a & 2 is that of lane % 4: the words of 4 more pairs of rows are at a constant distance.
    at_ = unit / kUnitsPerBlock * kTiling.block_bytes() + unit % kUnitsPerBlock * kTiling.unit_bytes() +
          code_place(lane % 4 * 2, 16 * place.j + 2 * place.t, kBits).byte;
    if (kBits == 8 && kUnits == 1) at_ += 4 * high;
    selector_ = high == 0 ? 0x5410 : 0x7632;
  }

  __device__ __forceinline__ void set_tile(int tile, int first_strip) {
#pragma unroll
    for (auto& block : sums_)
#pragma unroll
      for (float& sum : block) sum = 0;
#pragma unroll
    for (Parameters& parameters : parameters_) {
      parameters.set_tile(tile, first_strip);
      parameters.load_ahead();
    }
  }

  // Adds the products of a stage but for those under way, which finish() waits for: at most of that stage.
  __device__ __forceinline__ void multiply(const Stream& stream, int step, int stage) {
    const u8* const words = stream.slot(stage, 0) + at_;
    Words<kWords> words_of[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int q = 0; q < 2; ++q)
        words_of[i][q] = *reinterpret_cast<const Words<kWords>*>(words + i / 2 * kTiling.slot_bytes() +
                                                                 (i % 2 * 2 + q) * 4 * 64);
    ParameterPairs pairs[kSets];
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const RowParameters rows = parameters_[i].load(stream.slot(stage, 0));
      pairs[i] = pair_rows(rows, 0, rows, 1);
      parameters_[i].load_ahead();
    }
    wgmma_wait<3>();
    load_codes(a_[0], words_of[0]);
    multiply_rows<0>(stream, stage, words_of, pairs);
    multiply_rows<1>(stream, stage, words_of, pairs);
    // The stage before is read when no more than two products are under way; one of the warps fills it again,
    // each in turn.
    const int to = stream.previous(stage), next = step - 1 + kStages;
    const bool fills = step > 0 && next < stream.steps();
    wgmma_wait<2>();
    __syncwarp();  // what the other lanes have read is in order before the first lane arrives for all
    if (fills && lane_ == 0) arrive(stream.empty(to));
    multiply_rows<2>(stream, stage, words_of, pairs);
    multiply_rows<3>(stream, stage, words_of, pairs);
    if (fills && step % kTeamWarps == warp_ && lane_ == 0) {
      wait(stream.empty(to), parities_ >> (to - stream.first()) & 1);
      stream.load_weight(next, to);
      stream.load_x(next, to);
    }
    if (fills) parities_ ^= 1u << (to - stream.first());
  }
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
#pragma unroll
    for (auto& block : sums_) pin(block);
  }

  // As those of WarpProduct, but threads side by side have columns side by side: here a warp has columns far
  // apart. A block of the cluster has its share of the columns.
  static constexpr int kOdd = 2 * kTiling.sum_words();
  __device__ static __forceinline__ SumPlace place(int at, int rank, int cluster) {
    constexpr int kPairs = kUnits * kUnitCols / 2;
    const int token = cluster == 2 ? at / (kPairs / 2) : at / kPairs;
    const int pair = cluster == 2 ? at % (kPairs / 2) + rank * (kPairs / 2) : at % kPairs;
    const int second = pair / 4 % 2, high = kUnits == 2 ? pair / 32 : second;
    const LanePlace place = lane_place(high, {pair / 8 % 4, pair % 4});
    return {(kUnits == 2 ? second : 0) * kTiling.block_words() +
                (token / 8 * 4 + token % 2) * kTiling.sum_words() + place.warp * 33 + place.g * 4 +
                token % 8 / 2,
            token, pair};
  }
  static constexpr int kTeamWords = kUnits * kTiling.block_words();
  __device__ __forceinline__ void store(float* exchange, int team) const {
#pragma unroll
    for (int block = 0; block < kUnits; ++block) {
#pragma unroll
      for (int r = 0; r < kSums; ++r)
        exchange[(team * kUnits + block) * kTiling.block_words() + r * kTiling.sum_words() + warp_ * 33 +
                 lane_] = sums_[block][r];
    }
  }

 private:
  static constexpr int kSums = kTokens / 2;

  // A warp has columns of one group of 32, or two of 16, or of 64 where its loads of words then meet in no
  // bank. Of groups of 16 a lane has one, the odd ones the second.
  static constexpr bool kHalfUnits = kBits == 8 || kGroup == 32 || kGroup == 16;
  static constexpr int kSets = kGroup == 16 ? 2 : 1;
  struct WordPlace {
    int j, t;
  };
  __device__ static __forceinline__ WordPlace word_place(int odd, int g) {
    return kHalfUnits ? WordPlace{2 * odd + (g & 1), g >> 1} : WordPlace{g & 3, 2 * odd + (g >> 2)};
  }
  // Who has it.
  struct LanePlace {
    int warp, g;
  };
  __device__ static __forceinline__ LanePlace lane_place(int high, WordPlace word) {
    return kHalfUnits ? LanePlace{2 * high + (word.j >> 1), (word.j & 1) + 2 * word.t}
                      : LanePlace{2 * high + (word.t >> 1), word.j + 4 * (word.t & 1)};
  }

  static constexpr int kWords = kBits == 8 ? kUnits : 1;  // of a lane that lie together

  // Rows 16 * i and up of the stage, of which the values are in a_[i]; those of the next 16 are looked up
  // meanwhile.
  template <int i>
  __device__ __forceinline__ void multiply_rows(const Stream& stream, int stage,
                                                const Words<kWords> (&words)[4][2],
                                                const ParameterPairs (&pairs)[kSets]) {
    const ParameterPairs of_rows[2] = {of_lanes<8 * i>(pairs), of_lanes<8 * i + 4>(pairs)};
    if constexpr (i < 3) {
      wgmma_wait<2>();  // three products ago a_[i + 1] was read
      load_codes(a_[i + 1], words[i + 1]);
    }
    u32(&a)[kUnits][4] = a_[i];
#pragma unroll
    for (int block = 0; block < kUnits; ++block) {
#pragma unroll
      for (int r = 0; r < 4; ++r) a[block][r] = weight_pair(a[block][r], of_rows[r / 2]);
      pin(a[block]);
    }
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < kUnits; ++block)
      wgmma<Major::k>(Element(), sums_[block], a[block], stream.box(stage, i));
    wgmma_commit();
  }

  template <int kFirst>
  __device__ __forceinline__ ParameterPairs of_lanes(const ParameterPairs (&pairs)[kSets]) const {
    const ParameterPairs first = shuffle<kFirst>(pairs[0]);
    if constexpr (kSets == 1) return first;
    return select(is_odd_, shuffle<kFirst>(pairs[kSets - 1]), first);
  }

  __device__ __forceinline__ void load_codes(u32 (&values)[kUnits][4],
                                             const Words<kWords> (&words)[2]) const {
    if constexpr (kBits == 4) {
      if constexpr (kUnits == 2) {
        look_up_words(values, words[0].word[0], words[1].word[0], table_lane_);
      } else {
        // Half of each word; two nibbles of each half change places, then bytes are two rows of a column.
        u32 word = permute(words[0].word[0], words[1].word[0], selector_);
        word ^= ((word ^ word >> 4) & 0x00F000F0u) * 17;
        values[0][0] = look_up_pair<0>(word, table_lane_);
        values[0][1] = look_up_pair<1>(word, table_lane_);
        values[0][2] = look_up_pair<2>(word, table_lane_);
        values[0][3] = look_up_pair<3>(word, table_lane_);
      }
    } else {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
#pragma unroll
        for (int block = 0; block < kUnits; ++block) {
          const u32 word = words[q].word[block];
          values[block][2 * q] = byte_values<0, 2>(word, word);
          values[block][2 * q + 1] = byte_values<1, 3>(word, word);
        }
      }
    }
  }

  u32 table_lane_, selector_;
  u32 parities_ = 0;  // a bit a stage: of the phase of `empty`
  int warp_, lane_, at_;
  Parameters parameters_[kSets];
  bool is_odd_;
  u32 a_[4][kUnits][4];
  float sums_[kUnits][kSums];
};

#endif

}  // namespace halfbyte::device
