// `qgemm_simd`: products in f32 on vectors of any width, fused multiply and add where the CPU has it. Units
// of the weight are decoded to f32 in blocks that stay in the first-level cache, and multiplied there with
// all rows of x, which are copied before as the products want to read them.
//
//   forward, few rows    dot products: lanes are columns, whose sums are added at the end
//   forward              outer products: lanes are rows of x; dot products with those that fill half a vector
//                        or less
//   transposed           outer products: lanes are columns of the weight
//
// With up to 4 rows of x (transposed, with AVX2: 2) the weight is not stored: it is multiplied as it is
// decoded.
//
// A sum has one order, whichever thread makes it and however many there are: that of the columns or rows.
#include <algorithm>

#include "core/plan_device.h"
#include "cpu/parallel.h"
#include "ops/qgemm/weight/weight.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/qgemm/cpu/simd/simd_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"
#include "ops/qgemm/weight/decode-inl.h"
#include "ops/qgemm/weight/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

constexpr int64_t kBatch = 128;  // rows of x that a decoded block is used for
// A block of the weight: of outer products forward
constexpr int64_t kMostStrips = 4;  // so many rows is a panel of x read for
constexpr int64_t kBlockUnits = 2;
constexpr int64_t kBlockCols = kBlockUnits * kCols;
// and transposed, one unit wide; a task walks down several, side by side.
constexpr int64_t kBlockStrips = 2;
constexpr int64_t kMostUnits = 8;
// Of a task: 64 KB, as the decoded block forward; the second-level cache holds both.
constexpr int64_t kMostSums = kMostStrips * kRows * kBatch;
constexpr int64_t kAhead = 8192;  // bytes of the weight that are fetched ahead
// Vectors of sums that are held in registers, of which there are 32 or 16.
constexpr int kSums = HALFBYTE_AVX512 || HWY_ARCH_ARM_A64 ? 16 : 8;
// Rows of x of forward products: with so many, the weight is multiplied as it is decoded,
constexpr int kFewRows = 4;
// two rows of it have so many dot products at a time,
constexpr int kDotRows = kSums / 2;
// and of the last vector of rows of x, so many are left to those.
constexpr int64_t kMostRest = std::min(kDotRows, kLanes / 2);
constexpr int64_t kDotUnits = 8;  // of a dot product at a time: their x stays in the cache

// ---- 1. Kernels: sums in registers

// c[r][lanes] += a[r] * b[lanes] over `depth` steps, R numbers a and V vectors b each. Numbers a are kRow
// floats from each other and from step to step kStep: known here, so that their places take no registers.
template <int R, int V, int kRow, int kStep>
HWY_NOINLINE void add_outer(int64_t depth, const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                            int64_t b_step, float* HWY_RESTRICT c, int64_t c_row) {
  Floats sums[R][V];
  HWY_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) sums[r][v] = hn::LoadU(Tag(), c + r * c_row + v * kLanes);
  }
  for (int64_t i = 0; i < depth; ++i, a += kStep, b += b_step) {
    Floats vectors[V];
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) vectors[v] = hn::LoadU(Tag(), b + v * kLanes);
    HWY_UNROLL(16)
    for (int r = 0; r < R; ++r) {
      const Floats factor = hn::Set(Tag(), a[r * kRow]);
      HWY_UNROLL(16)
      for (int v = 0; v < V; ++v) sums[r][v] = hn::MulAdd(factor, vectors[v], sums[r][v]);
    }
  }
  HWY_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) hn::StoreU(sums[r][v], Tag(), c + r * c_row + v * kLanes);
  }
}

// The values of a line to memory.
struct StoreValues {
  float* HWY_RESTRICT to;  // those of the first of two rows
  int64_t row_floats;

  HWY_INLINE void operator()(int vector, Floats even, Floats odd) const {
    hn::StoreU(even, Tag(), to + vector * 16);
    hn::StoreU(odd, Tag(), to + row_floats + vector * 16);
  }
};

// A unit: the lines of its codes, and its parameters.
struct Unit {
  const uint8_t* codes;
  UnitParameters parameters;

  template <class Codes>
  HWY_INLINE const uint8_t* line(const Codes& of, int tile, int a) const {
    return codes + tile * formats::kTileBytes + a * of.line_bytes();
  }
};

// The values of rows 2 a and 2 a + 1 of a unit to memory, row_floats from each other, in column_order. What
// lies `ahead` bytes further is fetched meanwhile.
template <class Codes>
HWY_INLINE void decode_line(const Codes& codes, const Unit& unit, int a, int64_t ahead, float* w,
                            int64_t row_floats) {
  for (int tile = 0; tile < Codes::kTiles; ++tile) {
    const uint8_t* line = unit.line(codes, tile, a);
    hwy::Prefetch(line + ahead);
    HWY_UNROLL(4)
    for (int i = 0; i < 16; i += kLanes) {
      StoreValues sink{w + tile * Codes::kVectors * 16 + i, row_floats};
      codes.decode(line, a, tile, i, unit.parameters, sink);
    }
  }
}

