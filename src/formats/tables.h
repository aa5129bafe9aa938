// The code books of the table formats, and the decision edges that follow from them.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

enum class Tie : u8 {
  lower,        // to the lower value
  toward_zero,  // to the smaller magnitude
  even,         // to the even code
};

// Sixteen values and how a number is assigned to one. Codes are ranked by value; with
// rank = #{i : y > edges[i]} the code of y is code_of_rank[rank]. Every tie rule is expressed by the
// edges: an edge is the largest number that still belongs to the lower value.
struct CodeBook {
  float values[16] = {};  // by code
  float edges_f32[15] = {};
  double edges_f64[15] = {};
  u8 code_of_rank[16] = {};
  float max_magnitude = 0;  // the scale of a group is absmax / max_magnitude
  u8 zero_code = 0;         // of 0
  Tie tie = Tie::lower;     // with the values it decides all the rest

  constexpr bool operator==(const CodeBook&) const = default;
};

template <class F>
HALFBYTE_FN int rank_of(F y, const F (&edges)[15]) {
  int rank = 0;
  for (int i = 0; i < 15; ++i) rank += y > edges[i] ? 1 : 0;
  return rank;
}
HALFBYTE_FN int table_rank(const CodeBook& book, float y) { return rank_of(y, book.edges_f32); }
HALFBYTE_FN int table_rank(const CodeBook& book, double y) { return rank_of(y, book.edges_f64); }

// The code of y. NaN gives the lowest value: callers treat non-finite data first.
template <class F>
HALFBYTE_FN int table_encode(const CodeBook& book, F y) {
  return book.code_of_rank[table_rank(book, y)];
}

// Values by code; two codes may share the value 0 (then the one with the larger code is for negative
// numbers that round to 0).
HALFBYTE_FN CodeBook make_code_book(const float (&values)[16], Tie tie) {
  CodeBook book;
  book.tie = tie;
  int order[16] = {};
  for (int i = 0; i < 16; ++i) {  // insertion sort by (value, descending code)
    int j = i;
    for (; j > 0 && (values[i] < values[order[j - 1]] || values[i] == values[order[j - 1]]); --j)
      order[j] = order[j - 1];
    order[j] = i;
  }
  for (int i = 0; i < 16; ++i) {
    book.values[i] = values[i];
    book.code_of_rank[i] = static_cast<u8>(order[i]);
    book.max_magnitude = max(book.max_magnitude, abs(values[i]));
  }
  for (int i = 0; i < 15; ++i) {
    const double a = values[order[i]], b = values[order[i + 1]];
    // The midpoint, and the sign of what rounding it to f64 lost (two-sum): f32 values of very
    // different exponents need more than 53 bits.
    const double sum = a + b;
    const double b_part = sum - a;
    const double lost = (a - (sum - b_part)) + (b - b_part);
    const double middle = sum / 2;
    const bool exact = lost == 0;
    bool to_lower = true;
    if (tie == Tie::toward_zero) to_lower = middle > 0;
    if (tie == Tie::even) to_lower = order[i] % 2 == 0;
    if (a == b) to_lower = false;  // the two zeros: only numbers below 0 take the lower one
    double edge64 = middle;
    if (exact ? !to_lower : lost < 0) edge64 = next_below(middle);
    float edge32 = static_cast<float>(middle);
    const bool is_middle = static_cast<double>(edge32) == middle;
    if (static_cast<double>(edge32) > middle || (is_middle && (exact ? !to_lower : lost < 0)))
      edge32 = next_below(edge32);
    book.edges_f32[i] = edge32;
    book.edges_f64[i] = edge64;
  }
  book.zero_code = static_cast<u8>(table_encode(book, 0.0f));
  return book;
}

// One book for each row of halfbyte/formats.def of kind table, under the name of the row: what needs the book
// of a format finds it by that name, so that a row without one does not compile.
namespace books {

// NF4: QLoRA (arXiv:2305.14314), appendix E; the values of bitsandbytes.
constexpr float kNf4Values[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
constexpr CodeBook nf4 = make_code_book(kNf4Values, Tie::lower);

// FP4 of bitsandbytes: sign, 2 exponent bits, 1 mantissa bit, scaled so that the largest is 1. Not OCP E2M1.
constexpr float kFp4Values[16] = {
    0.0f, 0.0625f / 12,  8.0f / 12,  12.0f / 12,  4.0f / 12,  6.0f / 12,  2.0f / 12,  3.0f / 12,
    0.0f, -0.0625f / 12, -8.0f / 12, -12.0f / 12, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12};
constexpr CodeBook fp4 = make_code_book(kFp4Values, Tie::toward_zero);

// E2M1 of the OCP Microscaling Formats specification 1.0, table 5; code 8 (minus zero) decodes to +0.
constexpr float kFp4E2m1Values[16] = {0.0f, 0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr CodeBook fp4_e2m1 = make_code_book(kFp4E2m1Values, Tie::even);

// Those of fp4_e2m1 with other scales: NVFP4 (NVIDIA Model Optimizer, compressed-tensors), and MXFP4 of the
// OCP specification.
constexpr CodeBook nvfp4 = fp4_e2m1;
constexpr CodeBook mxfp4 = fp4_e2m1;

// The values are the user's (QuantSpec::table); only the tie rule is the format's.
constexpr CodeBook lut4 = {.tie = Tie::lower};

}  // namespace books

}  // namespace halfbyte::formats
