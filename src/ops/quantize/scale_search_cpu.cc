// SIMD search for the scales of groups: a lane has a candidate and walks the elements in order, so that the
// sums do not depend on the width of vectors. formats/scale_search.h has the definition.
#define HWY_WANT_AVX3_DL  // one more copy, for AVX-512 with byte permutes, which code books use
#include <algorithm>
#include <limits>
#include <memory>

#include "ops/quantize/quantize_ref.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/scale_search_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"

#ifndef HALFBYTE_SCALE_SEARCH_ONCE
#define HALFBYTE_SCALE_SEARCH_ONCE
namespace halfbyte::scale_search {

using formats::kSearchCandidates;
using formats::kSearchChunk;
using formats::kSearchTile;
using formats::SearchBins;
using formats::SearchGrid;
using formats::SearchPairs;

// |y| at most, in multiples of the largest value of the table: the reciprocal of the least factor, with what
// the rounding of a scale can add. Of short and of long groups.
constexpr float kShortLimit = 1.35f, kLongLimit = 3.2f;
// The same of short groups, as near as bf16 scales allow: 1 / 0.8, and 2^-8 of it.
constexpr float kPairsLimit = 1.256f;

// What all groups of a problem share.
struct Prepared {
  // Of short groups, and of long ones; by candidate.
  struct Grid {
    SearchGrid grid;
    alignas(64) float factor[kSearchCandidates], shift[kSearchCandidates];
    SearchBins bins;
    SearchPairs pairs;
  };
  Grid grids[2];
  // Of a table format, by rank: the values, and the edges above. Level k of a search tree over the edges, 2^k
  // of them by the path so far.
  alignas(64) float values[16] = {}, above[16] = {}, level1[16] = {}, level2[16] = {}, level3[16] = {};
  float level0 = 0;
  bool is_e2m1 = false;

  explicit Prepared(const formats::Codec& codec) : is_e2m1(codec.book == formats::books::fp4_e2m1) {
    for (const bool is_long : {false, true}) {
      Grid& to = grids[is_long ? 1 : 0];
      to.grid = SearchGrid::of(codec, is_long ? SearchGrid::kLong + 1 : 1);
      for (int i = 0; i < kSearchCandidates; ++i) {
        to.factor[i] = to.grid.factor(i);
        to.shift[i] = to.grid.shift(i);
      }
      if (codec.kind != formats::Kind::table) continue;
      const float limit = is_long ? kLongLimit : kShortLimit;
      to.bins = SearchBins::of(codec.book, codec.book.max_magnitude * limit);
      if (!is_long) to.pairs = SearchPairs::of(codec.book, codec.book.max_magnitude * kPairsLimit);
    }
    const float* const edges = codec.book.edges_f32;
    level0 = edges[7];
    for (int i = 0; i < 2; ++i) level1[i] = edges[3 + 8 * i];
    for (int i = 0; i < 4; ++i) level2[i] = edges[1 + 4 * i];
    for (int i = 0; i < 8; ++i) level3[i] = edges[2 * i];
    for (int i = 0; i < 16; ++i) {
      values[i] = codec.book.values[codec.book.code_of_rank[i]];
      above[i] = i < 15 ? edges[i] : std::numeric_limits<float>::infinity();
    }
  }
  const Grid& grid(int64_t n) const { return grids[n > SearchGrid::kLong ? 1 : 0]; }
};

// SearchScale of each candidate. unusable: 0, or infinity, which is added to its error.
struct Scales {
  alignas(64) float scale[kSearchCandidates], reciprocal[kSearchCandidates], bias[kSearchCandidates],
      low[kSearchCandidates], unusable[kSearchCandidates];

  void set(int i, const formats::SearchScale& from) {
    scale[i] = from.scale;
    reciprocal[i] = from.reciprocal;
    bias[i] = from.bias;
    low[i] = from.low;
    unusable[i] = from.usable ? 0 : std::numeric_limits<float>::infinity();
  }
};

template <class F>
void set_scales(const formats::RuleParams<F>& by_rule, const SearchGrid& grid, F per_unit,
                const formats::Codec& codec, Scales& scales) {
  for (int i = 0; i < kSearchCandidates; ++i)
    scales.set(i, formats::SearchScale::of(
                      formats::stored_params(formats::search_candidate(by_rule, grid, i, codec), codec),
                      per_unit, codec));
}

// Elements of a group, in units, with their weights, and zeros up to whole chunks.
struct Tile {
  alignas(64) float x[kSearchTile + kSearchChunk], weight[kSearchTile + kSearchChunk];
};

}  // namespace halfbyte::scale_search
#endif

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

