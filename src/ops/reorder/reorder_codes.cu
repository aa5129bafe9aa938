// reorder_codes: the codes of a weight from a view to the packed form, or back (kToPacked).
//
// kAligned: rows of the view are whole vectors of 16 bytes that begin at multiples of 16. A warp takes of the
// 32 rows of a strip 128 bytes, four tiles. A lane has half a tile of rows 2a and 2a + 1: words of the four
// slots of these rows, of which its neighbour has the other halves. They exchange them, so that each has two
// slots, and loads and stores are whole sectors on both sides. Else code by code: the weight is small or of
// an odd shape, or its codes are bit streams.
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "halfbyte_config.h"
#include "ops/reorder/reorder_args.h"

namespace halfbyte::device {

// Elements of 1 byte (4 bits: two codes) or 2 of words a, b, c, d, a matrix of them, transposed.
struct Square {
  u32 word[4];
};
// By bytes: word t is (a.t, b.t, c.t, d.t).
__device__ __forceinline__ Square transpose_bytes(const Square& w) {
  const u32 low0 = __byte_perm(w.word[0], w.word[1], 0x5140),
            high0 = __byte_perm(w.word[0], w.word[1], 0x7362),
            low1 = __byte_perm(w.word[2], w.word[3], 0x5140),
            high1 = __byte_perm(w.word[2], w.word[3], 0x7362);
  return {{__byte_perm(low0, low1, 0x5410), __byte_perm(low0, low1, 0x7632),
           __byte_perm(high0, high1, 0x5410), __byte_perm(high0, high1, 0x7632)}};
}
// By halves: words 0, 1 are (a, b), words 2, 3 are (c, d).
__device__ __forceinline__ Square transpose_halves(const Square& w) {
  return {{__byte_perm(w.word[0], w.word[1], 0x5410), __byte_perm(w.word[0], w.word[1], 0x7632),
           __byte_perm(w.word[2], w.word[3], 0x5410), __byte_perm(w.word[2], w.word[3], 0x7632)}};
}

__device__ __forceinline__ u32 swap_halves(u32 bytes, bool swap) {
  return swap ? (bytes & 0x0F0F0F0Fu) << 4 | (bytes >> 4 & 0x0F0F0F0Fu) : bytes;
}

// Of a lane: vectors of rows 2a and 2a + 1, and words 2h, 2h + 1 of the slots t = 0..3.
struct RowVectors {
  Words4 row[2];
};
struct SlotWords {
  u32 word[4][2];
};
__device__ __forceinline__ SlotWords to_slots(const RowVectors& v, bool swap) {
  SlotWords s;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Of 4-bit codes: columns 16 (2h + i) and 8 behind. Of 8-bit codes: 8 columns.
    const Square square = {{swap_halves(v.row[0].word[2 * i], swap), swap_halves(v.row[1].word[2 * i], swap),
                            swap_halves(v.row[0].word[2 * i + 1], swap),
                            swap_halves(v.row[1].word[2 * i + 1], swap)}};
    const Square slots = kBits == 4 ? transpose_bytes(square) : transpose_halves(square);
#pragma unroll
    for (int t = 0; t < 4; ++t) s.word[t][i] = slots.word[t];
  }
  return s;
}
__device__ __forceinline__ RowVectors to_rows(const SlotWords& s, bool swap) {
  RowVectors v;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Square slots = {{s.word[0][i], s.word[1][i], s.word[2][i], s.word[3][i]}};
    const Square square = kBits == 4 ? transpose_bytes(slots) : transpose_halves(slots);
    v.row[0].word[2 * i] = swap_halves(square.word[0], swap);
    v.row[1].word[2 * i] = swap_halves(square.word[1], swap);
    v.row[0].word[2 * i + 1] = swap_halves(square.word[2], swap);
    v.row[1].word[2 * i + 1] = swap_halves(square.word[3], swap);
  }
  return v;
}

// Lane h = 0, 1 of two neighbours takes slots h (first) and h + 2 (second).
struct Slots {
  Words4 first, second;
};
__device__ __forceinline__ Words4 join(u32 own0, u32 own1, u32 other0, u32 other1, bool h) {
  return {{h ? other0 : own0, h ? other1 : own1, h ? own0 : other0, h ? own1 : other1}};
}
__device__ __forceinline__ Slots exchange(const SlotWords& s, bool h) {
  u32 other[2][2];
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i) other[k][i] = shuffle_xor(h ? s.word[2 * k][i] : s.word[2 * k + 1][i], 1);
  return {
      join(h ? s.word[1][0] : s.word[0][0], h ? s.word[1][1] : s.word[0][1], other[0][0], other[0][1], h),
      join(h ? s.word[3][0] : s.word[2][0], h ? s.word[3][1] : s.word[2][1], other[1][0], other[1][1], h)};
}
__device__ __forceinline__ SlotWords exchange(const Slots& slots, bool h) {
  SlotWords s;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const Words4& v = k == 0 ? slots.first : slots.second;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 own = h ? v.word[2 + i] : v.word[i], other = shuffle_xor(h ? v.word[i] : v.word[2 + i], 1);
      s.word[2 * k][i] = h ? other : own;
      s.word[2 * k + 1][i] = h ? own : other;
    }
  }
  return s;
}

