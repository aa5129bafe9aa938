// The scalar reference of `reorder`: plain loops over the codes and parameters of a matrix.
#pragma once

#include <algorithm>
#include <cstring>

#include "ops/reorder/reorder.h"

namespace halfbyte {

inline void reorder_ref_to_packed(const ReorderArgs& args) {
  const formats::PackedLayout& p = args.layout;
  std::fill_n(args.packed, p.num_bytes, uint8_t{0});
  const auto put = [&](int64_t at, const void* from, int64_t i, int size) {
    std::memcpy(args.packed + at, static_cast<const uint8_t*>(from) + i * size, static_cast<size_t>(size));
  };
  for (int64_t row = 0; row < p.n; ++row) {
    for (int64_t col = 0; col < p.k; ++col) {
      formats::set_code_at(args.packed + p.code(row, col), p.place_in_unit(row, col).shift, p.bits,
                           view_code(args, row, col));
    }
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t i = args.one_group ? 0 : row * p.weight_groups + group / p.repeats;
      put(p.scale(row, group), args.scales, i, p.scale_bytes);
      if (p.has_biases) put(p.bias(row, group), args.biases, i, p.bias_bytes);
      if (!p.has_zeros) continue;
      if (!args.zero_words) {
        put(p.zero(row, group), args.zeros, i, 1);
        continue;
      }
      int zero = 0;  // bit by bit: the words of a group are weight_groups apart
      for (int64_t bit = 0; bit < p.bits; ++bit) {
        const int64_t at = row * p.bits + bit;
        const uint32_t word =
            static_cast<const uint32_t*>(args.zeros)[at / 32 * p.weight_groups + group / p.repeats];
        zero |= static_cast<int>(word >> at % 32 & 1) << bit;
      }
      args.packed[p.zero(row, group)] = static_cast<uint8_t>(zero);
    }
  }
  if (p.has_global_scale) std::memcpy(args.packed + p.global_scale, args.global_scale, 4);
  if (!p.double_quant) return;
  for (int64_t i = 0; i < (p.n * p.groups + 255) / 256; ++i)
    put(p.absmax + i * 4, args.absmax, args.one_group ? 0 : i, 4);
  std::memcpy(args.packed + p.map, args.map, 256 * 4);
  std::memcpy(args.packed + p.offset, args.offset, 4);
}

}  // namespace halfbyte
