#include "io/tiles.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"

namespace halfbyte::io {

Tiles::Tiles(const QuantizedWeight& weight, const Block& block)
    : spec_(weight.spec),
      rows_(block.rows),
      cols_(block.cols),
      tile_rows_(weight.scale_rows),
      tile_cols_(weight.spec.group_size),
      down_(ceil_div(rows_, tile_rows_)),
      across_(ceil_div(cols_, tile_cols_)) {}

QuantSpec Tiles::spec() const {
  QuantSpec spec = spec_;
  spec.granularity = Granularity::channel;
  return spec;
}

template <class Body>
void Tiles::for_each_run(const Body& body) const {
  for (int64_t row = 0; row < rows_; ++row)
    for (int64_t across = 0; across < across_; ++across) {
      const int64_t tile = row / tile_rows_ * across_ + across, col = across * tile_cols_;
      body(row * cols_ + col, (tile * tile_rows_ + row % tile_rows_) * tile_cols_,
           std::min(tile_cols_, cols_ - col));
    }
}

int64_t Tiles::element(int64_t index) const {
  const int64_t in_row = index % tile_cols_, tile_row = index / tile_cols_;
  const int64_t tile = tile_row / tile_rows_, row = tile / across_ * tile_rows_ + tile_row % tile_rows_;
  return row * cols_ + tile % across_ * tile_cols_ + in_row;
}

void Tiles::gather(const std::byte* x, int64_t size, std::byte* tiles) const {
  if (rows_ % tile_rows_ != 0 || cols_ % tile_cols_ != 0)
    std::memset(tiles, 0, static_cast<size_t>(num_elements() * size));
  for_each_run([&](int64_t from, int64_t to, int64_t n) {
    std::memcpy(tiles + to * size, x + from * size, static_cast<size_t>(n * size));
  });
}

void Tiles::scatter(const std::byte* tiles, std::byte* x) const {
  for_each_run([&](int64_t to, int64_t from, int64_t n) {
    std::memcpy(x + to, tiles + from, static_cast<size_t>(n));
  });
}

}  // namespace halfbyte::io
