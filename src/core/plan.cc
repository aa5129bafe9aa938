#include "core/plan.h"

#include "core/words.h"

namespace halfbyte {

std::string to_string(const Sku& sku) {
  return sku.op + ", " + sku.kernel + ", " + sku.backend + ", " + sku.dtypes;
}

const char* to_string(WeightRounding rounding) {
  constexpr std::array<Word<WeightRounding>, 3> kWords{{{WeightRounding::none, "none"},
                                                        {WeightRounding::code_rounded, "code-rounded"},
                                                        {WeightRounding::weight_rounded, "weight-rounded"}}};
  return word_of(kWords, rounding);
}

}  // namespace halfbyte
