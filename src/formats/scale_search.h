// The search for the scale (with zero point or bias) of a group that has the least squared error. What the
// scale rule makes of the range is the first of sixteen candidates; the others cover a part of the range, or
// a little more. All are tried as they are stored, in f32, and in units of a power of two near the largest
// magnitude of the group, so that nothing over- or underflows. A step of the search is plain arithmetic, so
// that every backend takes the same.
//
// With s the scale, b the bias (of formats that have none 0) and v the value of the code of y = (x - b) * (1
// / s), the error of x is (y - v)^2, and that of the group s^2 times the sum. The product y differs from the
// quotient next to ties only, where both codes have the same error.
#pragma once

#include "formats/codec.h"
#include "formats/mse_search.h"

namespace halfbyte::formats {

inline constexpr int kSearchCandidates = 16;

// How the candidates of a group differ from its rule: in their scale, by a factor, and in the low end of the
// range that the codes cover, by a share of that range.
struct SearchGrid {
  enum class Form : u8 {
    factors,  // of the scale: 1, and fifteen from `base` down
    ends,     // each end of the range loses 0 to 3 steps
    powers,   // of two: 1, 1/2, 2, and 1 again
  };
  Form form = Form::factors;
  float base = 1, step = 0;  // a factor is base - step * count(i)

  // Of a group of n elements. In long groups the best range is far within the whole one, and the error
  // changes slowly with it.
  static constexpr i64 kLong = 512;
  static HALFBYTE_FN SearchGrid of(const Codec& codec, i64 n) {
    const bool is_long = n > kLong;
    if (codec.scale_type == ScaleType::e8m0) return {Form::powers, 1, 1};
    if (codec.scale_type == ScaleType::e4m3)
      return factors(0.85f, 1.75f);  // in steps as small as those of E4M3
    if (codec.kind == Kind::table) return factors(is_long ? 0.35f : 0.8f, 1.15f);
    const Row row = row_of(codec.bits);
    if (codec.kind == Kind::affine || codec.asymmetric)
      return {Form::ends, 1, is_long ? row.long_step : row.step};
    return factors(is_long ? row.long_least : row.least, 1.05f);
  }

  HALFBYTE_FN float count(int i) const {
    switch (form) {
      case Form::factors:
        return static_cast<float>(i - 1);
      case Form::ends:
        return static_cast<float>(low_steps(i) + i % 4);
      case Form::powers:
        break;
    }
    return i == 1 ? 0.5f : i == 2 ? -1.0f : 0.0f;
  }
  HALFBYTE_FN float factor(int i) const { return i == 0 ? 1 : base - step * count(i); }
  HALFBYTE_FN float shift(int i) const {
    return form == Form::ends ? step * static_cast<float>(low_steps(i)) : 0;
  }

 private:
  static HALFBYTE_FN int low_steps(int i) { return i / 4; }

  // Of integer and affine formats: the least factor of scales; the steps of ends.
  struct Row {
    float least, long_least, step, long_step;
  };
  static HALFBYTE_FN Row row_of(int bits) {
    switch (bits) {
      case 2:
        return {0.35f, 0.15f, 0.09f, 0.12f};
      case 3:
        return {0.5f, 0.2f, 0.045f, 0.1f};
      case 4:
        return {0.7f, 0.3f, 0.02f, 0.08f};
      case 5:
        return {0.85f, 0.45f, 0.01f, 0.05f};
      case 6:
        return {0.9f, 0.6f, 0.005f, 0.03f};
      default:
        return {0.96f, 0.85f, 0.001f, 0.01f};
    }
  }
  static HALFBYTE_FN SearchGrid factors(float least, float most) {
    return {Form::factors, most, (most - least) / (kSearchCandidates - 2)};
  }
};

// Candidate i, before it is stored.
template <class F>
HALFBYTE_FN RuleParams<F> search_candidate(const RuleParams<F>& by_rule, const SearchGrid& grid, int i,
                                           const Codec& codec) {
  RuleParams<F> params = by_rule;
  if (i == 0) return params;
  params.scale = by_rule.scale * static_cast<F>(grid.factor(i));
  if (grid.form == SearchGrid::Form::ends) {
    const F moved = by_rule.scale * (static_cast<F>(codec.levels()) * static_cast<F>(grid.shift(i)));
    if (codec.kind == Kind::affine)
      params.bias = by_rule.bias + moved;
    else  // the range of integers contains 0
      params.min = min(static_cast<F>(0), by_rule.min + moved);
  }
  return params;
}

// What errors are computed of: x * per_unit.
template <class F>
HALFBYTE_FN F search_per_unit(F absmax) {
  constexpr int kMantissa = sizeof(F) == 4 ? 23 : 52, kBias2 = sizeof(F) == 4 ? 254 : 2046;
  return power_of_two<F>(kBias2 - static_cast<int>(bit_cast<typename Float<F>::Bits>(absmax) >> kMantissa));
}

// The parameters of a candidate in units, and the codes less the zero point.
struct SearchScale {
  float scale = 1, reciprocal = 1, bias = 0;
  float low = 0, high = 0;
  bool usable = false;  // else its error is infinite: it is not finite, or far from the values