using namespace scale_search;  // NOLINT(google-build-using-namespace)

#if HALFBYTE_SIMD

using Lanes = hn::CappedTag<float, kSearchCandidates>;
using V = hn::Vec<Lanes>;

// A vector holds a table of 8 floats.
#undef HALFBYTE_TABLE_LANES
#define HALFBYTE_TABLE_LANES (HWY_MAX_BYTES >= 32 && !HWY_HAVE_SCALABLE)

// ---- Candidates

#if HALFBYTE_TABLE_LANES

// x, rounded to a type of scales, where that loses nothing but digits.
template <formats::ScaleType kType>
HWY_INLINE V stored(Lanes d, V x, float global_scale) {
  const hn::RebindToUnsigned<Lanes> du;
  const auto rounded = [&](uint32_t unit) HWY_ATTR {  // to multiples of 2 * unit in the bits, half to even
    const auto bits = hn::BitCast(du, x);
    const auto odd =
        hn::IfThenElseZero(hn::Ne(hn::And(bits, hn::Set(du, 2 * unit)), hn::Zero(du)), hn::Set(du, 1u));
    const auto sum = hn::Add(bits, hn::Add(odd, hn::Set(du, unit - 1)));
    return hn::BitCast(d, hn::AndNot(hn::Set(du, 2 * unit - 1), sum));
  };
  if constexpr (kType == formats::ScaleType::e8m0) {  // of a mantissa below 1.75 nothing stays
    const auto sum = hn::Add(hn::BitCast(du, x), hn::Set(du, 0x00200000u));
    return hn::BitCast(d, hn::And(sum, hn::Set(du, 0x7F800000u)));
  }
  if constexpr (kType == formats::ScaleType::f16) {
    const hn::Rebind<hwy::float16_t, Lanes> d16;
    return hn::PromoteTo(d, hn::DemoteTo(d16, x));
  } else if constexpr (kType == formats::ScaleType::bf16) {
    return rounded(0x8000);
  } else if constexpr (kType == formats::ScaleType::e4m3) {
    const auto global = hn::Set(d, global_scale);
    x = hn::Mul(x, global);
    const auto most = hn::Set(d, 464.0f);  // what rounds to more than 448 is NaN
    return hn::Div(hn::IfThenElse(hn::Gt(x, most), hn::NaN(d), rounded(0x80000)), global);
  } else {
    return x;
  }
}

// set_scales for parameters so far from the bounds of all types that vectors do it without further questions.
template <formats::ScaleType kType>
HWY_INLINE void set_usual_scales(const formats::RuleParams<float>& by_rule, const Prepared::Grid& grid,
                                 float per_unit, const formats::Codec& codec, Scales& scales) {
  const Lanes d;
  const auto unit = hn::Set(d, per_unit), one = hn::Set(d, 1.0f);
  const auto levels = hn::Set(d, static_cast<float>(codec.levels()));
  const auto least = hn::Set(d, 0x1p-40f), most = hn::Set(d, 0x1p40f);
  for (size_t i = 0; i < kSearchCandidates; i += hn::Lanes(d)) {
    const auto moved = hn::Mul(hn::Set(d, by_rule.scale), hn::Mul(levels, hn::Load(d, grid.shift + i)));
    const auto code_scale = stored<kType>(d, hn::Mul(hn::Set(d, by_rule.scale), hn::Load(d, grid.factor + i)),
                                          codec.global_scale);
    auto scale = hn::Mul(code_scale, unit), bias = hn::Zero(d);
    auto low = hn::Set(d, static_cast<float>(codec.kind == formats::Kind::affine ? 0 : codec.q_min));
    if (codec.kind == formats::Kind::affine)
      bias = hn::Mul(stored<kType>(d, hn::Add(hn::Set(d, by_rule.bias), moved), codec.global_scale), unit);
    if (codec.asymmetric) {
      const auto round = hn::Set(d, formats::Float<float>::kUnit * 1.5f);
      const auto min = hn::Min(hn::Zero(d), hn::Add(hn::Set(d, by_rule.min), moved));
      low = hn::Max(hn::Set(d, static_cast<float>(-codec.levels())), hn::Div(min, code_scale));
      low = hn::Sub(hn::Add(low, round), round);
    }
    const auto usable = hn::And(hn::And(hn::Ge(hn::Abs(scale), least), hn::Le(hn::Abs(scale), most)),
                                hn::Le(hn::Abs(bias), most));
    scale = hn::IfThenElse(usable, scale, one);
    hn::Store(scale, d, scales.scale + i);
    hn::Store(hn::Div(one, scale), d, scales.reciprocal + i);
    hn::Store(hn::IfThenElseZero(usable, bias), d, scales.bias + i);
    hn::Store(low, d, scales.low + i);
    hn::Store(hn::IfThenZeroElse(usable, hn::Inf(d)), d, scales.unusable + i);
  }
}

