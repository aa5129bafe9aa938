// SIMD kernels of `observe`: the ranges of a batch, in tasks that threads share out. Groups are runs of
// elements that lie together, or columns side by side. Minima and maxima do not depend on the order, so that
// tasks join their ranges as they come. The rare elements that are not finite are found in a sum, and their
// task is done again one element at a time.
#include <algorithm>
#include <mutex>
#include <vector>

#include "core/counts.h"
#include "cpu/parallel.h"
#include "ops/observe/observe_ref.h"
#include "ops/observe/range_search.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/observe/observe_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

using formats::Seen;

#if HALFBYTE_SIMD

constexpr int64_t kTask = 65536;  // elements, large against the cost of scheduling
constexpr int64_t kWidth = 2048;  // columns of a tile: their ranges stay in L1
constexpr int64_t kHeight = 256;  // rows of a tile, so that joining its ranges does not count

template <class F>
void widen(Seen<F>& into, F min, F max) {
  into.min = std::min(into.min, min);
  into.max = std::max(into.max, max);
}

// What the tasks of a run share: where ranges go. Those of whole groups at once to the state, if there is
// one; those of parts of groups, or without a state all, to `seen`.
template <class F>
struct Shared {
  const ObserveProblem& problem;
  const void* x;
  Seen<F>* seen;
  F *min = nullptr, *max = nullptr;  // of the state
  std::mutex mutex;                  // of status, and of `seen` where groups have parts: held for moments
  QuantizeStatus status;

  // The ranges of n whole groups, from number `first` on.
  void put(int64_t first, const Seen<F>* found, int64_t n) const {
    if (min == nullptr) {
      std::copy_n(found, n, seen + first);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      const Seen<F> now =
          formats::observed(Seen<F>{min[first + i], max[first + i]}, found[i], problem.history);
      min[first + i] = now.min;
      max[first + i] = now.max;
    }
  }
  // Of parts of them.
  void join(int64_t first, const Seen<F>* found, int64_t n) {
    const std::lock_guard lock(mutex);
    for (int64_t i = 0; i < n; ++i) widen(seen[first + i], found[i].min, found[i].max);
  }
};

// The range of the finite elements [begin, end) of x, one at a time.
template <class F>
Seen<F> range_of_finite(Shared<F>& shared, int64_t begin, int64_t end, QuantizeStatus& status) {
  Seen<F> seen;
  for (int64_t i = begin; i < end; ++i) {
    const F value = formats::load_scale<F>(shared.x, i, scale_type(shared.problem.dtype));
    if (formats::is_finite(value))
      observe_ref::widen(seen, value);
    else if (status.num_nonfinite++ == 0)
      status.first_nonfinite = i;
  }
  return seen;
}

// ---- Elements as lanes of the same order. f32 and f64 are themselves; whether all are finite is found in a
// sum. The bits of f16 and bf16, with those of negative values turned over, are integers of that order, twice
// as many in a vector; the largest and the least are those of infinities and NaN, if there are any.

