// A weight of an output, and where its elements are in the input. Mostly it is a whole weight; but there are
// readers that want experts apart or stacked, gate and up apart, or turned what is stored transposed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/arithmetic.h"
#include "io/checkpoint.h"

namespace halfbyte::io {

// Rows of the row-major matrix of an output weight, from those of one weight of the input. A quantized one is
// decoded where it is read, to its dtype.
struct SourceRows {
  size_t weight;      // of Checkpoint::Impl::weights
  int64_t first = 0;  // its element that is the first of the first row
  int64_t num_rows = 0;
  int64_t row_stride = 0, col_stride = 1;  // between its elements
  bool as_stored = false;  // elements of a quantized weight are counted in the order in which it is stored
};

struct OutputWeight {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<SourceRows> sources;  // one behind the other, of one dtype; a whole weight is one source
  float plus = 0;  // is added to each element, and the sum rounded: readers may store norms so

  int64_t cols() const { return shape.empty() ? 1 : shape.back(); }
};

// Weight number `index` of the input. As it is, and with its last two axes exchanged: a source for each
// matrix, or all of one that is stored so.
OutputWeight whole_weight(const Weight& weight, size_t index);
OutputWeight transposed_weight(const Checkpoint::Impl& input, size_t index);

// These rows of a weight, one range behind the other: of a matrix any, of more axes whole matrices.
OutputWeight with_rows(const OutputWeight& weight, std::span<const RowRange> ranges);

// The sources must lie within their weights and make up the shape, Error(bug); and be of one dtype,
// of whole bytes unless they are a whole weight, and F32, F16 or BF16 for `plus`, Error(bad_input).
void check_output_weight(const Checkpoint::Impl& input, const OutputWeight& weight);

// As safetensors spells it: DType need not have it.
std::string stored_dtype(const Checkpoint::Impl& input, const OutputWeight& weight);
uint64_t num_bytes(const Checkpoint::Impl& input, const OutputWeight& weight);

// Whether it has all elements of a dense input weight in their order, as they are: then its bytes are those
// of the tensor.
bool is_whole(const Checkpoint::Impl& input, const OutputWeight& weight);
// Whether a row of it is a column in the input. A block is then read in runs as long as it has rows, and
// should have many: kTransposedElements.
bool is_transposed(const OutputWeight& weight);
inline constexpr int64_t kTransposedElements = 1 << 20;

// Bytes [offset, offset + bytes.size()) of the row-major matrix as it would be stored: whole elements, but
// for a whole weight. Thread safe. `scratch` grows to at most scratch_bytes(bytes.size()) if the row_stride
// of transposed sources is 1 or 2, for a whole weight not at all.
void read_output(const Checkpoint::Impl& input, const OutputWeight& weight, uint64_t offset,
                 std::span<std::byte> bytes, Buffer& scratch);
int64_t scratch_bytes(int64_t num_bytes);

}  // namespace halfbyte::io
