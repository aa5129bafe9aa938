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
  AmxTiles() { configure_tiles(); }
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
  template <int kSum, int kA, int kB>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  }

 private:
  static constexpr int64_t kLineBytes = 64;
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
