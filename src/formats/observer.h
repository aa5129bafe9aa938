// How an observer takes up the range of a batch.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

// min > max: nothing seen.
template <class F>
struct Seen {
  F min = bit_cast<F>(Float<F>::kInfinity), max = -bit_cast<F>(Float<F>::kInfinity);
  HALFBYTE_FN bool empty() const { return min > max; }
};

// What was seen of a group, with a batch. `history`: the weight of what was seen before, in [0, 1); negative:
// the range that contains both. Averages are computed in f64 and rounded once.
template <class F>
HALFBYTE_FN Seen<F> observed(const Seen<F>& before, const Seen<F>& batch, double history) {
  if (batch.empty()) return before;
  if (before.empty()) return batch;
  if (history < 0) return {formats::min(before.min, batch.min), formats::max(before.max, batch.max)};
  const double now = 1 - history;
  return {static_cast<F>(static_cast<double>(before.min) * history + static_cast<double>(batch.min) * now),
          static_cast<F>(static_cast<double>(before.max) * history + static_cast<double>(batch.max) * now)};
}

// The mean over the batches in which the group had values; `count`: how many there were.
template <class F>
HALFBYTE_FN Seen<F> observed_mean(const Seen<F>& before, const Seen<F>& batch, i64& count) {
  if (batch.empty()) return before;
  if (before.empty()) count = 0;
  const double history = static_cast<double>(count) / static_cast<double>(count + 1);
  ++count;
  return observed(before, batch, history);
}

}  // namespace halfbyte::formats
