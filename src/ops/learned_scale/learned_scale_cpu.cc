// SIMD kernels of `fake_quantize_learned_backward`.
//
// What elements add to the sums of their groups goes to buffers in L1, which are added up pairwise. Groups
// are walked in aligned pieces of a power of two, which threads share out; sums of pieces are added up at the
// end.
#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "cpu/parallel.h"
#include "ops/learned_scale/learned_scale_ref.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/learned_scale/learned_scale_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/sum-inl.h"
#include "grouped/linear-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

constexpr int64_t kPiece = 2048;               // elements
constexpr int64_t kColumns = 512, kRows = 64;  // of a piece of columns

enum class Mode { scale, scale_and_zero, table };

// ---- Elements

// Of a vector of elements: whether gradients pass, and what they add to the sums of scale and zero point.
template <class D>
struct Terms {
  hn::Mask<D> passes;
  hn::Vec<D> scale, zero;
};
template <Mode kMode, class D, class V = hn::Vec<D>>
HWY_INLINE Terms<D> terms_of(D d, V x, V gradient, V scale, V low, V high,
                             const TableValues<hn::TFromD<D>>& table) {
  const auto v = hn::Div(x, scale);
  const auto place = kMode == Mode::table ? v : hn::Round(v);
  const auto value = kMode == Mode::table ? table.nearest(d, v) : place;
  const auto bound = hn::Min(hn::Max(place, low), high);
  const auto passes = hn::Eq(bound, place);  // not NaN
  const auto counts = hn::Eq(place, place);  // likewise
  const auto factor = hn::IfThenElse(passes, hn::Sub(value, v), bound);
  Terms<D> terms{passes, hn::IfThenElseZero(counts, hn::Mul(gradient, factor)), hn::Zero(d)};
  if constexpr (kMode == Mode::scale_and_zero)
    terms.zero = hn::IfThenElseZero(hn::AndNot(passes, counts), gradient);
  return terms;
}

// dx and the terms of n elements, element i of group number i. Writes whole vectors.
template <class Type, Mode kMode, class Memory = typename Type::Memory, class F = typename Type::Compute>
void compute_terms(const Memory* HWY_RESTRICT x, const Memory* HWY_RESTRICT dy, int64_t n,
                   const Scales<F>& scales, const TableValues<F>& table, Memory* HWY_RESTRICT dx,
                   F* HWY_RESTRICT scale_terms, F* HWY_RESTRICT zero_terms) {
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto step = [&](const Memory* from_x, const Memory* from_dy, int64_t i) HWY_ATTR {
    const auto t =
        terms_of<kMode>(d, Type::load(d, from_x), Type::load(d, from_dy), hn::LoadU(d, scales.scale + i),
                        hn::LoadU(d, scales.low + i), hn::LoadU(d, scales.high + i), table);
    const auto live = hn::Ne(hn::LoadU(d, scales.inverse + i), hn::Zero(d));  // a scale of 0 adds nothing
    hn::StoreU(hn::IfThenElseZero(live, t.scale), d, scale_terms + i);
    if constexpr (kMode == Mode::scale_and_zero)
      hn::StoreU(hn::IfThenElseZero(live, t.zero), d, zero_terms + i);
    select<Type>(d, t.passes, from_dy, dx + i);
  };
  int64_t i = 0;
  for (; i + N <= n; i += N) step(x + i, dy + i, i);
  if (i >= n) return;
  HWY_ALIGN Memory last_x[kPad] = {}, last_dy[kPad] = {};
  std::copy_n(x + i, n - i, last_x);
  std::copy_n(dy + i, n - i, last_dy);
  step(last_x, last_dy, i);
}

// The last elements, and zeros behind them.
template <class Memory>
struct Padded {
  HWY_ALIGN Memory x[kPad], dy[kPad];
};
template <class Memory>
HWY_NOINLINE void pad(const Memory* x, const Memory* dy, int64_t n, Padded<Memory>& to) {
  std::fill(std::copy_n(x, n, to.x), to.x + kPad, Memory{0});
  std::fill(std::copy_n(dy, n, to.dy), to.dy + kPad, Memory{0});
}

