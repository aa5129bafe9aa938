#include "cpu/features.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace halfbyte {
namespace {

#ifdef __x86_64__

// Bits of CPUID, by leaf and register.
constexpr uint32_t kFma = 1u << 12, kOsXsave = 1u << 27, kF16c = 1u << 29;  // 1, ecx
constexpr uint32_t kAvx2 = 1u << 5, kAvx512F = 1u << 16, kAvx512Dq = 1u << 17, kAvx512Bw = 1u << 30,
                   kAvx512Vl = 1u << 31;                                           // 7.0, ebx
constexpr uint32_t kAvx512Vbmi = 1u << 1;                                          // 7.0, ecx
constexpr uint32_t kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;  // 7.0, edx
constexpr uint32_t kAvx512Bf16 = 1u << 5;                                          // 7.1, eax
// Bits of XCR0: registers that the system saves.
constexpr uint32_t kZmmState = 0xE6;      // xmm, ymm, masks, zmm0-15, zmm16-31
constexpr uint32_t kTileState = 0x60000;  // configuration and data of tiles

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};
// Zeros, where the processor does not have the leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

uint32_t xcr0() {
  uint32_t low = 0, high = 0;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Linux gives a process the state of tiles only where it asks for it.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuFeatures detect() {
  const auto has = [](uint32_t bits, uint32_t all) { return (bits & all) == all; };
  CpuFeatures features;
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
  if (!has(basic.ecx, kFma | kOsXsave | kF16c) || !has(xcr0(), kZmmState)) return features;
  features.avx512_bf16 = has(extended.ebx, kAvx2 | kAvx512F | kAvx512Dq | kAvx512Bw | kAvx512Vl) &&
                         has(extended.ecx, kAvx512Vbmi) && has(cpuid(7, 1).eax, kAvx512Bf16);
  const bool tiles =
      features.avx512_bf16 && has(extended.edx, kAmxTile) && has(xcr0(), kTileState) && may_use_tiles();
  features.amx_bf16 = tiles && has(extended.edx, kAmxBf16);
  features.amx_int8 = tiles && has(extended.edx, kAmxInt8);
  return features;
}

#else
CpuFeatures detect() { return {}; }
#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace halfbyte
