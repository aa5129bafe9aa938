#include "cuda/plain.h"

#include <fmt/format.h>

#include <iterator>

#include "formats/counts.h"

namespace halfbyte::cuda {
namespace {

constexpr int kPlainThreads = 256;

// What users are told of the counts.
static_assert(sizeof(QuantizeCounts) == 6 * sizeof(uint64_t));

std::vector<KernelParameter> joined(std::vector<KernelParameter> parameters,
                                    std::vector<KernelParameter> more) {
  std::move(more.begin(), more.end(), std::back_inserter(parameters));
  return parameters;
}

}  // namespace

std::string plain_lines() { return fmt::format("constexpr int kThreads = {};\n", kPlainThreads); }

KernelDescription plain_description(std::vector<KernelParameter> parameters, const std::string& items,
                                    int per_block) {
  KernelDescription description;
  description.parameters = std::move(parameters);
  const std::string blocks =
      per_block == 1 ? items : fmt::format("({} + {}) / {}", items, per_block - 1, per_block);
  description.grid = fmt::format("max(1, min(2147483647, {}))", blocks);
  description.block = kPlainThreads;
  return description;
}

KernelParameter number_parameter(const char* name, const char* type, const char* description) {
  return {name, type, "", "", false, description};
}
KernelParameter read_parameter(const char* name, const char* type, std::string elements,
                               const char* description) {
  return {name, type, std::move(elements), "read", false, description};
}
KernelParameter written_parameter(const char* name, const char* type, std::string elements,
                                  const char* description) {
  return {name, type, std::move(elements), "written", false, description};
}
KernelParameter updated_parameter(const char* name, const char* type, std::string elements,
                                  const char* description) {
  return {name, type, std::move(elements), "read and written", false, description};
}
KernelParameter optional_parameter(KernelParameter parameter, bool needed) {
  parameter.optional = !needed;
  return parameter;
}
KernelParameter counts_parameter() {
  return updated_parameter("counts", "u64", "6",
                           "What was found is added: [0] elements that are not finite, [2] scales that their "
                           "dtype cannot hold, [3] scales that it holds coarsely, [4] given scales and [5] "
                           "zero points that are invalid. [1]: the largest of what was there and the "
                           "complement (~) of the index of each element that is not finite.");
}

std::vector<KernelParameter> matrix_parameters(std::vector<KernelParameter> before) {
  return joined(std::move(before),
                {number_parameter("rows", "i64", "Rows, from 0."),
                 number_parameter("cols", "i64", "Elements of a row, from 0."),
                 number_parameter("group_size", "i64",
                                  "Neighbours in a row that share a scale, from 1; the last group of a row "
                                  "may be short. cols: a row is a group.")});
}
std::string matrix_code_bytes(int bits) { return fmt::format("rows * ((cols * {} + 7) / 8)", bits); }

std::vector<KernelParameter> tensor_parameters(std::vector<KernelParameter> before) {
  return joined(
      std::move(before),
      {number_parameter("outer", "i64", "The tensor is [outer, axis, inner], contiguous; each from 0."),
       number_parameter("axis", "i64", "See outer."), number_parameter("inner", "i64", "See outer."),
       number_parameter(
           "group_outer", "i64",
           "A group, which shares a scale, is [group_outer, group_axis, group_inner]; groups are "
           "in row-major order. This one is 1 or outer."),
       number_parameter("group_axis", "i64",
                        "See group_outer: from 1; the last group along axis may be short."),
       number_parameter("group_inner", "i64", "See group_outer: 1 or inner.")});
}

}  // namespace halfbyte::cuda