constexpr int64_t fours(int64_t n) { return (n + 3) / 4; }

// dx of n elements of group number `group`, and the first two levels of the trees over their terms: the sums
// of four each. Writes whole vectors, and reads them where there are `readable` elements.
template <class Type, Mode kMode, class Memory = typename Type::Memory, class F = typename Type::Compute>
HWY_INLINE void sum_fours(const Memory* HWY_RESTRICT x, const Memory* HWY_RESTRICT dy, int64_t n,
                          int64_t readable, const Scales<F>& scales, int64_t group,
                          const TableValues<F>& table, Memory* HWY_RESTRICT dx, F* HWY_RESTRICT scale_sums,
                          F* HWY_RESTRICT zero_sums) {
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto scale = hn::Set(d, scales.scale[group]), low = hn::Set(d, scales.low[group]),
             high = hn::Set(d, scales.high[group]);
  struct Sums {
    hn::Vec<decltype(d)> scale, zero;
  };
  const auto add = [&](auto a, auto b) HWY_ATTR {
    if constexpr (kEvenOdd<Type>)
      return hn::Add(a, b);
    else
      return pair_sums(d, a, b);
  };
  const auto sums_of_2 = [&](const Memory* from_x, const Memory* from_dy, Memory* to) HWY_ATTR -> Sums {
    const auto v = load_two<Type>(d, from_x), g = load_two<Type>(d, from_dy);
    const auto a = terms_of<kMode>(d, v.a, g.a, scale, low, high, table);
    const auto b = terms_of<kMode>(d, v.b, g.b, scale, low, high, table);
    select_two<Type>(d, a.passes, b.passes, from_dy, to);
    Sums sums{add(a.scale, b.scale), hn::Zero(d)};
    if constexpr (kMode == Mode::scale_and_zero) sums.zero = add(a.zero, b.zero);
    return sums;
  };
  const auto step = [&](const Memory* from_x, const Memory* from_dy, int64_t i, bool both) HWY_ATTR {
    const Sums a = sums_of_2(from_x, from_dy, dx + i);
    Sums b{hn::Zero(d), hn::Zero(d)};
    if (both) b = sums_of_2(from_x + 2 * N, from_dy + 2 * N, dx + i + 2 * N);
    hn::StoreU(pair_sums(d, a.scale, b.scale), d, scale_sums + i / 4);
    if constexpr (kMode == Mode::scale_and_zero)
      hn::StoreU(pair_sums(d, a.zero, b.zero), d, zero_sums + i / 4);
  };
  int64_t i = 0;
  for (; i + 4 * N <= n; i += 4 * N) {
    for (int64_t k = i + kAhead; k < i + kAhead + 4 * N; k += 64 / static_cast<int64_t>(sizeof(Memory))) {
      hwy::Prefetch(x + k);
      hwy::Prefetch(dy + k);
    }
    step(x + i, dy + i, i, true);
  }
  if (i < n && n % 4 == 0 && n - i <= 2 * N && i + 2 * N <= readable) {
    step(x + i, dy + i, i, false);
  } else if (i < n) {
    Padded<Memory> last;
    pad(x + i, dy + i, n - i, last);
    step(last.x, last.dy, i, true);
  }
  if (scales.inverse[group] != 0) return;  // a scale of 0 adds nothing
  std::fill_n(scale_sums, fours(n), F{0});
  if constexpr (kMode == Mode::scale_and_zero) std::fill_n(zero_sums, fours(n), F{0});
}

// The same of `count` groups one behind the other, the first of them number `group`; each has `stride` sums.
template <class Type, Mode kMode, class Memory = typename Type::Memory, class F = typename Type::Compute>
void sum_fours_of_groups(const Memory* x, const Memory* dy, int64_t n, int64_t count, int64_t readable,
                         const Scales<F>& scales, int64_t group, const TableValues<F>& table, Memory* dx,
                         F* scale_sums, F* zero_sums, int64_t stride) {
  for (int64_t i = 0; i < count; ++i)
    sum_fours<Type, kMode>(x + i * n, dy + i * n, n, readable - i * n, scales, group + i, table, dx + i * n,
                           scale_sums + i * stride, zero_sums + i * stride);
}

