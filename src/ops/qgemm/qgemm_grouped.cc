// Descriptors of products with the weights of experts, and the problems that they make.
#include <array>

#include "core/expect.h"
#include "core/packed_weight.h"
#include "core/words.h"
#include "halfbyte/device.hpp"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {
namespace {

constexpr const char* kWhat = "qgemm_grouped descriptor";
constexpr int64_t kMostExperts = int64_t{1} << 20, kMostRows = INT32_MAX;
constexpr std::array<Word<ExpertRows>, 3> kRows{
    {{ExpertRows::offsets, "offsets"}, {ExpertRows::indices, "indices"}, {ExpertRows::masked, "masked"}}};

// The product of `m` rows with one of the weights.
QgemmDescriptor of_one(const QgemmGroupedDescriptor& d, int64_t m) {
  QgemmDescriptor one{.spec = d.spec, .m = m, .n = d.n, .k = d.k, .transposed = d.transposed};
  one.dtype = d.dtype;
  one.bias = d.bias;
  one.accumulate = d.accumulate;
  one.alignment = d.alignment;
  one.variant = d.variant;
  return one;
}

int64_t rows_per_m(const QgemmGroupedDescriptor& d) {
  return d.rows == ExpertRows::indices ? d.top_k : d.rows == ExpertRows::masked ? d.num_experts : 1;
}

}  // namespace

const char* to_string(ExpertRows rows) { return word_of(kRows, rows); }
ExpertRows parse_expert_rows(std::string_view word) { return value_of(kRows, word, "rows of qgemm_grouped"); }

void check_descriptor(const QgemmGroupedDescriptor& d) {
  HALFBYTE_MUST(d.num_experts >= 1 && d.num_experts <= kMostExperts, invalid_problem, kWhat, "num_experts",
                "be", "1 to 2^20", d.num_experts);
  HALFBYTE_MUST(d.top_k >= 1 && d.top_k <= kMostRows, invalid_problem, kWhat, "top_k", "be", "1 to 2^31 - 1",
                d.top_k);
  check_descriptor(of_one(d, d.m));
  HALFBYTE_CHECK(d.m <= kMostRows / rows_per_m(d), usage,
                 "{}: m times {} must be at most 2^31 - 1 rows, got {} times {}", kWhat,
                 d.rows == ExpertRows::masked ? "num_experts" : "top_k", d.m, rows_per_m(d));
  int64_t num_bytes = 0;
  HALFBYTE_CHECK(!__builtin_mul_overflow(packed_weight_bytes(d.spec, d.n, d.k), d.num_experts, &num_bytes),
                 usage, "{}: {} weights [{}, {}] exceed 2^63 - 1 bytes", kWhat, d.num_experts, d.n, d.k);
  const auto only_indices = [&](const char* field, bool is_set) {
    HALFBYTE_CHECK(!is_set || d.rows == ExpertRows::indices, usage, "{}: {} needs rows indices, got {}",
                   kWhat, field, to_string(d.rows));
  };
  only_indices("top_k above 1", d.top_k > 1);
  only_indices("x_per_slot", d.x_per_slot);
  only_indices("sum_slots", d.sum_slots);
  only_indices("routing_weights", d.routing_weights);
  only_indices("routing_gradient", d.routing_gradient);
  HALFBYTE_CHECK(!d.swiglu || (!d.transposed && d.n % 2 == 0), usage,
                 "{}: swiglu needs transposed to be false and n to be even, got {} and {}", kWhat,
                 d.transposed, d.n);
  HALFBYTE_CHECK(!d.routing_gradient || (d.transposed && d.k > 0), usage,
                 "{}: routing_gradient needs transposed and k of at least 1, got {} and {}", kWhat,
                 d.transposed, d.k);
}

QgemmProblem make_qgemm_problem(Device device, const QgemmGroupedDescriptor& d, int num_threads) {
  const int64_t rows = d.m * rows_per_m(d);
  QgemmProblem problem = make_qgemm_problem(device, of_one(d, rows), num_threads);
  QgemmExperts& experts = problem.experts;
  experts.num = d.num_experts;
  experts.rows = d.rows;
  experts.rows_per_expert = d.rows == ExpertRows::masked ? d.m : 0;
  const bool per_token = d.rows == ExpertRows::indices && !d.x_per_slot;
  experts.rows_of_x = per_token ? d.m : rows;
  experts.slots_per_x = per_token ? d.top_k : 1;
  experts.slots_per_y = d.sum_slots ? d.top_k : 1;
  experts.routing_weights = d.routing_weights;
  experts.routing_gradient = d.routing_gradient;
  experts.swiglu = d.swiglu;
  return problem;
}

std::vector<QgemmChoice> explain_qgemm_grouped(Device device, const QgemmGroupedDescriptor& descriptor) {
  check_descriptor(descriptor);
  check_device(device);
  return explain_problem(make_qgemm_problem(device, descriptor, 0));
}

}  // namespace halfbyte
