// `qgemm` on the tiles of AMX.
#include "ops/qgemm/qgemm.h"

#ifdef __x86_64__
#include "cpu/features.h"
#include "cpu/tile_registers.h"
#include "ops/qgemm/cpu/amx/amx-inl.h"
#endif

namespace halfbyte {
namespace {

constexpr const char* kNoTiles =
    "the CPU does not have AMX tiles of bf16, or the system does not give them to this process";

#ifdef __x86_64__

// The tile registers of the processor, for as long as the object lives.
class AmxTiles {
 public:
  // line_bytes: of a line of tiles of columns, which are all but 3 and 4.
  explicit AmxTiles(int line_bytes = 64) : line_bytes_(line_bytes) {
    TileConfig config = kTileConfig;
    for (int tile = 0; tile < 8; ++tile)
      if (tile != 3 && tile != 4) config.line_bytes[tile] = static_cast<uint16_t>(line_bytes);
    configure_tiles(config);
  }
  ~AmxTiles() { release_tiles(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile, class Tile>
  void load(const Tile& tile) {
    static_assert(sizeof(Tile) == 1024);
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(&tile), "r"(kLineBytes), "m"(tile));
  }
  template <int kTile>
  void store(F32Tile& tile) {
    asm volatile("tilestored %%tmm%c1, (%2,%3,1)" : "=m"(tile) : "i"(kTile), "r"(&tile), "r"(kLineBytes));
  }
  // Of 16 lines, one behind the other.
  template <int kTile>
  void load_columns(const uint32_t* from) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(line_bytes_),
                 "m"(*reinterpret_cast<const uint32_t(*)[16 * 16]>(from)));
  }
  template <int kTile>
  void store_columns(float* to) {
    asm volatile("tilestored %%tmm%c1, (%2,%3,1)"
                 : "=m"(*reinterpret_cast<float(*)[16 * 16]>(to))
                 : "i"(kTile), "r"(to), "r"(line_bytes_));
  }
  template <int kSum, int kA, int kB>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  const int64_t line_bytes_;
};

std::string refuse(const QgemmProblem& problem) {
  return cpu_features().amx_bf16 ? refuse_amx(problem) : kNoTiles;
}
std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<AmxKernel<AmxTiles>>(problem, "cpu AMX_BF16");
}

#else

std::string refuse(const QgemmProblem&) { return kNoTiles; }
std::shared_ptr<const QgemmKernel> make(const QgemmProblem&) { return nullptr; }

#endif

}  // namespace

const QgemmVariant kQgemmAmx = {{"qgemm_amx", DeviceKind::cpu, &refuse, &make}};

}  // namespace halfbyte
