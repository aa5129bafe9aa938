// Products with quantized weights, and the packed form of a weight that they read.
//
//   forward      y[m, n] = x[m, k] . W^T (+ bias[n])      W[n, k] the decoded weight
//   transposed   y[m, k] = x[m, n] . W                    the gradient of the input of a linear layer
//
//   const PackedTensor w = load_weight(checkpoint, name, device).pack();  // once; checkpoint.hpp
//   const auto plan = QgemmPlan::select(device, {.spec = w.view().spec, .m = m, .n = n, .k = k});
//   plan.run(stream, workspace, {.x = x, .weight = w.view(), .y = y});
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "halfbyte/format.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

// A quantized matrix [rows, cols] in one of the layouts. Non-owning: WeightView, or of what is only read
// ConstWeightView. Parts that the spec does not have are null.
//   halfbyte            as QuantShape describes them
//   bitsandbytes        4 bits: the same, the first element of a pair in the high half of the byte;
//                       codes and groups (Granularity::flat) run across rows
//   compressed_tensors  rows of codes padded to words of 32 bits; zero points packed like codes, along the
//                       rows: word [r * bits / 32][group]
//   mlx                 rows of codes padded to words of 32 bits; biases beside the scales
template <class Data>  // void, const void
struct BasicWeightView {
  QuantSpec spec;
  int64_t rows = 0, cols = 0;
  Layout layout = Layout::halfbyte;
  Data* codes = nullptr;
  Data* scales = nullptr;  // of spec.scale_dtype; u8 codes of double_quantize if spec.double_quant
  Data* zeros = nullptr;
  Data* biases = nullptr;
  // Only with double quantization, in memory of the same device. DoubleQuantizedView describes them.
  ConstAs<Data, float>* absmax = nullptr;  // [ceil(number of scales / 256)]
  ConstAs<Data, float>* map = nullptr;     // [256]
  ConstAs<Data, float>* offset = nullptr;  // [1]
  // [1]: only of nvfp4, as in QuantShape; in memory of the same device.
  ConstAs<Data, float>* global_scale = nullptr;
  Device device = {};

  operator BasicWeightView<const void>() const requires(!std::is_const_v<Data>) {
    return {spec,   rows,   cols, layout, codes,        scales, zeros,
            biases, absmax, map,  offset, global_scale, device};
  }
};
using WeightView = BasicWeightView<void>;
using ConstWeightView = BasicWeightView<const void>;

// Bytes of each part; 0: the spec does not have it. Throws Error(usage) if there is no such view: of gptq and
// awq, in bitsandbytes formats of other than 4 bits, f64 scales, and in compressed-tensors zero points whose
// groups do not lie within rows.
struct WeightViewBytes {
  int64_t codes = 0, scales = 0, zeros = 0, biases = 0, absmax = 0, map = 0, offset = 0, global_scale = 0;
};
HALFBYTE_API WeightViewBytes weight_view_bytes(const QuantSpec& spec, int64_t rows, int64_t cols,
                                               Layout layout);

// A packed weight: one array that products in both directions read, at a multiple of 64 bytes on the CPU and
// of 256 on a CUDA device. Its content is opaque; `version` says which form it is. If the rows are a multiple
// of 32 and the columns a multiple of max(64, group size), it is at most 2 KB longer than the native layout.
// The exceptions are one scale for the whole tensor, which is stored once for each row, and groups of 48, 80,
// 96 and more columns that are multiples of 16, which are stored as several of 16, 32, 64 or 128
// (docs/formats.md).
inline constexpr int kPackedWeightVersion = 2;
template <class Data>  // void, const void
struct BasicPackedWeight {
  QuantSpec spec;
  int64_t rows = 0, cols = 0;
  Data* data = nullptr;
  Device device;
  int version = kPackedWeightVersion;
  int64_t num_bytes = -1;  // length of the memory; -1: not known. If it is known, too little is refused

  operator BasicPackedWeight<const void>() const requires(!std::is_const_v<Data>) {
    return {spec, rows, cols, data, device, version, num_bytes};
  }
};
using PackedWeight = BasicPackedWeight<void>;
using ConstPackedWeight = BasicPackedWeight<const void>;
// Throws Error(usage) if there is no packed form: for f64 scales, and for Granularity::flat with groups that
// do not divide the rows.
HALFBYTE_API int64_t packed_weight_bytes(const QuantSpec& spec, int64_t rows, int64_t cols);

