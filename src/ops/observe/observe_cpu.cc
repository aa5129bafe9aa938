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
void join(Seen<F>& into, F min, F max) {
  into.min = std::min(into.min, min);
  into.max = std::max(into.max, max);
}

// What the tasks of a run share.
template <class F>
struct Shared {
  const ObserveProblem& problem;
  const void* x;
  Seen<F>* seen;
  std::mutex mutex;  // of status, and of ranges that several tasks have a part of: held for moments
  QuantizeStatus status;
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

// The range of n elements from `from` on; with NaN or infinities in it any, and false.
template <class Type, class F = typename Type::Compute>
HWY_INLINE bool range_of_run(const typename Type::Memory* HWY_RESTRICT from, int64_t n, Seen<F>& seen) {
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto zero = hn::Zero(d);
  auto low0 = hn::Set(d, seen.min), low1 = low0, high0 = hn::Set(d, seen.max), high1 = high0;
  auto finite = zero;  // NaN where an element is not
  const auto take = [&](int64_t i, auto& low, auto& high) HWY_ATTR {
    const auto v = Type::load(d, from + i);
    finite = hn::MulAdd(v, zero, finite);
    low = hn::Min(low, v);
    high = hn::Max(high, v);
  };
  int64_t i = 0;
  for (; i + 4 * N <= n; i += 4 * N) {
    take(i, low0, high0);
    take(i + N, low1, high1);
    take(i + 2 * N, low0, high0);
    take(i + 3 * N, low1, high1);
  }
  for (; i + N <= n; i += N) take(i, low0, high0);
  if (i < n) take(n - N, low1, high1);  // some of them a second time
  if (!hn::AllTrue(d, hn::Eq(finite, zero))) return false;
  seen.min = hn::GetLane(hn::MinOfLanes(d, hn::Min(low0, low1))) + 0;  // -0 becomes +0
  seen.max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(high0, high1))) + 0;
  return true;
}

// Groups that are runs of elements: lines of `length`, cut into groups of `group`; or each line, of channels
// that take turns, is a part of one.
template <class Type>
void ranges_of_runs(Shared<typename Type::Compute>& shared, int64_t length, int64_t group, bool channels) {
  using F = typename Type::Compute;
  const ObserveProblem& p = shared.problem;
  const auto* const x = static_cast<const typename Type::Memory*>(shared.x);
  const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<F>()));
  const int64_t per_line = (length - 1) / group + 1, n = p.num_elements();
  const bool turns = channels && n > length * p.num_scales;
  parallel_for(n, kTask, p.num_threads, [&](int64_t begin, int64_t end, int) {
    QuantizeStatus status;
    int64_t line = begin / length, column = begin % length;
    for (int64_t at = begin; at < end;) {
      const int64_t k = column / group, last = std::min(length, (k + 1) * group);
      const int64_t run = std::min(last - column, end - at);
      Seen<F> seen;
      if (run < N || !range_of_run<Type>(x + at, run, seen))
        seen = range_of_finite(shared, at, at + run, status);
      const int64_t index = channels ? line % p.num_scales : line * per_line + k;
      if (!turns && column == k * group && column + run == last) {
        shared.seen[index] = seen;
      } else if (!seen.empty()) {
        const std::lock_guard lock(shared.mutex);
        join(shared.seen[index], seen.min, seen.max);
      }
      at += run;
      column += run;
      if (column == length) column = 0, ++line;
    }
    const std::lock_guard lock(shared.mutex);
    merge(shared.status, status);
  });
}

// Rows [row, end_row) of `columns`, of which the columns [first, first + n) are looked at.
struct Tile {
  int64_t row, end_row, columns, first, n;
};

// The range of every column; false where an element is not finite.
template <class Type, class F = typename Type::Compute>
HWY_INLINE bool range_of_columns(const typename Type::Memory* x, const Tile& tile, F* HWY_RESTRICT low,
                                 F* HWY_RESTRICT high) {
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto zero = hn::Zero(d);
  auto finite = zero;
  for (int64_t row = tile.row; row < tile.end_row;) {
    const auto* const from = x + row * tile.columns + tile.first;
    const auto take = [&](auto rows, int64_t i) HWY_ATTR {
      auto least = hn::LoadU(d, low + i), most = hn::LoadU(d, high + i);
      for (int64_t r = 0; r < rows; ++r) {
        const auto v = Type::load(d, from + r * tile.columns + i);
        finite = hn::MulAdd(v, zero, finite);
        least = hn::Min(least, v);
        most = hn::Max(most, v);
      }
      hn::StoreU(least, d, low + i);
      hn::StoreU(most, d, high + i);
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
  return hn::AllTrue(d, hn::Eq(finite, zero));
}

// Groups that are columns of bands of rows: [bands of `rows` rows, columns], in the order of scales; of every
// `axis` rows the last band may be short.
template <class Type>
void ranges_of_columns(Shared<typename Type::Compute>& shared, int64_t axis, int64_t rows, int64_t columns) {
  using F = typename Type::Compute;
  const ObserveProblem& p = shared.problem;
  const auto* const x = static_cast<const typename Type::Memory*>(shared.x);
  const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<F>()));
  const int64_t bands_per_axis = (axis - 1) / rows + 1, bands = p.num_scales / columns;
  const int64_t across = (columns - 1) / kWidth + 1, pieces = (rows - 1) / kHeight + 1;
  const int64_t grain = std::max<int64_t>(1, kTask / (std::min(rows, kHeight) * std::min(columns, kWidth)));
  parallel_for(bands * pieces * across, grain, p.num_threads, [&](int64_t begin, int64_t end, int) {
    HWY_ALIGN F low[kWidth], high[kWidth];
    QuantizeStatus status;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t band = item / (pieces * across), piece = item / across % pieces;
      const int64_t in_axis = band % bands_per_axis * rows;
      const int64_t first_row = band / bands_per_axis * axis + in_axis;
      const int64_t end_row = first_row + std::min(rows, axis - in_axis);
      Tile tile{first_row + piece * kHeight, 0, columns, item % across * kWidth, 0};
      tile.end_row = std::min(end_row, tile.row + kHeight);  // a short band has fewer pieces
      tile.n = std::min(kWidth, columns - tile.first);
      std::fill_n(low, tile.n, Seen<F>().min);
      std::fill_n(high, tile.n, Seen<F>().max);
      if (tile.n < N || !range_of_columns<Type>(x, tile, low, high)) {
        std::fill_n(low, tile.n, Seen<F>().min);
        std::fill_n(high, tile.n, Seen<F>().max);
        for (int64_t row = tile.row; row < tile.end_row; ++row)
          for (int64_t i = 0; i < tile.n; ++i) {
            const int64_t index = row * columns + tile.first + i;
            QuantizeStatus found;
            const Seen<F> one = range_of_finite(shared, index, index + 1, found);
            merge(status, found);
            low[i] = std::min(low[i], one.min);
            high[i] = std::max(high[i], one.max);
          }
      }
      Seen<F>* const seen = shared.seen + band * columns + tile.first;
      const std::unique_lock lock =
          pieces > 1 ? std::unique_lock(shared.mutex) : std::unique_lock<std::mutex>();
      for (int64_t i = 0; i < tile.n; ++i) join(seen[i], low[i] + 0, high[i] + 0);
    }
    const std::lock_guard lock(shared.mutex);
    merge(shared.status, status);
  });
}

