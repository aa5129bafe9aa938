#include <gtest/gtest.h>

#include "core/format.h"
#include "ops/qgemm/qgemm_testing.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

using testing::qgemm_formats;
using testing::short_text;

// Decoding gives them for a scale of 1, and what zero points and biases are added to.
TEST(QgemmWeights, ValuesOfCodes) {
  for (const QuantSpec& spec : qgemm_formats()) {
    if (info(spec.format).bits != 4) continue;
    const formats::Codec codec = make_codec(spec);
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      SCOPED_TRACE(fmt::format("{} {}", short_text(spec), to_string(dtype)));
      const std::array<float, 16> values = code_values(codec, dtype);
      for (int code = 0; code < 16; ++code) {
        const float exact = formats::decode(code, 1.0f, 0.0f, codec.asymmetric ? codec.q_min : 0, codec);
        EXPECT_EQ(values[static_cast<size_t>(code)], formats::stored(exact, scale_type(dtype))) << code;
      }
    }
  }
}

// Bytes of four codes a word.
TEST(QgemmWeights, ValuesOfCodesAsBytes) {
  const formats::Codec codec = make_codec({.format = Format::nf4});
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const CodeValuesArgs args = code_values_args(codec, dtype);
    for (int code = 0; code < 16; ++code) {
      const auto byte = [&](const formats::u32(&words)[4]) { return words[code / 4] >> code % 4 * 8 & 0xFF; };
      const float value = codec.book.values[code];
      EXPECT_EQ(byte(args.high) << 8 | byte(args.low),
                dtype == DType::f16 ? formats::to_f16(value) : formats::to_bf16(value))
          << code;
    }
  }
}

}  // namespace
}  // namespace halfbyte
