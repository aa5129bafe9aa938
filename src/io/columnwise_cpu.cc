#include "io/columnwise.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "core/checks.h"
#include "io/file.h"

namespace halfbyte::io {
namespace {

constexpr int64_t kWordBytes = 4;
// Of awq: the row, of eight, whose code is at bits [4 i, 4 i + 4) of a word.
constexpr std::array<int, 8> kAwqOrder = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr int64_t kTile = 16;  // words of a square that is turned, a line: of lines far apart few fit at once

int bits_of(const QuantizedWeight& weight) { return info(weight.spec.format).bits; }
bool is_awq(const QuantizedWeight& weight) { return layout_info(weight.layout).packing == Packing::awq; }

uint32_t load_word(const std::byte* words, int64_t index) {
  uint32_t word;
  std::memcpy(&word, words + index * kWordBytes, kWordBytes);
  return word;
}
void store_word(std::byte* words, int64_t index, uint32_t word) {
  std::memcpy(words + index * kWordBytes, &word, kWordBytes);
}

// How a run of codes lies in words: so many codes fill so many words, and where the pieces of each are. A
// code that is cut has more than one piece.
struct WordPacking {
  struct Piece {
    int word, shift, bit, mask;  // (code >> bit & mask) << shift
  };
  int codes, words;
  std::vector<std::vector<Piece>> pieces;  // of each code
};

WordPacking word_packing(const QuantizedWeight& weight) {
  const int bits = bits_of(weight);
  WordPacking packing;
  if (is_awq(weight)) {
    packing = {8, 1, std::vector<std::vector<WordPacking::Piece>>(8)};
    for (int i = 0; i < 8; ++i)
      packing.pieces[static_cast<size_t>(kAwqOrder[static_cast<size_t>(i)])] = {{0, 4 * i, 0, 15}};
    return packing;
  }
  packing.codes = weight.words.planar ? 32 : 32 / std::gcd(32, bits);
  packing.words = packing.codes * bits / 32;
  packing.pieces.resize(static_cast<size_t>(packing.codes));
  for (int i = 0; i < packing.codes; ++i) {
    auto& pieces = packing.pieces[static_cast<size_t>(i)];
    if (weight.words.planar) {
      // The lowest bits of all codes, as many as a power of two, then the next.
      for (int bit = 0, word = 0; bit < bits;) {
        const int width = bits - bit >= 8 ? 8 : bits - bit >= 4 ? 4 : bits - bit >= 2 ? 2 : 1;
        pieces.push_back({word + i * width / 32, i * width % 32, bit, (1 << width) - 1});
        bit += width;
        word += width;
      }
    } else {
      for (int bit = 0; bit < bits;) {
        const int at = i * bits + bit, width = std::min(bits - bit, 32 - at % 32);
        pieces.push_back({at / 32, at % 32, bit, (1 << width) - 1});
        bit += width;
      }
    }
  }
  return packing;
}

// `count` codes, a multiple of packing.codes, and their words; unpacked, codes are `stride` bytes apart.
void pack_run(const WordPacking& packing, const uint8_t* codes, int64_t count, std::byte* words) {
  std::array<uint32_t, 8> unit;
  for (int64_t first = 0, word = 0; first < count; first += packing.codes, word += packing.words) {
    unit = {};
    for (int i = 0; i < packing.codes; ++i)
      for (const auto& piece : packing.pieces[static_cast<size_t>(i)])
        unit[static_cast<size_t>(piece.word)] |=
            (uint32_t{codes[first + i]} >> piece.bit & static_cast<uint32_t>(piece.mask)) << piece.shift;
    for (int w = 0; w < packing.words; ++w) store_word(words, word + w, unit[static_cast<size_t>(w)]);
  }
}
void unpack_run(const WordPacking& packing, const std::byte* words, int64_t count, int64_t stride,
                uint8_t* codes) {
  for (int64_t first = 0, word = 0; first < count; first += packing.codes, word += packing.words)
    for (int i = 0; i < packing.codes; ++i) {
      uint32_t code = 0;
      for (const auto& piece : packing.pieces[static_cast<size_t>(i)])
        code |= (load_word(words, word + piece.word) >> piece.shift & static_cast<uint32_t>(piece.mask))
                << piece.bit;
      codes[(first + i) * stride] = static_cast<uint8_t>(code);
    }
}

// The native form of a row: a bit stream.
void pack_stream(const uint8_t* codes, int64_t count, int bits, std::byte* stream) {
  uint32_t pending = 0;
  int num_pending = 0;
  for (int64_t i = 0; i < count; ++i) {
    pending |= uint32_t{codes[i]} << num_pending;
    for (num_pending += bits; num_pending >= 8; num_pending -= 8, pending >>= 8)
      *stream++ = static_cast<std::byte>(pending);
  }
  if (num_pending > 0) *stream = static_cast<std::byte>(pending);
}
void unpack_stream(const std::byte* stream, int64_t count, int bits, uint8_t* codes) {
  uint32_t pending = 0;
  int num_pending = 0;
  for (int64_t i = 0; i < count; ++i, pending >>= bits, num_pending -= bits) {
    if (num_pending < bits) {
      pending |= static_cast<uint32_t>(*stream++) << num_pending;
      num_pending += 8;
    }
    codes[i] = static_cast<uint8_t>(pending & ((1u << bits) - 1));
  }
}

// from [rows, cols] -> to [cols, rows], of elements of this type.
template <class T>
void transpose(const std::byte* from, int64_t rows, int64_t cols, std::byte* to) {
  for (int64_t r0 = 0; r0 < rows; r0 += kTile)
    for (int64_t c0 = 0; c0 < cols; c0 += kTile)
      for (int64_t r = r0; r < std::min(r0 + kTile, rows); ++r)
        for (int64_t c = c0; c < std::min(c0 + kTile, cols); ++c)
          std::memcpy(to + (c * rows + r) * static_cast<int64_t>(sizeof(T)),
                      from + (r * cols + c) * static_cast<int64_t>(sizeof(T)), sizeof(T));
}
void transpose(const std::byte* from, int64_t rows, int64_t cols, int64_t size, std::byte* to) {
  size == 2 ? transpose<uint16_t>(from, rows, cols, to) : transpose<uint32_t>(from, rows, cols, to);
}

// Of gptq: the words of a row, from bottom to top of a column, are the bit stream of its codes. What is not
// planar and not in another order is only turned.
class RowCodes {
 public:
  explicit RowCodes(const QuantizedWeight& weight)
      : weight_(weight),
        bits_(bits_of(weight)),
        cols_(weight.cols()),
        packing_(weight.words.planar ? word_packing(weight) : WordPacking()),
        codes_(static_cast<size_t>(cols_)),
        ordered_(static_cast<size_t>(cols_)) {}

