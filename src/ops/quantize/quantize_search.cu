// quantize with searched scales (formats/scale_search.h), for any group size, row length and alignment. A
// block has some units of 8 groups of a row, whose codes begin at a byte. 16 lanes, a team, have a candidate
// each and walk the elements of a group in order, which they share in shared memory, so that no sum crosses
// lanes. In a group of more than kSearchTile elements each of the 8 teams sums one of the kSearchParts.
#include "formats/scale_search.h"
#include "ops/quantize/quantize.cuh"
#include "ops/quantize/scale_search_args.h"

namespace halfbyte::device {

constexpr int kLanes = kSearchCandidates, kTeams = kSearchUnit, kThreads = kSearchThreads;
static_assert(kTeams == kSearchParts && kThreads == kTeams * kLanes);
constexpr i64 kSmallGroup = i64{1} << 28;  // a unit's offsets have 32 bits
constexpr int kPiece = 128;                // elements that a team has in shared memory
constexpr int kPieceRow = kPiece + 4;      // so that the two teams of a warp read from different banks

constexpr bool kE2m1 = kTable && kCodec.book == books::fp4_e2m1;
// A little wider than the values, so that no edge is between two bins.
constexpr SearchBins kSearchBins =
    kTable && !kE2m1 ? SearchBins::of(kCodec.book, kCodec.book.max_magnitude * 1.03f) : SearchBins{};
constexpr float kLastBin = SearchBins::kBins - 1;

// A table format, by rank.
struct SearchTable {
  float values[16], above[16];
  u8 ranks[SearchBins::kBins];
};
constexpr SearchTable make_search_table() {
  SearchTable table = {};
  for (int i = 0; i < 16; ++i) {
    table.values[i] = kCodec.book.values[kCodec.book.code_of_rank[i]];
    table.above[i] = i < 15 ? kCodec.book.edges_f32[i] : Float<float>::kMax;
  }
  for (int i = 0; i < SearchBins::kBins; ++i) table.ranks[i] = kSearchBins.ranks[i];
  return table;
}
__device__ const SearchTable kSearchTable = make_search_table();

// search_error, with the table in shared memory.
__device__ __forceinline__ float error_of(float x, const SearchScale& by, const SearchTable& table) {
  if constexpr (!kSearchBins.usable && !kE2m1) return search_error(x, by, kCodec);
  float y = __fmul_rn(x, by.reciprocal);
  if constexpr (kSearchBins.of_magnitude || kE2m1) y = fabsf(y);
  if constexpr (kE2m1) {
    const float error = y - nearest_e2m1(y);
    return error * error;
  }
  // Beyond the bins the rank is that of the last one.
  const float place =
      clamp(__fmul_rn(y, kSearchBins.per_unit), -kSearchBins.center, kLastBin - kSearchBins.center);
  const u32 bin = bit_cast<u32>(place + (kRoundToInteger + kSearchBins.center)) - kRoundToIntegerBits;
  u32 rank = table.ranks[bin];
  if (y > table.above[rank]) ++rank;
  const float error = y - table.values[rank];
  return error * error;
}

struct Team {
  alignas(16) float x[kPieceRow], weight[kPieceRow];
};

template <class T>
__device__ __forceinline__ T shuffle_team(T value, int mask, u32 lanes) {
  if constexpr (sizeof(T) == 8) {
    const u64 bits = bit_cast<u64>(value);
    return bit_cast<T>(static_cast<u64>(__shfl_xor_sync(lanes, static_cast<u32>(bits), mask)) |
                       static_cast<u64>(__shfl_xor_sync(lanes, static_cast<u32>(bits >> 32), mask)) << 32);
  } else {
    return bit_cast<T>(__shfl_xor_sync(lanes, bit_cast<u32>(value), mask));
  }
}

// As held_params decides it.
__device__ __forceinline__ bool holds(const QuantizeArgs& args, const Range<F>& range,
                                      const GroupParams<F>& params) {
  if (is_usual(params)) return true;
  Range<F> held = range;
  if (is_symmetric(args)) held.low = held.high = max(range.low, range.high);
  return is_held(params, -held.low, held.high, kCodec);
}

// A candidate, and how it is stored.
struct Candidate {
  RuleParams<F> by_rule;
  GroupParams<F> params;
};
__device__ __forceinline__ Candidate make_candidate(const QuantizeArgs& args, const RuleParams<F>& by_rule,
                                                    const SearchGrid& grid, int i, float global) {
  Candidate candidate = {search_candidate(by_rule, grid, i, kCodec), {}};
  store_params(args, 0, candidate.by_rule, false, global, candidate.params);
  decide_codes(candidate.params, candidate.by_rule, false, kCodec);
  return candidate;
}

// Eight groups of a row.
struct Unit {
  i64 row, first_group;
};

extern "C" __global__ void __launch_bounds__(kThreads, sizeof(F) == 4 ? 7 : 4)
    quantize_search(const __grid_constant__ ScaleSearchArgs all) {
  __shared__ Unit units[kMaxSearchUnits];
  __shared__ Encoding encodings[kMaxSearchUnits * kSearchUnit];
  __shared__ Team teams[kTeams];
  __shared__ Range<F> ranges[kTeams];
  __shared__ float parts[kTeams][kLanes];
  __shared__ int broken[kTeams];
  __shared__ SearchTable table;
  const QuantizeArgs& args = all.quantize;
  const int thread = static_cast<int>(threadIdx.x), team = thread / kLanes, lane = thread % kLanes;
  const u32 lanes = team % 2 == 0 ? 0xFFFFu : 0xFFFF0000u;
  const i64 size = args.group_size;
  if (thread < all.units) {
    const i64 unit = block_index() * all.units + thread, row = unit / all.units_per_row;
    units[thread] = {row, (unit - row * all.units_per_row) * kSearchUnit};
  }
  if constexpr (kSearchBins.usable)
    for (int i = thread; i < static_cast<int>(sizeof(SearchTable) / 4); i += kThreads)
      reinterpret_cast<u32*>(&table)[i] = reinterpret_cast<const u32*>(&kSearchTable)[i];
  __syncthreads();

  const float global = global_scale(args);
  const bool is_long = size > kSearchTile;  // then all teams have one group after the other
#pragma unroll 1
  for (int slot = is_long ? 0 : team; slot < all.units * kSearchUnit; slot += is_long ? 1 : kTeams) {
    const Unit unit = units[slot / kSearchUnit];
    const i64 in_row = unit.first_group + slot % kSearchUnit, from = in_row * size;
    if (unit.row >= args.rows || in_row >= args.groups_per_row) continue;
    const i64 n = min(size, args.cols - from);
    const i64 index = unit.row * args.cols + from;  // of the first element

    Range<F> range = no_range<F>();
    bool all_finite = true;
    const int step = is_long ? kThreads : kLanes;
#pragma unroll 1
    for (i64 i = is_long ? thread : lane; i < n; i += step) {
      const F x = load_element(args.x, index + i);
      if (formats::is_finite(x))
        range = join(range, Range<F>{-x, x});
      else
        all_finite = false;
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2)
      range =
          join(range, Range<F>{shuffle_team(range.low, mask, lanes), shuffle_team(range.high, mask, lanes)});
    all_finite = __all_sync(lanes, all_finite);
    if (is_long) {
      if (lane == 0) {
        ranges[team] = range;
        broken[team] = !all_finite;
      }
      __syncthreads();
#pragma unroll 1
      for (int t = 0; t < kTeams; ++t) {
        range = join(range, ranges[t]);
        all_finite = all_finite && broken[t] == 0;
      }
    }

    const RuleParams<F> by_rule = params_by_rule(args.rule, range);
    Candidate candidate = make_candidate(args, by_rule, SearchGrid::of(kCodec, n), lane, global);
    const F absmax = max(range.low, range.high);
    int best = 0;
    if (absmax > 0) {
      const F per_unit = search_per_unit(absmax);
      const auto by = SearchScale::of(candidate.params, per_unit, kCodec);
      const bool weighted = all.importance != nullptr || !all_finite || n % kSearchChunk != 0;
      float sum = 0;
#pragma unroll 1
      for (i64 tile = is_long ? team * kSearchTile : 0; tile < n; tile += kSearchTile * kSearchParts) {
        const i64 tile_end = min(n, tile + kSearchTile);
#pragma unroll 1
        for (i64 piece = tile; piece < tile_end; piece += kPiece) {
          const int count = static_cast<int>(min<i64>(kPiece, tile_end - piece));
          const int whole = (count + kSearchChunk - 1) / kSearchChunk * kSearchChunk;
          Team& mine = teams[team];
          i64 column = 0;
          if (all.importance != nullptr)
            column = (all.importance_first + index + piece + lane) % all.importance_count;
#pragma unroll 1
          for (int i = lane; i < whole; i += kLanes) {
            F x = i < count ? load_element(args.x, index + piece + i) : 0;
            float weight = i < count ? 1 : 0;
            if (!formats::is_finite(x)) x = 0, weight = 0;
            mine.x[i] = static_cast<float>(x * per_unit);
            if (!weighted) continue;
            if (all.importance != nullptr) {
              if (weight != 0) weight = all.importance[column];
              for (column += kLanes; column >= all.importance_count;) column -= all.importance_count;
            }
            mine.weight[i] = weight;
          }
          __syncwarp(lanes);
#pragma unroll 1
          for (int i = 0; i < whole; i += kSearchChunk) {
            float terms[kSearchChunk];
#pragma unroll
            for (int k = 0; k < kSearchChunk; ++k) terms[k] = error_of(mine.x[i + k], by, table);
            if (weighted) {
#pragma unroll
              for (int k = 0; k < kSearchChunk; ++k) terms[k] = mine.weight[i + k] * terms[k];
            }
            sum = sum + sum_of_eight(terms);
          }
          __syncwarp(lanes);
        }
      }
      if (is_long) {
        parts[team][lane] = sum;
        __syncthreads();
        float of_lane[kSearchParts];
#pragma unroll
        for (int part = 0; part < kSearchParts; ++part) of_lane[part] = parts[part][lane];
        sum = sum_of_eight(of_lane);
      }
      float least = by.usable ? by.error(sum) : bit_cast<float>(Float<float>::kInfinity);
      // Of equal ones the first; where none is less than infinity, too.
      best = lane;
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) {
        const float error = shuffle_team(least, mask, lanes);
        const int other = shuffle_team(best, mask, lanes);
        if (error < least || (error == least && other < best)) least = error, best = other;
      }
    }
    if (lane == best && (!is_long || team == 0)) {
      if (best != 0 && !holds(args, range, candidate.params))
        candidate = make_candidate(args, by_rule, SearchGrid::of(kCodec, n), 0, global);
      GroupParams<F>& params = candidate.params;
      const i64 group = unit.row * args.groups_per_row + in_row;
      store_params(args, group, candidate.by_rule, true, global, params);
      if constexpr (kCodec.asymmetric) args.zeros[group] = static_cast<u8>(params.zero_point - kCodec.q_min);
      if (!is_usual(params)) count_losses(args, candidate.by_rule, range, params);
      encodings[slot] = {params.code_scale, params.code_bias, 0, params.zero_point, true};
    }
    if (is_long) __syncthreads();  // before the next group takes ranges, broken and parts
  }
  __syncthreads();