// All rows of a unit.
template <class Codes>
HWY_NOINLINE void decode_unit(const Codes& codes, const Unit& unit, int64_t ahead, float* w,
                              int64_t row_floats) {
  for (int a = 0; a < kRows / 2; ++a) decode_line(codes, unit, a, ahead, w + 2 * a * row_floats, row_floats);
}

// Two rows of some units side by side.
template <class Codes>
HWY_NOINLINE void decode_rows(const Codes& codes, int64_t num_units, const Unit* units, int a, int64_t ahead,
                              float* w, int64_t row_floats) {
  for (int64_t u = 0; u < num_units; ++u) decode_line(codes, units[u], a, ahead, w + u * kCols, row_floats);
}

// For a vector that is used more than once: GCC would make its load part of each of the instructions, and
// there are fewer loads in a cycle than those.
HWY_INLINE Floats in_register(Floats v) {
#if HWY_ARCH_X86 && (HWY_COMPILER_GCC || HWY_COMPILER_CLANG)
  asm("" : "+v"(v.raw));
#endif
  return v;
}

// The dot products of two rows with M rows of x. Of one, there are sums of even and odd vectors: a single one
// of each would wait for itself.
template <int M>
struct Dots {
  static constexpr int kParts = M == 1 ? 2 : 1;
  Floats sums[2][M][kParts];
  const float* x;  // [M][kCols], from the first vector on

  HWY_INLINE Dots() {}  // an implicit one would not be compiled for the target
  HWY_INLINE void operator()(int vector, Floats even, Floats odd) {
    HWY_UNROLL(8)
    for (int m = 0; m < M; ++m) {
      const Floats factor = in_register(hn::LoadU(Tag(), x + m * kCols + vector * 16));
      Floats &first = sums[0][m][vector % kParts], &second = sums[1][m][vector % kParts];
      first = hn::MulAdd(even, factor, first);
      second = hn::MulAdd(odd, factor, second);
    }
  }
};

// The same with the codes of a line, whose scales follow: of these, the products are the first.
template <int M>
struct CodeDots {
  static constexpr int kParts = Dots<M>::kParts;
  Floats products[2][M][kParts];
  const float* x;
  bool first;

  HWY_INLINE CodeDots() {}  // as above
  HWY_INLINE void operator()(int vector, Floats even, Floats odd) {
    const bool begins = first && vector < kParts;
    HWY_UNROLL(8)
    for (int m = 0; m < M; ++m) {
      const Floats factor = in_register(hn::LoadU(Tag(), x + m * kCols + vector * 16));
      Floats &of_even = products[0][m][vector % kParts], &of_odd = products[1][m][vector % kParts];
      of_even = begins ? hn::Mul(even, factor) : hn::MulAdd(even, factor, of_even);
      of_odd = begins ? hn::Mul(odd, factor) : hn::MulAdd(odd, factor, of_odd);
    }
  }
  HWY_INLINE Floats sum(int row, int m) const {
    return kParts == 1 ? products[row][m][0] : hn::Add(products[row][m][0], products[row][m][kParts - 1]);
  }
};

