// SIMD kernels of `reorder`: of two rows the 32 bytes of a tile to four slots of 16 bytes, and back; bit
// streams as they are. What is not whole goes through a buffer, code by code. Large outputs are written past
// the caches.
#define HWY_WANT_AVX3_DL  // one more copy, for AVX-512 with byte permutes, which these kernels use
#include <algorithm>

#include "ops/reorder/reorder.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/reorder/reorder_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

constexpr int kRowBytes = formats::kTileBytes / formats::kUnitRows;  // of a tile in fragments
constexpr int kPairBytes = 2 * kRowBytes;                            // of two rows: four slots
constexpr int kMostRowBytes = 64;                                    // of any tile
constexpr int64_t kTilesAtOnce = 64;
// An output beyond this does not stay in the caches.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

// Tiles of rows of the view lie at multiples of their size.
bool are_rows_aligned(const ReorderArgs& args) {
  return reinterpret_cast<uintptr_t>(args.codes) % kRowBytes == 0 && args.row_bits % (8 * kRowBytes) == 0;
}

// Of two rows of a tile, which are one behind the other, and their four slots: byte i of the slots is byte
// to_slots[i] of the rows, as code_place has it; to_rows is the way back. `turned`: slots 0, 1 and 2, 3 are
// exchanged.
struct PairBytes {
  alignas(64) uint8_t to_slots[kPairBytes], to_rows[kPairBytes];
};
constexpr PairBytes make_pair_bytes(int bits, bool turned) {
  PairBytes p{};
  for (int i = 0; i < kPairBytes; ++i) {
    const int t = i / 16 ^ (turned ? 2 : 0), octet = i / 4 % 4, byte = i % 4;
    const int odd = bits == 4 ? byte % 2 : byte / 2,
              in_octet = bits == 4 ? byte / 2 * 4 + t : t * 2 + byte % 2;
    const int from = odd * kRowBytes + octet * 8 + in_octet;
    p.to_slots[i] = static_cast<uint8_t>(from);
    p.to_rows[from] = static_cast<uint8_t>(i);
  }
  return p;
}
constexpr PairBytes kPairBytes4[] = {make_pair_bytes(4, false), make_pair_bytes(4, true)};
constexpr PairBytes kPairBytes8[] = {make_pair_bytes(8, false), make_pair_bytes(8, true)};

// Pairs of rows to slots and back. kStream: past the caches; slots then lie at multiples of 64 bytes, rows
// of 32.
#if HALFBYTE_VBMI

// One permute of bytes.
class Pairs {
 public:
  static constexpr int row_bytes() { return kRowBytes; }
  Pairs(int bits, bool swap) : swap_(swap) {
    const PairBytes* const bytes = bits == 4 ? kPairBytes4 : kPairBytes8;
    for (int turned = 0; turned < 2; ++turned) {
      to_slots_[turned] = _mm512_load_si512(bytes[turned].to_slots);
      to_rows_[turned] = _mm512_load_si512(bytes[turned].to_rows);
    }
  }
  template <bool kStream>
  HWY_INLINE void pack(const uint8_t* row0, const uint8_t* row1, uint8_t* slots, bool turned) const {
    const __m512i rows =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row0))),
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row1)), 1);
    const __m512i v = _mm512_permutexvar_epi8(to_slots_[turned], swapped(rows));
    if constexpr (kStream)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(slots), v);
    else
      _mm512_storeu_si512(slots, v);
  }
  template <bool kStream>
  HWY_INLINE void unpack(const uint8_t* slots, uint8_t* row0, uint8_t* row1, bool turned) const {
    const __m512i v = swapped(_mm512_permutexvar_epi8(to_rows_[turned], _mm512_loadu_si512(slots)));
    auto* const to0 = reinterpret_cast<__m256i*>(row0);
    auto* const to1 = reinterpret_cast<__m256i*>(row1);
    if constexpr (kStream) {
      _mm256_stream_si256(to0, _mm512_castsi512_si256(v));
      _mm256_stream_si256(to1, _mm512_extracti64x4_epi64(v, 1));
    } else {
      _mm256_storeu_si256(to0, _mm512_castsi512_si256(v));
      _mm256_storeu_si256(to1, _mm512_extracti64x4_epi64(v, 1));
    }
  }

 private:
  HWY_INLINE __m512i swapped(__m512i v) const {
    if (!swap_) return v;
    const __m512i low = _mm512_set1_epi8(0x0F);
    return _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(v, low), 4),
                           _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
  }
  __m512i to_slots_[2], to_rows_[2];
  bool swap_;
};

