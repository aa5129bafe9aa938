// y[m, k] = x[m, n] W of a packed weight, m <= 64: sm_90a.
//
// A cluster makes tiles of 64 or 128 columns of the weight; its blocks share the rows, and so do the teams of
// a block: its warps or, where there are more tokens, warpgroups. A team streams its own rows: bulk copies
// bring the codes and parameters of a step, one strip or two, and the box of x for them, several stages
// ahead. The codes become 16-bit weights in registers: operand A of the matrix instructions, whose rows are
// columns of the weight, whose k runs along the rows of the weight. Operand B is the box of x. At the end of
// a tile the sums of the teams meet in shared memory, and those of the blocks, and are added in a fixed
// order.
//
// A word of 4-bit codes has rows 2a and 2a + 1 of the columns 16j + 8 * second + 2t + e, e and second 0 or 1.
// Lane (g, t') has the words of a = 8i + t' and 8i + t' + 4 for the 16 rows i of a strip; e = 0 is fragment
// row g, e = 1 row g + 8.
#include "ops/qgemm/sm90_transposed/sm90_transposed_args.h"

#include "cuda/device/mma.cuh"
#include "ops/qgemm/weight/sm90.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTokens = kTiling.tokens, kUnits = kTiling.units, kStages = kTiling.stages;
constexpr int kTeams = kTiling.teams(), kTeamWarps = kTransposedThreads / 32 / kTeams,
              kStrips = kTiling.strips();
static_assert(kTiling.parameter_bytes == kScaleBytes + kSecondBytes && kTiling.group == kGroup);
static_assert(kTiling.fits());
static_assert(kTiling.bits == 8 || kTiling.table_bytes() == kPairTableBytes);

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}

// The bits of `mask` from a, the others from b.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(y) : "r"(mask), "r"(a), "r"(b));
  return y;
}

// What a team is copied: a ring of stages, numbers first() and up, a step in each. Copies are started by one
// thread.
class Stream {
 public:
  __device__ __forceinline__ Stream(const QgemmSm90TransposedArgs& args, u8* shared, int team, int rank)
      : args_(args),
        boxes_(shared + kTiling.boxes()),
        slots_(shared + kTiling.slots()),
        full_(reinterpret_cast<Barrier*>(shared + kTiling.barriers())),
        team_(team),
        first_box_(k_major_tile(boxes_, 1024)) {
    asm("" : "+l"(first_box_));  // kept in registers: made again in each step, it costs more
    const int sets = (args.strips + kStrips - 1) / kStrips;
    const int first = (rank == 0 ? 0 : sets / 2) + team, last = rank + 1 < args.cluster ? sets / 2 : sets;
    first_strip_ = first * kStrips;
    steps_ = max(last - first + kTeams - 1, 0) / kTeams;
  }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full(first() + i), 1);
      init_barrier(empty(first() + i), kTeamWarps);
    }
    fence_barrier_init();
  }

  __device__ __forceinline__ void set_tile(int tile) {
    const int unit = tile * kUnits, units = min(kUnits, args_.units - unit);
    code_bytes_ = static_cast<u32>(kTiling.joint() ? units / kTiling.units_per_block() * kTiling.block_bytes()
                                                   : units * kTiling.unit_bytes());
    const u8* const block = args_.weight + static_cast<i64>(unit / kPackedUnits) * args_.block_bytes;
    codes_ = block + unit % kPackedUnits * kTiling.unit_bytes();
    parameters_ = block + kPackedUnits * kTiling.unit_bytes();
  }

  // Codes and parameters; `full` waits for x too.
  __device__ __forceinline__ void load_weight(int step, int stage) const {
    constexpr u32 kApart = kTiling.joint() ? 0 : kTiling.group_bytes();
    arrive_expecting(full(stage), kStrips * (code_bytes_ + kApart) + kTiling.box_bytes());
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      // Behind the last strip: that once more, for rows beyond x, which are zeros.
      const int strip = kStrips == 1 ? strip_of(step) : min(strip_of(step) + i, args_.strips - 1);
      u8* const to = slots_ + (stage * kStrips + i) * kTiling.slot_bytes();
      copy_bulk_once(to, codes_ + static_cast<u64>(strip) * args_.strip_bytes, code_bytes_, full(stage));
      if constexpr (kApart != 0) load_parameters(to + kTiling.code_bytes(), strip, full(stage));
    }
  }
  __device__ __forceinline__ void load_x(int step, int stage) const {
    load_tile(boxes_ + stage * kTiling.box_bytes(), &args_.x, 0, strip_of(step) * kUnitRows, full(stage));
  }

  __device__ __forceinline__ int steps() const { return steps_; }  // of the team
  __device__ __forceinline__ int strip_of(int step) const { return first_strip_ + step * kTeams * kStrips; }
  __device__ __forceinline__ int first() const { return team_ * kStages; }
  __device__ __forceinline__ int next(int stage) const {
    return stage + 1 == first() + kStages ? first() : stage + 1;
  }
  __device__ __forceinline__ int previous(int stage) const {
    return stage == first() ? first() + kStages - 1 : stage - 1;
  }
  __device__ __forceinline__ Barrier* full(int stage) const { return full_ + stage; }
  __device__ __forceinline__ Barrier* empty(int stage) const { return full_ + kTeams * kStages + stage; }
  // Operand B of rows 16 * i and up, for wgmma().
  __device__ __forceinline__ u64 box(int stage, int i) const {
    const u32 low =
        static_cast<u32>(first_box_) + static_cast<u32>(stage * (kTiling.box_bytes() / 16) + i * 2);
    return (first_box_ & ~0xFFFFFFFFull) | low;
  }
  __device__ __forceinline__ const u8* box_bytes(int stage) const {
    return boxes_ + stage * kTiling.box_bytes();
  }
  __device__ __forceinline__ const u8* slot(int stage, int strip) const {
    return slots_ + (stage * kStrips + strip) * kTiling.slot_bytes();
  }

 private:
  // Units of a block of the packed layout.
  static constexpr int kPackedUnits = max(kGroup, kUnitCols) / kUnitCols;

  __device__ __forceinline__ void load_parameters(u8* to, int strip, Barrier* barrier) const {
    if constexpr (kGroup != 0) {
      copy_bulk(to, parameters_ + static_cast<u64>(strip) * args_.strip_bytes, kTiling.group_bytes(),
                barrier);
    } else {
      constexpr int kScales = kUnitRows * kScaleBytes, kSeconds = kUnitRows * kSecondBytes;
      copy_bulk(to, args_.weight + args_.scales + static_cast<i64>(strip) * kScales, kScales, barrier);
      if constexpr (kSeconds != 0)
        copy_bulk(to + kScales, args_.weight + args_.seconds + static_cast<i64>(strip) * kSeconds, kSeconds,
                  barrier);
    }
  }

  const QgemmSm90TransposedArgs& args_;
  u8 *boxes_, *slots_;
  Barrier* full_;
  int team_, first_strip_, steps_;
  u64 first_box_;
  const u8 *codes_ = nullptr, *parameters_ = nullptr;  // of the tile and strip 0; inlined parameters
  u32 code_bytes_ = 0;
};