// False where the parameters are not of the usual kind.
HWY_INLINE bool set_vector_scales(const formats::RuleParams<float>& by_rule, const Prepared::Grid& grid,
                                  float per_unit, const formats::Codec& codec, Scales& scales) {
  const float scale = formats::abs(by_rule.scale);
  if (!(scale > 0x1p-80f && scale < 0x1p80f && formats::abs(by_rule.bias) < 0x1p80f)) return false;
  switch (codec.scale_type) {
    case formats::ScaleType::f32:
      set_usual_scales<formats::ScaleType::f32>(by_rule, grid, per_unit, codec, scales);
      return true;
    case formats::ScaleType::f16:
      if (scale < 0x1p-20f) return false;
      set_usual_scales<formats::ScaleType::f16>(by_rule, grid, per_unit, codec, scales);
      return true;
    case formats::ScaleType::bf16:
      set_usual_scales<formats::ScaleType::bf16>(by_rule, grid, per_unit, codec, scales);
      return true;
    case formats::ScaleType::e4m3:
      if (scale * codec.global_scale < 0x1p-5f) return false;
      set_usual_scales<formats::ScaleType::e4m3>(by_rule, grid, per_unit, codec, scales);
      return true;
    case formats::ScaleType::e8m0:
      set_usual_scales<formats::ScaleType::e8m0>(by_rule, grid, per_unit, codec, scales);
      return true;
    case formats::ScaleType::f64:
      break;
  }
  return false;
}

#else

bool set_vector_scales(const formats::RuleParams<float>&, const Prepared::Grid&, float, const formats::Codec&,
                       Scales&) {
  return false;
}

#endif  // HALFBYTE_TABLE_LANES

HWY_INLINE bool set_vector_scales(const formats::RuleParams<double>&, const Prepared::Grid&, double,
                                  const formats::Codec&, Scales&) {
  return false;
}

// ---- Errors

// y less the value of a table format that is nearest to it, but for the sign.
class ByTree {
 public:
  explicit HWY_INLINE ByTree(const Prepared& prepared, const Prepared::Grid&) : prepared_(prepared) {}

  HWY_INLINE V operator()(Lanes d, V y) const { return hn::Sub(y, nearest(d, y)); }

 private:
#if HALFBYTE_TABLE_LANES
  HWY_INLINE V nearest(Lanes d, V y) const {
    const hn::RebindToSigned<Lanes> di;
    const auto step = [&](hn::Vec<decltype(di)> path, V edge) HWY_ATTR {
      return hn::Sub(hn::Add(path, path), hn::VecFromMask(di, hn::RebindMask(di, hn::Gt(y, edge))));
    };
    const auto at = [&](const float* table, hn::Vec<decltype(di)> path) HWY_ATTR {
      return hn::TableLookupLanes(hn::Load(d, table), hn::IndicesFromVec(d, path));
    };
    auto path = step(hn::Zero(di), hn::Set(d, prepared_.level0));
    path = step(path, at(prepared_.level1, path));
    path = step(path, at(prepared_.level2, path));
    path = step(path, at(prepared_.level3, path));
    if (hn::Lanes(d) == 16) return at(prepared_.values, path);
    const auto low = hn::And(path, hn::Set(di, 7));
    return hn::IfThenElse(hn::RebindMask(d, hn::Gt(path, hn::Set(di, 7))), at(prepared_.values + 8, low),
                          at(prepared_.values, low));
  }
#else
  HWY_INLINE V nearest(Lanes d, V y) const {
    auto value = hn::Set(d, prepared_.values[0]);
    for (int i = 0; i < 15; ++i)
      value = hn::IfThenElse(hn::Gt(y, hn::Set(d, prepared_.above[i])), hn::Set(d, prepared_.values[i + 1]),
                             value);
    return value;
  }
#endif

  const Prepared& prepared_;
};

