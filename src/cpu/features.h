// What the processor can do, where Highway does not tell it apart.
#pragma once

namespace halfbyte {

// Each holds only where the operating system saves the registers, too.
struct CpuFeatures {
  bool avx512_bf16 = false;  // AVX-512 F, BW, DQ, VL, VBMI and BF16, and with them AVX2, FMA and F16C
  bool amx_bf16 = false;     // all that, and AMX tiles of bf16, which this process may use
  bool amx_int8 = false;     // likewise of bytes
};
// Asked of the processor once; the first call asks the system for the tiles.
const CpuFeatures& cpu_features();

}  // namespace halfbyte