// A packed weight with its memory. Copies of the object share it; the last one frees it. Work on it must be
// done by then.
class HALFBYTE_API PackedTensor {
 public:
  PackedTensor() = default;  // of no elements
  // Uninitialized. Throws as packed_weight_bytes, and as Tensor.
  PackedTensor(const QuantSpec& spec, int64_t rows, int64_t cols, Device device = {});
  // A packed weight that `memory` holds, or is to hold: u8 of any shape, at least packed_weight_bytes long
  // and aligned as a PackedWeight. It is shared, not copied. Throws Error(usage) for other memory, and as
  // packed_weight_bytes.
  static PackedTensor of(const QuantSpec& spec, int64_t rows, int64_t cols, Tensor memory);
  // The rows of all of them, one behind the other, as one weight: products of the same x with several
  // weights (queries, keys and values; gate and up) are then one, and the columns of its y those of each.
  // They are as they were to the bit. The weights have one spec, the same columns and device, and but for the
  // last whole strips of 32 rows; their scales are not double quantized, and not one for the whole tensor,
  // and a global scale is the same for all. Throws Error(usage) where they are not so, naming the weight.
  // Waits for `stream`.
  static PackedTensor concat_rows(std::span<const ConstPackedWeight> weights, void* stream = nullptr);
  // The columns of all of them, one behind the other, likewise: the weights have the same rows, and but for
  // the last whole groups and whole blocks of columns (see `slice`).
  static PackedTensor concat_cols(std::span<const ConstPackedWeight> weights, void* stream = nullptr);
  const PackedWeight& view() const { return weight_; }  // valid as long as the memory
  // The same weight on another device, as Tensor::to.
  PackedTensor to(Device device, void* stream = nullptr) const;
  // Rows (axis 0) or columns (axis 1) of it, in memory of their own, as they are to the bit. Rows are cut at
  // multiples of 32; columns between groups, at multiples of 64 and of the length of a group up to 256.
  // Throws Error(usage), naming the reason, for other slices, with double quantization, and where so few
  // columns would be stored in another form (those of a single group of 48, 80, 96 and more columns).
  // QuantizedTensor::slice has fewer rules. Waits for `stream`.
  PackedTensor slice(const Slice& slice, void* stream = nullptr) const;

 private:
  Tensor memory_;
  PackedWeight weight_;
};

// To the packed form and back. Both are exact, and each undoes the other. They run where the memory is, as
// the functions in ops.hpp do. `from` and `to` have the same spec, rows, cols and device, and do not overlap.
// (For spec, Granularity::flat and group are the same if groups divide the rows.) Padding is written too:
// zeros in the packed form; after the rows of a view what its layout defines, the code of zero, or 0 bits in
// words. For a weight without elements, only absmax, map and offset of double quantization, or the global
// scale, are moved.
HALFBYTE_API void reorder(const ConstWeightView& from, const PackedWeight& to, Execution execution = {});
HALFBYTE_API void reorder(const ConstPackedWeight& from, const WeightView& to, Execution execution = {});

// PackedTensor::concat_rows into memory of the caller. `to` has the spec, columns and device of the weights,
// the rows of all, and overlaps none of them. Padding is written as `reorder` writes it. On a CUDA device the
// copies are enqueued on `stream`; where there is a global scale, the call waits for it to compare them.
// Throws as the member, and Error(usage) for another `to`.
HALFBYTE_API void concat_rows(std::span<const ConstPackedWeight> weights, const PackedWeight& to,
                              void* stream = nullptr);
// The same of PackedTensor::concat_cols and PackedTensor::slice.
HALFBYTE_API void concat_cols(std::span<const ConstPackedWeight> weights, const PackedWeight& to,
                              void* stream = nullptr);
HALFBYTE_API void copy_slice(const ConstPackedWeight& from, const Slice& slice, const PackedWeight& to,
                             void* stream = nullptr);

enum class QgemmMath : uint8_t {
  automatic,  // bf16 and f16: exact products, f32 sums. f32: f32 products, f32 sums
  tf32,       // f32 only: operands may be rounded to tf32
  f64,        // f32 only: products and sums in f64, rounded once
  // The CPU, forward, any dtype, formats but fp8: x is rounded to 8 bits with a scale for each 64 columns of
  // a row, and the values of a code book are rounded to 8 bits; integers are exact. Sums of 64 columns are
  // exact, too, and scaled in f32. Every target and number of threads gives the same bytes. docs/qgemm.md has
  // the error.
  int8,
};
HALFBYTE_API const char* to_string(QgemmMath math);  // "auto" "tf32" "f64" "int8"
HALFBYTE_API QgemmMath parse_qgemm_math(std::string_view word);

