// The version of the library.
#pragma once

#include "halfbyte/version.h"

namespace halfbyte {

inline constexpr int kVersionMajor = HALFBYTE_VERSION_MAJOR;
inline constexpr int kVersionMinor = HALFBYTE_VERSION_MINOR;
inline constexpr int kVersionPatch = HALFBYTE_VERSION_PATCH;
inline constexpr const char* kVersion = HALFBYTE_VERSION_STRING;

}  // namespace halfbyte
