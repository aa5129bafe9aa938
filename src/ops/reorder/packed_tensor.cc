// The packed form of an owning weight.
#include "core/expect.h"
#include "core/packed_weight.h"
#include "core/plan_device.h"
#include "core/weight_view.h"
#include "halfbyte/qgemm_grouped.hpp"
#include "ops/reorder/reorder.h"

namespace halfbyte {
namespace {

constexpr const char* kConcatRows = "concat_rows";

std::string name_of(size_t weight) { return fmt::format("weights[{}]", weight); }

float global_scale_of(const ConstPackedWeight& weight, void* stream) {
  float scale = 0;
  const int64_t at = packed_layout_of(weight.spec, weight.rows, weight.cols).global_scale;
  copy(weight.device, &scale, static_cast<const std::byte*>(weight.data) + at, sizeof scale, stream);
  wait_for(weight.device, stream);
  return scale;
}

// Returns the number of rows of all. Waits for `stream` where there is a global scale.
int64_t check_rows_to_concat(std::span<const ConstPackedWeight> weights, void* stream) {
  constexpr const char* kOp = kConcatRows;
  HALFBYTE_CHECK(!weights.empty(), usage, "{}: weights must not be empty", kOp);
  const ConstPackedWeight& first = weights[0];
  HALFBYTE_CHECK(
      !first.spec.double_quant && first.spec.granularity != Granularity::tensor, usage,
      "{}: scales must not be double quantized, or one for a tensor: those of several weights differ", kOp);
  check_device(first.device);
  int64_t rows = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const ConstPackedWeight& weight = weights[i];
    const std::string name = name_of(i);
    check_same_spec(kOp, name.c_str(), weight.spec, first.spec, "weights[0]");
    check_packed(kOp, name.c_str(), weight, first.device, false);
    HALFBYTE_CHECK(weight.cols == first.cols, usage, "{}: {}.cols must be {} as of the first, got {}", kOp,
                   name, first.cols, weight.cols);
    HALFBYTE_CHECK(weight.rows % formats::kUnitRows == 0 || i + 1 == weights.size(), usage,
                   "{}: {}.rows must be a multiple of {} but for the last weight, got {}", kOp, name,
                   formats::kUnitRows, weight.rows);
    if (has_global_scale(first.spec)) {
      const float expected = global_scale_of(first, stream), actual = global_scale_of(weight, stream);
      HALFBYTE_CHECK(actual == expected, usage,
                     "{}: the global scale of {} must be {} as of the first, got {}", kOp, name, expected,
                     actual);
    }
    rows += weight.rows;
  }
  return rows;
}

// Of checked weights, to a weight of all rows.
void copy_rows(std::span<const ConstPackedWeight> weights, const PackedWeight& to, void* stream) {
  const formats::PackedLayout layout = packed_layout_of(to.spec, to.rows, to.cols);
  auto* const memory = static_cast<std::byte*>(to.data);
  static constexpr std::byte kZeros[formats::kPackedAlignment] = {};  // a gap is shorter
  ReorderGap gaps[kReorderGaps] = {};
  find_gaps(layout, gaps);
  for (const ReorderGap& gap : gaps) copy(to.device, memory + gap.begin, kZeros, gap.end - gap.begin, stream);
  int64_t strip = 0;
  for (const ConstPackedWeight& weight : weights) {
    const formats::PackedLayout from = packed_layout_of(weight.spec, weight.rows, weight.cols);
    // What a strip has of a part, which lies strip by strip.
    const auto move = [&](int64_t to_part, int64_t from_part, int64_t strip_bytes) {
      copy(to.device, memory + to_part + strip * strip_bytes,
           static_cast<const std::byte*>(weight.data) + from_part, from.strips * strip_bytes, stream);
    };
    move(0, 0, from.strip_bytes);
    if (!from.inlined) {
      const int64_t parameters = from.groups * formats::kUnitRows;  // of a strip
      move(layout.scales, from.scales, parameters * from.scale_bytes);
      if (from.has_zeros) move(layout.zeros, from.zeros, parameters);
      if (from.has_biases) move(layout.biases, from.biases, parameters * from.bias_bytes);
    }
    if (from.has_global_scale && strip == 0)
      copy(to.device, memory + layout.global_scale,
           static_cast<const std::byte*>(weight.data) + from.global_scale, sizeof(float), stream);
    strip += from.strips;
  }
}

}  // namespace