  static bool are_as_stored(const QuantizedWeight& weight) {
    return !weight.words.planar && weight.words.order.empty();
  }
  // In place: the words of a row <-> its native form.
  void to_native(std::byte* row) {
    if (weight_.words.planar) {
      unpack_run(packing_, row, cols_, 1, codes_.data());
    } else {
      unpack_stream(row, cols_, bits_, codes_.data());
    }
    if (!weight_.words.order.empty()) {
      for (size_t i = 0; i < ordered_.size(); ++i)
        ordered_[i] = codes_[static_cast<size_t>(weight_.words.order[i])];
      codes_.swap(ordered_);
    }
    pack_stream(codes_.data(), cols_, bits_, row);
  }
  void to_stored(std::byte* row) {
    unpack_stream(row, cols_, bits_, codes_.data());
    if (!weight_.words.order.empty()) {
      for (size_t i = 0; i < ordered_.size(); ++i)
        ordered_[static_cast<size_t>(weight_.words.order[i])] = codes_[i];
      codes_.swap(ordered_);
    }
    if (weight_.words.planar) {
      pack_run(packing_, codes_.data(), cols_, row);
    } else {
      pack_stream(codes_.data(), cols_, bits_, row);
    }
  }

 private:
  const QuantizedWeight& weight_;
  const int bits_;
  const int64_t cols_;
  const WordPacking packing_;
  std::vector<uint8_t> codes_, ordered_;
};

void pack_gptq_codes(const QuantizedWeight& weight, const Block& block, const std::byte* native,
                     std::byte* stored) {
  const int64_t row_bytes = block.shape.row_bytes, words = row_bytes / kWordBytes;
  if (RowCodes::are_as_stored(weight)) return transpose<uint32_t>(native, block.rows, words, stored);
  RowCodes codes(weight);
  std::vector<std::byte> row(static_cast<size_t>(row_bytes));
  for (int64_t r = 0; r < block.rows; ++r) {
    std::memcpy(row.data(), native + r * row_bytes, row.size());
    codes.to_stored(row.data());
    for (int64_t w = 0; w < words; ++w) store_word(stored, w * block.rows + r, load_word(row.data(), w));
  }
}
void unpack_gptq_codes(const QuantizedWeight& weight, const Block& block, const std::byte* stored,
                       std::byte* native) {
  const int64_t row_bytes = block.shape.row_bytes, words = row_bytes / kWordBytes;
  transpose<uint32_t>(stored, words, block.rows, native);
  if (RowCodes::are_as_stored(weight)) return;
  RowCodes codes(weight);
  for (int64_t r = 0; r < block.rows; ++r) codes.to_native(native + r * row_bytes);
}

// Nibble i of word j <-> nibble j of word i.
void transpose_nibbles(std::array<uint32_t, 8>& words) {
  const auto exchange = [&](size_t distance, int shift, uint32_t mask) {
    for (size_t i = 0; i < 8; ++i) {
      if ((i & distance) != 0) continue;
      const uint32_t other = (words[i] >> shift ^ words[i + distance]) & mask;
      words[i + distance] ^= other;
      words[i] ^= other << shift;
    }
  };
  exchange(4, 16, 0x0000FFFF);
  exchange(2, 8, 0x00FF00FF);
  exchange(1, 4, 0x0F0F0F0F);
}

// f(k, c) for each eighth column and each word of a column, so that a line of the cache, of the native rows,
// of which few fit at distances that are powers of two, gets all of its codes.
template <class F>
void each_square(int64_t cols, int64_t words, const F& f) {
  constexpr int64_t kLineCodes = 128;
  for (int64_t k0 = 0; k0 < cols; k0 += kLineCodes)
    for (int64_t c = 0; c < words; ++c)
      for (int64_t k = k0; k < std::min(k0 + kLineCodes, cols); k += 8) f(k, c);
}

// At most eight codes of 4 bits: eight without a call.
void copy_codes(void* to, const void* from, int64_t count) {
  if (count == 8)
    std::memcpy(to, from, 4);
  else
    std::memcpy(to, from, static_cast<size_t>((count + 1) / 2));
}

// Of awq: eight columns of eight rows at once, each a word of eight nibbles on both sides. The last columns
// may be fewer: their words are filled up with `pad`, the code of zero as the native layout has it.
void pack_awq_codes(const Block& block, const std::byte* native, std::byte* stored) {
  const int64_t words = block.rows / 8, row_bytes = block.shape.row_bytes;
  each_square(block.cols, words, [&](int64_t k, int64_t c) {
    const int64_t count = std::min<int64_t>(8, block.cols - k);
    std::array<uint32_t, 8> square = {};  // of rows, then of columns
    for (size_t i = 0; i < 8; ++i)
      copy_codes(&square[i], native + (8 * c + kAwqOrder[i]) * row_bytes + k / 2, count);
    transpose_nibbles(square);
    for (int64_t j = 0; j < count; ++j)
      store_word(stored, (k + j) * words + c, square[static_cast<size_t>(j)]);
  });
}
void unpack_awq_codes(const Block& block, uint32_t pad, const std::byte* stored, std::byte* native) {
  const int64_t words = block.rows / 8, row_bytes = block.shape.row_bytes;
  each_square(block.cols, words, [&](int64_t k, int64_t c) {
    const int64_t count = std::min<int64_t>(8, block.cols - k);
    std::array<uint32_t, 8> square;  // of columns, then of rows
    square.fill(pad * 0x11111111u);
    for (int64_t j = 0; j < count; ++j)
      square[static_cast<size_t>(j)] = load_word(stored, (k + j) * words + c);
    transpose_nibbles(square);
    for (size_t i = 0; i < 8; ++i)
      copy_codes(native + (8 * c + kAwqOrder[i]) * row_bytes + k / 2, &square[i], count);
  });
}

void pack_zeros(const QuantizedWeight& weight, const Block& block, const std::byte* native,
                std::byte* stored) {
  const WordPacking packing = word_packing(weight);
  const int64_t groups = block.shape.groups_per_row, words = block.rows / packing.codes * packing.words;
  std::vector<uint8_t> zeros(static_cast<size_t>(block.rows));
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t r = 0; r < block.rows; ++r) {
      const auto zero = static_cast<int>(native[r * groups + group]);
      HALFBYTE_CHECK(
          !weight.words.zeros_less_one || zero > 0, bad_input,
          "weight \"{}\": row {} has a zero point of 0, which version 1 of gptq, where they are stored "
          "less 1, cannot hold",
          printable(weight.name), block.first_row + r);
      zeros[static_cast<size_t>(r)] = static_cast<uint8_t>(zero - (weight.words.zeros_less_one ? 1 : 0));
    }
    pack_run(packing, zeros.data(), block.rows, stored + group * words * kWordBytes);
  }
}
void unpack_zeros(const QuantizedWeight& weight, const Block& block, const std::byte* stored,
                  std::byte* native) {
  const WordPacking packing = word_packing(weight);
  const int64_t groups = block.shape.groups_per_row, words = block.rows / packing.codes * packing.words;
  auto* zeros = reinterpret_cast<uint8_t*>(native);
  for (int64_t group = 0; group < groups; ++group)
    unpack_run(packing, stored + group * words * kWordBytes, block.rows, groups, zeros + group);
  if (!weight.words.zeros_less_one) return;
  const int mask = (1 << bits_of(weight)) - 1;  // each field by itself: 15 is the zero point 0
  for (int64_t i = 0; i < block.shape.num_groups; ++i) zeros[i] = static_cast<uint8_t>((zeros[i] + 1) & mask);
}

}  // namespace