#elif HALFBYTE_SIMD

// Vectors of 16 bytes. Octet w of two rows is word w of their slots, in another order: a shuffle of bytes
// orders it, and a transposition of words makes slots.
class Pairs {
 public:
  static constexpr int row_bytes() { return kRowBytes; }
  Pairs(int bits, bool swap) : swap_(swap) {
    const PairBytes& bytes = bits == 4 ? kPairBytes4[0] : kPairBytes8[0];
    alignas(16) uint8_t to_words[16], to_octets[16];
    for (int i = 0; i < 16; ++i) {
      const int from = bytes.to_slots[i / 4 * 16 + i % 4], in_octets = from / kRowBytes * 8 + from % 8;
      to_words[i] = static_cast<uint8_t>(in_octets);
      to_octets[in_octets] = static_cast<uint8_t>(i);
    }
    to_words_ = hn::Load(D(), to_words);
    to_octets_ = hn::Load(D(), to_octets);
  }
  template <bool kStream>
  HWY_INLINE void pack(const uint8_t* row0, const uint8_t* row1, uint8_t* slots, bool turned) const {
    V v[4];
    for (int i = 0; i < 2; ++i)
      zip(swapped(hn::LoadU(D(), row0 + 16 * i)), swapped(hn::LoadU(D(), row1 + 16 * i)), &v[2 * i],
          &v[2 * i + 1]);
    for (V& words : v) words = hn::TableLookupBytes(words, to_words_);
    transpose(v);
    for (int t = 0; t < 4; ++t) store<kStream>(v[t], slots + 16 * (t ^ (turned ? 2 : 0)));
  }
  template <bool kStream>
  HWY_INLINE void unpack(const uint8_t* slots, uint8_t* row0, uint8_t* row1, bool turned) const {
    V v[4];
    for (int t = 0; t < 4; ++t) v[t] = hn::LoadU(D(), slots + 16 * (t ^ (turned ? 2 : 0)));
    transpose(v);
    for (V& words : v) words = hn::TableLookupBytes(words, to_octets_);
    for (int i = 0; i < 2; ++i) {
      V a, b;
      zip(v[2 * i], v[2 * i + 1], &a, &b);
      store<kStream>(swapped(a), row0 + 16 * i);
      store<kStream>(swapped(b), row1 + 16 * i);
    }
  }

 private:
  using D = hn::Full128<uint8_t>;
  using V = hn::Vec<D>;
  using D32 = hn::Repartition<uint32_t, D>;
  using D64 = hn::Repartition<uint64_t, D>;

  template <bool kStream>
  static HWY_INLINE void store(V v, uint8_t* to) {
    if constexpr (kStream)
      hn::Stream(v, D(), to);
    else
      hn::StoreU(v, D(), to);
  }
  HWY_INLINE V swapped(V v) const {
    if (!swap_) return v;
    const hn::Repartition<uint16_t, D> d16;
    const auto low = hn::Set(D(), 0x0F);
    return hn::Or(hn::BitCast(D(), hn::ShiftLeft<4>(hn::BitCast(d16, hn::And(v, low)))),
                  hn::And(hn::BitCast(D(), hn::ShiftRight<4>(hn::BitCast(d16, v))), low));
  }
  // Lower and upper octets of a and b; its own way back.
  static HWY_INLINE void zip(V a, V b, V* low, V* high) {
    const auto x = hn::BitCast(D64(), a), y = hn::BitCast(D64(), b);
    *low = hn::BitCast(D(), hn::InterleaveLower(D64(), x, y));
    *high = hn::BitCast(D(), hn::InterleaveUpper(D64(), x, y));
  }
  // A matrix of words.
  static HWY_INLINE void transpose(V (&v)[4]) {
    const auto low = [](V a, V b) HWY_ATTR {
      return hn::BitCast(D(), hn::InterleaveLower(D32(), hn::BitCast(D32(), a), hn::BitCast(D32(), b)));
    };
    const auto high = [](V a, V b) HWY_ATTR {
      return hn::BitCast(D(), hn::InterleaveUpper(D32(), hn::BitCast(D32(), a), hn::BitCast(D32(), b)));
    };
    const V a = low(v[0], v[1]), b = high(v[0], v[1]), c = low(v[2], v[3]), d = high(v[2], v[3]);
    zip(a, c, &v[0], &v[1]);
    zip(b, d, &v[2], &v[3]);
  }

