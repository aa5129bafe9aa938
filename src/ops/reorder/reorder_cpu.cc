// SIMD kernels of `reorder`: of two rows the 32 bytes of a tile to four slots of 16 bytes, and back. What is
// not whole goes through a buffer, code by code.
#include <algorithm>

#include "ops/reorder/reorder.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/reorder/reorder_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

constexpr int kRowBytes = formats::kTileBytes / formats::kUnitRows;  // of a tile
constexpr int kPairBytes = 2 * kRowBytes;                            // of two rows: four slots

// A row of a tile is four octets. Octet w of two rows, 16 bytes, is word w of their four slots (code_place),
// in another order: byte i of these words comes from byte to_words[i] of the octets, which are one behind the
// other; to_rows is the way back.
struct Octets {
  alignas(16) uint8_t to_words[16], to_rows[16];
};
constexpr Octets make_octets(int bits) {
  Octets o{};
  for (int i = 0; i < 16; ++i) {
    const int t = i / 4, byte = i % 4;
    const int from = bits == 4 ? byte % 2 * 8 + byte / 2 * 4 + t : byte / 2 * 8 + t * 2 + byte % 2;
    o.to_words[i] = static_cast<uint8_t>(from);
    o.to_rows[from] = static_cast<uint8_t>(i);
  }
  return o;
}
constexpr Octets kOctets4 = make_octets(4), kOctets8 = make_octets(8);

#if HALFBYTE_SIMD

using D8 = hn::Full128<uint8_t>;
using V8 = hn::Vec<D8>;

HWY_INLINE V8 swap_halves(V8 bytes) {
  const hn::Repartition<uint16_t, D8> d16;
  const auto low = hn::Set(D8(), 0x0F);
  const auto words = hn::BitCast(d16, bytes);
  return hn::Or(hn::BitCast(D8(), hn::ShiftLeft<4>(hn::BitCast(d16, hn::And(bytes, low)))),
                hn::And(hn::BitCast(D8(), hn::ShiftRight<4>(words)), low));
}

// Rows of words to columns.
HWY_INLINE void transpose(V8 (&v)[4]) {
  const hn::Repartition<uint32_t, D8> d32;
  const hn::Repartition<uint64_t, D8> d64;
  const auto low = [&](V8 a, V8 b) HWY_ATTR {
    return hn::BitCast(d64, hn::InterleaveLower(d32, hn::BitCast(d32, a), hn::BitCast(d32, b)));
  };
  const auto high = [&](V8 a, V8 b) HWY_ATTR {
    return hn::BitCast(d64, hn::InterleaveUpper(d32, hn::BitCast(d32, a), hn::BitCast(d32, b)));
  };
  const auto a = low(v[0], v[1]), b = high(v[0], v[1]), c = low(v[2], v[3]), d = high(v[2], v[3]);
  v[0] = hn::BitCast(D8(), hn::InterleaveLower(d64, a, c));
  v[1] = hn::BitCast(D8(), hn::InterleaveUpper(d64, a, c));
  v[2] = hn::BitCast(D8(), hn::InterleaveLower(d64, b, d));
  v[3] = hn::BitCast(D8(), hn::InterleaveUpper(d64, b, d));
}

// The octets 0 and 1 of both rows are in a, b; then octet by octet.
HWY_INLINE void zip(V8 a, V8 b, V8* low, V8* high) {
  const hn::Repartition<uint64_t, D8> d64;
  const auto x = hn::BitCast(d64, a), y = hn::BitCast(d64, b);
  *low = hn::BitCast(D8(), hn::InterleaveLower(d64, x, y));
  *high = hn::BitCast(D8(), hn::InterleaveUpper(d64, x, y));
}

// `turned`: slots 0, 1 and 2, 3 are exchanged.
HWY_INLINE void pack_pair(const uint8_t* row0, const uint8_t* row1, uint8_t* packed, const Octets& octets,
                          bool swap, int turned) {
  V8 v[4];
  for (int i = 0; i < 2; ++i) {
    V8 a = hn::LoadU(D8(), row0 + 16 * i), b = hn::LoadU(D8(), row1 + 16 * i);
    if (swap) a = swap_halves(a), b = swap_halves(b);
    zip(a, b, &v[2 * i], &v[2 * i + 1]);
  }
  const V8 index = hn::Load(D8(), octets.to_words);
  for (V8& words : v) words = hn::TableLookupBytes(words, index);
  transpose(v);
  for (int t = 0; t < 4; ++t) hn::StoreU(v[t], D8(), packed + 16 * (t ^ turned));
}
HWY_INLINE void unpack_pair(const uint8_t* packed, uint8_t* row0, uint8_t* row1, const Octets& octets,
                            bool swap, int turned) {
  V8 v[4];
  for (int t = 0; t < 4; ++t) v[t] = hn::LoadU(D8(), packed + 16 * (t ^ turned));
  transpose(v);
  const V8 index = hn::Load(D8(), octets.to_rows);
  for (V8& words : v) words = hn::TableLookupBytes(words, index);
  for (int i = 0; i < 2; ++i) {
    V8 a, b;
    zip(v[2 * i], v[2 * i + 1], &a, &b);
    if (swap) a = swap_halves(a), b = swap_halves(b);
    hn::StoreU(a, D8(), row0 + 16 * i);
    hn::StoreU(b, D8(), row1 + 16 * i);
  }
}