bool is_columnwise(const QuantizedWeight& weight) {
  return layout_info(weight.layout).packing != Packing::rows;
}

int64_t columnwise_unit(const QuantizedWeight& weight) { return word_packing(weight).codes; }

StoredRange columnwise_range(const QuantizedWeight& weight, const Block& block, Role role) {
  const int64_t bits = bits_of(weight), rows = weight.rows();
  StoredRange range;
  int64_t row_bits = 0;  // of a row of the weight, in each row of the tensor
  switch (role) {
    case Role::codes:
      row_bits = is_awq(weight) ? bits : 8 * kWordBytes;
      range.num_runs = is_awq(weight) ? block.cols : block.shape.row_bytes / kWordBytes;
      break;
    case Role::zeros:
      row_bits = bits;
      range.num_runs = block.shape.groups_per_row;
      break;
    case Role::scales:
      row_bits = 8 * size_of(weight.spec.scale_dtype);
      range.num_runs = block.shape.groups_per_row;
      break;
    default:
      HALFBYTE_FAIL(bug, "layout {} has no role {}", to_string(weight.layout), static_cast<int>(role));
  }
  range.offset = static_cast<uint64_t>(block.first_row * row_bits / 8);
  range.run_bytes = static_cast<uint64_t>(block.rows * row_bits / 8);
  range.stride = static_cast<uint64_t>(rows * row_bits / 8);
  return range;
}