// Adds the products of some units of a strip with M rows of x to sums[row][m] of vectors; x_unit: floats from
// a unit of x to the next.
template <int M, class Codes>
HWY_NOINLINE void add_dots(const Codes& codes, int64_t num_units, const Unit* units, const float* x,
                           int64_t x_unit, int64_t ahead, float* to) {
  // One multiplication for each sum instead of each weight, while there are registers for twice the sums.
  if constexpr (Codes::kScalesLast && 2 * M * (1 + Dots<M>::kParts) <= kSums) {
    for (int a = 0; a < kRows / 2; ++a) {
      float* const row_sums = to + 2 * a * M * kLanes;
      Floats sums[2][M];
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        sums[0][m] = hn::LoadU(Tag(), row_sums + m * kLanes);
        sums[1][m] = hn::LoadU(Tag(), row_sums + (M + m) * kLanes);
      }
      for (int64_t u = 0; u < num_units; ++u) {
        const uint8_t* line = units[u].line(codes, 0, a);
        hwy::Prefetch(line + ahead);
        CodeDots<M> dots;
        HWY_UNROLL(4)
        for (int i = 0; i < 16; i += kLanes) {
          dots.first = i == 0;
          dots.x = x + u * x_unit + i;
          codes.decode_codes(line, a, i, dots);
        }
        const Floats even = Codes::scales(units[u].parameters, 2 * a),
                     odd = Codes::scales(units[u].parameters, 2 * a + 1);
        HWY_UNROLL(8)
        for (int m = 0; m < M; ++m) {
          sums[0][m] = hn::MulAdd(dots.sum(0, m), even, sums[0][m]);
          sums[1][m] = hn::MulAdd(dots.sum(1, m), odd, sums[1][m]);
        }
      }
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        hn::StoreU(sums[0][m], Tag(), row_sums + m * kLanes);
        hn::StoreU(sums[1][m], Tag(), row_sums + (M + m) * kLanes);
      }
    }
    return;
  }
  constexpr int kLast = Dots<M>::kParts - 1;
  for (int a = 0; a < kRows / 2; ++a) {
    Dots<M> dots;
    float* const row_sums = to + 2 * a * M * kLanes;
    HWY_UNROLL(8)
    for (int m = 0; m < M; ++m) {
      dots.sums[0][m][kLast] = dots.sums[1][m][kLast] = hn::Zero(Tag());
      dots.sums[0][m][0] = hn::LoadU(Tag(), row_sums + m * kLanes);
      dots.sums[1][m][0] = hn::LoadU(Tag(), row_sums + (M + m) * kLanes);
    }
    for (int64_t u = 0; u < num_units; ++u)
      for (int tile = 0; tile < Codes::kTiles; ++tile) {
        const uint8_t* line = units[u].line(codes, tile, a);
        hwy::Prefetch(line + ahead);
        HWY_UNROLL(4)
        for (int i = 0; i < 16; i += kLanes) {
          dots.x = x + u * x_unit + tile * Codes::kVectors * 16 + i;
          codes.decode(line, a, tile, i, units[u].parameters, dots);
        }
      }
    HWY_UNROLL(8)
    for (int m = 0; m < M; ++m) {
      if (kLast > 0) {
        dots.sums[0][m][0] = hn::Add(dots.sums[0][m][0], dots.sums[0][m][kLast]);
        dots.sums[1][m][0] = hn::Add(dots.sums[1][m][0], dots.sums[1][m][kLast]);
      }
      hn::StoreU(dots.sums[0][m][0], Tag(), row_sums + m * kLanes);
      hn::StoreU(dots.sums[1][m][0], Tag(), row_sums + (M + m) * kLanes);
    }
  }
}

// Adds the products of decoded rows of the weight, kRow floats from each other, R at a time with M rows of x
// to sums[row][m] of vectors. Where these are few, each has parts, so as not to wait for itself.
template <int R, int M, int kRow>
HWY_NOINLINE void add_decoded_dots(int64_t num_rows, int64_t num_units, const float* HWY_RESTRICT w,
                                   const float* HWY_RESTRICT x, float* HWY_RESTRICT to) {
  constexpr int kParts = R * M * 4 <= kSums ? 4 : R * M * 2 <= kSums ? 2 : 1;
  for (int64_t row = 0; row < num_rows; row += R, w += R * kRow, to += R * M * kLanes) {
    Floats sums[kParts][R][M];
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        sums[0][r][m] = hn::LoadU(Tag(), to + (r * M + m) * kLanes);
        HWY_UNROLL(3)
        for (int p = 1; p < kParts; ++p) sums[p][r][m] = hn::Zero(Tag());
      }
    }
    for (int64_t unit = 0; unit < num_units; ++unit)
      for (int64_t first = 0; first < kCols; first += kParts * kLanes) {
        HWY_UNROLL(4)
        for (int p = 0; p < kParts; ++p) {
          const int64_t col = first + p * kLanes;
          Floats weights[R];
          HWY_UNROLL(8)
          for (int r = 0; r < R; ++r)
            weights[r] = in_register(hn::LoadU(Tag(), w + r * kRow + unit * kCols + col));
          HWY_UNROLL(8)
          for (int m = 0; m < M; ++m) {
            const Floats factor = in_register(hn::LoadU(Tag(), x + (unit * M + m) * kCols + col));
            HWY_UNROLL(8)
            for (int r = 0; r < R; ++r) sums[p][r][m] = hn::MulAdd(weights[r], factor, sums[p][r][m]);
          }
        }
      }
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        HWY_UNROLL(3)
        for (int p = 1; p < kParts; ++p) sums[0][r][m] = hn::Add(sums[0][r][m], sums[p][r][m]);
        hn::StoreU(sums[0][r][m], Tag(), to + (r * M + m) * kLanes);
      }
    }
  }
}

