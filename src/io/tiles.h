// The blocks of a matrix that have a scale each, as rows of a matrix of their own: what is quantized with a
// scale a row is so quantized with a scale a block. Zeros fill up the blocks at the edges.
#pragma once

#include "io/layout.h"

namespace halfbyte::io {

class Tiles {
 public:
  // Of rows of a weight whose scale_rows is more than 1.
  Tiles(const QuantizedWeight& weight, const Block& block);

  int64_t count() const { return down_ * across_; }  // row by row, as their scales are stored
  int64_t num_elements() const { return count() * tile_rows_ * tile_cols_; }
  QuantSpec spec() const;
  // The element of the block that is number `index` of the tiles; that one must not be a filling.
  int64_t element(int64_t index) const;
  // x [rows, cols] of elements of `size` bytes to the matrix of tiles; bytes back.
  void gather(const std::byte* x, int64_t size, std::byte* tiles) const;
  void scatter(const std::byte* tiles, std::byte* x) const;

 private:
  // Calls body(element of the block, element of the tiles, how many) for the rows of tiles.
  template <class Body>
  void for_each_run(const Body& body) const;

  const QuantSpec spec_;
  const int64_t rows_, cols_, tile_rows_, tile_cols_, down_, across_;
};

}  // namespace halfbyte::io