template <class Type>
QuantizeStatus ranges(const ObserveProblem& p, const void* x, void* seen) {
  using F = typename Type::Compute;
  Shared<F> shared{p, x, static_cast<Seen<F>*>(seen), {}, {}};
  std::fill_n(shared.seen, p.num_scales, Seen<F>());
  if (p.num_elements() == 0) return {};
  const bool channels = p.scale_strides.outer == 0;
  if (p.num_scales == 1)
    ranges_of_runs<Type>(shared, p.num_elements(), p.num_elements(), false);
  else if (channels && p.inner > 1)
    ranges_of_runs<Type>(shared, p.inner, p.inner, true);
  else if (channels)
    ranges_of_columns<Type>(shared, p.outer, p.outer, p.axis);
  else if (p.inner == 1)
    ranges_of_runs<Type>(shared, p.axis, p.group_size, false);
  else
    ranges_of_columns<Type>(shared, p.axis, p.group_size, p.inner);
  return shared.status;
}

QuantizeStatus ObserveRanges(const ObserveProblem& problem, const void* x, void* seen) {
  switch (problem.dtype) {
    case DType::f32:
      return ranges<F32>(problem, x, seen);
    case DType::f16:
      return ranges<F16>(problem, x, seen);
    case DType::bf16:
      return ranges<BF16>(problem, x, seen);
    default:
      return ranges<F64>(problem, x, seen);
  }
}

#else  // !HALFBYTE_SIMD

QuantizeStatus ObserveRanges(const ObserveProblem& problem, const void* x, void* seen) {
  return problem.dtype == DType::f64 ? observe_ref::value_ranges(problem, x, static_cast<Seen<double>*>(seen))
                                     : observe_ref::value_ranges(problem, x, static_cast<Seen<float>*>(seen));
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
namespace {

template <class F>
void take_up(const ObserveProblem& problem, const formats::Seen<F>* seen, const ObserveTensors& tensors) {
  if (problem.num_elements() == 0) return;
  const double history = history_of(problem, (*tensors.num_batches)++);
  auto *const min = static_cast<F*>(tensors.min), *const max = static_cast<F*>(tensors.max);
  constexpr int64_t kGroups = 16384;  // of a task
  parallel_for(problem.num_scales, kGroups, problem.num_threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const auto state = formats::observed(formats::Seen<F>{min[i], max[i]}, seen[i], history);
      min[i] = state.min;
      max[i] = state.max;
    }
  });
}

template <class F>
QuantizeStatus run(const ObserveProblem& problem, const ObserveTensors& tensors) {
  std::vector<formats::Seen<F>> seen(static_cast<size_t>(problem.num_scales));
  const QuantizeStatus status = value_ranges_cpu(problem, tensors.x, seen.data());
  search_ranges_cpu(problem, tensors.x, seen.data());
  take_up(problem, seen.data(), tensors);
  return status;
}

}  // namespace

HWY_EXPORT(ObserveRanges);

QuantizeStatus value_ranges_cpu(const ObserveProblem& problem, const void* x, void* seen) {
  return HWY_DYNAMIC_DISPATCH(ObserveRanges)(problem, x, seen);
}

void take_up_cpu(const ObserveProblem& problem, const void* seen, const ObserveTensors& tensors) {
  if (problem.dtype == DType::f64)
    take_up(problem, static_cast<const formats::Seen<double>*>(seen), tensors);
  else
    take_up(problem, static_cast<const formats::Seen<float>*>(seen), tensors);
}

QuantizeStatus observe_cpu(const ObserveProblem& problem, const ObserveTensors& tensors) {
  return problem.dtype == DType::f64 ? run<double>(problem, tensors) : run<float>(problem, tensors);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