// The parameters of two rows, `row` (even) and the next of strip `strip` of a step, in one group: number
// `group` (of 32 columns) of unit `unit`.
class Parameters {
 public:
  Parameters() = default;
  __device__ __forceinline__ Parameters(const QgemmSm90TransposedArgs& args, const u8* shared, int unit,
                                        int group, int strip, int row)
      : args_(&args),
        map_(reinterpret_cast<const float*>(shared + kTiling.map())),
        unit_(unit),
        group_(kGroup == 32 ? group : 0),
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
      load_scales(rows.scale, scale);
    }
    const u8* const second =
        block + kTiling.groups_per_block() * kScales + (group_ * kUnitRows + row_) * kSecondBytes;
    if constexpr (kAsymmetric) {
      const u16 zeros = *reinterpret_cast<const u16*>(second);
      rows.zero[0] = static_cast<float>(zeros & 0xFF);
      rows.zero[1] = static_cast<float>(zeros >> 8);
    }
    if constexpr (kAffine) load_scales(rows.bias, second);
    return rows;
  }

 private:
  const QgemmSm90TransposedArgs* args_ = nullptr;
  const float* map_ = nullptr;
  int unit_ = 0, group_ = 0, strip_ = 0, row_ = 0;
  u32 block_[2] = {};
  float absmax_[2] = {}, offset_ = 0;
};

template <int n>
struct alignas(4 * n) Words {
  u32 word[n];
};

