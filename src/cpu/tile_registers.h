// The tile registers of AMX. By assembly that says what memory it reads: the intrinsics of GCC 12 do not, so
// that it would move or drop what is written there before.
#pragma once

#include <cstdint>

namespace halfbyte {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t line_bytes[16];
  uint8_t lines[16];
};
// All of 16 lines of 64 bytes.
inline constexpr TileConfig kTileConfig = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// The calling thread has them, until it releases them.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

}  // namespace halfbyte
