// `qgemm` by products of bf16 tiles: `Tiles` is the machine's AMX, or stands in for it in tests.
//
// Tiles are 1 KB. A product adds to one of f32 [16][16] that of [16][16 pairs] and [16 pairs][16]: pairs are
// summed. Along what is summed, 32 rows or columns of the weight are a tile; of the other axis ("out"), 32
// are a pair of tiles. x is packed to tiles once, zeros beyond its extents, and weights are decoded to them,
// one piece ahead of the one that is multiplied, which leaves the vector units to the decoder.
//
// Every sum has one order, that of a chain of products of tiles over the sum; where a tile of f32 is put
// aside in memory between them it is exact. So neither threads nor blocks of the output change a byte.
#pragma once

#include <algorithm>
#include <utility>

#include "ops/qgemm/cpu/amx/few_rows-inl.h"
#include "ops/qgemm/cpu/amx/few_rows_transposed-inl.h"

namespace halfbyte {

// The tile of columns of 16 rows, and back.
HALFBYTE_AVX512 inline void transpose(const F32Tile& from, F32Tile& to) {
  __m512i rows[kTileLines];
  for (int i = 0; i < kTileLines; ++i) rows[i] = _mm512_load_si512(from.lines[i]);
  transpose(rows);
  for (int i = 0; i < kTileLines; ++i) _mm512_store_si512(to.lines[i], rows[i]);
}

// Why AMX does not take a problem, whatever the machine; empty if it does.
inline std::string refuse_amx(const QgemmProblem& problem) {
  if (problem.in_cols() == 0) return "there is nothing to sum";
  return refuse_bf16_decode(problem);
}

// How a problem is cut. Numbers of tiles, or of pairs of tiles.
struct AmxBlocks {
  static constexpr int kMaxMTiles = 16;  // of a task: x and f32 tiles stay in the L2 cache
  static constexpr int kMaxPairs = 8;

  int64_t units = 0;        // of 64 columns of a row
  int64_t sum_tiles = 0;    // of the whole sum
  int64_t chunk_tiles = 0;  // of the sum, decoded at a time; even
  int64_t chunks = 0;
  int64_t out_pairs = 0, m_tiles = 0;
  int64_t task_pairs = 0, task_m_tiles = 0;  // of a task
  int64_t out_tasks = 0, m_tasks = 0;

  AmxBlocks(const QgemmProblem& problem, int num_threads) {
    const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    units = parts(problem.k, formats::kUnitCols);
    sum_tiles = problem.transposed ? problem.weight.strips : 2 * units;
    out_pairs = problem.transposed ? 2 * units : problem.weight.strips;
    m_tiles = parts(problem.m, kTileLines);
    m_tasks = parts(m_tiles, kMaxMTiles);
    task_m_tiles = formats::round_up(parts(m_tiles, m_tasks), 2);
    // Few rows of x: less is decoded at a time, to the L1 cache. Forward, 33 to 64 rows take 0.6 to 0.8 of
    // the time so on a Xeon, transposed not less; there 17 to 32 rows take 0.87 to 0.92 times as long with
    // half of it once more.
    const bool few = m_tiles <= (problem.transposed ? 2 : 4);
    chunk_tiles = !few ? 8 : problem.transposed ? 2 : 4;
    chunks = parts(sum_tiles, chunk_tiles);
    const int64_t min_pairs = problem.transposed ? 2 : 1;
    task_pairs = few ? min_pairs : kMaxPairs;
    while (task_pairs > min_pairs && parts(out_pairs, task_pairs) * m_tasks < 4 * num_threads)
      task_pairs /= 2;
    out_tasks = parts(out_pairs, task_pairs);
  }

  // Where a tile of x lies: [chunk][m tile][tile of the chunk]. What is multiplied with a chunk is
  // contiguous; it would not stay in the cache at strides of powers of two.
  int64_t x_tile(int64_t m_tile, int64_t sum_tile) const {
    return (sum_tile / chunk_tiles * m_tiles + m_tile) * chunk_tiles + sum_tile % chunk_tiles;
  }
};

template <class Tiles>
class AmxKernel : public QgemmKernel {
 public:
  AmxKernel(const QgemmProblem& problem, std::string backend)
      : problem_(problem),
        backend_(std::move(backend)),
        num_threads_(effective_threads(problem.num_threads)),
        blocks_(problem, num_threads_),
        few_rows_(problem_),
        few_rows_transposed_(problem_),
        order_(problem.codec.bits) {
    for (int column = 0; column < 32; ++column)
      for (int tile = 0; tile < 2; ++tile)
        for (int pair = 0; pair < 16; ++pair)
          if (transposed_column(0, tile, pair) == column)
            out_places_[column / 16][column % 16] = 16 * tile + pair;
  }

