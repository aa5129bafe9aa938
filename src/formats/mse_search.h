// The search for the range whose quantization to integers has the least sum of squared errors: in stages,
// first a ladder of ranges down to thousandths of that of the values, then finer ladders around the best few.
// All in units of a power of two near the largest magnitude, so that nothing over- or underflows. A step of a
// search is plain arithmetic in F, so that every backend takes the same.
//
// With s the scale, q = rne(clamp(x * (1 / s), low, low + levels)) and the error (x - q * s)^2, summed
// pairwise (formats/pairwise.h) over the elements of the group in order; the others, and what is not finite,
// count as 0. The product differs from the quotient x / s next to ties only, where both codes have the same
// error.
#pragma once

#include "formats/pairwise.h"

namespace halfbyte::formats {

// The codes, less the zero point.
struct MseCodes {
  bool asymmetric = false;  // low is in [-levels, 0]; else q_min
  i32 q_min = -128, levels = 255;
  double divisor = 127;  // symmetric: absmax / scale
  double eps = 0;        // no scale is less
};

struct MseStage {
  int parents, scales, zeros;  // of each parent, so many scales around its own, with so many zero points
  float step;                  // between scales, relative to that of the parent
  int zero_shift;              // between zero points: the codes to the nearer end >> zero_shift, at least 1
  HALFBYTE_FN int count() const { return parents * scales * zeros; }  // a multiple of 16
};
inline constexpr int kMseStages = 4;            // behind the ladder
inline constexpr int kMseMostCandidates = 288;  // of a stage
inline constexpr int kMseMostParents = 8;
// Stage 0 is the ladder. `scales` candidates in a row are neighbours.
HALFBYTE_FN MseStage mse_stage(bool asymmetric, int stage) {
  if (asymmetric) switch (stage) {
      case 0:
        return {1, 12, 12, 0, 0};
      case 1:
        return {6, 8, 3, 0.06f, 3};
      case 2:
        return {6, 16, 3, 0.006f, 5};
      case 3:
        return {4, 8, 3, 0.0013f, 8};
      default:
        return {2, 8, 3, 0.0003f, 8};
    }
  switch (stage) {
    case 0:
      return {1, 96, 1, 0, 0};
    case 1:
      return {8, 32, 1, 0.007f, 0};
    case 2:
      return {8, 8, 1, 0.0015f, 0};
    case 3:
      return {4, 8, 1, 0.00035f, 0};
    default:
      return {2, 8, 1, 0.00008f, 0};
  }
}

// The power of two of a biased exponent; 0 gives half the smallest normal number.
template <class F>
HALFBYTE_FN F power_of_two(int biased) {
  constexpr int kMantissa = sizeof(F) == 4 ? 23 : 52;
  using Bits = typename Float<F>::Bits;
  return bit_cast<F>(biased > 0 ? static_cast<Bits>(biased) << kMantissa
                                : static_cast<Bits>(1) << (kMantissa - 1));
}

template <class F>
struct MseCandidate {
  F scale = 1, low = 0;
};

// The search in the range [min, max] of finite values, not both 0.
template <class F>
struct MseSearch {
  F unit = 1, per_unit = 1;  // powers of two: x * per_unit is what errors are computed of
  F min = 0, max = 0;        // in units, extended to contain 0
  F eps = 0;

  static HALFBYTE_FN MseSearch of(F min, F max, const MseCodes& codes) {
    constexpr int kMantissa = sizeof(F) == 4 ? 23 : 52, kBias2 = sizeof(F) == 4 ? 254 : 2046;
    const F absmax = formats::max(-min, max);
    const int exponent = static_cast<int>(bit_cast<typename Float<F>::Bits>(absmax) >> kMantissa);
    MseSearch search;
    search.unit = power_of_two<F>(exponent);
    search.per_unit = power_of_two<F>(kBias2 - exponent);
    search.min =
        codes.asymmetric ? formats::min(static_cast<F>(0), min * search.per_unit) : -absmax * search.per_unit;
    search.max =
        codes.asymmetric ? formats::max(static_cast<F>(0), max * search.per_unit) : absmax * search.per_unit;
    // A scale beyond twice the largest magnitude makes all codes 0.
    search.eps = formats::min(static_cast<F>(1024), static_cast<F>(codes.eps) * search.per_unit);
    return search;
  }