template <class F>
struct Floats {
  using Lane = F;
  using Wide = F;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const F* x) {
    return hn::LoadU(d, x);
  }
  static F value(F lane) { return lane; }
  template <class D>
  static HWY_INLINE hn::Vec<D> values(D, hn::Vec<D> lanes) {
    return lanes;
  }
  template <class D>
  static HWY_INLINE bool all_finite(D, hn::Vec<D>, hn::Vec<D>) {  // see watch
    return true;
  }
  static constexpr F kLeast = -Seen<F>().min, kMost = Seen<F>().min;
};
constexpr int kF16Infinity = 0x7C00, kBf16Infinity = 0x7F80;
template <int kInfinity, float (*kToFloat)(uint16_t)>
struct Halves {
  using Lane = int16_t;
  using Wide = int32_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint16_t* x) {
    const auto v = hn::LoadU(d, reinterpret_cast<const int16_t*>(x));
    return hn::Xor(v, hn::And(hn::BroadcastSignBit(v), hn::Set(d, int16_t{0x7FFF})));
  }
  static float value(int32_t lane) {
    return kToFloat(static_cast<uint16_t>(lane < 0 ? lane ^ 0x7FFF : lane));
  }
  template <class D>  // of wide lanes
  static HWY_INLINE hn::Vec<hn::Rebind<float, D>> values(D d, hn::Vec<D> lanes) {
    const hn::Rebind<float, D> df;
    const auto bits = hn::Xor(lanes, hn::And(hn::BroadcastSignBit(lanes), hn::Set(d, 0x7FFF)));
    if constexpr (kInfinity == kF16Infinity) {
      const hn::Rebind<uint16_t, D> d16;
      const hn::Rebind<hwy::float16_t, D> half;
      return hn::PromoteTo(
          df, hn::BitCast(half, hn::TruncateTo(d16, hn::BitCast(hn::RebindToUnsigned<D>(), bits))));
    } else {
      return hn::BitCast(df, hn::ShiftLeft<16>(bits));
    }
  }
  template <class D>
  static HWY_INLINE bool all_finite(D d, hn::Vec<D> least, hn::Vec<D> most) {
    return hn::AllTrue(
        d, hn::And(hn::Gt(least, hn::Set(d, -kInfinity - 1)), hn::Lt(most, hn::Set(d, kInfinity))));
  }
  static bool is_finite(int32_t least, int32_t most) { return -kInfinity - 1 < least && most < kInfinity; }
  static constexpr int16_t kLeast = -0x8000, kMost = 0x7FFF;
};
inline float f16_value(uint16_t bits) { return formats::f16_to_f32(bits); }
inline float bf16_value(uint16_t bits) { return formats::bf16_to_f32(bits); }
template <class Type>
struct OrderedOf : Floats<typename Type::Memory> {};
template <>
struct OrderedOf<F16> : Halves<kF16Infinity, f16_value> {};
template <>
struct OrderedOf<BF16> : Halves<kBf16Infinity, bf16_value> {};
template <class Type>
constexpr bool kIsHalf = sizeof(typename Type::Memory) == 2;

// A sum that is 0 unless an element was not finite; nothing for halves.
template <class Type, class D, class V>
HWY_INLINE void watch(D d, V v, V& sum) {
  if constexpr (!kIsHalf<Type>) sum = hn::MulAdd(v, hn::Zero(d), sum);
}
template <class Type, class D, class V>
HWY_INLINE bool is_finite(D d, V sum) {
  if constexpr (kIsHalf<Type>)
    return true;
  else
    return hn::AllTrue(d, hn::Eq(sum, hn::Zero(d)));
}
// The value of the least and the largest lane; false where they are not finite.
template <class Type, class F, class Lane>
HWY_INLINE bool to_seen(Lane least, Lane most, Seen<F>& seen) {
  using Ordered = OrderedOf<Type>;
  seen = {Ordered::value(least) + 0, Ordered::value(most) + 0};  // -0 becomes +0
  if constexpr (kIsHalf<Type>)
    return Ordered::is_finite(least, most);
  else
    return true;
}

// Of n elements, at least a vector, lanes with the least and the largest.
template <class Type, class D, class V = hn::Vec<D>>
HWY_INLINE void take_run(D d, const typename Type::Memory* HWY_RESTRICT from, int64_t n, V& least, V& most,
                         V& sum) {
  using Ordered = OrderedOf<Type>;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  auto least1 = hn::Set(d, Ordered::kMost), most1 = hn::Set(d, Ordered::kLeast);
  least = least1, most = most1;
  const auto take = [&](int64_t i, V& low, V& high) HWY_ATTR {
    const auto v = Ordered::load(d, from + i);
    watch<Type>(d, v, sum);
    low = hn::Min(low, v);
    high = hn::Max(high, v);
  };
  int64_t i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    take(i, least, most);
    take(i + N, least1, most1);
  }
  if (i + N <= n) take(i, least, most), i += N;
  if (i < n) take(n - N, least1, most1);  // some of them a second time
  least = hn::Min(least, least1);
  most = hn::Max(most, most1);
}