// The products of M rows of x with two rows, added.
template <int M, int kVectors>
struct Columns {
  Floats sums[M][kVectors];
  Floats factors[2][M];

  HWY_INLINE Columns() {}  // as above
  HWY_INLINE void operator()(int vector, Floats even, Floats odd) {
    HWY_UNROLL(8)
    for (int m = 0; m < M; ++m)
      sums[m][vector] = hn::MulAdd(odd, factors[1][m], hn::MulAdd(even, factors[0][m], sums[m][vector]));
  }
};

// Adds the products of M rows of x, [rows][M], with units below one another to sums[m][column].
template <int M, class Codes>
HWY_NOINLINE void add_columns(const Codes& codes, int64_t num_units, const Unit* units, const float* x,
                              int64_t ahead, float* to, int64_t to_row) {
  constexpr int kVectors = Codes::kVectors;
  for (int tile = 0; tile < Codes::kTiles; ++tile)
    for (int i = 0; i < 16; i += kLanes) {
      Columns<M, kVectors> columns;
      float* const sums = to + tile * kVectors * 16 + i;
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        HWY_UNROLL(4)
        for (int v = 0; v < kVectors; ++v) columns.sums[m][v] = hn::LoadU(Tag(), sums + m * to_row + v * 16);
      }
      for (int64_t u = 0; u < num_units; ++u)
        for (int a = 0; a < kRows / 2; ++a) {
          const uint8_t* line = units[u].line(codes, tile, a);
          hwy::Prefetch(line + ahead);
          const float* const factors = x + (u * kRows + 2 * a) * M;
          HWY_UNROLL(8)
          for (int m = 0; m < M; ++m) {
            columns.factors[0][m] = in_register(hn::Set(Tag(), factors[m]));
            columns.factors[1][m] = in_register(hn::Set(Tag(), factors[M + m]));
          }
          codes.decode(line, a, tile, i, units[u].parameters, columns);
        }
      HWY_UNROLL(8)
      for (int m = 0; m < M; ++m) {
        HWY_UNROLL(4)
        for (int v = 0; v < kVectors; ++v) hn::StoreU(columns.sums[m][v], Tag(), sums + m * to_row + v * 16);
      }
    }
}

// ---- 2. Products

class Product {
 public:
  Product(const QgemmProblem& problem, const QgemmTensors& tensors, void* workspace)
      : problem_(problem),
        tensors_(tensors),
        units_((problem.k + kCols - 1) / kCols),
        strips_((problem.n + kRows - 1) / kRows),
        places_(static_cast<UnitPlace*>(workspace)),
        x_(reinterpret_cast<float*>(places_ + units_)),
        x_cols_((problem.in_cols() + kCols - 1) / kCols * kCols),
        parameters_(problem, tensors, places_) {}

  void run() {
    find_units(problem_.weight, places_);
    if (problem_.codec.kind == formats::Kind::floating)
      run_codes(ByteCodes<true>(problem_.codec));
    else if (problem_.codec.bits == 8)
      run_codes(ByteCodes<false>(problem_.codec));
    else if (problem_.codec.bits != 4)
      run_codes(StreamCodes(problem_.codec));
    else if (problem_.codec.kind == formats::Kind::table)
      run_codes(TableCodes(problem_.codec));
    else if (is_shifted(problem_.codec))
      run_codes(ShiftedCodes(problem_.codec));
    else
      run_codes(SymmetricCodes(problem_.codec));
  }

 private:
  template <class Codes>
  void run_codes(const Codes& codes) {
    if (problem_.transposed)
      transposed(codes);
    else if (problem_.m <= kFewRows)
      forward_few(codes);
    else if (problem_.m <= 2 * kDotRows)
      forward_dots(codes);
    else
      forward_many(codes);
  }

  void find(int64_t strip, int64_t unit, Unit& to) const {
    to.codes = parameters_.codes(strip, unit);
    parameters_.load(strip, unit, to.parameters);
  }
  template <class Codes>
  void decode(const Codes& codes, int64_t strip, int64_t unit, int64_t ahead, float* w,
              int64_t row_floats) const {
    Unit at;
    find(strip, unit, at);
    decode_unit(codes, at, ahead, w, row_floats);
  }