// Where sums lie in the exchange, in words from those of a team on: of a token and of the first of a pair of
// columns of the tile; kOdd on, of the second.
struct SumPlace {
  int word, token, pair;
};

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
        parameters_[i][q] = Parameters(args, shared, unit, kGroups == 2 ? i : half, kGroups == 2 ? 0 : i,
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

  // Adds the products of a stage.
  __device__ __forceinline__ void multiply(const Stream& stream, int step, int stage) {
    Words<kWords> words_of[kStrips][kChunks][4];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const u8* const words = stream.slot(stage, strip) + at_;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
        for (int q = 0; q < 4; ++q)
          words_of[strip][chunk][q] = *reinterpret_cast<const Words<kWords>*>(words + chunk * 1024 + q * 256);
    }
    ParameterPairs pairs[kSets][2][2];  // of the even and the odd rows of 16
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
    u32 b[kStrips][2][kTokenTiles][2];
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
    // The stage is read: it is filled again.
    __syncwarp();
    if (lane_ == 0 && step + kStages < stream.steps()) {
      stream.load_weight(step + kStages, stage);
      stream.load_x(step + kStages, stage);
    }
    load_ahead();

#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < kCols; ++j) {  // 16 columns
            const int col = chunk * kCols + j, set = kGroups == 2 ? col / 2 : strip;
            u32 a[2][4];
            load_codes(a, words_of[strip][chunk][2 * i], words_of[strip][chunk][2 * i + 1], j);
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
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int r = 0; r < 4 * kTokenTiles; ++r)
        exchange[(team * kBlocks + block) * kTiling.block_words() + r * 32 + lane_] =
            sums_[block][r / 4][r % 4];
    }
  }

 private:
  // Words of a lane that lie together, for kCols times 16 columns; 8-bit codes of two units come in two
  // chunks.
  static constexpr int kWords = kBits == 8 ? 4 : 2 * kUnits, kCols = kBits == 8 ? 2 : kWords;
  static constexpr int kChunks = 2 * kUnits / kCols;
  // Of parameters of a lane: there are two groups, or two strips, or one of each.
  static constexpr int kGroups = kGroup == 32 && kUnits == 2 ? 2 : 1, kSets = kGroups * kStrips;

  __device__ __forceinline__ void load_ahead() {
#pragma unroll
    for (auto& set : parameters_)
#pragma unroll
      for (Parameters& parameters : set) parameters.load_ahead();
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
      : table_lane_(pair_table_lane(lane, rank)),
        warp_(warp),
        lane_(lane),
        parameters_(args, shared, kUnits == 2 ? warp / 2 : 0, warp % 2, lane / 16, lane % 16 * 2) {
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
    parameters_.set_tile(tile, first_strip);
    parameters_.load_ahead();
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
    const RowParameters rows = parameters_.load(stream.slot(stage, 0));
    const ParameterPairs pairs = pair_rows(rows, 0, rows, 1);
    parameters_.load_ahead();
    wgmma_wait<3>();
    load_codes(a_[0], words_of[0]);
    multiply_rows<0>(stream, stage, words_of, pairs);
    multiply_rows<1>(stream, stage, words_of, pairs);
    // The stage before is read when no more than two products are under way; one of the warps fills it again,
    // each in turn.
    const int to = stream.previous(stage), next = step - 1 + kStages;
    const bool fills = step > 0 && next < stream.steps();
    wgmma_wait<2>();
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

  // A warp has columns of one group of 32, or of 64 where its loads of words then meet in no bank.
  static constexpr bool kHalfUnits = kBits == 8 || kGroup == 32;
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
                                                const ParameterPairs& pairs) {
    const ParameterPairs of_rows[2] = {shuffle<8 * i>(pairs), shuffle<8 * i + 4>(pairs)};
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
  Parameters parameters_;
  u32 a_[4][kUnits][4];
  float sums_[kUnits][kSums];
};

using Product = Select<kTokens <= 16, WarpProduct, WarpgroupProduct>;
static_assert(kTeams * Product::kTeamWords * 4 == kTiling.exchange_bytes());

struct Pair {
  float even = 0, odd = 0;
};

// The sums of the teams of this block, of a pair of columns.
__device__ __forceinline__ Pair add_teams(const float* sums) {
  Pair sum;
#pragma unroll
  for (int team = 0; team < kTeams; ++team) {
    sum.even += sums[team * Product::kTeamWords];
    sum.odd += sums[team * Product::kTeamWords + Product::kOdd];
  }
  return sum;
}

// Adds up the sums of the teams and of the blocks of the cluster, and stores y. Of a cluster each block has
// half of the sums, those for the other one it sends there. `parity`: of the number of the tile: what is sent
// stays until the other block has come to the end of the next tile.
__device__ __forceinline__ void finish(const QgemmSm90TransposedArgs& args, const float* exchange, int tile,
                                       int rank, int parity) {
  constexpr int kPairs = kTokens * kUnits * kUnitCols / 2;  // as many words are sent
  const int count = kPairs / args.cluster;
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // places are not made before the products, in registers that those need
  const auto sent = [&](int at) {
    const int word = parity * kPairs + 2 * at;
    return scratch_address(word / 32, word % 32, static_cast<u32>(rank));
  };
  if (args.cluster == 2) {
    for (int at = thread; at < count; at += kTransposedThreads) {
      const SumPlace place = Product::place(at, 1 - rank, 2);
      if (place.token >= args.m) continue;
      const Pair sum = add_teams(exchange + place.word);
      store_cluster(address_in(static_cast<u32>(1 - rank), sent(at)), sum.even, sum.odd);
    }
    cluster_arrive();
  }
  constexpr int kOwn = (kPairs + kTransposedThreads - 1) / kTransposedThreads;
  Pair own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = thread + i * kTransposedThreads;
    const SumPlace place = Product::place(at, rank, args.cluster);
    if (at < count && place.token < args.m) own[i] = add_teams(exchange + place.word);
  }
  if (args.cluster == 2) cluster_wait();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = thread + i * kTransposedThreads;
    const SumPlace place = Product::place(at, rank, args.cluster);
    const i64 column = static_cast<i64>(tile) * kUnits * kUnitCols + place.pair * 2;
    if (at >= count || place.token >= args.m || column >= args.k) continue;
    float even = own[i].even, odd = own[i].odd;
    if (args.cluster == 2) {  // the sum of two does not depend on their order
      even += load_shared(sent(at));
      odd += load_shared(sent(at) + 4);
    }
    u32* const y = reinterpret_cast<u32*>(static_cast<u16*>(args.y) + place.token * args.k + column);
    if (args.accumulate) {
      even += load(Element(), static_cast<u16>(*y));
      odd += load(Element(), static_cast<u16>(*y >> 16));
    }
    *y = store_pair(Element(), even, odd);
  }
}