// to[i] = from[i] + to[i]
template <class F>
HWY_INLINE void add_to(const F* HWY_RESTRICT from, F* HWY_RESTRICT to, int64_t n) {
  const hn::ScalableTag<F> d;
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Add(hn::LoadU(d, from + i), hn::LoadU(d, to + i)), d, to + i);
}

// Pairwise sums of rows of terms, element by element.
template <class F>
class RowSums {
 public:
  // Where the next row is written.
  F* next() {
    const auto level = static_cast<size_t>(std::countr_one(count_));
    if (level == num_parts_) {
      parts_[num_parts_] = memory->take<F>(kColumns + kPad);
      std::fill_n(parts_[num_parts_++], kColumns + kPad, F{0});
    }
    return parts_[level];
  }
  // It has been written.
  void add(int64_t width) {
    const auto level = static_cast<size_t>(std::countr_one(count_++));
    for (size_t below = 0; below < level; ++below) add_to(parts_[below], parts_[level], width);
  }
  // Of all rows, of which there are some; then there are none.
  const F* total(int64_t width) {
    auto level = static_cast<size_t>(std::countr_zero(count_));
    F* const sum = parts_[level];
    while (++level < num_parts_)
      if (count_ >> level & 1) add_to(parts_[level], sum, width);
    count_ = 0;
    return sum;
  }

  // Of this many rows, what is taken of the memory.
  static int64_t bytes(int64_t num_rows) {
    return std::bit_width(static_cast<uint64_t>(num_rows)) * halfbyte::Scratch::bytes_of<F>(kColumns + kPad);
  }

  halfbyte::Scratch* memory = nullptr;

 private:
  std::array<F*, 64> parts_;  // of 2^level rows, where that bit of the count is set
  size_t num_parts_ = 0;
  uint64_t count_ = 0;
};

// ---- Tensors

// The loops over elements are compiled once for each mode, all around them once.
template <class Type>
class Runner {
 public:
  using F = typename Type::Compute;
  using Memory = typename Type::Memory;

  Runner(const LsqProblem& problem, const LsqTensors& tensors)
      : problem_(problem),
        tensors_(tensors),
        x_(static_cast<const Memory*>(tensors.x)),
        dy_(static_cast<const Memory*>(tensors.dy)),
        dx_(static_cast<Memory*>(tensors.y)),
        past_caches_(problem.num_elements() * size_of(problem.dtype) >= linear::kStreamBytes),
        num_sums_(problem.learns_zeros() ? 2 : 1),
        memory_(tensors.scratch ? *tensors.scratch : own_) {
    if (problem.codec.kind == formats::Kind::table) {
      compute_terms_ = &compute_terms<Type, Mode::table>;
      sum_fours_ = &sum_fours_of_groups<Type, Mode::table>;
    } else if (problem.learns_zeros()) {
      compute_terms_ = &compute_terms<Type, Mode::scale_and_zero>;
      sum_fours_ = &sum_fours_of_groups<Type, Mode::scale_and_zero>;
    }
  }

  // What a run by one thread takes of its scratch, with two sums.
  static int64_t scratch_bytes(const LsqProblem& p) {
    if (p.num_elements() == 0) return 0;
    const bool one = p.num_scales == 1 && p.scale_strides.axis == 0, channels = p.scale_strides.outer == 0;
    const bool columns = !one && (channels ? p.inner == 1 : p.inner > 1);
    const int64_t size = one ? p.num_elements() : channels ? p.outer * p.inner : p.group_size;
    const int64_t piece = columns ? kRows : kPiece, pieces = (size + piece - 1) / piece;
    return halfbyte::Scratch::bytes_of<Scratch>(1) +
           halfbyte::Scratch::bytes_of<F>(kMostSums * p.num_scales * pieces) +
           (columns ? kMostSums * RowSums<F>::bytes(std::max(kRows, pieces)) : 0);
  }

