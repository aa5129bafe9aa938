// y = x . W^T for up to 64 tokens (rows of x): sm_90a. The weight is operand A of the matrix instructions,
// decoded into registers; tokens are the columns of operand B, which is x in shared memory.
//
// A warpgroup of its own keeps a ring of stages full of the codes of the block's tiles, one behind the other,
// and of x. Each of the others has 64 rows, or twice 64, and some of the columns of each stage; it decodes
// the next chunk of its columns while the tensor cores multiply this one. The sums of a chunk start at zero
// and are scaled in f32 when they are added to those of the tile; affine formats are scaled as they are
// decoded.
#include "ops/qgemm/sm90_wgmma/sm90_wgmma_args.h"

#include "ops/qgemm/weight/sm90.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTokens = kTiling.tokens, kStages = kTiling.stages, kCluster = kTiling.cluster;
static_assert(kStages > 1);
constexpr int kWarpgroups = kTiling.warpgroups();  // that multiply; one more copies
constexpr int kMultipliers = kWarpgroups * 128, kThreads = kTiling.threads();
// Of a thread that multiplies or copies: what all threads have when they start, dealt anew.
constexpr int kManyRegisters = kWarpgroups == 2 ? 232 : 112, kFewRegisters = kWarpgroups == 2 ? 40 : 32;
constexpr int kRowGroups = kTiling.row_groups(), kColGroups = kTiling.col_groups();
constexpr int kTilePairs = kTiling.strips / 2,
              kPairs = kTilePairs / kRowGroups;  // of strips, the latter a warpgroup's
constexpr int kStageCols = kTiling.stage_cols(), kGroupCols = kStageCols / kColGroups;  // of a warpgroup
constexpr int kStageBytes = kTiling.stage_bytes(), kStripBytes = kTiling.strip_bytes();
constexpr int kBlockCols = kTiling.block_cols, kBlockBytes = kTiling.block_bytes;
constexpr int kStageBlocks = kStageCols / kBlockCols;
// Columns that are added up before they are scaled.
constexpr int kChunkCols = kGroup == 32 ? 32 : 64, kChunkSteps = kChunkCols / 16;
constexpr int kChunks = kGroupCols / kChunkCols;
constexpr int kChunkWords = (kChunkCols + kWordsCols - 1) / kWordsCols;  // 16 bytes of codes each
static_assert(kChunks % 2 == 0 && kPairs <= 2);
constexpr bool kScalesChunks = kGroup != 0 && !kAffine;  // else rows, at the end, or codes
constexpr int kSums = kTokens / 2;                       // of a thread
constexpr int kBoxBytes = kTokens * 128;                 // of x: 64 columns
constexpr int kGroupLines = 4 * kPairs * kSums;          // of scratch memory, for the sums of a warpgroup
constexpr int kClusterLines =
    kRowGroups * (kColGroups - 1) * kGroupLines;  // before those from the other block
static_assert(kClusterLines + (kCluster - 1) * kGroupLines <= 256);
static_assert(kCluster == 1 || kRowGroups <= 2);

// From the codes of a column 0: where those of a column begin that a lane reads at once.
__device__ constexpr int code_offset(int col) {
  return col / kBlockCols * kBlockBytes + col % kBlockCols / kUnitCols * (kUnitRows * kUnitCols * kBits / 8) +
         col % kUnitCols / kWordsCols * 1024;
}
// Where the scales of the group of a column begin.
__device__ constexpr int group_offset(int col) {
  return col / kBlockCols * kBlockBytes + kUnitRows * kBlockCols * kBits / 8 +
         col % kBlockCols / kGroupSize * (kUnitRows * kScaleBytes);
}
// Likewise its zero points or biases.
__device__ constexpr int second_offset(int col) {
  return col / kBlockCols * kBlockBytes +
         kUnitRows * (kBlockCols * kBits / 8 + kBlockCols / kGroupSize * kScaleBytes) +
         col % kBlockCols / kGroupSize * (kUnitRows * kSecondBytes);
}

#endif