void pack_columnwise(const QuantizedWeight& weight, const Block& block, Role role, const std::byte* native,
                     std::byte* stored) {
  if (role == Role::scales) {
    transpose(native, block.rows, block.shape.groups_per_row, size_of(weight.spec.scale_dtype), stored);
  } else if (role == Role::zeros) {
    pack_zeros(weight, block, native, stored);
  } else if (is_awq(weight)) {
    pack_awq_codes(block, native, stored);
  } else {
    pack_gptq_codes(weight, block, native, stored);
  }
}

void unpack_columnwise(const QuantizedWeight& weight, const Block& block, Role role, const std::byte* stored,
                       std::byte* native) {
  if (role == Role::scales) {
    transpose(stored, block.shape.groups_per_row, block.rows, size_of(weight.spec.scale_dtype), native);
  } else if (role == Role::zeros) {
    unpack_zeros(weight, block, stored, native);
  } else if (is_awq(weight)) {
    unpack_awq_codes(block, weight.spec.asymmetric ? 0 : 8, stored, native);
  } else {
    unpack_gptq_codes(weight, block, stored, native);
  }
}

std::vector<uint32_t> columnwise_zero_words(const QuantizedWeight& weight, int zero) {
  const WordPacking packing = word_packing(weight);
  const std::vector<uint8_t> zeros(static_cast<size_t>(packing.codes), static_cast<uint8_t>(zero));
  std::vector<uint32_t> words(static_cast<size_t>(packing.words));
  pack_run(packing, zeros.data(), packing.codes, reinterpret_cast<std::byte*>(words.data()));
  return words;
}

}  // namespace halfbyte::io
