// The value of a table format that is nearest to a number, by lookup: 32 bins of equal width, whose edges and
// values lie in shared memory, one a bank, so that no two lanes wait for each other.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/table.cuh"
#include "grouped/linear_args.h"
#include "halfbyte_config.h"

namespace halfbyte::device {

// Few bins hold an edge. Of a bin there are the values below its edges, between them and above.
struct ValueBins {
  static constexpr int kMaxEdges = TableBins::kMaxEdges;
  int num_edges = kMaxEdges + 1;  // most in one bin; kMaxEdges + 1: too many, not usable
  float limit = 0;                // what is beyond has the bin of it
  float bins_per_unit = 0;        // bin = rint(y * bins_per_unit) + kCenter
  static constexpr int kCenter = 16;
  float edges[kMaxEdges][32] = {};
  float values[kMaxEdges + 1][32] = {};
};

constexpr ValueBins make_value_bins(const CodeBook& book) {
  ValueBins best;
  if (!(book.max_magnitude > 0x1p-60f && book.max_magnitude < 0x1p60f)) return best;
  // What is computed of a quotient near 0 may be inexact: nothing may be decided there.
  if (abs(book.values[book.code_of_rank[0]]) < 0x1p-12f || abs(book.values[book.code_of_rank[15]]) < 0x1p-12f)
    return best;
  float values[16] = {book.values[book.code_of_rank[0]]}, edges[15] = {};
  u8 ranks[16] = {};
  int n = 0;  // edges between values that differ
  for (int rank = 1; rank < 16; ++rank) {
    const float value = book.values[book.code_of_rank[rank]];
    if (value == values[n]) continue;
    edges[n] = book.edges_f32[rank - 1];
    values[++n] = value;
    ranks[n] = static_cast<u8>(n);
  }
  for (int i = 1; i <= 16; ++i) {
    const TableBins bins =
        place_edges(edges, n, ranks, false, book.max_magnitude * (1.0f + static_cast<float>(i) / 128));
    if (bins.num_edges >= best.num_edges) continue;
    best.num_edges = bins.num_edges;
    best.limit = bins.limit;
    best.bins_per_unit = bins.bins_per_unit;
    for (int k = 0; k <= bins.num_edges; ++k)
      for (int bin = 0; bin < 32; ++bin) {
        if (k < bins.num_edges) best.edges[k][bin] = bins.edges[k][bin];
        best.values[k][bin] = values[min(n, static_cast<int>(bins.rank[bin]) + k)];
      }
  }
  return best;
}

constexpr ValueBins kBins = kTable ? make_value_bins(kBook) : ValueBins{};
constexpr bool kTableFits = kBins.num_edges <= ValueBins::kMaxEdges;
__device__ const ValueBins kDeviceBins = kBins;

// The table is an argument where no bins are used: in kernels that are not compiled for one, kBook is empty.
constexpr bool kTableGiven = kTable && kBook.max_magnitude == 0;
__device__ __forceinline__ float lowest_of(const LinearTable& table) {
  return kTableGiven ? table.values[0] : kBook.values[kBook.code_of_rank[0]];
}
__device__ __forceinline__ float highest_of(const LinearTable& table) {
  return kTableGiven ? table.values[15] : kBook.values[kBook.code_of_rank[15]];
}

struct SharedBins {
  float edges[kTable ? kBins.num_edges : 1][32], values[kTable ? kBins.num_edges + 1 : 1][32];
};
__device__ __forceinline__ SharedBins& shared_bins() {
  __shared__ SharedBins bins;
  return bins;
}
// By all threads of a block, before table_value.
__device__ __forceinline__ void load_bins() {
  if constexpr (kTable && kTableFits) {
    if (threadIdx.x < 32) {
#pragma unroll
      for (int k = 0; k <= kBins.num_edges; ++k) {
        if (k < kBins.num_edges) shared_bins().edges[k][threadIdx.x] = kDeviceBins.edges[k][threadIdx.x];
        shared_bins().values[k][threadIdx.x] = kDeviceBins.values[k][threadIdx.x];
      }
    }
    __syncthreads();
  }
}
// Of a y that is not NaN.
__device__ __forceinline__ float table_value(float y) {
  const float inside = fminf(fmaxf(y, -kBins.limit), kBins.limit);
  const u32 bin =
      bit_cast<u32>(__fmaf_rn(inside, kBins.bins_per_unit, kRoundToInteger + ValueBins::kCenter)) -
      kRoundToIntegerBits;
  const SharedBins& bins = shared_bins();
  float value = bins.values[0][bin];
#pragma unroll
  for (int k = 0; k < kBins.num_edges; ++k)
    if (y > bins.edges[k][bin]) value = bins.values[k + 1][bin];
  return value;
}

// The same of any y, by all edges.
template <class F>
__device__ __forceinline__ F any_table_value(const LinearTable& table, F y) {
  F value = static_cast<F>(lowest_of(table));
#pragma unroll
  for (int i = 0; i < 15; ++i) {
    F edge, above;
    if constexpr (kTableGiven) {
      edge = sizeof(F) == 4 ? static_cast<F>(table.edges_f32[i]) : static_cast<F>(table.edges_f64[i]);
      above = static_cast<F>(table.values[i + 1]);
    } else {
      edge = sizeof(F) == 4 ? static_cast<F>(kBook.edges_f32[i]) : static_cast<F>(kBook.edges_f64[i]);
      above = static_cast<F>(kBook.values[kBook.code_of_rank[i + 1]]);
    }
    if (y > edge) value = above;
  }
  return value;
}

}  // namespace halfbyte::device