  // Rows of x, from the first on.
  struct Rows {
    int64_t first, end;
  };
  // Panels of rows of x, padded with 0, of as many rows each as rows_of says for what is left. A panel is
  // [columns][rows]; for dot products [units][rows][columns]. Columns are in the order of the weight, where
  // they are its columns.
  template <class RowsOf>
  void make_panels(Rows x, const RowsOf& rows_of, bool dots) {
    std::array<uint8_t, kCols> order;
    for (int i = 0; i < kCols; ++i) order[static_cast<size_t>(i)] = static_cast<uint8_t>(i);
    if (!problem_.transposed) order = column_order(problem_.codec.bits);
    const int64_t num_in = problem_.in_cols();
    const int threads = (x.end - x.first) * num_in < 65536 ? 1 : problem_.num_threads;
    parallel_for(x_cols_ / kCols, 1, threads, [&](int64_t chunk, int64_t, int) {
      const int64_t begin = chunk * kCols, n = std::min<int64_t>(kCols, num_in - begin);
      float values[kCols] = {};
      for (int64_t first = x.first, width; first < x.end; first += width) {
        width = rows_of(x.end - first);
        float* const panel = x_panel(first) + begin * width;
        const int64_t row_step = dots ? kCols : 1, col_step = dots ? 1 : width;
        for (int64_t row = 0; row < width; ++row) {
          if (first + row < x.end)
            load_x(problem_, tensors_, (first + row) * num_in + begin, n, values);
          else
            std::fill_n(values, kCols, 0.0f);
          for (size_t i = 0; i < kCols; ++i)
            panel[static_cast<int64_t>(i) * col_step + row * row_step] = values[order[i]];
        }
      }
    });
  }
  // At least so many, for the threads to be done together. How many there are has no effect on a sum.
  int64_t tasks_wanted() const { return 4 * effective_threads(problem_.num_threads); }

  // The panel that begins with a row of x.
  float* x_panel(int64_t row) const { return x_ + row * x_cols_; }

  // ---- Forward, few rows: lanes are columns. A block is one strip.

  template <class Codes>
  void forward_few(const Codes& codes) {
    const int64_t rows = problem_.m;
    const auto add = rows == 1   ? add_dots<1, Codes>
                     : rows == 2 ? add_dots<2, Codes>
                     : rows == 3 ? add_dots<3, Codes>
                                 : add_dots<kFewRows, Codes>;
    const int64_t ahead = kDotUnits * problem_.weight.strip_bytes / units_;  // the next block
    make_panels(
        {0, rows}, [](int64_t left) { return left; }, true);
    parallel_for(strips_, 1, problem_.num_threads, [&](int64_t strip, int64_t, int) {
      alignas(64) float sums[kRows * kFewRows * kLanes] = {};  // [row of the weight][row of x]
      Unit block[kDotUnits];
      for (int64_t unit = 0; unit < units_; unit += kDotUnits) {
        const int64_t units = std::min(kDotUnits, units_ - unit);
        for (int64_t u = 0; u < units; ++u) find(strip, unit + u, block[u]);
        add(codes, units, block, x_ + unit * rows * kCols, rows * kCols, ahead, sums);
      }
      store_dots({0, rows}, strip, sums);
    });
  }
  // Sums of dot products, [row of the weight][row of x] of vectors, of a strip.
  void store_dots(Rows x, int64_t strip, const float* sums) const {
    const int64_t width = dot_rows(x.end - x.first);
    for (int64_t m = x.first; m < x.end; ++m) {
      float y[kRows];
      for (int64_t row = 0; row < kRows; ++row)
        y[row] =
            hn::GetLane(hn::SumOfLanes(Tag(), hn::Load(Tag(), sums + (row * width + m - x.first) * kLanes)));
      store_y(problem_, tensors_, m, strip * kRows, std::min<int64_t>(kRows, problem_.n - strip * kRows), y);
    }
  }

  // ---- Forward, some more rows: dot products of two rows of a strip at a time, decoded before

  // Rows of x of a panel, of those that are left.
  static int64_t dot_rows(int64_t left) {
    return std::min<int64_t>(left <= 4 ? left : left <= 6 ? 6 : 8, kDotRows);
  }