// The range of n elements, at least a vector; with NaN or infinities in it any, and false.
template <class Type, class D, class F = typename Type::Compute>
HWY_INLINE bool range_of_run(D d, const typename Type::Memory* from, int64_t n, Seen<F>& seen) {
  using Lane = typename OrderedOf<Type>::Lane;
  auto least = hn::Zero(d), most = least, sum = least;
  take_run<Type>(d, from, n, least, most, sum);
  HWY_ALIGN Lane lows[HWY_MAX_BYTES / sizeof(Lane)], highs[HWY_MAX_BYTES / sizeof(Lane)];
  hn::Store(least, d, lows);
  hn::Store(most, d, highs);
  const size_t N = hn::Lanes(d);
  return to_seen<Type>(*std::min_element(lows, lows + N), *std::max_element(highs, highs + N), seen) &&
         is_finite<Type>(d, sum);
}
template <class Type, class F = typename Type::Compute>
HWY_INLINE bool range_of_any_run(const typename Type::Memory* from, int64_t n, Seen<F>& seen) {
  using Lane = typename OrderedOf<Type>::Lane;
  const hn::ScalableTag<Lane> d;
  const hn::CappedTag<Lane, 16 / sizeof(Lane)> d16;
  if (n >= static_cast<int64_t>(hn::Lanes(d))) return range_of_run<Type>(d, from, n, seen);
  return n >= static_cast<int64_t>(hn::Lanes(d16)) && range_of_run<Type>(d16, from, n, seen);
}

// The ranges of short groups, each of n elements, at least a vector, one behind the other: as many as a
// vector has wide lanes. Their vectors are reduced together: each step makes one of two.
template <class Type, class F = typename Type::Compute>
HWY_INLINE bool ranges_of_groups(const typename Type::Memory* from, int64_t n, Seen<F>* seen) {
  using Wide = typename OrderedOf<Type>::Wide;
  const hn::ScalableTag<Wide> dw;
  const hn::ScalableTag<typename OrderedOf<Type>::Lane> d;
  constexpr size_t kMostLanes = HWY_MAX_BYTES / sizeof(Wide);
  HWY_ALIGN Wide lows[kMostLanes * kMostLanes], highs[kMostLanes * kMostLanes];
  const size_t N = hn::Lanes(dw);
  auto least = hn::Zero(d), most = least, sum = least;
  // Of the two halves of a wide lane the one that counts.
  const auto wide = [&](auto v, auto choose) HWY_ATTR {
    if constexpr (kIsHalf<Type>) {
      const auto pair = hn::BitCast(dw, v);
      return hn::ShiftRight<16>(hn::BitCast(dw, choose(v, hn::BitCast(d, hn::ShiftLeft<16>(pair)))));
    } else {
      return v;
    }
  };
  const auto lower = [](auto a, auto b) HWY_ATTR { return hn::Min(a, b); };
  const auto higher = [](auto a, auto b) HWY_ATTR { return hn::Max(a, b); };
  for (size_t g = 0; g < N; ++g) {
    take_run<Type>(d, from + static_cast<int64_t>(g) * n, n, least, most, sum);
    hn::Store(wide(least, lower), dw, lows + g * N);
    hn::Store(wide(most, higher), dw, highs + g * N);
  }
  const auto halve = [&](Wide* lanes, size_t i, auto choose) HWY_ATTR {
    const auto a = hn::Load(dw, lanes + 2 * i), b = hn::Load(dw, lanes + 2 * i + N);
    hn::Store(choose(hn::ConcatEven(dw, b, a), hn::ConcatOdd(dw, b, a)), dw, lanes + i);
  };
  for (size_t vectors = N; vectors > 1; vectors /= 2)
    for (size_t i = 0; i < vectors / 2 * N; i += N) {
      halve(lows, i, lower);
      halve(highs, i, higher);
    }
  using Ordered = OrderedOf<Type>;
  const hn::ScalableTag<F> df;
  const auto lowest = hn::Load(dw, lows), highest = hn::Load(dw, highs);
  const auto value = [&](auto lanes) HWY_ATTR {
    return hn::Add(Ordered::values(dw, lanes), hn::Zero(df));
  };  // -0 becomes +0
  static_assert(sizeof(Seen<F>) == 2 * sizeof(F));
  hn::StoreInterleaved2(value(lowest), value(highest), df, &seen->min);
  return is_finite<Type>(d, sum) && Ordered::all_finite(dw, lowest, highest);
}