  // A unit has as many chunks as a group has elements.
#pragma unroll 1
  for (i64 chunk = thread; chunk < all.units * size; chunk += kThreads) {
    const int of = all.units == 1 ? 0 : static_cast<int>(static_cast<u32>(chunk) / static_cast<u32>(size));
    const Unit unit = units[of];
    const i64 offset = (chunk - of * size) * kChunk, col = unit.first_group * size + offset;
    if (unit.row >= args.rows || col >= args.cols) continue;
    const i64 index = unit.row * args.cols + col;
    const int n = static_cast<int>(min<i64>(kChunk, args.cols - col));
    const int group = size < kSmallGroup ? static_cast<int>(static_cast<u32>(offset) / static_cast<u32>(size))
                                         : static_cast<int>(offset / size);
    const int in_group = static_cast<int>(min<i64>(kChunk, (group + 1) * size - offset));
    const u64 bits = encode_slow(
        args, index, n, [&](int i) { return load_element(args.x, index + i); },
        [&](int i) {
          const int behind = i < in_group ? 0 : 1 + (i - in_group) / static_cast<int>(min<i64>(size, kChunk));
          return encodings[of * kSearchUnit + group + behind];
        });
    u8* const to = args.codes + unit.row * args.row_bytes + col / kChunk * kBits;
    const int num_bytes = (n * kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < kBits; ++i)
      if (i < num_bytes) to[i] = static_cast<u8>(bits >> (8 * i));
  }
}

}  // namespace halfbyte::device
