// Weights that are stored transposed, [in, out], as gptq and awq have them: what belongs to a row of the
// weight lies in columns of the tensors, and a block of rows is a run of each of their rows.
#pragma once

#include "io/layout.h"

namespace halfbyte::io {

// Whether the layout of the weight is one of these.
bool is_columnwise(const QuantizedWeight& weight);
// Rows of the weight whose codes and zero points fill whole words; blocks have a multiple of it.
int64_t columnwise_unit(const QuantizedWeight& weight);

// As of layout.h, for these layouts. `native` and `stored` do not overlap. Error(bad_input) for zero points
// of 0 where they are stored less 1.
StoredRange columnwise_range(const QuantizedWeight& weight, const Block& block, Role role);
void pack_columnwise(const QuantizedWeight& weight, const Block& block, Role role, const std::byte* native,
                     std::byte* stored);
void unpack_columnwise(const QuantizedWeight& weight, const Block& block, Role role, const std::byte* stored,
                       std::byte* native);

// Words that hold the zero point `zero` of every row: as many as repeat.
std::vector<uint32_t> columnwise_zero_words(const QuantizedWeight& weight, int zero);

}  // namespace halfbyte::io