  template <class F>
  static HALFBYTE_FN SearchScale of(const GroupParams<F>& params, F per_unit, const Codec& codec) {
    SearchScale result;
    const auto scale = static_cast<float>(params.scale * per_unit);
    const auto bias = static_cast<float>(params.bias * per_unit);
    result.usable = abs(scale) >= 0x1p-40f && abs(scale) <= 0x1p40f && abs(bias) <= 0x1p40f;
    if (!result.usable) return result;
    result.scale = scale;
    result.reciprocal = 1 / scale;
    result.bias = bias;
    result.low = static_cast<float>(codec.kind == Kind::affine ? 0 : codec.q_min - params.zero_point);
    result.high = result.low + static_cast<float>(codec.levels());
    return result;
  }
  HALFBYTE_FN float error(float sum) const { return scale * scale * sum; }
};

// The squared error of x, which is in units, in those of the scale.
HALFBYTE_FN float search_error(float x, const SearchScale& by, const Codec& codec) {
  float y = 0, value = 0;
  if (codec.kind == Kind::table) {
    y = x * by.reciprocal;
    value = codec.book.values[table_encode(codec.book, y)];
  } else {
    constexpr float kRound = Float<float>::kUnit * 1.5f;
    y = (codec.kind == Kind::affine ? x - by.bias : x) * by.reciprocal;
    value = (clamp(y, by.low, by.high) + kRound) - kRound;
  }
  const float error = y - value;
  return error * error;
}

// Of y >= 0 the nearest value of E2M1, as its code book has it: y is rounded to one bit behind the leading
// one, or below 2 to halves, ties to the even code. That is what adding 2^22 times the power of two does.
HALFBYTE_FN float nearest_e2m1(float y) {
  const float within = min(y, 6.0f);
  const u32 power = max(bit_cast<u32>(within) & 0x7F800000u, 0x3F800000u);
  const float shift = bit_cast<float>(power + (22u << 23));
  return (within + shift) - shift;
}

// The ranks of a table format by lookup: y falls into one of 64 bins of equal width, none of which has more
// than one edge. Where the values have both signs, |y| does, which is as far from its value.
struct SearchBins {
  static constexpr int kBins = 64;
  bool usable = false, of_magnitude = false;
  float per_unit = 0, center = 0;  // the bin of y is rint(y * per_unit + center)
  u8 ranks[kBins] = {};            // at the low end of each

  // For |y| up to `limit`.
  static HALFBYTE_FN SearchBins of(const CodeBook& book, float limit) {
    SearchBins bins;
    bins.usable = book.max_magnitude > 0x1p-60f && book.max_magnitude < 0x1p60f;
    if (!bins.usable) return bins;
    bins.of_magnitude = book.values[0] == 0 && book.values[8] == 0;
    for (int code = 0; code < 8; ++code)
      bins.of_magnitude =
          bins.of_magnitude && book.values[code] >= 0 && book.values[8 + code] == -book.values[code];
    bins.per_unit = static_cast<float>(bins.of_magnitude ? kBins - 1 : kBins / 2 - 1) / limit;
    bins.center = bins.of_magnitude ? 0 : kBins / 2;
    for (int bin = 0; bin < kBins; ++bin) {
      int below = 0, within = 0;
      for (int i = 0; i < 15; ++i) {
        if (bins.of_magnitude && i < 8) {  // the edges of negative numbers, and the one below 0
          ++below;
          continue;
        }
        const float place =
            book.edges_f32[i] * bins.per_unit + bins.center - (static_cast<float>(bin) - 0.5f);
        below += place < 0 ? 1 : 0;
        within += place >= 0 && place < 1 ? 1 : 0;
        if (abs(place) < 1e-4f) bins.usable = false;  // bins are found to 1e-5
      }
      bins.ranks[bin] = static_cast<u8>(below);
      if (within > 1) bins.usable = false;
    }
    return bins;
  }
};

// Errors of a table format by lookup without ranks: y falls into one of 32 bins, each of which has the values
// on both sides of its edge. The nearer one is that of the code of y, as is checked of each edge.
struct SearchPairs {
  static constexpr int kBins = 32;
  static constexpr float kCenter = 0.5f * kBins;
  bool usable = false;
  float per_unit = 0;  // the bin of y is rint(y * per_unit + kCenter)
  float low[kBins] = {}, high[kBins] = {};