// The same of E2M1: formats::nearest_e2m1 of |y|.
class OfE2m1 {
 public:
  HWY_INLINE OfE2m1(const Prepared&, const Prepared::Grid&) {}

  HWY_INLINE V operator()(Lanes d, V signed_y) const {
    const hn::RebindToUnsigned<Lanes> du;
    const auto y = hn::Abs(signed_y), within = hn::Min(y, hn::Set(d, 6.0f));
    const auto power =
        hn::Max(hn::And(hn::BitCast(du, within), hn::Set(du, 0x7F800000u)), hn::Set(du, 0x3F800000u));
    const auto shift = hn::BitCast(d, hn::Add(power, hn::Set(du, 22u << 23)));
    return hn::Sub(y, hn::Sub(hn::Add(within, shift), shift));
  }
};

#if HALFBYTE_VBMI
class ByBins {
 public:
  HWY_INLINE ByBins(const Prepared& prepared, const Prepared::Grid& grid)
      : ranks_(_mm512_loadu_si512(grid.bins.ranks)),
        above_(_mm512_load_ps(prepared.above)),
        values_(_mm512_load_ps(prepared.values)),
        per_unit_(_mm512_set1_ps(grid.bins.per_unit)),
        center_(_mm512_set1_ps(formats::Float<float>::kUnit * 1.5f + grid.bins.center)),
        sign_(_mm512_set1_epi32(grid.bins.of_magnitude ? std::numeric_limits<int32_t>::min() : 0)) {}

  HWY_INLINE V operator()(Lanes, V signed_y) const {
    const __m512 y = _mm512_castsi512_ps(_mm512_andnot_si512(sign_, _mm512_castps_si512(signed_y.raw)));
    // The bin in the low byte.
    const __m512i bin = _mm512_castps_si512(_mm512_fmadd_ps(y, per_unit_, center_));
    const __m512i rank = _mm512_permutexvar_epi8(bin, ranks_);  // in the low four bits
    const __mmask16 is_above = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(rank, above_), _CMP_GT_OQ);
    const __m512i next = _mm512_mask_add_epi32(rank, is_above, rank, _mm512_set1_epi32(1));
    return V{_mm512_sub_ps(y, _mm512_permutexvar_ps(next, values_))};
  }

 private:
  const __m512i ranks_;
  const __m512 above_, values_, per_unit_, center_;
  const __m512i sign_;
};

class ByPairs {
 public:
  HWY_INLINE ByPairs(const Prepared&, const Prepared::Grid& grid)
      : low_{_mm512_loadu_ps(grid.pairs.low), _mm512_loadu_ps(grid.pairs.low + 16)},
        high_{_mm512_loadu_ps(grid.pairs.high), _mm512_loadu_ps(grid.pairs.high + 16)},
        per_unit_(_mm512_set1_ps(grid.pairs.per_unit)),
        center_(_mm512_set1_ps(formats::Float<float>::kUnit * 1.5f + SearchPairs::kCenter)) {}

  HWY_INLINE V operator()(Lanes, V y) const {
    // The bin in the low five bits.
    const __m512i bin = _mm512_castps_si512(_mm512_fmadd_ps(y.raw, per_unit_, center_));
    const __m512 low = _mm512_sub_ps(y.raw, _mm512_permutex2var_ps(low_[0], bin, low_[1]));
    const __m512 high = _mm512_sub_ps(y.raw, _mm512_permutex2var_ps(high_[0], bin, high_[1]));
    return V{_mm512_range_ps(low, high, 2)};  // the one of smaller magnitude
  }

 private:
  const __m512 low_[2], high_[2];
  const __m512 per_unit_, center_;
};
#else
using ByBins = ByTree;
using ByPairs = ByTree;
#endif

// Adds the errors of n elements of the tile, a multiple of kSearchChunk, to those of all candidates.
struct Errors {
  const formats::Codec& codec;
  const Prepared& prepared;
  const Prepared::Grid& grid;
  const bool by_bins, by_pairs;  // of table formats
  const Scales& scales;
  const Tile& tile;

  template <bool kWeighted>
  void add(int64_t begin, int64_t n, float* sums) const {
    switch (codec.kind) {
      case formats::Kind::table:
        if (prepared.is_e2m1) return add<formats::Kind::table, kWeighted, OfE2m1>(begin, n, sums);
        if (by_pairs) return add<formats::Kind::table, kWeighted, ByPairs>(begin, n, sums);
        if (by_bins) return add<formats::Kind::table, kWeighted, ByBins>(begin, n, sums);
        return add<formats::Kind::table, kWeighted, ByTree>(begin, n, sums);
      case formats::Kind::integer:
        return add<formats::Kind::integer, kWeighted, ByTree>(begin, n, sums);
      case formats::Kind::affine:
        return add<formats::Kind::affine, kWeighted, ByTree>(begin, n, sums);
      case formats::Kind::floating:  // whose scales nothing searches for
        return;
    }
  }

