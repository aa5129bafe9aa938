// Files of weights that are not safetensors: named for what they are, with advice.
#pragma once

#include <string_view>

namespace halfbyte::io {

struct Container {
  const char* what;    // "a GGUF file"
  const char* advice;  // how to get safetensors
};

// By the first bytes of a file, at least 8; null where they are not known.
const Container* container_of_bytes(std::string_view bytes);
// By the ending of a name; null where it is not known.
const Container* container_of_name(std::string_view name);

}  // namespace halfbyte::io