// Elements of a task: whole groups, unless they are long.
int64_t runs_task(int64_t length, int64_t group) {
  const int64_t unit = length % group == 0 ? group : length;
  return unit > 4 * kTask ? kTask : (kTask - 1) / unit * unit + unit;
}

// Groups that are runs of elements: lines of `length`, cut into groups of `group`; or each line, of channels
// that take turns, is a part of one.
template <class Type>
void ranges_of_runs(Shared<typename Type::Compute>& shared, int64_t length, int64_t group, bool channels) {
  using F = typename Type::Compute;
  const ObserveProblem& p = shared.problem;
  const auto* const x = static_cast<const typename Type::Memory*>(shared.x);
  const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<typename OrderedOf<Type>::Lane>()));
  const auto batch = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<typename OrderedOf<Type>::Wide>()));
  const int64_t per_line = (length - 1) / group + 1, n = p.num_elements();
  const bool turns = channels && n > length * p.num_scales;
  // Groups that lie together, through the ends of lines; long ones are as fast one by one.
  const bool batched = !turns && length % group == 0 && N <= group && group <= 64 * N;
  const int64_t task = runs_task(length, group);
  parallel_for((n - 1) / task + 1, 1, p.num_threads, [&](int64_t first_task, int64_t end_task, int) {
    Seen<F> found[HWY_MAX_BYTES / sizeof(F)];
    QuantizeStatus status;
    const int64_t begin = first_task * task, end = std::min(n, end_task * task);
    int64_t line = begin / length, column = begin % length;
    int64_t alone = begin;  // up to here groups are done one by one: one of them is not finite
    for (int64_t at = begin; at < end;) {
      const int64_t k = column / group, last = std::min(length, (k + 1) * group);
      const int64_t index = channels ? line % p.num_scales : line * per_line + k;
      int64_t run = std::min(last - column, end - at);
      const bool tried = batched && at >= alone && column == k * group && end - at >= batch * group;
      if (tried && ranges_of_groups<Type>(x + at, group, found)) {
        run = batch * group;
        shared.put(index, found, batch);
      } else {
        if (tried) alone = at + batch * group;
        if (!range_of_any_run<Type>(x + at, run, found[0]))
          found[0] = range_of_finite(shared, at, at + run, status);
        if (!turns && column == k * group && column + run == last)
          shared.put(index, found, 1);
        else
          shared.join(index, found, 1);
      }
      at += run;
      column += run;
      if (column >= length) line += column / length, column %= length;
    }
    const std::lock_guard lock(shared.mutex);
    merge(shared.status, status);
  });
}

// Rows [row, end_row) of `columns`, of which the columns [first, first + n) are looked at, at least a vector.
struct Tile {
  int64_t row, end_row, columns, first, n;
};

// The range of every column; false where an element is not finite.
template <class Type, class F = typename Type::Compute>
HWY_INLINE bool range_of_columns(const typename Type::Memory* x, const Tile& tile,
                                 Seen<F>* HWY_RESTRICT seen) {
  using Ordered = OrderedOf<Type>;
  using Lane = typename Ordered::Lane;
  const hn::ScalableTag<Lane> d;
  HWY_ALIGN Lane lows[kWidth], highs[kWidth];
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  std::fill_n(lows, tile.n, Ordered::kMost);
  std::fill_n(highs, tile.n, Ordered::kLeast);
  auto sum = hn::Zero(d);
  for (int64_t row = tile.row; row < tile.end_row;) {
    const auto* const from = x + row * tile.columns + tile.first;
    const auto take = [&](auto rows, int64_t i) HWY_ATTR {
      auto least = hn::LoadU(d, lows + i), most = hn::LoadU(d, highs + i);
      for (int64_t r = 0; r < rows; ++r) {
        const auto v = Ordered::load(d, from + r * tile.columns + i);
        watch<Type>(d, v, sum);
        least = hn::Min(least, v);
        most = hn::Max(most, v);
      }
      hn::StoreU(least, d, lows + i);
      hn::StoreU(most, d, highs + i);
    };
    const auto take_all = [&](auto rows) HWY_ATTR {
      int64_t i = 0;
      for (; i + N <= tile.n; i += N) take(rows, i);
      if (i < tile.n) take(rows, tile.n - N);
      row += rows;
    };
    if (tile.end_row - row >= 4)
      take_all(std::integral_constant<int64_t, 4>());
    else
      take_all(std::integral_constant<int64_t, 1>());
  }
  bool finite = is_finite<Type>(d, sum);
  for (int64_t i = 0; i < tile.n; ++i) finite &= to_seen<Type>(lows[i], highs[i], seen[i]);
  return finite;
}