__device__ __forceinline__ void reorder_vectors(const ReorderArgs& args) {
  constexpr int kSteps = 4;  // row pairs of a lane
  const PackedLayout& p = args.layout;
  const int lane = static_cast<int>(threadIdx.x % 32), in_row = lane % 8, pair = lane / 8;
  const bool h = lane % 2 != 0;
  const i64 warp = block_index() * (kReorderThreads / 32) + threadIdx.x / 32;
  const i64 tiles = p.tiles_per_strip(), warps_per_strip = (tiles + kTilesPerWarp - 1) / kTilesPerWarp;
  const i64 strip = warp / warps_per_strip, first_tile = warp % warps_per_strip * kTilesPerWarp;
  if (strip >= p.strips) return;  // all lanes
  const i64 tile = first_tile + in_row / 2, row_bytes = args.row_bits / 8;
  const i64 row_byte = first_tile * (kTileBytes / kUnitRows) + in_row * kVectorBytes;
  const bool in_view = row_byte < p.k * kBits / 8, in_packed = tile < tiles;
  u8* const packed = args.packed + p.tile(strip, tile);
  u8* const codes = args.codes + row_byte;
  const auto row_of = [&](int step, int odd) { return strip * kUnitRows + 2 * (4 * step + pair) + odd; };
  // Where slots t = h and h + 2 of the pair of rows lie.
  const auto slot = [&](int step, int k) {
    const int a = 4 * step + pair;
    return reinterpret_cast<Words4*>(packed + 16 * packed_slot(a, (h ? 1 : 0) + 2 * k));
  };
  if constexpr (kToPacked) {
    RowVectors rows[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        rows[step].row[odd] = {};
        const i64 row = row_of(step, odd);
        if (in_view && row < p.n)
          rows[step].row[odd] = load_once(reinterpret_cast<const Words4*>(codes + row * row_bytes));
      }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Slots slots = exchange(to_slots(rows[step], args.high_first), h);
      if (!in_packed) continue;
      store_once(slot(step, 0), slots.first);
      store_once(slot(step, 1), slots.second);
    }
  } else {
    Slots slots[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      slots[step] = {};
      if (!in_packed) continue;
      slots[step] = {load_once(slot(step, 0)), load_once(slot(step, 1))};
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const RowVectors rows = to_rows(exchange(slots[step], h), args.high_first);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const i64 row = row_of(step, odd);
        if (in_view && row < p.n)
          store_once(reinterpret_cast<Words4*>(codes + row * row_bytes), rows.row[odd]);
      }
    }
  }
}

// A thread takes some columns of a row of the packed form, or a byte of the view.
__device__ __forceinline__ void reorder_bytes(const ReorderArgs& args) {
  const PackedLayout& p = args.layout;
  const i64 thread = block_index() * kReorderThreads + threadIdx.x;
  if constexpr (kToPacked) {
    constexpr int kCols = reorder_columns(kBits);
    const i64 parts = p.blocks_per_strip * (p.block_cols / kCols), row = thread / parts,
              col = thread % parts * kCols;
    if (row >= p.strips * kUnitRows) return;
    u64 codes = 0;
    for (int i = 0; i < kCols; ++i)
      if (row < p.n && col + i < p.k) codes |= static_cast<u64>(view_code(args, row, col + i)) << (i * kBits);
    u8* const packed = args.packed + p.code(row, col);
    for (int i = 0; i < kCols * kBits / 8; ++i) packed[i] = static_cast<u8>(codes >> (8 * i));
  } else {
    if (thread >= args.num_code_bytes) return;
    const bool joined = args.row_bits == p.k * kBits;  // a row may end amid a byte
    i64 row = min(thread * 8 / args.row_bits, p.n - 1), col = (thread * 8 - row * args.row_bits) / kBits;
    int byte = 0;
    // `at`: the bit of the byte that a code begins at, which may be in the byte before.
    for (int at = static_cast<int>(view_bit(args, row, col) - thread * 8); at < 8; at += kBits, ++col) {
      if (joined && col == p.k && row + 1 < p.n) {
        ++row;
        col = 0;
      }
      const int code = col < p.k ? p.load_code(args.packed, row, col) : padding_code(args, row);
      const int shift = args.high_first ? at ^ 4 : at;
      byte |= shift >= 0 ? code << shift : code >> -shift;
    }
    args.codes[thread] = static_cast<u8>(byte);
  }
}

extern "C" __global__ void __launch_bounds__(kReorderThreads)
    reorder_codes(const __grid_constant__ ReorderArgs args) {
  if constexpr (kAligned)
    reorder_vectors(args);
  else
    reorder_bytes(args);
}

}  // namespace halfbyte::device