  V to_words_, to_octets_;
  bool swap_;
};

#else

class Pairs {
 public:
  static constexpr int row_bytes() { return kRowBytes; }
  Pairs(int bits, bool swap) : bytes_(bits == 4 ? kPairBytes4 : kPairBytes8), swap_(swap) {}
  template <bool>
  void pack(const uint8_t* row0, const uint8_t* row1, uint8_t* slots, bool turned) const {
    for (int i = 0; i < kPairBytes; ++i) {
      const int from = bytes_[turned].to_slots[i];
      slots[i] = swapped((from < kRowBytes ? row0 : row1)[from % kRowBytes]);
    }
  }
  template <bool>
  void unpack(const uint8_t* slots, uint8_t* row0, uint8_t* row1, bool turned) const {
    for (int i = 0; i < kRowBytes; ++i) {
      row0[i] = swapped(slots[bytes_[turned].to_rows[i]]);
      row1[i] = swapped(slots[bytes_[turned].to_rows[kRowBytes + i]]);
    }
  }

 private:
  uint8_t swapped(uint8_t byte) const { return static_cast<uint8_t>(swap_ ? byte << 4 | byte >> 4 : byte); }
  const PairBytes* bytes_;
  bool swap_;
};

#endif

// Pairs of rows of bit streams, one behind the other in the packed form, too.
class StreamPairs {
 public:
  StreamPairs(int bits, bool) : row_bytes_(formats::tile_bytes(bits) / formats::kUnitRows) {}
  int row_bytes() const { return row_bytes_; }
  template <bool>
  void pack(const uint8_t* row0, const uint8_t* row1, uint8_t* pair, bool) const {
    std::copy_n(row0, row_bytes_, pair);
    std::copy_n(row1, row_bytes_, pair + row_bytes_);
  }
  template <bool>
  void unpack(const uint8_t* pair, uint8_t* row0, uint8_t* row1, bool) const {
    std::copy_n(pair, row_bytes_, row0);
    std::copy_n(pair + row_bytes_, row_bytes_, row1);
  }

 private:
  int row_bytes_;
};

// What a row of the view has of a tile. Its bytes are those of the view if it is whole, else `count` codes of
// a buffer, the first of them at bit `first` of the view.
struct Piece {
  int64_t first, count;
  bool whole;
  uint8_t* bytes;
};
class Row {
 public:
  Row(const ReorderArgs& args, int64_t row, int row_bytes)
      : row_bytes_(row_bytes),
        tile_cols_(row_bytes * 8 / args.layout.bits),
        cols_(row < args.layout.n ? args.layout.k : 0),
        first_(row * args.row_bits),
        num_whole_(first_ % 8 == 0 ? cols_ / tile_cols_ : 0),
        bytes_(args.codes + first_ / 8) {}
  HWY_INLINE Piece piece(int64_t tile, uint8_t* buffer) const {
    if (tile < num_whole_) return {first_, tile_cols_, true, bytes_ + tile * row_bytes_};
    return {first_ + tile * row_bytes_ * 8, std::clamp<int64_t>(cols_ - tile * tile_cols_, 0, tile_cols_),
            false, buffer};
  }

 private:
  int64_t row_bytes_, tile_cols_, cols_, first_, num_whole_;
  uint8_t* bytes_;
};

HWY_INLINE void put_code(const ReorderArgs& args, uint8_t* bytes, int64_t bit, int bits, int code) {
  const ViewPlace place = view_place(args, bit);
  formats::set_code_at(bytes + place.byte, place.shift, bits, code);
}
HWY_INLINE int get_code(const ReorderArgs& args, const uint8_t* bytes, int64_t bit) {
  const ViewPlace place = view_place(args, bit);
  return formats::code_at(bytes + place.byte, place.shift, args.layout.bits);
}
// From the view to the buffer of a piece that is not whole, and back.
void gather(const ReorderArgs& args, const Piece& piece) {
  const int bits = args.layout.bits;
  std::fill_n(piece.bytes, kMostRowBytes, uint8_t{0});
  for (int64_t i = 0; i < piece.count * bits; i += bits)
    put_code(args, piece.bytes, i, bits, get_code(args, args.codes, piece.first + i));
}
void scatter(const ReorderArgs& args, const Piece& piece) {
  const int bits = args.layout.bits;
  for (int64_t i = 0; i < piece.count * bits; i += bits)
    put_code(args, args.codes, piece.first + i, bits, get_code(args, piece.bytes, i));
}