// Groups that are columns of bands of rows: [bands of `rows` rows, columns], in the order of scales; of every
// `axis` rows the last band may be short.
template <class Type>
void ranges_of_columns(Shared<typename Type::Compute>& shared, int64_t axis, int64_t rows, int64_t columns) {
  using F = typename Type::Compute;
  const ObserveProblem& p = shared.problem;
  const auto* const x = static_cast<const typename Type::Memory*>(shared.x);
  const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<typename OrderedOf<Type>::Lane>()));
  const int64_t bands_per_axis = (axis - 1) / rows + 1, bands = p.num_scales / columns;
  const int64_t across = (columns - 1) / kWidth + 1, pieces = (rows - 1) / kHeight + 1;
  const int64_t grain = std::max<int64_t>(1, kTask / (std::min(rows, kHeight) * std::min(columns, kWidth)));
  parallel_for(bands * pieces * across, grain, p.num_threads, [&](int64_t begin, int64_t end, int) {
    Seen<F> found[kWidth];
    QuantizeStatus status;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t band = item / (pieces * across), piece = item / across % pieces;
      const int64_t in_axis = band % bands_per_axis * rows;
      const int64_t first_row = band / bands_per_axis * axis + in_axis;
      const int64_t end_row = first_row + std::min(rows, axis - in_axis);
      Tile tile{first_row + piece * kHeight, 0, columns, item % across * kWidth, 0};
      if (tile.row >= end_row) continue;  // a short band has fewer pieces
      tile.end_row = std::min(end_row, tile.row + kHeight);
      tile.n = std::min(kWidth, columns - tile.first);
      if (tile.n < N || !range_of_columns<Type>(x, tile, found)) {
        std::fill_n(found, tile.n, Seen<F>());
        for (int64_t row = tile.row; row < tile.end_row; ++row)
          for (int64_t i = 0; i < tile.n; ++i) {
            const int64_t index = row * columns + tile.first + i;
            QuantizeStatus here;
            const Seen<F> one = range_of_finite(shared, index, index + 1, here);
            merge(status, here);
            widen(found[i], one.min, one.max);
          }
      }
      if (pieces > 1)
        shared.join(band * columns + tile.first, found, tile.n);
      else
        shared.put(band * columns + tile.first, found, tile.n);
    }
    const std::lock_guard lock(shared.mutex);
    merge(shared.status, status);
  });
}

template <class Type>
QuantizeStatus ranges(const ObserveProblem& p, const void* x, void* seen, const ObserveTensors* state) {
  using F = typename Type::Compute;
  if (p.num_elements() == 0) {
    if (state == nullptr) std::fill_n(static_cast<Seen<F>*>(seen), p.num_scales, Seen<F>());
    return {};
  }
  const bool channels = p.scale_strides.outer == 0, one = p.num_scales == 1;
  const bool columns = !one && (channels ? p.inner == 1 : p.inner > 1);
  // As [lines of `length`], groups along them; or as [`axis` rows, columns].
  const int64_t length = one ? p.num_elements() : channels ? p.inner : p.axis;
  const int64_t group = one || channels ? length : p.group_size;
  const int64_t axis = channels ? p.outer : p.axis, rows = channels ? p.outer : p.group_size;
  const bool parts = columns
                         ? rows > kHeight
                         : runs_task(length, group) < group || (length % group != 0 && length > 4 * kTask) ||
                               (channels && !one && p.outer > 1);
  Scratch own;
  Seen<F>* joined = nullptr;  // of `state`, where groups are found in parts
  Shared<F> shared{p, x, static_cast<Seen<F>*>(seen), nullptr, nullptr, {}, {}};
  if (state != nullptr) {
    ++*state->num_batches;
    shared.min = static_cast<F*>(state->min);
    shared.max = static_cast<F*>(state->max);
    if (parts) {
      joined = (state->scratch ? *state->scratch : own).take<Seen<F>>(p.num_scales);
      std::fill_n(joined, p.num_scales, Seen<F>());
    }
    shared.seen = joined;
  } else if (parts) {
    std::fill_n(shared.seen, p.num_scales, Seen<F>());
  }
  if (columns)
    ranges_of_columns<Type>(shared, axis, rows, channels ? p.axis : p.inner);
  else
    ranges_of_runs<Type>(shared, length, group, channels && !one);
  if (joined != nullptr) shared.put(0, joined, p.num_scales);
  return shared.status;
}

