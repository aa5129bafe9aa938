// The hash that names and guards what is stored: compiled kernels, finished files. Against damage, not
// against forgery.
#pragma once

#include <string>
#include <string_view>

namespace halfbyte {

// XXH3-128 as 32 hexadecimal digits.
std::string hash_hex(std::string_view bytes);

}  // namespace halfbyte
