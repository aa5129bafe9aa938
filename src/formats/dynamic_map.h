// The signed dynamic 8-bit map that double quantization assigns scales to.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

// bitsandbytes' dynamic map: for e = 0 .. 6 the midpoints of 2^e equal parts of [0.1, 1] times 10^(e-6), both
// signs, and 0 and 1, ascending. The f32 bits of the 127 positive values: libraries differ in their last
// place, so files carry the map they were made with; these are the values PyTorch 2.11 gives.
constexpr u32 kDynamicMapPositive[127] = {
    0x3513A3B7u, 0x365A1A94u, 0x370205FFu, 0x37B24206u, 0x38378034u, 0x388AEFB3u, 0x38BA1F4Bu, 0x3923D70Bu,
    0x398CE705u, 0x39C7E283u, 0x3A016F01u, 0x3A1EECC1u, 0x3A3C6A80u, 0x3A59E83Eu, 0x3A7765FFu, 0x3AA7EF9Du,
    0x3AF1A9FCu, 0x3B1DB22Du, 0x3B428F5Cu, 0x3B676C8Au, 0x3B8624DDu, 0x3B989374u, 0x3BAB020Du, 0x3BBD70A4u,
    0x3BCFDF3Bu, 0x3BE24DD3u, 0x3BF4BC6Au, 0x3C039581u, 0x3C0CCCCDu, 0x3C160418u, 0x3C1F3B64u, 0x3C3AE148u,
    0x3C68F5C3u, 0x3C8B851Fu, 0x3CA28F5Du, 0x3CB9999Au, 0x3CD0A3D7u, 0x3CE7AE15u, 0x3CFEB852u, 0x3D0AE148u,
    0x3D166667u, 0x3D21EB85u, 0x3D2D70A3u, 0x3D38F5C3u, 0x3D447AE1u, 0x3D500000u, 0x3D5B851Fu, 0x3D670A3Du,
    0x3D728F5Du, 0x3D7E147Bu, 0x3D84CCCDu, 0x3D8A8F5Du, 0x3D9051EBu, 0x3D96147Bu, 0x3D9BD70Au, 0x3DA1999Au,
    0x3DA75C2Au, 0x3DAD1EB8u, 0x3DB2E148u, 0x3DB8A3D7u, 0x3DBE6667u, 0x3DC428F7u, 0x3DC9EB85u, 0x3DDB3334u,
    0x3DF80000u, 0x3E0A6666u, 0x3E18CCCDu, 0x3E273333u, 0x3E35999Au, 0x3E440000u, 0x3E526666u, 0x3E60CCCDu,
    0x3E6F3333u, 0x3E7D9999u, 0x3E860000u, 0x3E8D3334u, 0x3E946666u, 0x3E9B999Au, 0x3EA2CCCCu, 0x3EAA0000u,
    0x3EB13333u, 0x3EB86666u, 0x3EBF999Au, 0x3EC6CCCCu, 0x3ECE0000u, 0x3ED53333u, 0x3EDC6666u, 0x3EE3999Au,
    0x3EEACCCCu, 0x3EF20000u, 0x3EF93332u, 0x3F003333u, 0x3F03CCCCu, 0x3F076666u, 0x3F0B0000u, 0x3F0E999Au,
    0x3F123334u, 0x3F15CCCDu, 0x3F196666u, 0x3F1D0000u, 0x3F20999Au, 0x3F243334u, 0x3F27CCCDu, 0x3F2B6666u,
    0x3F2F0000u, 0x3F32999Au, 0x3F363334u, 0x3F39CCCDu, 0x3F3D6666u, 0x3F410000u, 0x3F44999Au, 0x3F483333u,
    0x3F4BCCCDu, 0x3F4F6666u, 0x3F530000u, 0x3F56999Au, 0x3F5A3333u, 0x3F5DCCCDu, 0x3F616666u, 0x3F650000u,
    0x3F68999Au, 0x3F6C3333u, 0x3F6FCCCDu, 0x3F736666u, 0x3F770000u, 0x3F7A999Au, 0x3F7E3333u,
};

struct DynamicMap {
  float values[256] = {};
};
HALFBYTE_FN DynamicMap make_dynamic_map() {
  DynamicMap map;
  for (int i = 0; i < 127; ++i) {
    map.values[128 + i] = bit_cast<float>(kDynamicMapPositive[i]);
    map.values[126 - i] = -map.values[128 + i];
  }
  map.values[255] = 1.0f;
  return map;
}
constexpr DynamicMap kDynamicMap = make_dynamic_map();

// The entry nearest to y, ties to the lower one.
HALFBYTE_FN int dynamic_encode(const float (&values)[256], float y) {
  int low = 0, high = 255;  // the answer is in [low, high]
  while (low < high) {
    const int middle = (low + high) / 2;
    const double edge = (static_cast<double>(values[middle]) + static_cast<double>(values[middle + 1])) / 2;
    if (static_cast<double>(y) > edge)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace halfbyte::formats
