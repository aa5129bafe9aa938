// SIMD kernels of percentile and mse ranges. Percentiles: short groups by std::nth_element, long ones by the
// counts of 16 bits of a key at a time. Errors: a lane has a candidate and walks the elements in order.
#include <algorithm>
#include <numeric>
#include <vector>

#include "core/format.h"
#include "cpu/parallel.h"
#include "formats/convert.h"
#include "ops/observe/range_search.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/observe/range_search_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"

#ifndef HALFBYTE_RANGE_SEARCH_CPU_ONCE
#define HALFBYTE_RANGE_SEARCH_CPU_ONCE
namespace halfbyte::range_search {

inline constexpr int kBlock = 16;  // elements summed in registers

// The candidates of a stage: a multiple of 16, whole vectors.
template <class F>
struct Candidates {
  static constexpr int kMost = formats::kMseMostCandidates;
  int count = 0;
  formats::MseCandidate<F> candidate[kMost];
  alignas(64) F scale[kMost], reciprocal[kMost], low[kMost], high[kMost];

  void set(int n, int levels) {
    count = n;
    for (int i = 0; i < n; ++i) {
      const auto& from = candidate[i];
      scale[i] = from.scale;
      reciprocal[i] = 1 / from.scale;
      low[i] = from.low;
      high[i] = from.low + static_cast<F>(levels);
    }
  }
};

}  // namespace halfbyte::range_search
#endif

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

using range_search::Candidates;
using range_search::kBlock;

#if HALFBYTE_SIMD

// The sum of n terms in a row, each of a candidate in every lane.
template <int n, class D, class V, class F>
HWY_INLINE V terms(D d, const F* HWY_RESTRICT x, V scale, V reciprocal, V low, V high) {
  if constexpr (n == 1) {
    const auto round = hn::Set(d, formats::Float<F>::kUnit * static_cast<F>(1.5));
    const auto v = hn::Set(d, *x);
    const auto quotient = hn::Min(high, hn::Max(low, hn::Mul(v, reciprocal)));
    const auto code = hn::Sub(hn::Add(quotient, round), round);
    const auto error = hn::Sub(v, hn::Mul(code, scale));
    return hn::Mul(error, error);
  } else {
    return hn::Add(terms<n / 2>(d, x, scale, reciprocal, low, high),
                   terms<n / 2>(d, x + n / 2, scale, reciprocal, low, high));
  }
}

// The sums of the errors of all candidates over n elements, in units, a multiple of kBlock.
template <class F>
void MseErrors(const F* x, int64_t n, const Candidates<F>& candidates, F* errors) {
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int>(hn::Lanes(d));
  HWY_ALIGN F parts[64][hn::MaxLanes(d)];
  for (int i = 0; i < candidates.count; i += N) {
    const auto scale = hn::Load(d, candidates.scale + i);
    const auto reciprocal = hn::Load(d, candidates.reciprocal + i);
    const auto low = hn::Load(d, candidates.low + i), high = hn::Load(d, candidates.high + i);
    uint64_t blocks = 0;
    for (int64_t k = 0; k < n; k += kBlock, ++blocks) {
      auto sum = terms<kBlock>(d, x + k, scale, reciprocal, low, high);
      int level = 0;
      for (; blocks >> level & 1; ++level) sum = hn::Add(hn::Load(d, parts[level]), sum);
      hn::Store(sum, d, parts[level]);
    }
    auto sum = hn::Zero(d);
    for (int level = 0; blocks >> level != 0; ++level)
      if (blocks >> level & 1) sum = hn::Add(hn::Load(d, parts[level]), sum);
    hn::StoreU(sum, d, errors + i);
  }
}

#else  // !HALFBYTE_SIMD

template <class F>
void MseErrors(const F* x, int64_t n, const Candidates<F>& candidates, F* errors) {
  for (int i = 0; i < candidates.count; ++i) {
    formats::PairwiseSum<F> sum;
    for (int64_t k = 0; k < n; ++k)
      sum.add(formats::mse_term(x[k], candidates.scale[i], candidates.reciprocal[i], candidates.low[i],
                                candidates.high[i]));
    errors[i] = sum.total();
  }
}

#endif  // HALFBYTE_SIMD