  QuantizeStatus run() {
    const LsqProblem& p = problem_;
    if (p.num_elements() == 0) {
      for (int64_t group = 0; group < p.num_scales; ++group) store(group, Totals{}, 0);
    } else if (p.num_scales == 1 && p.scale_strides.axis == 0) {
      run_rows(p.num_elements(), p.num_elements());
    } else if (p.scale_strides.outer == 0) {  // channels
      if (p.inner == 1)
        run_columns(p.axis, p.outer, p.outer);
      else if (p.outer == 1)
        run_rows(p.inner, p.inner);
      else
        run_channels();
    } else if (p.inner == 1) {
      run_rows(p.axis, p.group_size);
    } else {
      run_columns(p.inner, p.axis, p.group_size);
    }
    return status_;
  }

 private:
  static constexpr int64_t kMostSums = 2;
  struct Totals {
    F scale = 0, zero = 0;
  };

  // What a thread works with. `terms`: [sum], of four elements each.
  struct Scratch {
    Scales<F> scales;
    RowSums<F> rows[kMostSums];
    HWY_ALIGN F terms[kMostSums][kPiece + kPad];
    HWY_ALIGN Memory x[kPiece + kPad], dy[kPiece + kPad], dx[kPiece + kPad];
    QuantizeStatus status, ignored;
  };

  // Calls body(scratch, i) for the pieces of work [0, n), of about `elements` each, in parallel.
  template <class Body>
  void for_each(int64_t n, int64_t elements, const Body& body) {
    if (problem_.num_threads == 1) {  // one for all
      static_assert(std::is_trivially_destructible_v<Scratch> &&
                    alignof(Scratch) <= halfbyte::Scratch::kAlignment);
      if (only_ == nullptr) only_ = new (memory_.take<std::byte>(sizeof(Scratch))) Scratch;
      for (auto& rows : only_->rows) rows.memory = &memory_;
      for (int64_t i = 0; i < n; ++i) body(*only_, i);
      if (past_caches_) hwy::FlushStream();
      merge(status_, std::exchange(only_->status, {}));
      return;
    }
    parallel_for(n, std::max<int64_t>(1, linear::kTask / elements), problem_.num_threads,
                 [&](int64_t begin, int64_t end, int) {
                   halfbyte::Scratch memory;
                   const auto scratch = std::make_unique_for_overwrite<Scratch>();
                   for (auto& rows : scratch->rows) rows.memory = &memory;
                   for (int64_t i = begin; i < end; ++i) body(*scratch, i);
                   if (past_caches_) hwy::FlushStream();
                   const std::lock_guard lock(mutex_);
                   merge(status_, scratch->status);
                 });
  }