PackedTensor::PackedTensor(const QuantSpec& spec, int64_t rows, int64_t cols, Device device)
    : memory_(device, DType::u8, {packed_weight_bytes(spec, rows, cols)}),
      weight_{spec, rows, cols, memory_.data(), device, kPackedWeightVersion, memory_.num_bytes()} {}

PackedTensor PackedTensor::of(const QuantSpec& spec, int64_t rows, int64_t cols, Tensor memory) {
  constexpr const char* kOp = "packed tensor";
  HALFBYTE_MUST(memory.dtype() == DType::u8, invalid_argument, kOp, "memory", "be", "u8",
                to_string(memory.dtype()));
  PackedTensor result;
  result.memory_ = std::move(memory);
  const Tensor& held = result.memory_;
  result.weight_ = {spec, rows, cols, held.data(), held.device(), kPackedWeightVersion, held.num_bytes()};
  check_packed(kOp, "memory", result.weight_, held.device(), false);
  return result;
}

PackedTensor PackedTensor::concat_rows(std::span<const ConstPackedWeight> weights, void* stream) {
  const int64_t rows = check_rows_to_concat(weights, stream);
  const ConstPackedWeight& first = weights[0];
  PackedTensor result(first.spec, rows, first.cols, first.device);
  copy_rows(weights, result.weight_, stream);
  wait_for(first.device, stream);
  return result;
}

void concat_rows(std::span<const ConstPackedWeight> weights, const PackedWeight& to, void* stream) {
  constexpr const char* kOp = kConcatRows;
  const int64_t rows = check_rows_to_concat(weights, stream);
  const ConstPackedWeight& first = weights[0];
  check_same_spec(kOp, "to", to.spec, first.spec, "weights[0]");
  HALFBYTE_CHECK(to.rows == rows && to.cols == first.cols, usage,
                 "{}: to must be [{}, {}], the rows of all weights, got [{}, {}]", kOp, rows, first.cols,
                 to.rows, to.cols);
  const ArgumentMemory written = check_packed(kOp, "to", to, first.device, true);
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string name = name_of(i);
    check_apart(kOp, written, check_packed(kOp, name.c_str(), weights[i], first.device, false));
  }
  copy_rows(weights, to, stream);
}

PackedTensor PackedTensor::to(Device device, void* stream) const {
  PackedTensor result = *this;
  result.memory_ = memory_.to(device, stream);
  result.weight_.data = result.memory_.data();
  result.weight_.device = device;
  return result;
}

PackedExperts::PackedExperts(const QuantSpec& spec, int64_t num_experts, int64_t rows, int64_t cols,
                             Device device)
    : num_experts_(num_experts) {
  constexpr const char* kOp = "packed experts";
  HALFBYTE_MUST(num_experts >= 0, invalid_argument, kOp, "num_experts", "be", ">= 0", num_experts);
  const int64_t num_bytes = packed_weight_bytes(spec, rows, cols);
  memory_ = Tensor(device, DType::u8, {num_experts, num_bytes});
  stack_ = {spec, rows, cols, memory_.data(), device, kPackedWeightVersion, memory_.num_bytes()};
}

PackedWeight PackedExperts::view(int64_t expert) const {
  HALFBYTE_MUST(expert >= 0 && expert < num_experts_, invalid_argument, "packed experts", "expert", "be",
                fmt::format("one of {}", num_experts_), expert);
  PackedWeight weight = stack_;
  weight.num_bytes = stack_.num_bytes / num_experts_;
  weight.data = static_cast<std::byte*>(stack_.data) + expert * weight.num_bytes;
  return weight;
}

PackedExperts PackedExperts::to(Device device, void* stream) const {
  PackedExperts result = *this;
  result.memory_ = memory_.to(device, stream);
  result.stack_.data = result.memory_.data();
  result.stack_.device = device;
  return result;
}

PackedTensor QuantizedTensor::pack(Execution execution, int64_t expert) const {
  const WeightView from = weight_view(expert);
  PackedTensor packed(from.spec, from.rows, from.cols, from.device);
  reorder(from, packed.view(), execution);
  return packed;
}

}  // namespace halfbyte