void MseErrors32(const float* x, int64_t n, const Candidates<float>& candidates, float* errors) {
  MseErrors(x, n, candidates, errors);
}
void MseErrors64(const double* x, int64_t n, const Candidates<double>& candidates, double* errors) {
  MseErrors(x, n, candidates, errors);
}

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {

HWY_EXPORT(MseErrors32);
HWY_EXPORT(MseErrors64);

namespace {

using formats::Seen;
using range_search::kBlock;

void mse_errors(const float* x, int64_t n, const range_search::Candidates<float>& candidates, float* errors) {
  HWY_DYNAMIC_DISPATCH(MseErrors32)(x, n, candidates, errors);
}
void mse_errors(const double* x, int64_t n, const range_search::Candidates<double>& candidates,
                double* errors) {
  HWY_DYNAMIC_DISPATCH(MseErrors64)(x, n, candidates, errors);
}

// Elements [begin, begin + n) of a group, in order.
template <class F>
class Reader {
 public:
  Reader(const ObserveProblem& problem, const void* x)
      : groups_(problem.groups()), x_(x), type_(scale_type(problem.dtype)) {}

  const Groups& groups() const { return groups_; }

  // Calls take(value) with each that is finite, other() for each that is not.
  template <class Take, class Other>
  void read(const Groups::Group& group, int64_t begin, int64_t n, const Take& take,
            const Other& other) const {
    switch (type_) {
      case formats::ScaleType::f32:
        return read<formats::ScaleType::f32>(group, begin, n, take, other);
      case formats::ScaleType::f16:
        return read<formats::ScaleType::f16>(group, begin, n, take, other);
      case formats::ScaleType::bf16:
        return read<formats::ScaleType::bf16>(group, begin, n, take, other);
      case formats::ScaleType::f64:
        return read<formats::ScaleType::f64>(group, begin, n, take, other);
      case formats::ScaleType::e4m3:  // no types of x
      case formats::ScaleType::e8m0:
        break;
    }
  }

 private:
  template <formats::ScaleType type, class Take, class Other>
  void read(const Groups::Group& group, int64_t begin, int64_t n, const Take& take,
            const Other& other) const {
    // Lines of elements that are `stride` apart.
    int64_t line = groups_.group_inner, stride = 1;
    if (line == 1) line = group.axis, stride = groups_.strides.axis;
    if (line == 1) line = groups_.group_outer, stride = groups_.strides.outer;
    for (int64_t k = begin; k < begin + n;) {
      const int64_t count = std::min(line - k % line, begin + n - k);
      const int64_t from = group.begin + groups_.offset<true>(group, k);
      for (int64_t i = 0; i < count; ++i) {
        const F value = formats::load_scale<F>(x_, from + i * stride, type);
        if (formats::is_finite(value))
          take(value);
        else
          other();
      }
      k += count;
    }
  }

  Groups groups_;
  const void* x_;
  formats::ScaleType type_;
};

// ---- Percentile

// A group that a thread sorts; a longer one is counted by all.
constexpr int64_t kSorted = 1 << 18;

template <class F>
Seen<F> sorted_range(const Reader<F>& reader, const Groups::Group& group, double percentile,
                     std::vector<F>& values) {
  values.clear();
  reader.read(
      group, 0, group.size, [&](F x) { values.push_back(x); }, [] {});
  if (values.empty()) return {};
  const auto n = static_cast<int64_t>(values.size());
  const int64_t k = formats::percentile_rank(percentile, n);
  const auto ranked = [&](int64_t index) {
    const auto nth = values.begin() + index;
    std::nth_element(values.begin(), nth, values.end());
    return *nth + 0;
  };
  return {ranked(n - k), ranked(k - 1)};
}

template <class F>
Seen<F> counted_range(const ObserveProblem& problem, const Reader<F>& reader, const Groups::Group& group) {
  using Bits = typename formats::Float<F>::Bits;
  constexpr int kDigit = 16, kBins = 1 << kDigit, kKey = 8 * sizeof(F);
  struct Target {
    int64_t rank = 0;  // among those that begin with prefix
    Bits prefix = 0;
  };
  Target targets[2];
  std::vector<std::vector<int64_t>> counts(static_cast<size_t>(effective_threads(problem.num_threads)));
  for (int shift = kKey - kDigit; shift >= 0; shift -= kDigit) {
    const bool first = shift == kKey - kDigit;
    for (auto& of_thread : counts) of_thread.assign(2 * kBins, 0);
    parallel_for(group.size, kSorted, problem.num_threads, [&](int64_t begin, int64_t end, int worker) {
      int64_t* const bins = counts[static_cast<size_t>(worker)].data();
      reader.read(
          group, begin, end - begin,
          [&](F x) {
            const Bits key = formats::order_bits(x);
            const auto digit = static_cast<size_t>(key >> shift & (kBins - 1));
            if (first) {
              ++bins[digit];
              return;
            }
            const Bits prefix = key >> shift >> kDigit;
            if (prefix == targets[0].prefix) ++bins[digit];
            if (prefix == targets[1].prefix) ++bins[kBins + digit];
          },
          [] {});
    });
    std::vector<int64_t>& total = counts[0];
    for (size_t t = 1; t < counts.size(); ++t)
      for (size_t i = 0; i < total.size(); ++i) total[i] += counts[t][i];
    if (first) {
      const int64_t n = std::accumulate(total.begin(), total.begin() + kBins, int64_t{0});
      if (n == 0) return {};
      const int64_t k = formats::percentile_rank(problem.observer.percentile, n);
      targets[0].rank = n - k;
      targets[1].rank = k - 1;
    }
    for (int i = 0; i < 2; ++i) {
      const int64_t* bin = total.data() + (first ? 0 : i * kBins);
      const int64_t* const begin = bin;
      for (; targets[i].rank >= *bin; ++bin) targets[i].rank -= *bin;
      targets[i].prefix = static_cast<Bits>(targets[i].prefix << kDigit | static_cast<Bits>(bin - begin));
    }
  }
  return {formats::from_order_bits<F>(targets[0].prefix), formats::from_order_bits<F>(targets[1].prefix)};
}

template <class F>
void percentiles(const ObserveProblem& problem, const Reader<F>& reader, Seen<F>* seen) {
  const Groups& groups = reader.groups();
  const int64_t longest = groups.longest();
  if (longest > kSorted) {
    for (int64_t s = 0; s < groups.num_groups; ++s)
      seen[s] = counted_range(problem, reader, groups.group<true>(s));
    return;
  }
  parallel_for(groups.num_groups, std::max<int64_t>(1, 65536 / longest), problem.num_threads,
               [&](int64_t begin, int64_t end, int) {
                 std::vector<F> values;
                 for (int64_t s = begin; s < end; ++s)
                   seen[s] = sorted_range(reader, groups.group<true>(s), problem.observer.percentile, values);
               });
}

// ---- Mse

// The search of a group, from the errors of one stage to the candidates of the next.
template <class F>
class Search {
 public:
  Search(const Seen<F>& seen, const formats::MseCodes& codes)
      : codes_(codes), steps_(formats::MseSearch<F>::of(seen.min, seen.max, codes)) {
    stage_ = formats::mse_stage(codes.asymmetric, 0);
    for (int i = 0; i < stage_.count(); ++i) candidates.candidate[i] = steps_.rung(i, codes);
    candidates.set(stage_.count(), codes.levels);
  }

  range_search::Candidates<F> candidates;
  F per_unit() const { return steps_.per_unit; }

  // False where the search is at its end.
  bool next(const F* errors) {
    const int count = candidates.count;
    for (int i = 0; i < count; ++i)
      if ((number_ == 0 && i == 0) || errors[i] < least_) {
        least_ = errors[i];
        best_ = candidates.candidate[i];
      }
    if (number_ == formats::kMseStages) return false;
    F merits[formats::kMseMostCandidates];
    int order[formats::kMseMostCandidates];
    for (int i = 0; i < count; ++i) {
      merits[i] = formats::mse_merit(errors, i, stage_.scales);
      order[i] = i;
    }
    stage_ = formats::mse_stage(codes_.asymmetric, ++number_);
    std::partial_sort(order, order + stage_.parents, order + count,
                      [&](int i, int j) { return merits[i] != merits[j] ? merits[i] < merits[j] : i < j; });
    formats::MseCandidate<F> parents[formats::kMseMostParents];
    for (int i = 0; i < stage_.parents; ++i) parents[i] = candidates.candidate[order[i]];
    for (int i = 0; i < stage_.count(); ++i)
      candidates.candidate[i] = steps_.child(parents[i / (stage_.scales * stage_.zeros)], i, stage_, codes_);
    candidates.set(stage_.count(), codes_.levels);
    return true;
  }
  Seen<F> range() const {
    Seen<F> result;
    steps_.range(best_, codes_, result.min, result.max);
    return result;
  }

 private:
  formats::MseCodes codes_;
  formats::MseSearch<F> steps_;
  formats::MseStage stage_{};
  int number_ = 0;
  formats::MseCandidate<F> best_;
  F least_ = 0;
};

// Elements that a thread takes in units at a time: a group, or a piece of one.
constexpr int kPieceLevel = 14;
constexpr int64_t kPiece = 1 << kPieceLevel;

// Returns how many there are with the zeros behind them.
template <class F>
int64_t read_piece(const Reader<F>& reader, const Groups::Group& group, int64_t begin, F per_unit,
                   F* values) {
  const int64_t n = std::min<int64_t>(kPiece, group.size - begin);
  int64_t count = 0;
  reader.read(
      group, begin, n, [&](F x) { values[count++] = x * per_unit; }, [&] { values[count++] = 0; });
  while (count % kBlock != 0) values[count++] = 0;
  return count;
}

// A group of one piece.
template <class F>
Seen<F> piece_range(const Reader<F>& reader, const Groups::Group& group, Search<F>& search, F* values) {
  const int64_t n = read_piece(reader, group, 0, search.per_unit(), values);
  F errors[formats::kMseMostCandidates];
  do mse_errors(values, n, search.candidates, errors);
  while (search.next(errors));
  return search.range();
}

// A group of many, by all threads.
template <class F>
Seen<F> pieces_range(const ObserveProblem& problem, const Reader<F>& reader, const Groups::Group& group,
                     Search<F>& search) {
  const int64_t pieces = (group.size - 1) / kPiece + 1;
  std::vector<F> errors(static_cast<size_t>(pieces * formats::kMseMostCandidates));
  F totals[formats::kMseMostCandidates] = {};
  do {
    const int64_t count = search.candidates.count;
    parallel_for(pieces, 4, problem.num_threads, [&](int64_t begin, int64_t end, int) {
      std::vector<F> values(static_cast<size_t>(kPiece));
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t n = read_piece(reader, group, piece * kPiece, search.per_unit(), values.data());
        mse_errors(values.data(), n, search.candidates, errors.data() + piece * count);
      }
    });
    for (int64_t i = 0; i < count; ++i) {
      formats::PairwiseSum<F> sum;
      for (int64_t piece = 0; piece < pieces; ++piece)
        sum.add_block(errors[static_cast<size_t>(piece * count + i)], kPieceLevel);
      totals[i] = sum.total();
    }
  } while (search.next(totals));
  return search.range();
}

template <class F>
void least_errors(const ObserveProblem& problem, const Reader<F>& reader, Seen<F>* seen) {
  const Groups& groups = reader.groups();
  const formats::MseCodes codes = mse_codes(problem.observer.qparams);
  const auto is_open = [](const Seen<F>& range) {
    return !range.empty() && !(range.min == 0 && range.max == 0);
  };
  const int64_t longest = groups.longest();
  if (longest > kPiece) {
    for (int64_t s = 0; s < groups.num_groups; ++s) {
      if (!is_open(seen[s])) continue;
      Search<F> search(seen[s], codes);
      seen[s] = pieces_range(problem, reader, groups.group<true>(s), search);
    }
    return;
  }
  parallel_for(groups.num_groups, std::max<int64_t>(1, 4096 / longest), problem.num_threads,
               [&](int64_t begin, int64_t end, int) {
                 std::vector<F> values(static_cast<size_t>(kPiece));
                 for (int64_t s = begin; s < end; ++s) {
                   if (!is_open(seen[s])) continue;
                   Search<F> search(seen[s], codes);
                   seen[s] = piece_range(reader, groups.group<true>(s), search, values.data());
                 }
               });
}

template <class F>
void run(const ObserveProblem& problem, const void* x, Seen<F>* seen) {
  if (!needs_search(problem)) return;
  const Reader<F> reader(problem, x);
  if (problem.observer.kind == ObserverKind::percentile)
    percentiles(problem, reader, seen);
  else
    least_errors(problem, reader, seen);
}

}  // namespace

void search_ranges_cpu(const ObserveProblem& problem, const void* x, void* seen) {
  if (problem.dtype == DType::f64)
    run(problem, x, static_cast<Seen<double>*>(seen));
  else
    run(problem, x, static_cast<Seen<float>*>(seen));
}

}  // namespace halfbyte
#endif  // HWY_ONCE
