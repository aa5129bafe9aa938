// The code of a table format by lookup instead of fifteen comparisons. The quotient y falls into one of 32
// bins of equal width, one a lane of a warp; few bins hold an edge, none more than kNumEdges. A lane gets the
// rank below its bin and the edges within by shuffles: the rank of y is the first plus the edges below y.
#pragma once

#include "cuda/device/reduce.cuh"
#include "formats/tables.h"

namespace halfbyte::device {

inline constexpr float kRoundToInteger =
    12582912.0f;  // 1.5 * 2^23: x + this has the rounded x in its low bits
inline constexpr u32 kRoundToIntegerBits = 0x4B400000u;

struct TableBins {
  static constexpr int kMaxEdges = 3;
  // values[8 | c] == -values[c]: the magnitude is looked up, bit 3 is the sign. For two zeros that are codes
  // 0 and 8.
  bool sign_magnitude = false;
  bool signed_zero = false;  // numbers just below 0 have another rank than 0
  int num_edges = 0;         // most edges in one bin; kMaxEdges + 1: too many, not usable
  float limit = 0;           // |y| must not exceed it
  float bins_per_unit = 0;   // bin = rint(y * bins_per_unit) + center
  int center = 0;
  float edges[kMaxEdges][32] = {};
  u32 rank[32] = {};
  // code = code_of_rank_0 ^ (code_of_rank_bit[i] for each bit i of the rank)
  u8 code_of_rank_0 = 0;
  u8 code_of_rank_bit[4] = {};
};

constexpr bool is_zero_edge(float edge) { return edge < 0 && edge == next_below(0.0f); }

// The bins of the ranks given by n edges; `codes` are those of the ranks.
constexpr TableBins place_edges(const float* edges, int n, const u8* codes, bool sign_magnitude,
                                float limit) {
  TableBins bins;
  bins.sign_magnitude = bins.signed_zero = sign_magnitude;
  bins.limit = limit;
  bins.center = sign_magnitude ? 0 : 16;
  bins.bins_per_unit = (sign_magnitude ? 31.0f : 15.0f) / limit;
  for (int i = 0, edge = 0; i < 32; ++i) {
    bins.rank[i] = static_cast<u32>(edge);
    for (int k = 0; k < TableBins::kMaxEdges; ++k) bins.edges[k][i] = Float<float>::kMax;
    int here = 0;
    for (; edge < n; ++edge, ++here) {
      const double place = static_cast<double>(edges[edge]) * bins.bins_per_unit + bins.center - i - 0.5;
      // Bins are found with an error of 1e-5: an edge this near to the next bin would be uncertain.
      bool usable = place < -1e-4 || place > 1e-4;
      // Where the quotient of a fast division may be inexact there must be no edge, but that below 0: see
      // kLargestSignedScale.
      if (is_zero_edge(edges[edge]))
        bins.signed_zero = true;
      else
        usable = usable && abs(edges[edge]) >= 0x1p-12f;
      if (!usable) bins.num_edges = TableBins::kMaxEdges + 1;
      if (place > 0) break;
      if (here < TableBins::kMaxEdges) bins.edges[here][i] = edges[edge];
    }
    bins.num_edges = max(bins.num_edges, here);
  }
  bins.code_of_rank_0 = codes[0];
  for (int bit = 0; 1 << bit <= n; ++bit)
    bins.code_of_rank_bit[bit] = static_cast<u8>(codes[1 << bit] ^ codes[0]);
  if (sign_magnitude) bins.code_of_rank_bit[3] = 8;
  for (int rank = 0; rank <= n; ++rank) {
    int code = codes[0];
    for (int bit = 0; bit < 4; ++bit)
      if (rank >> bit & 1) code ^= bins.code_of_rank_bit[bit];
    if (code != codes[rank]) bins.num_edges = TableBins::kMaxEdges + 1;
  }
  return bins;
}

// least: by how much |y| exceeds the largest magnitude at most, in 128ths of it.
constexpr TableBins make_table_bins(const CodeBook& book, int least) {
  bool symmetric = book.values[0] == 0 && book.values[8] == 0;
  for (int code = 0; code < 8; ++code)
    symmetric = symmetric && book.values[code] >= 0 && book.values[8 + code] == -book.values[code];
  TableBins best;
  best.num_edges = TableBins::kMaxEdges + 1;
  if (!(book.max_magnitude > 0x1p-60f && book.max_magnitude < 0x1p60f)) return best;
  for (int i = least; i < least + 16; ++i) {
    const float limit = book.max_magnitude * (1.0f + static_cast<float>(i) / 128);
    const TableBins whole = place_edges(book.edges_f32, 15, book.code_of_rank, false, limit);
    if (whole.num_edges < best.num_edges) best = whole;
    if (!symmetric) continue;
    // Of the magnitudes, which have half as many edges: the non-negative values, ranks 8 and up.
    const TableBins half = place_edges(book.edges_f32 + 8, 7, book.code_of_rank + 8, true, limit);
    if (half.num_edges < best.num_edges) best = half;
  }
  return best;
}

}  // namespace halfbyte::device