  template <class Codes>
  void forward_dots(const Codes& codes) {
    const Rows x{0, problem_.m};
    const int64_t ahead = kDotUnits * problem_.weight.strip_bytes / units_;  // the next block
    make_panels(x, dot_rows, true);
    parallel_for(strips_, 1, problem_.num_threads, [&](int64_t strip, int64_t, int) {
      alignas(64) float w[2 * kDotUnits * kCols];
      alignas(64) float sums[2 * kDotRows * kRows * kLanes] = {};
      Unit block[kDotUnits];
      for (int64_t unit = 0; unit < units_; unit += kDotUnits) {
        const int64_t units = std::min(kDotUnits, units_ - unit);
        for (int64_t u = 0; u < units; ++u) find(strip, unit + u, block[u]);
        for (int a = 0; a < kRows / 2; ++a) {
          decode_rows(codes, units, block, a, ahead, w, kDotUnits * kCols);
          for (int64_t m = 0, width; m < problem_.m; m += width) {
            width = dot_rows(problem_.m - m);
            of_width(width, [&]<int M>() {
              add_decoded_dots<2, M, kDotUnits * kCols>(2, units, w, x_panel(m) + unit * kCols * width,
                                                        sums + (m * kRows + 2 * a * width) * kLanes);
            });
          }
        }
      }
      store_dots_of(x, strip, kRows, sums);
    });
  }
  // Calls a function for what dot_rows gives.
  template <class Function>
  static void of_width(int64_t width, const Function& function) {
    switch (width) {
      case 1:
        return function.template operator()<1>();
      case 2:
        return function.template operator()<2>();
      case 3:
        return function.template operator()<3>();
      case 4:
        return function.template operator()<4>();
      case 6:
        return function.template operator()<std::min(6, kDotRows)>();
      default:
        return function.template operator()<kDotRows>();
    }
  }
  void store_dots_of(Rows x, int64_t strip, int64_t rows, const float* sums) const {
    for (int64_t m = x.first, width; m < x.end; m += width) {
      width = dot_rows(x.end - m);
      for (int64_t row = 0; row < rows; row += kRows, sums += kRows * width * kLanes)
        store_dots({m, std::min(x.end, m + width)}, strip + row / kRows, sums);
    }
  }

  // ---- Forward, many rows: lanes are rows of x, but for the rest

  // What a task makes: outputs of some strips and rows of x.
  struct RowTask {
    int64_t strip, rows;  // the first; of the weight
    int64_t batch, end;   // rows of x
  };
  // Rows of x of a panel, of those that are left.
  static int64_t panel_rows(int64_t left) { return left > kLanes ? 2 * kLanes : kLanes; }

  template <class Codes>
  void forward_many(const Codes& codes) {
    const int64_t left = problem_.m % kLanes, outer = problem_.m - (left <= kMostRest ? left : 0);
    make_panels({0, outer}, panel_rows, false);
    make_panels({outer, problem_.m}, dot_rows, true);
    const int64_t batches = (outer + kBatch - 1) / kBatch;
    const int64_t block_strips = std::clamp<int64_t>(strips_ * batches / tasks_wanted(), 1, kMostStrips);
    const int64_t blocks = (strips_ + block_strips - 1) / block_strips;
    parallel_for(blocks * batches, 1, problem_.num_threads, [&](int64_t i, int64_t, int) {
      alignas(64) float w[kMostStrips * kRows * kBlockCols];
      alignas(64) float sums[kMostSums] = {};
      alignas(64) float dots[kMostStrips * kRows * kMostRest * kLanes];
      const int64_t strip = i / batches * block_strips, batch = i % batches * kBatch;
      const int64_t end = std::min(outer, batch + kBatch);
      const RowTask task{strip, std::min(block_strips, strips_ - strip) * kRows, batch, end};
      const Rows rest{end, end == outer ? problem_.m : end};  // the last batch has it
      const int64_t width = dot_rows(rest.end - rest.first);
      std::fill_n(dots, task.rows * width * kLanes, 0.0f);
      for (int64_t unit = 0; unit < units_; unit += kBlockUnits) {
        const int64_t units = std::min(kBlockUnits, units_ - unit);
        for (int64_t row = 0; row < task.rows; row += kRows)
          for (int64_t u = 0; u < units; ++u)
            decode(codes, strip + row / kRows, unit + u, kAhead, w + row * kBlockCols + u * kCols,
                   kBlockCols);
        add_block(task, unit, units * kCols, w, sums);
        if (width > 0)
          of_width(width, [&]<int M>() {
            constexpr int R = M == 1 ? 8 : M == 2 ? kSums / 2 : M <= 4 ? kSums / 4 : kSums / 8;
            add_decoded_dots<R, M, kBlockCols>(task.rows, units, w,
                                               x_panel(rest.first) + unit * kCols * width, dots);
          });
      }
      store_rows(task, sums);
      store_dots_of(rest, strip, task.rows, dots);
    });
  }
  // sums[row of the weight][row of x], by lines of the cache: a column of them has more lines than the first
  // level has room for at that distance.
  void store_rows(const RowTask& task, const float* sums) const {
    constexpr int64_t kLine = 16;
    for (int64_t first = task.batch; first < task.end; first += kLine) {
      const int64_t count = std::min(kLine, task.end - first);
      float y[kLine][kMostStrips * kRows];
      for (int64_t row = 0; row < task.rows; ++row)
        for (int64_t i = 0; i < count; ++i) y[i][row] = sums[row * kBatch + first - task.batch + i];
      for (int64_t i = 0; i < count; ++i)
        store_y(problem_, tensors_, first + i, task.strip * kRows,
                std::min(task.rows, problem_.n - task.strip * kRows), y[i]);
    }
  }
  // sums[row][row of x] += products of a decoded block, `cols` columns wide, with the rows of x of a task.
  void add_block(const RowTask& task, int64_t unit, int64_t cols, const float* w, float* sums) const {
    // Rows of the weight with two vectors of rows of x, and with one.
    constexpr int kWide = kSums / 2, kNarrow = kSums;
    for (int64_t m = task.batch; m < task.end; m += 2 * kLanes) {
      const int64_t width = panel_rows(task.end - m);
      const float* const panel = x_panel(m) + unit * kCols * width;
      // Of the next panel, a part is fetched with each of the products.
      const auto* next = reinterpret_cast<const uint8_t*>(x_panel(m + 2 * kLanes) + unit * kCols * width);
      const bool wide = width > kLanes;
      const int64_t rows = wide ? kWide : kNarrow;
      for (int64_t row = 0; row < task.rows; row += rows) {
        (wide ? add_outer<kWide, 2, kBlockCols, 1>
              : add_outer<kNarrow, 1, kBlockCols, 1>)(cols, w + row * kBlockCols, panel, width,
                                                      sums + row * kBatch + m - task.batch, kBatch);
        for (int64_t i = 0; i < cols * width * 4 / (task.rows / rows); i += 64, next += 64)
          hwy::Prefetch(next);
      }
    }
  }

