// Sums in one order on every backend: pairwise. The sum of a sequence is that of the binary tree over its
// indices, S(i, 2m) = S(i, m) + S(i + m, m) for m a power of two and i a multiple of 2m; what lies beyond the
// end adds nothing. So any way of cutting it into blocks of a power of two, at multiples of their size, gives
// the same bytes, and the error grows with the logarithm of the length (Higham, Accuracy and Stability of
// Numerical Algorithms, 4.2). A total is never -0, and NaN is one of one kind.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

template <class F>
HALFBYTE_FN F quiet_nan() {
  return bit_cast<F>(static_cast<typename Float<F>::Bits>(Float<F>::kInfinity | Float<F>::kInfinity >> 1));
}

// What a total is stored as. With it the signs of zeros within a sum do not matter: padding with zeros
// changes nothing.
template <class F>
HALFBYTE_FN F total_of(F sum) {
  return sum == sum ? sum + 0 : quiet_nan<F>();  // NOLINT(misc-redundant-expression): not so of NaN
}

// Terms in order, or sums of whole blocks of them.
template <class F>
class PairwiseSum {
 public:
  HALFBYTE_FN void add(F term) { add_block(term, 0); }
  // The sum of the next 2^level terms; so far the number of terms is a multiple of that.
  HALFBYTE_FN void add_block(F sum, int level) {
    const u64 size = 1ull << level;
    u64 carry = size;
    for (; count_ & carry; carry <<= 1, ++level) sum = parts_[level] + sum;
    parts_[level] = sum;
    count_ += size;
  }
  HALFBYTE_FN F total() const {
    F sum = 0;
    for (int level = 0; level < 64; ++level)
      if (count_ >> level & 1)
        sum = (count_ & ((1ull << level) - 1)) != 0 ? parts_[level] + sum : parts_[level];
    return total_of(sum);
  }

 private:
  F parts_[64] = {};  // of level k where bit k of the count is set
  u64 count_ = 0;
};

}  // namespace halfbyte::formats