  template <formats::Kind kKind, bool kWeighted, class OfTable>
  void add(int64_t begin, int64_t n, float* sums) const {
    const Lanes d;
    const OfTable of_table(prepared, grid);
    const auto round = hn::Set(d, formats::Float<float>::kUnit * 1.5f);
    const auto levels = hn::Set(d, static_cast<float>(codec.levels()));
    for (size_t c = 0; c < kSearchCandidates; c += hn::Lanes(d)) {
      const auto reciprocal = hn::Load(d, scales.reciprocal + c), bias = hn::Load(d, scales.bias + c);
      const auto low = hn::Load(d, scales.low + c), high = hn::Add(low, levels);
      const auto term = [&](int64_t i) HWY_ATTR {
        const auto x = hn::Set(d, tile.x[i]);
        const auto y = hn::Mul(kKind == formats::Kind::affine ? hn::Sub(x, bias) : x, reciprocal);
        V error;
        if constexpr (kKind == formats::Kind::table)
          error = of_table(d, y);
        else
          error = hn::Sub(y, hn::Sub(hn::Add(hn::Min(high, hn::Max(low, y)), round), round));
        const auto square = hn::Mul(error, error);
        return kWeighted ? hn::Mul(hn::Set(d, tile.weight[i]), square) : square;
      };
      auto sum = hn::Load(d, sums + c);
      for (int64_t i = begin; i < begin + n; i += kSearchChunk) {
        const auto first = hn::Add(hn::Add(term(i), term(i + 1)), hn::Add(term(i + 2), term(i + 3)));
        const auto second = hn::Add(hn::Add(term(i + 4), term(i + 5)), hn::Add(term(i + 6), term(i + 7)));
        sum = hn::Add(sum, hn::Add(first, second));
      }
      hn::Store(sum, d, sums + c);
    }
  }
};

// Elements [first, first + n) of x, in units.
template <class Type>
HWY_INLINE void load_tile(const QuantizeProblem& problem, int64_t first, int64_t n,
                          typename Type::Compute per_unit, Tile& tile) {
  int64_t i = 0;
  if constexpr (sizeof(typename Type::Compute) == 4) {
    const Lanes d;
    const auto unit = hn::Set(d, per_unit);
    const auto* const x = static_cast<const typename Type::Memory*>(problem.x) + first;
    for (const auto N = static_cast<int64_t>(hn::Lanes(d)); i + N <= n; i += N)
      hn::StoreU(hn::Mul(Type::load(d, x + i), unit), d, tile.x + i);
  }
  using F = typename Type::Compute;
  for (; i < n; ++i)
    tile.x[i] = static_cast<float>(load_element<F>(problem.x, problem.dtype, first + i) * per_unit);
}

void load_weights(const Importance& importance, int64_t first, int64_t n, Tile& tile) {
  int64_t column = (importance.first + first) % importance.count;
  for (int64_t i = 0; i < n;) {
    const int64_t count = std::min(n - i, importance.count - column);
    std::copy_n(importance.weights + column, count, tile.weight + i);
    i += count;
    column = 0;
  }
}

// The first candidate of least error; 0 where all are infinite.
HWY_INLINE int least_error(const Scales& scales,
                           const float (&parts)[formats::kSearchParts][kSearchCandidates], bool all_parts) {
  const Lanes d;
  const auto error = [&](size_t i) HWY_ATTR {
    const auto part = [&](int p) HWY_ATTR { return hn::Load(d, parts[p] + i); };
    auto sum = part(0);
    if (all_parts)
      sum = hn::Add(hn::Add(hn::Add(part(0), part(1)), hn::Add(part(2), part(3))),
                    hn::Add(hn::Add(part(4), part(5)), hn::Add(part(6), part(7))));
    const auto scale = hn::Load(d, scales.scale + i);
    return hn::Add(hn::Mul(hn::Mul(scale, scale), sum), hn::Load(d, scales.unusable + i));
  };
  auto least = error(0);
  for (size_t i = hn::Lanes(d); i < kSearchCandidates; i += hn::Lanes(d)) least = hn::Min(least, error(i));
  least = hn::MinOfLanes(d, least);
  size_t i = 0;
  intptr_t lane = -1;
  for (; (lane = hn::FindFirstTrue(d, hn::Eq(error(i), least))) < 0;) i += hn::Lanes(d);
  return static_cast<int>(i) + static_cast<int>(lane);
}

