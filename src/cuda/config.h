// Lines of "halfbyte_config.h", in which a kernel finds the types and constants that it is specialised on.
#pragma once

#include <initializer_list>
#include <string>

#include "cuda/jit.h"
#include "formats/codec.h"
#include "halfbyte/tensor.hpp"

namespace halfbyte::cuda {

// `name`: the element type of `dtype`.
std::string type_config(const char* name, DType dtype);
// Element: the type of the dense tensor.
std::string element_config(DType dtype);
// A constant of a structure, with its fields by name, in their order.
struct ConfigField {
  const char* name;
  int64_t value;
};
std::string struct_config(const char* type, const char* name, std::initializer_list<ConfigField> fields);
// kCodec.
std::string codec_config(const formats::Codec& codec);
// kBook; null: of no table.
std::string book_config(const formats::CodeBook* book);
// The whole text around lines as above.
std::string config_text(const std::string& lines);

}  // namespace halfbyte::cuda
