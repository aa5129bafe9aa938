// The hash that names and guards compiled kernels. Against damage, not against forgery.
#pragma once

#include <string>
#include <string_view>

namespace halfbyte::cuda {

// XXH3-128 as 32 hexadecimal digits.
std::string hash_hex(std::string_view bytes);

}  // namespace halfbyte::cuda
