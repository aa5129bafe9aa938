// Codes of b bits in a little-endian bit stream: element i occupies bits i*b .. i*b + b - 1.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

HALFBYTE_FN i64 packed_bytes(i64 num_codes, int bits) { return (num_codes * bits + 7) / 8; }

// Eight codes, one a byte of `codes`, to 8 * bits bits (the low bytes of the result), and back.
HALFBYTE_FN u64 pack8(u64 codes, int bits) {
  const u64 pairs = (codes & 0x00FF00FF00FF00FFull) | ((codes & 0xFF00FF00FF00FF00ull) >> (8 - bits));
  const u64 quads = (pairs & 0x0000FFFF0000FFFFull) | ((pairs & 0xFFFF0000FFFF0000ull) >> (16 - 2 * bits));
  return (quads & 0x00000000FFFFFFFFull) | ((quads & 0xFFFFFFFF00000000ull) >> (32 - 4 * bits));
}
HALFBYTE_FN u64 unpack8(u64 packed, int bits) {
  const u64 four = (1ull << (4 * bits)) - 1, two = ((1ull << (2 * bits)) - 1) * 0x0000000100000001ull;
  const u64 one = ((1ull << bits) - 1) * 0x0001000100010001ull;
  const u64 quads = (packed & four) | ((packed & (four << (4 * bits))) << (32 - 4 * bits));
  const u64 pairs = (quads & two) | ((quads & (two << (2 * bits))) << (16 - 2 * bits));
  return (pairs & one) | ((pairs & (one << bits)) << (8 - bits));
}

// The code that begins at bit `shift` of a byte and may end in the next.
HALFBYTE_FN int code_at(const u8* bytes, int shift, int bits) {
  u32 word = bytes[0];
  if (shift + bits > 8) word |= static_cast<u32>(bytes[1]) << 8;
  return static_cast<int>((word >> shift) & ((1u << bits) - 1u));
}
HALFBYTE_FN void set_code_at(u8* bytes, int shift, int bits, int code) {
  const u32 mask = ((1u << bits) - 1u) << shift, word = static_cast<u32>(code) << shift;
  bytes[0] = static_cast<u8>((bytes[0] & ~mask) | word);
  if (shift + bits > 8) bytes[1] = static_cast<u8>((bytes[1] & ~(mask >> 8)) | word >> 8);
}

// One code. `bytes` must reach to packed_bytes(i + 1, bits); for put_code the bits must be 0.
HALFBYTE_FN int get_code(const u8* bytes, i64 i, int bits) {
  const i64 bit = i * bits;
  return code_at(bytes + bit / 8, static_cast<int>(bit % 8), bits);
}
HALFBYTE_FN void put_code(u8* bytes, i64 i, int bits, int code) {
  const i64 bit = i * bits;
  const i64 byte = bit / 8;
  const int shift = static_cast<int>(bit % 8);
  const u32 word = static_cast<u32>(code) << shift;
  bytes[byte] = static_cast<u8>(bytes[byte] | word);
  if (shift + bits > 8) bytes[byte + 1] = static_cast<u8>(bytes[byte + 1] | (word >> 8));
}

}  // namespace halfbyte::formats