  // ---- Transposed: lanes are columns

  static constexpr int kFused = kSums / 4;  // rows of x with which the weight is multiplied as it is decoded

  // What a task makes: outputs of some units of columns and rows of x.
  struct ColumnTask {
    int64_t unit, units;
    int64_t batch, end;  // rows of x

    int64_t sum_row() const { return units * kCols; }
  };
  // Rows of x of a panel, of those that are left.
  static int64_t few_rows(int64_t left) { return left >= 7 ? 8 : std::min<int64_t>(left, 4); }
  int64_t next_block() const { return kBlockStrips * problem_.weight.strip_bytes; }

  template <class Codes>
  void transposed(const Codes& codes) {
    make_panels({0, problem_.m}, few_rows, false);
    const int64_t batches = (problem_.m + kBatch - 1) / kBatch;
    const int64_t padded = (std::min(problem_.m, kBatch) + 7) / 8 * 8;
    const int64_t side = std::clamp<int64_t>(units_ * batches / tasks_wanted(), 1,
                                             std::min(kMostUnits, kMostSums / (padded * kCols)));
    const int64_t groups = (units_ + side - 1) / side;
    parallel_for(groups * batches, 1, problem_.num_threads, [&](int64_t i, int64_t, int) {
      alignas(64) float sums[kMostSums] = {};
      const int64_t batch = i / groups * kBatch, unit = i % groups * side;
      const ColumnTask task{unit, std::min(side, units_ - unit), batch, std::min(problem_.m, batch + kBatch)};
      if (problem_.m <= kFused)
        add_fused(codes, task, sums);
      else
        add_decoded(codes, task, sums);
      store_columns(task, sums);
    });
  }
  // sums[row of x][column] += products of all rows of the weight, with few rows of x.
  template <class Codes>
  void add_fused(const Codes& codes, const ColumnTask& task, float* sums) const {
    const int64_t width = few_rows(problem_.m);
    const auto add = width == 1   ? add_columns<1, Codes>
                     : width == 2 ? add_columns<2, Codes>
                     : width == 3 ? add_columns<std::min(3, kFused), Codes>
                                  : add_columns<kFused, Codes>;
    for (int64_t strip = 0; strip < strips_; strip += kBlockStrips) {
      const int64_t strips = std::min(kBlockStrips, strips_ - strip);
      for (int64_t u = 0; u < task.units; ++u) {
        Unit block[kBlockStrips];
        for (int64_t i = 0; i < strips; ++i) find(strip + i, task.unit + u, block[i]);
        add(codes, strips, block, x_ + strip * kRows * width, next_block(), sums + u * kCols, task.sum_row());
      }
    }
  }
  // The same with more rows, by decoded blocks.
  template <class Codes>
  void add_decoded(const Codes& codes, const ColumnTask& task, float* sums) const {
    alignas(64) float w[kBlockStrips * kRows * kCols];
    for (int64_t strip = 0; strip < strips_; strip += kBlockStrips) {
      const int64_t strips = std::min(kBlockStrips, strips_ - strip), rows = strips * kRows;
      for (int64_t u = 0; u < task.units; ++u) {
        for (int64_t i = 0; i < strips; ++i)
          decode(codes, strip + i, task.unit + u, next_block(), w + i * kRows * kCols, kCols);
        for (int64_t m = task.batch, width; m < task.end; m += width) {
          width = few_rows(task.end - m);
          const auto add = width == 8   ? add_rows<8>
                           : width == 4 ? add_rows<4>
                           : width == 3 ? add_rows<3>
                           : width == 2 ? add_rows<2>
                                        : add_rows<1>;
          add(rows, x_panel(m) + strip * kRows * width, w,
              sums + (m - task.batch) * task.sum_row() + u * kCols, task.sum_row());
        }
      }
    }
  }
  // A panel of R rows of x times a block.
  template <int R>
  static void add_rows(int64_t depth, const float* panel, const float* w, float* sums, int64_t sum_row) {
    constexpr int kVectors = std::min(kCols / kLanes, kSums / (R == 3 ? 4 : R));  // divides a unit
    static_assert(kCols % (kVectors * kLanes) == 0);
    for (int v = 0; v < kCols; v += kVectors * kLanes)
      add_outer<R, kVectors, 1, R>(depth, panel, w + v, kCols, sums + v, sum_row);
  }
  void store_columns(const ColumnTask& task, const float* sums) const {
    const std::array<uint8_t, kCols> order = column_order(problem_.codec.bits);
    for (int64_t m = task.batch; m < task.end; ++m)
      for (int64_t u = 0; u < task.units; ++u) {
        const float* const from = sums + (m - task.batch) * task.sum_row() + u * kCols;
        float y[kCols];
        for (size_t i = 0; i < kCols; ++i) y[order[i]] = from[i];
        const int64_t col = (task.unit + u) * kCols;
        store_y(problem_, tensors_, m, col, std::min<int64_t>(kCols, problem_.k - col), y);
      }
  }

