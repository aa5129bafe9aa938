#include "core/plan.h"

namespace halfbyte {

std::string to_string(const Sku& sku) {
  return sku.op + ", " + sku.kernel + ", " + sku.backend + ", " + sku.dtypes;
}

}  // namespace halfbyte