QuantizeStatus ObserveRanges(const ObserveProblem& problem, const void* x, void* seen,
                             const ObserveTensors* state) {
  switch (problem.dtype) {
    case DType::f32:
      return ranges<F32>(problem, x, seen, state);
    case DType::f16:
      return ranges<F16>(problem, x, seen, state);
    case DType::bf16:
      return ranges<BF16>(problem, x, seen, state);
    default:
      return ranges<F64>(problem, x, seen, state);
  }
}

#else  // !HALFBYTE_SIMD

template <class F>
QuantizeStatus ranges(const ObserveProblem& problem, const void* x, void* seen, const ObserveTensors* state) {
  if (state == nullptr) return observe_ref::value_ranges(problem, x, static_cast<Seen<F>*>(seen));
  std::vector<Seen<F>> batch(static_cast<size_t>(problem.num_scales));
  const QuantizeStatus status = observe_ref::value_ranges(problem, x, batch.data());
  observe_ref::take_up(problem, batch.data(), *state);
  return status;
}

QuantizeStatus ObserveRanges(const ObserveProblem& problem, const void* x, void* seen,
                             const ObserveTensors* state) {
  return problem.dtype == DType::f64 ? ranges<double>(problem, x, seen, state)
                                     : ranges<float>(problem, x, seen, state);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
namespace {

template <class F>
void take_up(const ObserveProblem& problem, const formats::Seen<F>* seen, const ObserveTensors& tensors) {
  auto *const min = static_cast<F*>(tensors.min), *const max = static_cast<F*>(tensors.max);
  constexpr int64_t kGroups = 16384;  // of a task
  parallel_for(problem.num_scales, kGroups, problem.num_threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      formats::i64 count = tensors.num_batches[i];
      const auto state = formats::observed_mean(formats::Seen<F>{min[i], max[i]}, seen[i], count);
      min[i] = state.min;
      max[i] = state.max;
      tensors.num_batches[i] = count;
    }
  });
}

// percentile, mse.
template <class F>
QuantizeStatus run_search(const ObserveProblem& problem, const ObserveTensors& tensors) {
  std::vector<formats::Seen<F>> seen(static_cast<size_t>(problem.num_scales));
  const QuantizeStatus status = value_ranges_cpu(problem, tensors.x, seen.data());
  search_ranges_cpu(problem, tensors.x, seen.data());
  take_up(problem, seen.data(), tensors);
  return status;
}

}  // namespace

HWY_EXPORT(ObserveRanges);

QuantizeStatus value_ranges_cpu(const ObserveProblem& problem, const void* x, void* seen) {
  return HWY_DYNAMIC_DISPATCH(ObserveRanges)(problem, x, seen, nullptr);
}

QuantizeStatus observe_cpu(const ObserveProblem& problem, const ObserveTensors& tensors) {
  if (problem.num_elements() == 0) return {};
  if (problem.is_mean())
    return problem.dtype == DType::f64 ? run_search<double>(problem, tensors)
                                       : run_search<float>(problem, tensors);
  return HWY_DYNAMIC_DISPATCH(ObserveRanges)(problem, tensors.x, nullptr, &tensors);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