  const QgemmProblem& problem_;
  const QgemmTensors& tensors_;
  const int64_t units_, strips_;
  UnitPlace* const places_;
  float* const x_;
  const int64_t x_cols_;
  const ParameterLoader parameters_;
};

bool HasQgemmSimd() { return true; }
void QgemmSimdCpu(const QgemmProblem& problem, const QgemmTensors& tensors, void* workspace) {
  Product(problem, tensors, workspace).run();
}

#else  // !HALFBYTE_SIMD

bool HasQgemmSimd() { return false; }
void QgemmSimdCpu(const QgemmProblem&, const QgemmTensors&, void*) {}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
namespace {

HWY_EXPORT(HasQgemmSimd);
HWY_EXPORT(QgemmSimdCpu);

class SimdKernel : public QgemmKernel {
 public:
  explicit SimdKernel(const QgemmProblem& problem) : problem_(problem) {}
  std::string name() const override { return "qgemm_simd"; }
  std::string backend() const override { return fmt::format("cpu {}", simd_target()); }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::none};
  }
  int64_t workspace_bytes() const override {
    const auto round_up = [](int64_t n, int64_t multiple) {
      return (n + multiple - 1) / multiple * multiple;
    };
    const int64_t cols = round_up(problem_.in_cols(), formats::kUnitCols);
    return kAlignment +
           round_up(problem_.k, formats::kUnitCols) / formats::kUnitCols *
               static_cast<int64_t>(sizeof(UnitPlace)) +
           round_up(problem_.m, 32) * cols * 4;
  }
  void run(const QgemmTensors& tensors, void*, void* workspace) const override {
    auto* const aligned = static_cast<uint8_t*>(workspace) +
                          (kAlignment - reinterpret_cast<uintptr_t>(workspace) % kAlignment) % kAlignment;
    HWY_DYNAMIC_DISPATCH(QgemmSimdCpu)(problem_, tensors, aligned);
  }

 private:
  static constexpr int64_t kAlignment = 64;  // of vectors in the workspace, which has 16
  QgemmProblem problem_;
};

std::string refuse(const QgemmProblem& problem) {
  if (!HWY_DYNAMIC_DISPATCH(HasQgemmSimd)()) return "the CPU has none of the vectors that it is compiled for";
  if (!problem.packed) return "it takes packed weights, not views";
  if (problem.math == QgemmMath::f64) return "its sums are f32, not f64";
  const int64_t least = formats::kUnitCols / (problem.codec.bits == 4 ? 4 : 2);
  if (problem.group < problem.k && problem.group % least != 0)
    return fmt::format("its groups are multiples of {} columns, or rows, not {}", least, problem.group);
  return {};
}

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<SimdKernel>(problem);
}

}  // namespace

const QgemmVariant kQgemmSimd = {{"qgemm_simd", DeviceKind::cpu, &refuse, &make}};

}  // namespace halfbyte
#endif  // HWY_ONCE