  void write(const Memory* from, int64_t n, Memory* to) const {
    if (past_caches_)
      stream_copy(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from),
                  static_cast<size_t>(n) * sizeof(Memory));
    else
      std::copy_n(from, n, to);
  }

  // Scales [first, first + n); counts what is none where `count`.
  void load(Scratch& scratch, int64_t first, int64_t n, bool count) const {
    scratch.scales.load(problem_, tensors_, first, 1, n, count ? scratch.status : scratch.ignored);
  }
  // What a scale that is none adds is 0, whatever `scale`.
  void store(int64_t group, const Totals& totals, F scale) const {
    lsq_ref::store_gradients(problem_, tensors_, group, totals.scale, totals.zero, scale);
  }

  // Groups of `size` elements along rows, one behind the other.
  void run_rows(int64_t row, int64_t size) {
    const int64_t per_row = (row + size - 1) / size, num_groups = problem_.num_scales;
    const auto begin_of = [&](int64_t group) { return group / per_row * row + group % per_row * size; };
    const auto size_of_group = [&](int64_t group) { return std::min(size, row - group % per_row * size); };
    if (size > kPiece) {
      return run_pieces((size + kPiece - 1) / kPiece, size_of_group,
                        [&](Scratch& scratch, int64_t group, int64_t begin, int64_t n) HWY_ATTR {
                          const int64_t at = begin_of(group) + begin;
                          compute(scratch, x_ + at, dy_ + at, n, 1, n, 0, scratch.dx, 0, 0);
                          write(scratch.dx, n, dx_ + at);
                        });
    }
    const int64_t per_piece = std::min(kScales, kPiece / size);
    for_each((num_groups + per_piece - 1) / per_piece, per_piece * size,
             [&](Scratch& scratch, int64_t piece) HWY_ATTR {
               const int64_t stride = fours(size);  // terms of a group
               const int64_t first = piece * per_piece, count = std::min(per_piece, num_groups - first);
               const int64_t begin = begin_of(first), last = first + count - 1;
               const int64_t n = begin_of(last) + size_of_group(last) - begin;
               load(scratch, first, count, true);
               for (int64_t i = 0, at = 0, groups = 0; i < count; i += groups) {
                 const int64_t left = row - (first + i) % per_row * size, here = std::min(size, left);
                 groups = std::clamp<int64_t>(left / size, 1, count - i);
                 compute(scratch, x_ + begin + at, dy_ + begin + at, here, groups, n - at, i, scratch.dx + at,
                         i * stride, stride);
                 if (here < size)
                   for (int64_t s = 0; s < num_sums_; ++s)
                     std::fill(scratch.terms[s] + i * stride + fours(here),
                               scratch.terms[s] + (i + 1) * stride, F{0});
                 at += groups * here;
               }
               write(scratch.dx, n, dx_ + begin);
               for (int64_t s = 0; s < num_sums_; ++s) add_up(scratch.terms[s], count, stride);
               for (int64_t i = 0; i < count; ++i)
                 store(first + i, totals_at(scratch.terms, i), scratch.scales.scale[i]);
             });
  }

  // Channels whose elements lie in runs of `inner`.
  void run_channels() {
    const LsqProblem& p = problem_;
    const int64_t size = p.outer * p.inner;
    run_pieces((size + kPiece - 1) / kPiece, [&](int64_t) { return size; },
               [&](Scratch& scratch, int64_t group, int64_t begin, int64_t n) HWY_ATTR {
                 // Calls body(from, to, length): elements of the piece that lie together in the tensor.
                 const auto for_each_run = [&](const auto& body) {
                   for (int64_t to = 0, length = 0; to < n; to += length) {
                     const int64_t k = begin + to, o = k / p.inner, i = k - o * p.inner;
                     length = std::min(n - to, p.inner - i);
                     body((o * p.axis + group) * p.inner + i, to, length);
                   }
                 };
                 for_each_run([&](int64_t from, int64_t to, int64_t length) {
                   std::copy_n(x_ + from, length, scratch.x + to);
                   std::copy_n(dy_ + from, length, scratch.dy + to);
                 });
                 compute(scratch, scratch.x, scratch.dy, n, 1, n, 0, scratch.dx, 0, 0);
                 for_each_run([&](int64_t from, int64_t to, int64_t length) {
                   std::copy_n(scratch.dx + to, length, dx_ + from);
                 });
               });
  }

  // Groups of up to `pieces` pieces. body(scratch, group, begin, n) computes the elements [begin, begin + n)
  // of the group, whose scale is number 0.
  template <class SizeOf, class Body>
  void run_pieces(int64_t pieces, const SizeOf& size_of_group, const Body& body) {
    F* const sums = zeros(num_sums_ * problem_.num_scales * pieces);
    const auto at = [&](int64_t sum, int64_t group) {
      return sums + (sum * problem_.num_scales + group) * pieces;
    };
    for_each(problem_.num_scales * pieces, kPiece, [&](Scratch& scratch, int64_t item) HWY_ATTR {
      const int64_t group = item / pieces, piece = item % pieces, begin = piece * kPiece;
      const int64_t n = std::min(kPiece, size_of_group(group) - begin);
      if (n <= 0) return;
      load(scratch, group, 1, piece == 0);
      body(scratch, group, begin, n);
      for (int64_t s = 0; s < num_sums_; ++s) at(s, group)[piece] = tree_sum(scratch.terms[s], fours(n));
    });
    for_each(problem_.num_scales, pieces, [&](Scratch& scratch, int64_t group) HWY_ATTR {
      Totals totals{tree_sum(at(0, group), pieces)};
      if (num_sums_ == 2) totals.zero = tree_sum(at(1, group), pieces);
      load(scratch, group, 1, false);
      store(group, totals, scratch.scales.scale[0]);
    });
  }

  // Groups side by side: of `size` rows each, `rows` of them from one outer index.
  void run_columns(int64_t columns, int64_t rows, int64_t size) {
    const int64_t bands_per_axis = (rows + size - 1) / size, bands = problem_.num_scales / columns;
    const int64_t pieces = (size + kRows - 1) / kRows, across = (columns + kColumns - 1) / kColumns;
    // Totals of columns [column, column + width) of a band, from scratch.rows.
    const auto finish = [&](Scratch& scratch, int64_t band, int64_t column, int64_t width) HWY_ATTR {
      const F* totals[kMostSums];
      for (int64_t s = 0; s < num_sums_; ++s) totals[s] = scratch.rows[s].total(width);
      for (int64_t i = 0; i < width; ++i)
        store(band * columns + column + i, totals_at(totals, i), scratch.scales.scale[i]);
    };
    F* const sums = zeros(pieces == 1 ? 0 : num_sums_ * bands * pieces * columns);
    const auto at = [&](int64_t sum, int64_t band, int64_t piece) {
      return sums + ((sum * bands + band) * pieces + piece) * columns;
    };
    for_each(bands * pieces * across, kRows * kColumns, [&](Scratch& scratch, int64_t item) HWY_ATTR {
      const int64_t tile = item % across, piece = item / across % pieces, band = item / across / pieces;
      const int64_t in_axis = band % bands_per_axis * size, begin = piece * kRows;
      const int64_t height = std::min({kRows, size - begin, rows - in_axis - begin});
      if (height <= 0) return;
      const int64_t column = tile * kColumns, width = std::min(kColumns, columns - column);
      load(scratch, band * columns + column, width, piece == 0);
      for (int64_t r = 0; r < height; ++r) {
        const int64_t index = (band / bands_per_axis * rows + in_axis + begin + r) * columns + column;
        if (r + 1 < height)
          for (int64_t i = 0; i < width; i += 64 / static_cast<int64_t>(sizeof(Memory))) {
            hwy::Prefetch(x_ + index + columns + i);
            hwy::Prefetch(dy_ + index + columns + i);
          }
        F* const terms = scratch.rows[0].next();
        if (scratch.scales.far)
          for (int64_t i = 0; i < width; ++i)
            terms[i] = run_element(scratch.scales.params(i), x_[index + i], dy_[index + i], scratch.dx[i]);
        else
          compute_terms_(x_ + index, dy_ + index, width, scratch.scales, table_, scratch.dx, terms,
                         scratch.rows[num_sums_ - 1].next());
        for (int64_t s = 0; s < num_sums_; ++s) scratch.rows[s].add(width);
        write(scratch.dx, width, dx_ + index);
      }
      if (pieces == 1) return finish(scratch, band, column, width);
      for (int64_t s = 0; s < num_sums_; ++s)
        std::copy_n(scratch.rows[s].total(width), width, at(s, band, piece) + column);
    });
    if (pieces == 1) return;
    for_each(bands * across, pieces * kColumns, [&](Scratch& scratch, int64_t item) HWY_ATTR {
      const int64_t band = item / across, column = item % across * kColumns;
      const int64_t width = std::min(kColumns, columns - column);
      for (int64_t piece = 0; piece < pieces; ++piece)
        for (int64_t s = 0; s < num_sums_; ++s) {
          std::copy_n(at(s, band, piece) + column, width, scratch.rows[s].next());
          scratch.rows[s].add(width);
        }
      load(scratch, band * columns + column, width, false);
      finish(scratch, band, column, width);
    });
  }

  F* zeros(int64_t n) {
    F* const values = memory_.template take<F>(n);
    std::fill_n(values, n, F{0});
    return values;
  }

  template <class Terms>
  Totals totals_at(const Terms& terms, int64_t i) const {
    return {terms[0][i], num_sums_ == 2 ? terms[1][i] : 0};
  }

  // dx of an element, and what it adds to the sum of its scale. Learned zero points are never far.
  F run_element(const formats::GroupParams<F>& params, const Memory& x, const Memory& dy, Memory& dx) const {
    const auto load = [&](const Memory& from) {
      return linear_ref::load_element<F>(&from, problem_.dtype, 0);
    };
    const LsqTerms<F> terms = lsq_terms(load(x), load(dy), params.code_scale, params.zero_point,
                                        problem_.codec.q_min, problem_.codec.q_max);
    dx = terms.passes ? dy : Memory{0};
    return terms.scale;
  }

  // dx of `count` groups of n elements, the first of them number `group`, and `stride` sums of four terms
  // each from scratch.terms + to on.
  void compute(Scratch& scratch, const Memory* x, const Memory* dy, int64_t n, int64_t count,
               int64_t readable, int64_t group, Memory* dx, int64_t to, int64_t stride) const {
    if (!scratch.scales.far)
      return sum_fours_(x, dy, n, count, readable, scratch.scales, group, table_, dx, scratch.terms[0] + to,
                        scratch.terms[num_sums_ - 1] + to, stride);
    for (int64_t g = 0; g < count; ++g) {
      const auto params = scratch.scales.params(group + g);
      F* const sums = scratch.terms[0] + to + g * stride;
      for (int64_t i = 0; i < n; i += 4) {
        F terms[4] = {};
        for (int64_t j = i; j < std::min(n, i + 4); ++j)
          terms[j - i] = run_element(params, x[g * n + j], dy[g * n + j], dx[g * n + j]);
        sums[i / 4] = (terms[0] + terms[1]) + (terms[2] + terms[3]);
      }
    }
  }

  // The sums of `count` groups of `size` terms, to the first `count` places.
  static void add_up(F* terms, int64_t count, int64_t size) {
    if (std::has_single_bit(static_cast<uint64_t>(size))) {
      for (int64_t n = count * size; n > count;) n = halve(terms, n, terms);
    } else {
      for (int64_t i = 0; i < count; ++i) terms[i] = tree_sum(terms + i * size, size);
    }
  }

  const LsqProblem& problem_;
  const TableValues<F> table_{problem_.codec.book};
  const LsqTensors& tensors_;
  const Memory *x_, *dy_;
  Memory* dx_;
  bool past_caches_;
  int64_t num_sums_;  // of the scale, and of the zero point where it is learned
  // Of the mode of the problem.
  decltype(&compute_terms<Type, Mode::scale>) compute_terms_ = &compute_terms<Type, Mode::scale>;
  decltype(&sum_fours_of_groups<Type, Mode::scale>) sum_fours_ = &sum_fours_of_groups<Type, Mode::scale>;
  halfbyte::Scratch own_;
  halfbyte::Scratch& memory_;  // of what all threads share
  Scratch* only_ = nullptr;    // of one thread
  std::mutex mutex_;           // of status_, held for moments
  QuantizeStatus status_;
};