  // For |y| up to `limit`.
  static HALFBYTE_FN SearchPairs of(const CodeBook& book, float limit) {
    SearchPairs pairs;
    pairs.usable = book.max_magnitude > 0x1p-60f && book.max_magnitude < 0x1p60f;
    if (!pairs.usable) return pairs;
    pairs.per_unit = (kCenter - 0.51f) / limit;
    const auto value = [&](int rank) { return book.values[book.code_of_rank[rank]]; };
    for (int bin = 0; bin < kBins; ++bin) {
      int below = 0, within = 0;
      for (int i = 0; i < 15; ++i) {
        const float place = book.edges_f32[i] * pairs.per_unit + kCenter - (static_cast<float>(bin) - 0.5f);
        below += place < 0 ? 1 : 0;
        within += place >= 0 && place < 1 ? 1 : 0;
        if (abs(place) < 1e-4f) pairs.usable = false;  // bins are found to 1e-5
      }
      pairs.low[bin] = value(below);
      pairs.high[bin] = value(below + (within == 1 ? 1 : 0));
      if (within > 1) pairs.usable = false;
    }
    // The last y below an edge, and the first above it: away from the edge both distances only grow apart.
    for (int i = 0; i < 15; ++i) {
      const float edge = book.edges_f32[i] + 0.0f, above = -next_below(-edge);
      if (abs(edge - value(i)) > abs(edge - value(i + 1)) ||
          abs(above - value(i + 1)) > abs(above - value(i)))
        pairs.usable = false;
    }
    return pairs;
  }
};

// The sum of the errors of a group: chunks of 8 elements pairwise, those of each 1024 elements one after the
// other; the sums of these go into eight parts in turn, which are added pairwise. Elements that a chunk lacks
// add 0.
inline constexpr int kSearchChunk = 8, kSearchParts = 8;
inline constexpr i64 kSearchTile = 1024;
HALFBYTE_FN float sum_of_eight(const float* x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
class SearchSum {
 public:
  HALFBYTE_FN void add(float term) {
    chunk_[count_ % kSearchChunk] = term;
    if (++count_ % kSearchChunk == 0) add_chunk();
  }
  HALFBYTE_FN float total() {
    while (count_ % kSearchChunk != 0) add(0);
    return sum_of_eight(parts_);
  }

 private:
  HALFBYTE_FN void add_chunk() {
    float& part = parts_[(count_ - 1) / kSearchTile % kSearchParts];
    part = part + sum_of_eight(chunk_);
  }

  float chunk_[kSearchChunk] = {}, parts_[kSearchParts] = {};
  i64 count_ = 0;
};

// The parameters of candidate `best` of a group in the range [min, max]; those of the rule where its scale
// type cannot hold the others.
template <class F>
HALFBYTE_FN GroupParams<F> searched_params(const RuleParams<F>& by_rule, const SearchGrid& grid, int best,
                                           F min, F max, const Codec& codec) {
  const GroupParams<F> params = held_params(search_candidate(by_rule, grid, best, codec), min, max, codec);
  return params.held || best == 0 ? params : held_params(by_rule, min, max, codec);
}

// The search in a group of n elements, of which the finite ones are in the range [min, max] (min > max:
// none). x(i) is an element, weight(i) how much its error counts. Of equal candidates the first is taken.
template <class F, class X, class Weight>
HALFBYTE_FN GroupParams<F> search_params(i64 n, const X& x, const Weight& weight, F min, F max,
                                         const Codec& codec) {
  const RuleParams<F> by_rule = rule_params(min, max, codec);
  const SearchGrid grid = SearchGrid::of(codec, n);
  const F absmax = min > max ? 0 : formats::max(-min, max);
  int best = 0;
  float least = bit_cast<float>(Float<float>::kInfinity);
  if (absmax > 0) {
    const F per_unit = search_per_unit(absmax);
    for (int candidate = 0; candidate < kSearchCandidates; ++candidate) {
      const auto by = SearchScale::of(stored_params(search_candidate(by_rule, grid, candidate, codec), codec),
                                      per_unit, codec);
      if (!by.usable) continue;
      SearchSum sum;
      for (i64 i = 0; i < n; ++i)
        sum.add(is_finite(x(i)) ? weight(i) * search_error(static_cast<float>(x(i) * per_unit), by, codec)
                                : 0);
      if (const float error = by.error(sum.total()); error < least) {
        least = error;
        best = candidate;
      }
    }
  }
  return searched_params(by_rule, grid, best, min, max, codec);
}

}  // namespace halfbyte::formats