// The part of the output that one block of a simt kernel computes; 0: chosen by the library.
struct QgemmTile {
  int m = 0, n = 0;  // n: along the other axis of y
  bool operator==(const QgemmTile&) const = default;
};

struct HALFBYTE_API QgemmDescriptor {
  QuantSpec spec = {};          // of the weight [n, k]
  int64_t m = 0, n = 0, k = 0;  // each may be 0
  bool transposed = false;
  DType dtype = DType::bf16;  // of x, y and bias: bf16, f16, f32
  // The weight is a PackedWeight; false: a WeightView. Few kernels read one. For the others a run first packs
  // it into the workspace, which is larger by the packed weight: on the CPU, and on CUDA devices for m
  // above 8.
  bool packed = true;
  Layout layout = Layout::halfbyte;  // of the WeightView
  bool bias = false;                 // forward only
  bool accumulate = false;           // y += instead of y =; the sum is rounded once
  QgemmMath math = QgemmMath::automatic;
  // CUDA: the kernel starts before the previous kernel on the stream has ended (programmatic dependent
  // launch), and reads the weight in the meantime. It touches x, bias and y only after that kernel has ended.
  // So nothing may still write the weight: neither the previous kernel nor, if that one started early too,
  // the kernels before it, back to and including the last kernel in front of the unbroken run of kernels that
  // start early.
  bool early_start = false;
  // Alignment of the addresses of x, y, bias and the codes of a view, in bytes, on which CUDA kernels rely. A
  // power of two, at least the size of an element; 16 is fastest. Other parts of a view are aligned to their
  // elements; on the CPU all tensors are, and codes lie anywhere.
  int64_t alignment = 16;
  std::string variant = {};  // "qgemm_sm80": only this one; empty: the first that does not refuse
  QgemmTile tile = {};       // for qgemm_simt

  bool operator==(const QgemmDescriptor&) const = default;
};
// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const QgemmDescriptor& descriptor);

// One row for each variant, in the order in which they are tried, with the reason if it refuses: first those
// of the device's kind, then the others.
struct QgemmChoice {
  std::string variant;
  std::string reason;  // empty: it takes the description
  bool packs = false;  // it takes a view by packing it first, in each run
};
HALFBYTE_API std::vector<QgemmChoice> explain_qgemm(Device device, const QgemmDescriptor& descriptor);

// y = ... as above. A plan has one order of sums, so its runs give the same bytes; another kernel, device or
// m may give others. precision_guarantee() says how weights are rounded. It has nothing to report: the status
// is that of empty data. y overlaps nothing; weight and x may overlap.
struct HALFBYTE_API Qgemm {
  using Descriptor = QgemmDescriptor;
  struct Args {
    ConstTensorView x = {};         // read: [m, k]; transposed: [m, n]
    ConstPackedWeight weight = {};  // read, if descriptor.packed
    ConstWeightView view = {};      // read, else
    ConstTensorView bias = {};      // read: [n]
    TensorView y = {};              // written (read too, if accumulate): [m, n]; transposed: [m, k]
  };
  using Status = QuantizeStatus;
};
using QgemmPlan = Plan<Qgemm>;
extern template class Plan<Qgemm>;

// The plans of one product for every m, for weights that meet batches of any size. Each is selected when it
// is first wanted. Threads may share the object; copies of it share the plans.
//
//   const QgemmPlans plans(device, {.spec = w.view().spec, .n = n, .k = k});
//   plans.run(stream, workspace, {.x = x, .weight = w.view(), .y = y});
class HALFBYTE_API QgemmPlans {
 public:
  // Plans for m up to kSmall are kept for good; of the others those that were used last.
  static constexpr int64_t kSmall = 64;
  static constexpr int64_t kMostOthers = 32;

  // descriptor.m is ignored. Throws as QgemmPlan::select what does not depend on m.
  QgemmPlans(Device device, const QgemmDescriptor& descriptor, const PlanPreference& preference = {});

  Device device() const;
  const QgemmDescriptor& descriptor() const;  // its m is 0
  // QgemmPlan::select of the descriptor with this m, or the plan that it once returned. Takes no lock for a
  // plan that is kept for good. Where it selects, on a CUDA device a kernel may be compiled.
  QgemmPlan at(int64_t m) const;
  int64_t workspace_size(int64_t m) const { return at(m).workspace_size(); }
  // Runs the plan of m = args.x.shape[0]. Throws as `at` and QgemmPlan::run.
  void run(void* stream, const Workspace& workspace, const Qgemm::Args& args) const;

 private:
  struct Plans;
  std::shared_ptr<Plans> plans_;
};

}  // namespace halfbyte
