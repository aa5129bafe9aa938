// A weight of an output, and where its elements are in the input. Mostly it is a whole weight; but there are
// readers that want experts apart or stacked, gate and up apart, or turned what is stored transposed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace halfbyte::io {

// Rows of the row-major matrix of an output weight, from those of one dense weight of the input.
struct SourceRows {
  size_t weight;      // of Checkpoint::Impl::weights
  int64_t first = 0;  // its element that is the first of the first row
  int64_t num_rows = 0;
  int64_t row_stride = 0, col_stride = 1;  // between its elements
};

struct OutputWeight {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<SourceRows> sources;  // one behind the other, of one dtype; a whole weight is one source
};

}  // namespace halfbyte::io
