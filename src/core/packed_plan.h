// What the plans of `quantize` and `dequantize` share.
#pragma once

#include "core/plan.h"
#include "halfbyte/quantize_plan.hpp"

namespace halfbyte {

// "bf16 -> nf4, scale f16", or the other way.
std::string text_of_dtypes(const QuantizeDescriptor& descriptor, bool quantizes);
// That what parts say of themselves is that of the descriptor; the parts are called `name`.
void check_parts(const char* op, const std::string& name, const ConstQuantizedView& parts,
                 const QuantizeDescriptor& descriptor);

// Of calls without a plan: parts, which are written where the dense matrix is read, lie apart from it and
// each other.
void check_parts_apart(const char* op, const ArgumentMemory& dense, const ConstQuantizedView& parts);

// The arguments: a matrix, and the parts that quantization writes and dequantization reads.
template <class Op, auto matrix, auto parts>
struct PackedImpl : Plan<Op>::Impl {
  using Args = typename Op::Args;
  using View = std::remove_cvref_t<decltype(std::declval<Args>().*parts)>;

  std::string parts_name;

  PackedImpl(const char* op, Device device, const QuantizeDescriptor& d, const PlanPreference& preference,
             const char* matrix_name, const char* name_of_parts, bool quantizes,
             void (*rules)(const char* op, const QuantizeDescriptor& descriptor) = nullptr)
      : Plan<Op>::Impl(op, device, d, preference, rules), parts_name(name_of_parts) {
    this->sku.dtypes = text_of_dtypes(d, quantizes);
    this->sku.aux_element = DType::u8;
    this->sku.layout = Layout::halfbyte;
    const QuantShape shape = quant_shape(d.spec, d.rows, d.cols);
    const int64_t scale_size = size_of(d.spec.scale_dtype), scale_bytes = shape.num_groups * scale_size;
    this->tensor(matrix_name, matrix, d.dtype, {d.rows, d.cols})
        .any_leading_axes()
        .promised(d.alignment)
        .written(!quantizes);
    const auto part = [&](const char* name, auto pointer, int64_t num_bytes) -> ArgumentRow& {
      const auto find = [pointer](const Args& args) -> ArgumentData { return untyped(args.*parts.*pointer); };
      return this->memory(parts_name + name, find, num_bytes).written(quantizes);
    };
    part(".codes", &View::codes, shape.code_bytes()).promised(d.alignment);
    part(".scales", &View::scales, scale_bytes).aligned(scale_size);
    part(".zeros", &View::zeros, shape.num_groups)
        .null_unless(has_zeros(d.spec), "only asymmetric integer formats have zero points");
    part(".biases", &View::biases, scale_bytes)
        .aligned(scale_size)
        .null_unless(has_biases(d.spec), "only affine formats have biases");
    part(".global_scale", &View::global_scale, int64_t{sizeof(float)})
        .aligned(sizeof(float))
        .null_unless(has_global_scale(d.spec), "only nvfp4 has a global scale");
  }

  void check_values(const Args& args) const override {
    check_parts(this->op, parts_name, args.*parts, this->descriptor);
  }
};

}  // namespace halfbyte
