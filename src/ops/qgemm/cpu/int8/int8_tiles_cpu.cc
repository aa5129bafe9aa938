#include "ops/qgemm/cpu/int8/int8_tiles.h"

#include "cpu/features.h"
#ifdef __x86_64__
#include "cpu/tile_registers.h"
#endif

namespace halfbyte {
namespace {

#ifdef __x86_64__

constexpr int64_t kWeightLine = 128, kXLine = 64, kSumLine = 128;  // bytes

// Tiles 0 and 1: sums; 2: x; 4 and 5: the weight.
constexpr Int8Tiles kMachine = {
    [] { configure_tiles(kTileConfig); }, release_tiles,
    [](const uint8_t* weight) {
      asm volatile("tileloadd (%0,%1,1), %%tmm4\n\ttileloadd 64(%0,%1,1), %%tmm5" ::"r"(weight),
                   "r"(kWeightLine), "m"(*reinterpret_cast<const uint8_t(*)[16 * kWeightLine]>(weight)));
    },
    [](const int8_t* x, int32_t* to) {
      asm volatile(
          "tileloadd (%0,%1,1), %%tmm2\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\t"
          "tdpbsud %%tmm4, %%tmm2, %%tmm0\n\ttdpbsud %%tmm5, %%tmm2, %%tmm1" ::"r"(x),
          "r"(kXLine), "m"(*reinterpret_cast<const int8_t(*)[16 * kXLine]>(x)));
      asm volatile("tilestored %%tmm0, (%1,%2,1)\n\ttilestored %%tmm1, 64(%1,%2,1)"
                   : "=m"(*reinterpret_cast<int32_t(*)[16 * kSumLine / 4]>(to))
                   : "r"(to), "r"(kSumLine));
    }};

const Int8Tiles* of_machine() { return cpu_features().amx_int8 ? &kMachine : nullptr; }

#else

const Int8Tiles* of_machine() { return nullptr; }

#endif

const Int8Tiles* given = nullptr;

}  // namespace

const Int8Tiles* int8_tiles() { return given != nullptr ? given : of_machine(); }
void set_int8_tiles(const Int8Tiles* tiles) { given = tiles; }

}  // namespace halfbyte