#else

HWY_INLINE uint8_t swap_halves(uint8_t byte, bool swap) {
  return static_cast<uint8_t>(swap ? byte << 4 | byte >> 4 : byte);
}
HWY_INLINE void pack_pair(const uint8_t* row0, const uint8_t* row1, uint8_t* packed, const Octets& octets,
                          bool swap, int turned) {
  for (int i = 0; i < kPairBytes; ++i) {
    const int t = i / 16, word = i / 4 % 4, from = octets.to_words[4 * t + i % 4];
    packed[i ^ 16 * turned] = swap_halves((from < 8 ? row0 : row1)[word * 8 + from % 8], swap);
  }
}
HWY_INLINE void unpack_pair(const uint8_t* packed, uint8_t* row0, uint8_t* row1, const Octets& octets,
                            bool swap, int turned) {
  for (int i = 0; i < kPairBytes; ++i) {
    const int t = i / 16, word = i / 4 % 4, from = octets.to_words[4 * t + i % 4];
    (from < 8 ? row0 : row1)[word * 8 + from % 8] = swap_halves(packed[i ^ 16 * turned], swap);
  }
}

#endif

// What a row of the view has of a tile: `count` codes from number `first` on. Its bytes are those of the view
// if it is whole, else a buffer in which the codes lie from the first byte on.
struct Piece {
  int64_t first, count;
  bool whole;
  uint8_t* bytes;
};
HWY_INLINE Piece piece_of(const ReorderArgs& args, int64_t row, int64_t tile, uint8_t* buffer) {
  const int bits = args.layout.bits, tile_cols = kRowBytes * 8 / bits;
  const int64_t first = row * args.row_codes + tile * tile_cols;
  const int64_t count =
      row < args.layout.n ? std::clamp<int64_t>(args.layout.k - tile * tile_cols, 0, tile_cols) : 0;
  const bool whole = count == tile_cols && first * bits % 8 == 0;
  return {first, count, whole, whole ? args.codes + first * bits / 8 : buffer};
}

HWY_INLINE void put_code(const ReorderArgs& args, uint8_t* bytes, int64_t i, int code) {
  const ViewPlace place = view_place(args, i);
  const int mask = ((1 << args.layout.bits) - 1) << place.shift;
  bytes[place.byte] = static_cast<uint8_t>((bytes[place.byte] & ~mask) | code << place.shift);
}
HWY_INLINE int get_code(const ReorderArgs& args, const uint8_t* bytes, int64_t i) {
  const ViewPlace place = view_place(args, i);
  return bytes[place.byte] >> place.shift & ((1 << args.layout.bits) - 1);
}
// From the view to the buffer of a piece that is not whole, and back.
void gather(const ReorderArgs& args, const Piece& piece) {
  std::fill_n(piece.bytes, kRowBytes, uint8_t{0});
  for (int64_t i = 0; i < piece.count; ++i)
    put_code(args, piece.bytes, i, get_code(args, args.codes, piece.first + i));
}
void scatter(const ReorderArgs& args, const Piece& piece) {
  for (int64_t i = 0; i < piece.count; ++i)
    put_code(args, args.codes, piece.first + i, get_code(args, piece.bytes, i));
}

// Behind the codes of a row, up to the next.
void put_padding(const ReorderArgs& args, int64_t row) {
  const formats::PackedLayout& p = args.layout;
  const int64_t begin = row * args.row_codes;
  const int64_t end = row + 1 < p.n ? begin + args.row_codes : args.num_code_bytes * 8 / p.bits;
  for (int64_t i = begin + p.k; i < end; ++i) put_code(args, args.codes, i, padding_code(args, row));
}

void ReorderTilesCpu(const ReorderProblem& problem, const ReorderTiles& tiles) {
  const ReorderArgs& args = problem.args;
  const formats::PackedLayout& p = args.layout;
  const Octets& octets = p.bits == 4 ? kOctets4 : kOctets8;
  const int64_t first_row = tiles.strip * formats::kUnitRows;
  alignas(16) uint8_t buffers[2][kRowBytes];
  for (int a = 0; a < formats::kUnitRows / 2; ++a) {
    const int64_t row = first_row + 2 * a;
    for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
      const Piece pieces[] = {piece_of(args, row, tile, buffers[0]),
                              piece_of(args, row + 1, tile, buffers[1])};
      uint8_t* const packed = args.packed + p.tile(tiles.strip, tile) + a * kPairBytes;
      if (problem.to_packed) {
        for (const Piece& piece : pieces)
          if (!piece.whole) gather(args, piece);
        pack_pair(pieces[0].bytes, pieces[1].bytes, packed, octets, args.high_first, a & 2);
      } else {
        unpack_pair(packed, pieces[0].bytes, pieces[1].bytes, octets, args.high_first, a & 2);
        for (const Piece& piece : pieces)
          if (!piece.whole) scatter(args, piece);
      }
    }
  }
  if (problem.to_packed || tiles.last < p.tiles_per_strip()) return;
  for (int64_t row = first_row; row < std::min<int64_t>(p.n, first_row + formats::kUnitRows); ++row)
    put_padding(args, row);
}

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(ReorderTilesCpu);

void reorder_tiles_cpu(const ReorderProblem& problem, const ReorderTiles& tiles) {
  HWY_DYNAMIC_DISPATCH(ReorderTilesCpu)(problem, tiles);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