extern "C" __global__ void
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__launch_bounds__(kThreads, 1)
#endif
    qgemm_sm90_wgmma(const __grid_constant__ QgemmSm90WgmmaArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ Words4 shared_words[];
  u8* const shared = reinterpret_cast<u8*>(shared_words);
  u8* const ring = shared + kTiling.ring_offset();
  float* const map = reinterpret_cast<float*>(shared + kTiling.map_offset());
  Barrier* const full = reinterpret_cast<Barrier*>(shared + kTiling.barrier_offset());
  Barrier* const empty = full + kStages;
  // Of the sums of a tile that the other block of the cluster sends; when they may be overwritten.
  Barrier* const received = empty + kStages;
  Barrier* const taken = received + 1;

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0), warp_of_group = warp % 4, warpgroup = warp / 4;
  const u32 rank = kCluster == 1 ? 0 : cluster_rank();
  const int worker = static_cast<int>(blockIdx.x) / kCluster;

  const int first_pair = worker * args.num_pairs + min(worker, args.num_longer);
  const int last_pair = first_pair + args.num_pairs + (worker < args.num_longer ? 1 : 0);
  const int half = static_cast<int>(rank);
  const int first_stage = args.num_stages * half / kCluster,
            last_stage = args.num_stages * (half + 1) / kCluster;

  let_next_start();
  const bool copies_codes = warp == kWarpgroups * 4, copies_x = warp == kWarpgroups * 4 + 1;
  // The warp that makes the barriers waits for nobody and starts to copy.
  if (copies_codes) {
    if (elect_lane()) {
#pragma unroll
      for (int slot = 0; slot < kStages; ++slot) {
        init_barrier(full + slot, 2);
        init_barrier(empty + slot, kWarpgroups * 4);
      }
      init_barrier(received, 1);
      init_barrier(taken, 4);
      fence_barrier_init();
    }
    __syncwarp();
    arrive_some(0, kMultipliers + 32);
    arrive_some(15, 64);
  } else if (copies_x) {
    if (elect_lane()) prefetch_map(&args.x);
    sync_some(15, 64);
  }
  if constexpr (kCluster > 1) cluster_arrive_relaxed();

  if (warpgroup == kWarpgroups) {
    // ---- The ring: a lane copies codes, another x.
    keep_registers<kFewRegisters>();
    int slot = 0;
    u32 parity = 1;  // of the phase of `empty` before this round
    const auto advance = [&] {
      if (++slot == kStages) slot = 0, parity ^= 1;
    };
    if (copies_codes && elect_lane()) {
      const int last_strip = min(2 * last_pair, args.num_strips);
      int before_x = kStages / 2;  // stages; those behind them would hold up x
      for (int strip = 2 * first_pair; strip < last_strip; strip += kTiling.strips) {
        const u8* from = args.weight + strip * args.strip_bytes + i64{first_stage} * kStripBytes;
        int num_bytes =
            (args.num_blocks - first_stage * kStageBlocks) * kBlockBytes;  // to the end of the strip
        const int num_strips = min(kTiling.strips, last_strip - strip);
        for (int stage = first_stage; stage < last_stage; ++stage, advance()) {
          if (before_x-- == 0) wait_for_earlier();
          const u32 size = static_cast<u32>(min(num_bytes, kStripBytes));
          u8* to = ring + slot * kStageBytes + kTiling.x_bytes();
          wait(empty + slot, parity);
          arrive_expecting(full + slot, size * static_cast<u32>(num_strips));
          const u8* source = from;
#pragma unroll
          for (int i = 0; i < kTiling.strips; ++i, source += args.strip_bytes)
            if (i < num_strips) copy_bulk_once(to + i * kStripBytes, source, size, full + slot);
          from += kStripBytes;
          num_bytes -= kStripBytes;
        }
      }
    } else if (copies_x && elect_lane()) {
      wait_for_earlier();
      for (int pair = first_pair; pair < last_pair; pair += kTilePairs)
        for (int stage = first_stage; stage < last_stage; ++stage, advance()) {
          wait(empty + slot, parity);
          arrive_expecting(full + slot, kTiling.x_bytes());
#pragma unroll
          for (int i = 0; i < kStageCols / 64; ++i)
            load_tile(ring + slot * kStageBytes + i * kBoxBytes, &args.x, 0, stage * kStageCols + i * 64,
                      full + slot);
        }
    }
    return;
  }

  // ---- The products.
  take_registers<kManyRegisters>();
  if constexpr (kBits == 4) build_pair_table<kMultipliers>(thread, rank);
  if constexpr (kDoubleQuant)
    if (thread < 256) map[thread] = reinterpret_cast<const float*>(args.weight + args.map)[thread];
  wait_for_earlier();
  sync_some(0, kMultipliers + 32);
  if constexpr (kCluster > 1) cluster_wait();  // the other block has its barriers

  const int row_group = warpgroup / kColGroups, col_group = warpgroup % kColGroups;
  int slot = 0;
  u32 parity = 0;
  // By all warps, when the sums of the stage are done.
  const auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) arrive(empty + slot);
  };

  // ---- A lane's rows, 2a and 2a + 1 of the strip.
  const int g = lane / 4, t = lane % 4, a_of_strip = 8 * (warp_of_group & 1) + g;
  const int pair_of_tile = row_group * kPairs, strip_of_tile = 2 * pair_of_tile + warp_of_group / 2;
  const int strip_at = kTiling.x_bytes() + strip_of_tile * kStripBytes;
  const int first_col = col_group * kGroupCols;  // of a stage
  const int codes_at = strip_at + code_offset(first_col) + packed_slot(a_of_strip, t) * 16;
  const int scales_at = strip_at + group_offset(first_col) + 2 * a_of_strip * kScaleBytes;
  const int seconds_at = strip_at + second_offset(first_col) + 2 * a_of_strip * kSecondBytes;
  const u32 table_lane = pair_table_lane(lane, rank);
  const u64 x = k_major_tile(ring + first_col / 64 * kBoxBytes, 1024);  // of the first stage

  u32 tile_parity = 0;
  for (int pair = first_pair; pair < last_pair; pair += kTilePairs) {
    // Pairs of strips that this warpgroup has, now and in the next tile.
    const int num_pairs_here = last_pair - pair - pair_of_tile;
    const bool active = num_pairs_here > 0, active_again = num_pairs_here > kTilePairs;
    const int strip = 2 * pair + strip_of_tile, row = strip * 32 + 2 * a_of_strip;  // of the first
    float sums[kPairs][kSums] = {};
    RowPair rows[2];  // of two pairs of strips, or of every other chunk of one

    // `group`: of the row; `b`: the pair of strips.
    const auto load_rows = [&](RowPair& to, const u8* scales, const u8* seconds, int b, int group,
                               bool inside) {
      if constexpr (kDoubleQuant) {
        const u32 codes = *reinterpret_cast<const u16*>(scales);
        const float* const absmax = reinterpret_cast<const float*>(args.weight + args.absmax);
        const float offset = *reinterpret_cast<const float*>(args.weight + args.offset);
        const int at = min(row + 64 * b, args.n - 1) * args.groups + group;
        to.scale[0] = map[codes & 255] * absmax[min(at, args.last_scale) >> 8] + offset;
        to.scale[1] = map[codes >> 8] * absmax[min(at + args.groups, args.last_scale) >> 8] + offset;
      } else {
        load_scales(to.scale, scales);
      }
      // What was not copied may be anything.
      to.scale[0] = inside ? to.scale[0] : 0;
      to.scale[1] = inside ? to.scale[1] : 0;
      if constexpr (kAsymmetric) {
        const u32 zeros = *reinterpret_cast<const u16*>(seconds);
        to.zero[0] = above_2_23(zeros & 255);
        to.zero[1] = above_2_23(zeros >> 8);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          to.zero_pair[i] = store_pair(Element(), to.zero[i] - kMagic, to.zero[i] - kMagic);
      }
      if constexpr (kAffine) {
        float bias[2];
        load_scales(bias, seconds);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          to.scale_pair[i] = store_pair(Element(), to.scale[i], to.scale[i]);
          to.bias_pair[i] = inside ? store_pair(Element(), bias[i], bias[i]) : 0;
        }
      }
    };
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int b = i % kPairs;
        const i64 at = min(strip + 2 * b, args.num_strips - 1) * i64{kUnitRows} + 2 * a_of_strip;
        load_rows(rows[i], args.weight + args.scales + at * kScaleBytes,
                  args.weight + args.seconds + at * kSecondBytes, b, 0, true);
      }
    }

    if (active) {
      u32 a[2][kChunkSteps][4];
      float chunk[2][kSums];
      Words4 words[kPairs][kChunkWords];
      // Chunk c of the stage in `slot`, which is of pair c % kPairs: first its codes, which take a while,
      // then its values to a[c % 2].
      const auto load_chunk = [&](int c) {
        const u8* const from = ring + slot * kStageBytes + c % kPairs * 2 * kStripBytes + codes_at;
#pragma unroll
        for (int i = 0; i < kChunkWords; ++i)
          if (const int col = c / kPairs * kChunkCols + i * kWordsCols; col % kWordsCols == 0)
            words[c % kPairs][i] = load_words(from + code_offset(col));
      };
      const auto decode_chunk = [&](int c, int stage) {
        const int b = c % kPairs, q = c / kPairs;
        const u8* const from = ring + slot * kStageBytes + b * 2 * kStripBytes;
        RowPair& to = rows[c % 2];
        if constexpr (kGroup != 0) {
          const int col = stage * kStageCols + first_col + q * kChunkCols;
          load_rows(to, from + scales_at + group_offset(q * kChunkCols) - group_offset(0),
                    from + seconds_at + second_offset(q * kChunkCols) - second_offset(0), b, col / kGroupSize,
                    col < args.num_blocks * kBlockCols);
        }
#pragma unroll
        for (int j = 0; j < kChunkSteps; ++j) {
          const int col = q * kChunkCols + 16 * j;
          decode(a[c % 2][j], words[b][16 * j / kWordsCols], col % kWordsCols / 16, to, table_lane);
        }
#pragma unroll
        for (int j = 0; j < kChunkSteps; ++j) pin(a[c % 2][j]);
      };
      const auto add_chunk = [&](int c) {
        if constexpr (kScalesChunks) {
          pin(chunk[c % 2]);
#pragma unroll
          for (int i = 0; i < kSums; ++i)
            sums[c % kPairs][i] =
                multiply_add(rows[c % 2].scale[i / 2 % 2], chunk[c % 2][i], sums[c % kPairs][i]);
        }
      };

      wait(full + slot, parity);
      load_chunk(0);
      decode_chunk(0, first_stage);
      for (int stage = first_stage; stage < last_stage; ++stage) {
        const int done = slot;
#pragma unroll
        for (int c = 0; c < kChunks * kPairs; ++c) {
          const int q = c / kPairs;
          // Only the address changes, which does not carry into the upper half.
          const int x_offset = done * kStageBytes + q * kChunkCols / 64 * kBoxBytes + q * kChunkCols % 64 * 2;
          const u32 x_low = static_cast<u32>(x) + static_cast<u32>(x_offset) / 16;
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < kChunkSteps; ++j) {
            const u64 tile = (x >> 32) << 32 | (x_low + static_cast<u32>(j * 2));
            if constexpr (kScalesChunks)
              wgmma<Major::k>(Element(), chunk[c % 2], a[c % 2][j], tile, j > 0);
            else
              wgmma<Major::k>(Element(), sums[c % kPairs], a[c % 2][j], tile);
          }
          wgmma_commit();
          const bool ends_stage = c + 1 == kChunks * kPairs, goes_on = !ends_stage || stage + 1 < last_stage;
          const int next = ends_stage ? 0 : c + 1;
          if (goes_on) {
            if (ends_stage) {
              if (++slot == kStages) slot = 0, parity ^= 1;
              wait(full + slot, parity);
            }
            load_chunk(next);
          }
          if (c > 0) {
            wgmma_wait<1>();
            add_chunk(c - 1);
          }
          if (goes_on) decode_chunk(next, ends_stage ? stage + 1 : stage);
        }
        // Sums that are under way from one turn of the loop to the next would make the compiler wait for each
        // instruction.
        wgmma_wait<0>();
        if constexpr (!kScalesChunks)
          for (auto& some : sums) pin(some);
        add_chunk(kChunks * kPairs - 1);
        release(done);
      }
    } else {
      for (int stage = first_stage; stage < last_stage; ++stage) {
        wait(full + slot, parity);
        release(slot);
        if (stage + 1 < last_stage && ++slot == kStages) slot = 0, parity ^= 1;
      }
    }
    if (++slot == kStages) slot = 0, parity ^= 1;

    // ---- The sums of the warpgroups, then of the blocks.
    const auto line = [&](int first, int i) {
      return scratch_address(first + warp_of_group * (kPairs * kSums) + i, lane, rank);
    };
    const auto each_sum = [&](const auto& f) {
#pragma unroll
      for (int i = 0; i < kPairs * kSums; ++i) f(sums[i / kSums][i % kSums], i);
    };
    if constexpr (kColGroups > 1) {
      // The first of them adds up. The second barrier: what it read may be overwritten.
      constexpr int kNumThreads = kColGroups * 128;
      const int stored = 1 + 2 * row_group, read = stored + 1,
                lines = row_group * (kColGroups - 1) * kGroupLines;
      if (active && col_group > 0) {
        if (pair > first_pair) sync_some(read, kNumThreads);
        each_sum(
            [&](float& sum, int i) { store_shared(line(lines + (col_group - 1) * kGroupLines, i), sum); });
        arrive_some(stored, kNumThreads);
      } else if (active) {
        sync_some(stored, kNumThreads);
#pragma unroll
        for (int c = 0; c < kColGroups - 1; ++c)
          each_sum([&](float& sum, int i) { sum += load_shared(line(lines + c * kGroupLines, i)); });
        if (active_again) arrive_some(read, kNumThreads);
      }
    }
    bool stores = active && col_group == 0;
    if constexpr (kCluster > 1) {
      // Each block finishes half of the rows, or the first all.
      const u32 finisher = kRowGroups > 1 ? static_cast<u32>(row_group) : 0;
      if (stores && rank != finisher) {
        if (pair > first_pair) wait_cluster(taken, tile_parity ^ 1);
        const u32 barrier = address_in(finisher, shared_address(received));
        each_sum([&](float& sum, int i) {
          store_async(address_in(finisher, line(kClusterLines, i)), sum, barrier);
        });
      }
      stores = stores && rank == finisher;
      if (stores) {
        if (warp_of_group == 0 && lane == 0) arrive_expecting(received, kGroupLines * 128);
        wait_cluster(received, tile_parity);
        each_sum([&](float& sum, int i) { sum += load_shared(line(kClusterLines, i)); });
        __syncwarp();
        if (lane == 0 && active_again) arrive_cluster(address_in(rank ^ 1, shared_address(taken)));
      }
      tile_parity ^= 1;
    }

    if (!stores) continue;
    using Memory = Element::Memory;