  // Candidate i of the ladder. Symmetric: eight steps an octave, twelve octaves; asymmetric: each end has
  // twelve rungs, 1, 3/4, 1/2, 3/8, 1/4, 3/16, 1/8, 1/16 .. 1/256. Large ranges come first.
  HALFBYTE_FN MseCandidate<F> rung(int i, const MseCodes& codes) const {
    if (!codes.asymmetric) {
      const F part = static_cast<F>(16 - i % 8) / static_cast<F>(16 << i / 8);
      return {formats::max(eps, max * part / static_cast<F>(codes.divisor)), static_cast<F>(codes.q_min)};
    }
    const F levels = static_cast<F>(codes.levels);
    const F low = min * end_rung(i / 12), high = max * end_rung(i % 12);
    const F scale = formats::max(eps, (high - low) / levels);
    return {scale, round_half_even(formats::max(-levels, low / scale))};
  }
  // Candidate i of a later stage; it belongs to parent i / (scales * zeros).
  HALFBYTE_FN MseCandidate<F> child(const MseCandidate<F>& parent, int i, const MseStage& stage,
                                    const MseCodes& codes) const {
    const F offset =
        static_cast<F>(2 * (i % stage.scales) - (stage.scales - 1)) * (static_cast<F>(stage.step) / 2);
    MseCandidate<F> result = {formats::max(eps, parent.scale * (1 + offset)), parent.low};
    if (codes.asymmetric) {
      const int low_end = static_cast<int>(-parent.low);
      const int step = formats::max(1, formats::min(low_end, codes.levels - low_end) >> stage.zero_shift);
      const int shift = (i / stage.scales % stage.zeros - stage.zeros / 2) * step;
      const F low = parent.low + static_cast<F>(shift);
      result.low = formats::min(static_cast<F>(0), formats::max(static_cast<F>(-codes.levels), low));
    }
    return result;
  }

  // The range of a candidate.
  HALFBYTE_FN void range(const MseCandidate<F>& best, const MseCodes& codes, F& low, F& high) const {
    const F bottom = codes.asymmetric ? best.low : static_cast<F>(-codes.divisor);
    const F top = codes.asymmetric ? best.low + static_cast<F>(codes.levels) : static_cast<F>(codes.divisor);
    low = formats::max(-Float<F>::kMax, best.scale * bottom * unit) + 0;
    high = formats::min(Float<F>::kMax, best.scale * top * unit) + 0;
  }

 private:
  static HALFBYTE_FN F end_rung(int i) {
    const int octave = i < 6 ? i / 2 : i - 3, quarters = i < 6 ? 4 - i % 2 : 4;
    return static_cast<F>(quarters) / static_cast<F>(4 << octave);
  }
};

// The squared error of x, in units. The sum of x and 1.5 * 2^(bits of the mantissa) is rounded to an integer.
template <class F>
HALFBYTE_FN F mse_term(F x, F scale, F reciprocal, F low, F high) {
  constexpr F kRound = Float<F>::kUnit * static_cast<F>(1.5);
  const F code = (clamp(x * reciprocal, low, high) + kRound) - kRound;
  const F error = x - code * scale;
  return error * error;
}

// How good a candidate is as a parent: less is better. What is not least among its neighbours in a line comes
// behind what is, so that parents lie apart.
template <class F>
HALFBYTE_FN F mse_merit(const F* errors, int i, int line) {
  const F error = errors[i];
  const bool least =
      (i % line == 0 || error <= errors[i - 1]) && (i % line == line - 1 || error <= errors[i + 1]);
  return least ? error : error * static_cast<F>(0x1p60);
}
// How many of the candidates come before number i as parents; of equal ones the first does.
template <class F>
HALFBYTE_FN int mse_rank(const F* merits, int count, int i) {
  const F merit = merits[i];
  int rank = 0;
  for (int j = 0; j < count; ++j) rank += merits[j] < merit || (merits[j] == merit && j < i) ? 1 : 0;
  return rank;
}

}  // namespace halfbyte::formats
