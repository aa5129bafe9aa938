// How the kernels on the CPU walk a problem: a grid of lines, cut into tiles that threads share out.
#pragma once

#include <algorithm>

#include "cpu/parallel.h"
#include "grouped/linear.h"

namespace halfbyte::linear {

constexpr int64_t kScales = 1024;          // of a chunk of a line, at most
constexpr int64_t kWidth = 16384;          // columns of a tile, unless each has a scale
constexpr int64_t kTask = 65536;           // elements of a tile, large against the cost of scheduling it
constexpr int64_t kFused = 1 << 18;        // elements of groups whose scales are computed within a tile
constexpr int64_t kStreamBytes = 8 << 20;  // an output beyond this is written past the caches

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Columns [column, end_column) of the lines [line, end_line).
struct Tile {
  int64_t outer, line, end_line, column, end_column;
};

// [outer, lines, length], row-major. `group_lines` lines by `group_cols` columns share a scale. The strides,
// of tensors too: outer, of lines (scales: of groups of lines), of columns (likewise).
struct Grid {
  const LinearProblem& problem;
  LinearTensors tensors;
  LinearStrides scale;
  int64_t outer, lines, length;
  int64_t group_lines, group_cols;
  bool per_column;
  bool past_caches;
  int64_t unit = 2;  // elements of packed codes, or of a mask, that share a byte
  int64_t odd_cols =
      0;  // packed rows of this length, no multiple of `unit`, make up a line: each begins at a byte

  // The problem has elements.
  Grid(const LinearProblem& p, const LinearTensors& t)
      : problem(p), tensors(t), scale(p.scale_strides), outer(p.outer), lines(p.axis), length(p.inner) {
    const CodeStorage& packed = p.has_mask ? p.mask : p.codes;
    if (p.has_mask) unit = 8;
    const bool odd = (p.has_mask || is_packed(packed.dtype)) && packed.cols % unit != 0;
    bool contiguous = true;
    for_each_strides([&](const LinearStrides& s) {
      contiguous = contiguous && (s.inner == 1 || p.inner == 1) && (s.axis == p.inner || p.axis == 1) &&
                   (s.outer == p.axis * p.inner || p.outer == 1);
    });
    group_lines = p.group_size;
    group_cols = scale.inner == 0 ? p.inner : 1;
    if (p.inner == 1 || (contiguous && scale.inner == 0)) {  // the axis is the line, or becomes it
      for_each_strides([&](LinearStrides& s) {
        s = contiguous ? LinearStrides{0, p.axis * p.inner, 1} : LinearStrides{0, s.outer, s.axis};
      });
      scale = {0, scale.outer, scale.axis};
      length = p.axis * p.inner;
      lines = outer;
      outer = group_lines = 1;
      group_cols = scale.inner == 0 ? length : p.group_size * p.inner;
      const bool odd_zeros = is_packed(p.zeros.dtype) && p.zeros.cols % 2 != 0;
      if (contiguous && !odd && !odd_zeros && length % group_cols == 0 &&
          scale.axis == length / group_cols * scale.inner) {  // all is one line
        length *= lines;
        lines = 1;
        if (scale.inner == 0) group_cols = length;
      }
    }
    per_column = group_cols == 1 && scale.inner == 1;
    if (odd && packed.cols != length) odd_cols = packed.cols;
    past_caches = p.num_elements() * (p.op == LinearOp::quantize ? 1 : size_of(p.dtype)) >= kStreamBytes;
  }

  template <class Body>
  void for_each_strides(const Body& body) {
    if (tensors.x) body(tensors.x_strides);
    if (tensors.dy) body(tensors.dy_strides);
    if (tensors.y) body(tensors.y_strides);
    if (tensors.codes && !is_packed(problem.codes.dtype)) body(tensors.code_strides);
  }

  struct Place {
    int64_t outer, line, column;
  };
  static int64_t offset(const LinearStrides& strides, const Place& at) {
    return at.outer * strides.outer + at.line * strides.axis + at.column * strides.inner;
  }
  int64_t index(const Place& at) const { return (at.outer * lines + at.line) * length + at.column; }
  int64_t scale_index(const Place& at) const {
    return offset(scale, {at.outer, at.line / group_lines, at.column / group_cols});
  }
  // Scales of the columns [begin, end), which lie scale.inner apart.
  int64_t num_scales(int64_t begin, int64_t end) const {
    return (end - 1) / group_cols - begin / group_cols + 1;
  }
  // Whether each group lies in one tile, so that its scale is computed there.
  bool fused() const {
    const bool shared = (scale.outer == 0 && outer > 1) || (scale.axis == 0 && lines > group_lines);
    return problem.computed && !shared && group_lines <= kFused / group_cols;
  }

  // Tiles, in parallel. They begin at a byte of packed codes or of a mask; where `fused` with whole groups,
  // and at a byte of packed zero points.
  template <class Body>
  void for_each_tile(const Body& body) const {
    int64_t columns = fused() ? unit * group_cols : unit;
    if (odd_cols != 0 && columns % odd_cols != 0) columns *= odd_cols;
    const int64_t rows = fused() ? 2 * group_lines : 1;
    const int64_t width = std::min(length, round_up(per_column ? kScales : kWidth, columns));
    const int64_t height = std::min(lines, round_up(std::max<int64_t>(1, kTask / width), rows));
    const int64_t across = (length + width - 1) / width, down = (lines + height - 1) / height;
    parallel_for(outer * down * across, 1, problem.num_threads, [&](int64_t first, int64_t last, int) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t line = i / across % down * height, column = i % across * width;
        body(Tile{i / across / down, line, std::min(lines, line + height), column,
                  std::min(length, column + width)});
      }
    });
  }
};

}  // namespace halfbyte::linear