// Behind the codes of a row, up to the next; of the last code what there is room for.
void put_padding(const ReorderArgs& args, int64_t row) {
  const formats::PackedLayout& p = args.layout;
  const int64_t end = row + 1 < p.n ? (row + 1) * args.row_bits : args.num_code_bytes * 8;
  for (int64_t bit = view_bit(args, row, p.k); bit < end; bit += p.bits) {
    const int bits = static_cast<int>(std::min<int64_t>(p.bits, end - bit));
    put_code(args, args.codes, bit, bits, padding_code(args, row) & ((1 << bits) - 1));
  }
}

// At most kTilesAtOnce. What the next pair of rows reads is fetched meanwhile.
template <class AnyPairs, bool kToPacked, bool kStream>
void reorder_tiles(const ReorderArgs& args, const ReorderTiles& tiles) {
  const formats::PackedLayout& p = args.layout;
  const AnyPairs pairs(p.bits, args.high_first);
  const int64_t num_tiles = tiles.last - tiles.first;
  const int64_t row_bytes = args.row_bits / 8;
  uint8_t* packed[kTilesAtOnce];
  for (int64_t i = 0; i < num_tiles; ++i) packed[i] = args.packed + p.tile(tiles.strip, tiles.first + i);
  alignas(16) uint8_t buffers[2][kMostRowBytes];
  for (int a = 0; a < formats::kUnitRows / 2; ++a) {
    const int64_t row = tiles.strip * formats::kUnitRows + 2 * a;
    const bool turned = (a & 2) != 0;
    const Row rows[] = {Row(args, row, pairs.row_bytes()), Row(args, row + 1, pairs.row_bytes())};
    for (int64_t i = 0; i < num_tiles; ++i) {
      const Piece pieces[] = {rows[0].piece(tiles.first + i, buffers[0]),
                              rows[1].piece(tiles.first + i, buffers[1])};
      uint8_t* const slots = packed[i] + a * 2 * pairs.row_bytes();
      if constexpr (kToPacked) {
        for (const Piece& piece : pieces)
          if (!piece.whole) gather(args, piece);
        for (const Piece& piece : pieces) hwy::Prefetch(piece.bytes + 2 * row_bytes);
        pairs.template pack<kStream>(pieces[0].bytes, pieces[1].bytes, slots, turned);
      } else {
        hwy::Prefetch(slots + 2 * pairs.row_bytes());
        if (kStream && pieces[0].whole && pieces[1].whole)
          pairs.template unpack<true>(slots, pieces[0].bytes, pieces[1].bytes, turned);
        else
          pairs.template unpack<false>(slots, pieces[0].bytes, pieces[1].bytes, turned);
        for (const Piece& piece : pieces)
          if (!piece.whole) scatter(args, piece);
      }
    }
  }
}

void ReorderTilesCpu(const ReorderProblem& problem, const ReorderTiles& tiles) {
  const ReorderArgs& args = problem.args;
  const formats::PackedLayout& p = args.layout;
  const auto run = [&]<class AnyPairs, bool kToPacked, bool kStream>() {
    for (int64_t first = tiles.first; first < tiles.last; first += kTilesAtOnce)
      reorder_tiles<AnyPairs, kToPacked, kStream>(
          args, {tiles.strip, first, std::min<int64_t>(tiles.last, first + kTilesAtOnce)});
  };
  const bool fragments = formats::in_fragments(p.bits);
  const bool past_caches = fragments && p.num_bytes >= kStreamBytes;
  // Lines of the packed form are those of two rows.
  const bool stream =
      past_caches && (problem.to_packed ? p.block_bytes % kPairBytes == 0 : are_rows_aligned(args));
  if (!fragments && problem.to_packed)
    run.template operator()<StreamPairs, true, false>();
  else if (!fragments)
    run.template operator()<StreamPairs, false, false>();
  else if (problem.to_packed)
    stream ? run.template operator()<Pairs, true, true>() : run.template operator()<Pairs, true, false>();
  else
    stream ? run.template operator()<Pairs, false, true>() : run.template operator()<Pairs, false, false>();
  if (stream) hwy::FlushStream();
  if (problem.to_packed || tiles.last < p.tiles_per_strip()) return;
  const int64_t first_row = tiles.strip * formats::kUnitRows;
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