  std::string name() const override { return "qgemm_amx"; }
  std::string backend() const override { return backend_; }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false,
            few_rows_.taken() || few_rows_transposed_.scales_x() ? WeightRounding::code_rounded
                                                                 : WeightRounding::weight_rounded};
  }
  int64_t workspace_bytes() const override {
    return 48 + (few_rows_.taken()              ? few_rows_.workspace_bytes()
                 : few_rows_transposed_.taken() ? few_rows_transposed_.workspace_bytes()
                                                : x_bytes() + num_threads_ * scratch_bytes());
  }

  void run(const QgemmTensors& tensors, void*, void* workspace) const override {
    auto* const begin =
        static_cast<uint8_t*>(workspace) + (64 - reinterpret_cast<uintptr_t>(workspace) % 64) % 64;
    if (few_rows_.taken()) return few_rows_.run(tensors, begin, num_threads_);
    if (few_rows_transposed_.taken())
      return few_rows_transposed_.run(tensors, begin, num_threads_, [&](int64_t unit, const UnitSums& sums) {
        for (int i = 0; i < 2; ++i) store(tensors, sums.of[i], 0, 2 * unit + i);
      });
    auto* const x = reinterpret_cast<Bf16Tile*>(begin);
    uint8_t* const scratch = begin + x_bytes();
    const int threads = problem_.num_threads;
    pack(tensors, x);
    parallel_for(blocks_.out_tasks * blocks_.m_tasks, 1, threads,
                 [&](int64_t first, int64_t last, int worker) {
                   for (int64_t i = first; i < last; ++i) {
                     uint8_t* const memory = scratch + worker * scratch_bytes();
                     problem_.transposed ? multiply_block<true>(tensors, x, i, memory)
                                         : multiply_block<false>(tensors, x, i, memory);
                   }
                 });
  }

 private:
  static constexpr int64_t kPrefetchBytes = 4096, kPrefetchStrips = 4;  // ahead of the decoder

  int64_t x_bytes() const {
    return blocks_.chunks * blocks_.m_tiles * blocks_.chunk_tiles * int64_t{sizeof(Bf16Tile)};
  }
  // Of a thread: pairs of decoded tiles of two chunks; f32 tiles.
  int64_t buffer_tiles() const { return blocks_.task_pairs * blocks_.chunk_tiles * 2; }
  int64_t scratch_bytes() const {
    return 2 * buffer_tiles() * int64_t{sizeof(Bf16Tile)} +
           blocks_.task_m_tiles * blocks_.task_pairs * 2 * int64_t{sizeof(F32Tile)};
  }

  // ---- 1. x as tiles

  void pack(const QgemmTensors& tensors, Bf16Tile* x) const {
    const int64_t tiles_at_once = problem_.transposed ? 1 : 2;
    const int64_t columns = blocks_.sum_tiles / tiles_at_once;
    parallel_for(blocks_.m_tiles * columns, 64, problem_.num_threads, [&](int64_t first, int64_t last, int) {
      for (int64_t i = first; i < last; ++i) {
        Bf16Tile* const to = x + blocks_.x_tile(i / columns, i % columns * tiles_at_once);
        problem_.transposed ? pack_rows(problem_, tensors, i / columns, i % columns, *to)
                            : pack_pairs(tensors, i / columns, i % columns, to);
      }
    });
  }
  // Forward: pairs of the 64 columns of a unit, of 16 rows.
  HALFBYTE_AVX512 void pack_pairs(const QgemmTensors& tensors, int64_t m_tile, int64_t unit,
                                  Bf16Tile* to) const {
    const int64_t row = m_tile * kTileLines, col = unit * formats::kUnitCols;
    __m512i pairs[2][kTileLines];
    order_.load_transposed(row_of_x(problem_, tensors, row) + col, problem_.in_cols(), problem_.m - row,
                           problem_.in_cols() - col, pairs);
    for (int j = 0; j < 2; ++j)
      for (int line = 0; line < kTileLines; ++line) _mm512_store_si512(to[j].lines[line], pairs[j][line]);
  }

  // ---- 2. Blocks of the output, by decoded weights

  // Decodes chunks of the weight, for some pairs of tiles of the output: [pair][tile of the chunk][2].
  template <bool kTransposed>
  class ChunkDecoder {
   public:
    HALFBYTE_AVX512 ChunkDecoder(const AmxKernel& kernel, const QgemmTensors& tensors, int64_t first_pair,
                                 int64_t num_pairs)
        : decoder_(kernel.problem_, tensors, WeightRounding::weight_rounded),
          sum_tiles_(kernel.blocks_.sum_tiles),
          chunk_tiles_(kernel.blocks_.chunk_tiles),
          first_pair_(first_pair),
          num_pairs_(num_pairs),
          prefetch_(kTransposed ? kPrefetchStrips * kernel.problem_.weight.strip_bytes : kPrefetchBytes) {}

    // To decode a chunk to `to` in the course of `num_calls` of advance().
    void begin(int64_t chunk, Bf16Tile* to, int64_t num_calls) {
      const int64_t num_tiles = formats::clamp<int64_t>(sum_tiles_ - chunk * chunk_tiles_, 0, chunk_tiles_);
      num_inner_ = kTransposed ? num_pairs_ / 2 : num_tiles / 2;
      num_steps_ = 4 * num_inner_ * (kTransposed ? num_tiles : num_pairs_);
      num_calls_ = num_calls;
      chunk_ = chunk;
      to_ = to;
      quarter_ = 0;
      credit_ = inner_ = outer_ = 0;
    }
    HALFBYTE_AVX512 void advance() {
      for (credit_ += num_steps_; credit_ >= num_calls_; credit_ -= num_calls_) step();
    }

   private:
    // A quarter of a unit; units in the order of memory.
    [[gnu::noinline]] HALFBYTE_AVX512 void step() {
      const int64_t tile = kTransposed ? outer_ : 2 * inner_, pair = kTransposed ? 2 * inner_ : outer_;
      if (quarter_ == 0) {
        if (kTransposed)
          decoder_.select(chunk_ * chunk_tiles_ + tile, (first_pair_ + pair) / 2);
        else
          decoder_.select(first_pair_ + pair, (chunk_ * chunk_tiles_ + tile) / 2);
        decoder_.prefetch(prefetch_);
      }
      Bf16Tile* const first = to_ + (pair * chunk_tiles_ + tile) * 2;
      decoder_.template decode<kTransposed>(quarter_, quarter_ + 1, first,
                                            first + (kTransposed ? 2 * chunk_tiles_ : 2));
      if (++quarter_ < 4) return;
      quarter_ = 0;
      if (++inner_ < num_inner_) return;
      inner_ = 0;
      ++outer_;
    }

    UnitDecoder decoder_;
    const int64_t sum_tiles_, chunk_tiles_, first_pair_, num_pairs_, prefetch_;
    int64_t num_inner_ = 0, num_steps_ = 0, num_calls_ = 1, credit_ = 0, chunk_ = 0;
    int64_t inner_ = 0, outer_ = 0;  // units of a strip; strips
    int quarter_ = 0;
    Bf16Tile* to_ = nullptr;
  };

  template <bool kTransposed, int kSum, int kWeight, int kX>
  HALFBYTE_AVX512 static void multiply(Tiles& tiles) {
    if constexpr (kTransposed)
      tiles.template multiply<kSum, kX, kWeight>();
    else
      tiles.template multiply<kSum, kWeight, kX>();
  }

  // Adds the products of a chunk to the f32 tiles `sums` of a pair and one tile of rows, or two, while the
  // next chunk is decoded.
  template <bool kTransposed, int kRows>
  HALFBYTE_AVX512 void multiply_pair(Tiles& tiles, const Bf16Tile* weights, const Bf16Tile* x,
                                     int64_t num_tiles, bool is_first, F32Tile* sums,
                                     ChunkDecoder<kTransposed>& ahead) const {
    F32Tile* const second = sums + blocks_.task_pairs * 2;
    const Bf16Tile* const second_x = x + blocks_.chunk_tiles;
    if (is_first) {
      tiles.template zero<0>();
      tiles.template zero<1>();
      if constexpr (kRows == 2) {
        tiles.template zero<2>();
        tiles.template zero<3>();
      }
    } else {
      tiles.template load<0>(sums[0]);
      tiles.template load<1>(sums[1]);
      if constexpr (kRows == 2) {
        tiles.template load<2>(second[0]);
        tiles.template load<3>(second[1]);
      }
    }
    for (int64_t i = 0; i < num_tiles; ++i) {
      tiles.template load<4>(weights[2 * i]);
      tiles.template load<6>(x[i]);
      multiply<kTransposed, 0, 4, 6>(tiles);
      tiles.template load<5>(weights[2 * i + 1]);
      multiply<kTransposed, 1, 5, 6>(tiles);
      if constexpr (kRows == 2) {
        tiles.template load<7>(second_x[i]);
        multiply<kTransposed, 2, 4, 7>(tiles);
        multiply<kTransposed, 3, 5, 7>(tiles);
      }
      ahead.advance();
    }
    tiles.template store<0>(sums[0]);
    tiles.template store<1>(sums[1]);
    if constexpr (kRows == 2) {
      tiles.template store<2>(second[0]);
      tiles.template store<3>(second[1]);
    }
  }

  template <bool kTransposed>
  HALFBYTE_AVX512 void multiply_block(const QgemmTensors& tensors, const Bf16Tile* x, int64_t task,
                                      uint8_t* memory) const {
    const AmxBlocks& b = blocks_;
    const int64_t first_pair = task % b.out_tasks * b.task_pairs,
                  first_m = task / b.out_tasks * b.task_m_tiles;
    const int64_t num_pairs = std::min(b.task_pairs, b.out_pairs - first_pair);
    const int64_t num_m = std::min(b.task_m_tiles, b.m_tiles - first_m);
    auto* const decoded = reinterpret_cast<Bf16Tile*>(memory);
    auto* const sums = reinterpret_cast<F32Tile*>(decoded + 2 * buffer_tiles());  // [m tile][pair][2]
    Tiles tiles;
    ChunkDecoder<kTransposed> ahead(*this, tensors, first_pair, num_pairs);
    ahead.begin(0, decoded, 1);
    ahead.advance();
    for (int64_t chunk = 0; chunk < b.chunks; ++chunk) {
      const int64_t num_tiles = std::min(b.chunk_tiles, b.sum_tiles - chunk * b.chunk_tiles);
      const Bf16Tile* const weights = decoded + chunk % 2 * buffer_tiles();
      ahead.begin(chunk + 1, decoded + (chunk + 1) % 2 * buffer_tiles(),
                  num_tiles * num_pairs * ((num_m + 1) / 2));
      for (int64_t m = 0; m < num_m; m += 2)
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
          const Bf16Tile* const x_tiles = x + b.x_tile(first_m + m, chunk * b.chunk_tiles);
          F32Tile* const to = sums + (m * b.task_pairs + pair) * 2;
          const Bf16Tile* const w = weights + pair * b.chunk_tiles * 2;
          if (m + 1 < num_m)
            multiply_pair<kTransposed, 2>(tiles, w, x_tiles, num_tiles, chunk == 0, to, ahead);
          else
            multiply_pair<kTransposed, 1>(tiles, w, x_tiles, num_tiles, chunk == 0, to, ahead);
        }
    }
    for (int64_t m = 0; m < num_m; ++m)
      for (int64_t pair = 0; pair < num_pairs; ++pair)
        store(tensors, sums + (m * b.task_pairs + pair) * 2, first_m + m, first_pair + pair);
  }

  // Columns 32 * pair of up to 16 rows of y from their two tiles; forward: tiles of [out][m].
  HALFBYTE_AVX512 void store(const QgemmTensors& tensors, const F32Tile* sums, int64_t m_tile,
                             int64_t pair) const {
    F32Tile rows[2];
    if (!problem_.transposed)
      for (int i = 0; i < 2; ++i) transpose(sums[i], rows[i]);
    const float factor = global_factor(problem_, tensors);
    const int64_t num_rows = std::min<int64_t>(kTileLines, problem_.m - m_tile * kTileLines);
    for (int64_t line = 0; line < num_rows; ++line)
      for (int half = 0; half < 2; ++half)
        store_outputs(problem_, tensors, factor, m_tile * kTileLines + line, pair * 32 + half * 16,
                      problem_.transposed ? _mm512_permutex2var_ps(_mm512_load_ps(sums[0].lines[line]),
                                                                   _mm512_load_si512(out_places_[half]),
                                                                   _mm512_load_ps(sums[1].lines[line]))
                                          : _mm512_load_ps(rows[half].lines[line]));
  }

  const QgemmProblem problem_;
  std::string backend_;
  int num_threads_;
  AmxBlocks blocks_;
  FewRows<Tiles> few_rows_;
  FewRowsTransposed<Tiles> few_rows_transposed_;
  UnitOrder order_;                        // forward
  alignas(64) int32_t out_places_[2][16];  // transposed: of columns 0 .. 15, 16 .. 31 in the two tiles
};

}  // namespace halfbyte
