#include "cuda/config.h"

#include <fmt/format.h>

#include "core/checks.h"

namespace halfbyte::cuda {
namespace {

const char* element_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "F32";
    case DType::f16:
      return "F16";
    case DType::bf16:
      return "BF16";
    case DType::f64:
      return "F64";
    default:
      HALFBYTE_FAIL(bug, "config: no element type for {}", to_string(dtype));
  }
}

// A book is its values and its tie rule: an expression, and the lines that it needs before it. Null: of no
// table.
struct BookText {
  std::string lines, value;
};
BookText text_of(const formats::CodeBook* book) {
  if (book == nullptr) return {"", "CodeBook{}"};
  std::string lines = "constexpr float kTableValues[16] = {";
  for (const float value : book->values) lines += fmt::format("{:a}f, ", value);
  return {lines + "};\n", fmt::format("make_code_book(kTableValues, Tie({}))", static_cast<int>(book->tie))};
}

}  // namespace

std::string type_config(const char* name, DType dtype) {
  return fmt::format("using {} = {};\n", name, element_type(dtype));
}
std::string element_config(DType dtype) { return type_config("Element", dtype); }

std::string struct_config(const char* type, const char* name, std::initializer_list<ConfigField> fields) {
  std::string text;
  for (const auto& [field, value] : fields)
    text += fmt::format("{}.{} = {}", text.empty() ? "" : ", ", field, value);
  return fmt::format("constexpr {} {} = {{{}}};\n", type, name, text);
}

std::string codec_config(const formats::Codec& codec) {
  const BookText book = text_of(codec.kind == formats::Kind::table ? &codec.book : nullptr);
  return book.lines +
         fmt::format(
             "constexpr Codec kCodec = {{.kind = Kind({}), .rule = Rule({}), .scale_type = ScaleType({}), "
             ".bits = {}, .asymmetric = {}, .unrounded_code_scale = {}, .q_min = {}, .q_max = {}, "
             ".book = {}}};\n",
             static_cast<int>(codec.kind), static_cast<int>(codec.rule), static_cast<int>(codec.scale_type),
             static_cast<int>(codec.bits), codec.asymmetric, codec.unrounded_code_scale, codec.q_min,
             codec.q_max, book.value);
}
std::string book_config(const formats::CodeBook* book) {
  const BookText text = text_of(book);
  return text.lines + fmt::format("constexpr CodeBook kBook = {};\n", text.value);
}

std::string config_text(const std::string& lines) {
  return "#pragma once\n#include \"cuda/device/types.cuh\"\n#include \"formats/codec.h\"\n"
         "namespace halfbyte::device {\n" +
         lines + "}\n";
}

}  // namespace halfbyte::cuda
