// The device code that lies in the library as text (cmake/EmbedSources.cmake). Light: the generated unit
// includes nothing else.
#pragma once

#include <span>
#include <string_view>

namespace halfbyte::cuda {

// Named as it is included: "formats/codec.h", "cuda/device/types.cuh", "ops/quantize/quantize.cu".
struct EmbeddedFile {
  const char* name;
  std::string_view text;  // ends with a 0 byte behind it
};
std::span<const EmbeddedFile> embedded_files();  // sorted by name

}  // namespace halfbyte::cuda