__device__ __forceinline__ void run(const QgemmSm90TransposedArgs& args, u8* shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31;
  const int warp_of_block = __shfl_sync(~0u, thread >> 5, 0);  // known to be the same in all lanes
  const int warp = warp_of_block % kTeamWarps, team = warp_of_block / kTeamWarps;
  const int shift = args.cluster - 1;  // of 1 or 2
  const int cluster = static_cast<int>(blockIdx.x) >> shift,
            num_clusters = static_cast<int>(gridDim.x) >> shift;
  const int rank = static_cast<int>(blockIdx.x) & shift;
  const bool copies = warp == 0 && lane == 0;

  let_next_start();
  int tile = cluster;
  Stream stream(args, shared, team, rank);
  stream.set_tile(tile);
  // Half of the ring does not wait for x, x does not wait behind the other half.
  constexpr int kEarly = (kStages + 1) / 2;
  if (copies) {
    stream.init();
    prefetch_map(&args.x);
    for (int i = 0; i < min(kEarly, stream.steps()); ++i) stream.load_weight(i, stream.first() + i);
  }
  if constexpr (kBits == 4) build_pair_table<kTransposedThreads>(thread, static_cast<u32>(rank));
  if constexpr (kDoubleQuant) {
    if (thread < 256)
      reinterpret_cast<float*>(shared + kTiling.map())[thread] =
          reinterpret_cast<const float*>(args.weight + args.map)[thread];
  }
  Product product(args, shared, warp, lane, static_cast<u32>(rank));
  wait_for_earlier();
  if (copies) {
    for (int i = 0; i < min(kEarly, stream.steps()); ++i) stream.load_x(i, stream.first() + i);
    for (int i = kEarly; i < min(kStages, stream.steps()); ++i) {
      stream.load_x(i, stream.first() + i);
      stream.load_weight(i, stream.first() + i);
    }
  }
  // The other block of a cluster has begun when sums are sent there.
  if (args.cluster == 2) cluster_arrive_relaxed();
  __syncthreads();

  int stage = stream.first();
  u32 parity = 0;
  for (int number = 0;; ++number) {
    product.set_tile(tile, stream.strip_of(0));
    for (int step = 0; step < stream.steps(); ++step) {
      wait(stream.full(stage), parity);
      product.multiply(stream, step, stage);
      stage = stream.next(stage);
      if (stage == stream.first()) parity ^= 1;
    }
    product.finish();

    // The exchange lies where the stages do: all of them are done with, and the next tile's come after.
    __syncthreads();
    float* const exchange = reinterpret_cast<float*>(shared + kTiling.boxes());
    product.store(exchange, team);
    if (args.cluster == 2 && number == 0) cluster_wait();
    __syncthreads();
    finish(args, exchange, tile, rank, number % 2);
    tile += num_clusters;
    if (tile >= args.tiles) return;
    fence_proxy_async();
    __syncthreads();
    stream.set_tile(tile);
    if (copies) {
      for (int i = 0, to = stage; i < min(kStages, stream.steps()); ++i, to = stream.next(to)) {
        stream.load_weight(i, to);
        stream.load_x(i, to);
      }
    }
  }
}

#endif

extern "C" __global__ void __launch_bounds__(kTransposedThreads, 1)
    qgemm_sm90_transposed(const __grid_constant__ QgemmSm90TransposedArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) u8 shared[];
  run(args, shared);
#endif
}

}  // namespace halfbyte::device
