// Lines of "halfbyte_config.h", in which a kernel finds the types and constants that it is specialised on.
#pragma once

#include <string>

#include "cuda/jit.h"
#include "formats/codec.h"
#include "halfbyte/tensor.hpp"

namespace halfbyte::cuda {

// Element: the type of the dense tensor.
std::string element_config(DType dtype);
// kCodec.
std::string codec_config(const formats::Codec& codec);
// kBook; null: of no table.
std::string book_config(const formats::CodeBook* book);
// The whole text around lines as above.
std::string config_text(const std::string& lines);

}  // namespace halfbyte::cuda