template <class Type, class F = typename Type::Compute>
formats::GroupParams<F> SearchGroup(const QuantizeProblem& problem, int64_t first, int64_t n, F min, F max) {
  const formats::Codec& codec = problem.codec;
  const auto& prepared = *static_cast<const Prepared*>(problem.prepared);
  const Prepared::Grid& grid = prepared.grid(n);
  const auto by_rule = formats::rule_params(min, max, codec);
  const F absmax = formats::max(-min, max);
  int best = 0;
  if (absmax > 0) {
    const F per_unit = formats::search_per_unit(absmax);
    Scales scales;
    const bool usual = set_vector_scales(by_rule, grid, per_unit, codec, scales);
    if (!usual) set_scales(by_rule, grid.grid, per_unit, codec, scales);
    alignas(64) float parts[formats::kSearchParts][kSearchCandidates];
    std::fill_n(&parts[0][0], n > kSearchTile ? sizeof parts / sizeof(float) : kSearchCandidates, 0.0f);
    const bool weighted = problem.importance.weights != nullptr;
    // Scales below the normal f16 are rounded by more than the limit of pairs allows.
    const bool by_pairs =
        usual && grid.pairs.usable &&
        (codec.scale_type != formats::ScaleType::f16 || formats::abs(by_rule.scale) >= 0x1p-13f);
    Tile tile;
    const Errors errors{codec, prepared, grid, usual && grid.bins.usable, by_pairs, scales, tile};
    for (int64_t begin = 0, part = 0; begin < n; begin += kSearchTile, ++part) {
      const int64_t count = std::min<int64_t>(kSearchTile, n - begin),
                    whole = count / kSearchChunk * kSearchChunk;
      float* const sums = parts[part % formats::kSearchParts];
      load_tile<Type>(problem, first + begin, count, per_unit, tile);
      if (weighted) {
        load_weights(problem.importance, first + begin, count, tile);
        errors.add<true>(0, whole, sums);
      } else {
        errors.add<false>(0, whole, sums);
      }
      if (whole == count) continue;
      if (!weighted) std::fill(tile.weight + whole, tile.weight + count, 1.0f);
      std::fill(tile.x + count, tile.x + whole + kSearchChunk, 0.0f);
      std::fill(tile.weight + count, tile.weight + whole + kSearchChunk, 0.0f);
      errors.add<true>(whole, kSearchChunk, sums);
    }
    best = least_error(scales, parts, n > kSearchTile);
  }
  return formats::searched_params(by_rule, grid.grid, best, min, max, codec);
}

#endif  // HALFBYTE_SIMD

formats::GroupParams<float> SearchGroup32(const QuantizeProblem& problem, int64_t first, int64_t n, float min,
                                          float max) {
#if HALFBYTE_SIMD
  if (problem.dtype == DType::f16) return SearchGroup<F16>(problem, first, n, min, max);
  if (problem.dtype == DType::bf16) return SearchGroup<BF16>(problem, first, n, min, max);
  return SearchGroup<F32>(problem, first, n, min, max);
#else
  return group_params_ref(problem, first, n, min, max);
#endif
}
formats::GroupParams<double> SearchGroup64(const QuantizeProblem& problem, int64_t first, int64_t n,
                                           double min, double max) {
#if HALFBYTE_SIMD
  return SearchGroup<F64>(problem, first, n, min, max);
#else
  return group_params_ref(problem, first, n, min, max);
#endif
}

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(SearchGroup32);
HWY_EXPORT(SearchGroup64);

std::shared_ptr<const void> prepare_search_cpu(const QuantizeProblem& problem) {
  return std::make_shared<const scale_search::Prepared>(problem.codec);
}
formats::GroupParams<float> search_group_cpu(const QuantizeProblem& problem, int64_t first, int64_t n,
                                             float min, float max) {
  return HWY_DYNAMIC_DISPATCH(SearchGroup32)(problem, first, n, min, max);
}
formats::GroupParams<double> search_group_cpu(const QuantizeProblem& problem, int64_t first, int64_t n,
                                              double min, double max) {
  return HWY_DYNAMIC_DISPATCH(SearchGroup64)(problem, first, n, min, max);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