#pragma unroll
    for (int b = 0; b < kPairs; ++b) {
      const int row_here = row + 64 * b;
      if (b >= num_pairs_here || row_here >= args.n) break;
      const bool second = row_here + 1 < args.n;
      const Memory* const biases = static_cast<const Memory*>(args.bias) + row_here;
      float bias[2] = {};
      if (args.bias != nullptr) {
        bias[0] = load(Element(), biases[0]);
        if (second) bias[1] = load(Element(), biases[1]);
      }
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int token = 2 * i + 2 * t + e;
          if (token >= args.m) continue;
          float v[2] = {sums[b][i + e], sums[b][i + e + 2]};
          if constexpr (kGroup == 0 && !kAffine) {
            v[0] *= rows[b].scale[0];
            v[1] *= rows[b].scale[1];
          }
          v[0] += bias[0];
          v[1] += bias[1];
          Memory* const y = static_cast<Memory*>(args.y) + token * i64{args.n} + row_here;
          if (args.accumulate) {
            v[0] += load(Element(), y[0]);
            if (second) v[1] += load(Element(), y[1]);
          }
          if (args.pairs) {
            *reinterpret_cast<u32*>(y) = store_pair(Element(), v[0], v[1]);
          } else {
            y[0] = store(Element(), v[0]);
            if (second) y[1] = store(Element(), v[1]);
          }
        }
      }
    }
  }
#endif
}

}  // namespace halfbyte::device