int64_t LsqScratchBytes(const LsqProblem& problem) {
  switch (problem.dtype) {
    case DType::f32:
      return Runner<F32>::scratch_bytes(problem);
    case DType::f16:
      return Runner<F16>::scratch_bytes(problem);
    case DType::bf16:
      return Runner<BF16>::scratch_bytes(problem);
    default:
      return Runner<F64>::scratch_bytes(problem);
  }
}

QuantizeStatus LsqCpu(const LsqProblem& problem, const LsqTensors& tensors) {
  switch (problem.dtype) {
    case DType::f32:
      return Runner<F32>(problem, tensors).run();
    case DType::f16:
      return Runner<F16>(problem, tensors).run();
    case DType::bf16:
      return Runner<BF16>(problem, tensors).run();
    default:
      return Runner<F64>(problem, tensors).run();
  }
}

#else  // !HALFBYTE_SIMD

int64_t LsqScratchBytes(const LsqProblem&) { return 0; }

QuantizeStatus LsqCpu(const LsqProblem& problem, const LsqTensors& tensors) {
  return lsq_ref::run(problem, tensors);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(LsqCpu);
HWY_EXPORT(LsqScratchBytes);

int64_t lsq_scratch_bytes(const LsqProblem& problem) {
  return HWY_DYNAMIC_DISPATCH(LsqScratchBytes)(problem);
}

QuantizeStatus lsq_cpu(const LsqProblem& problem, const LsqTensors& tensors) {
  return HWY_DYNAMIC_DISPATCH(LsqCpu)(problem, tensors);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
