// Tiles of bytes (AMX), as `qgemm_int8` uses them where units of the weight have one scale.
#pragma once

#include <cstdint>

namespace halfbyte {

struct Int8Tiles {
  static constexpr int kXRows = 16;

  void (*begin)();  // the calling thread uses tiles until end()
  void (*end)();
  // A unit of the weight: of row r < 32, columns 4 c to 4 c + 3 at 128 c + 4 r, unsigned.
  void (*load)(const uint8_t* weight);
  // The exact products of kXRows rows of x, 64 columns each, with the unit: to[row of x][row of the weight].
  void (*sum)(const int8_t* x, int32_t* to);
};

// Those of the machine; nullptr: it has none, or the system does not give them to this process.
const Int8Tiles* int8_tiles();

// For tests: stands in for those of the machine until the next call; nullptr: those of the machine. Not while
// other threads compute.
void set_int8_tiles(const Int8Tiles* tiles);

}  // namespace halfbyte
