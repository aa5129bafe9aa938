// Sequences of calls of the C interface. The bytes choose the functions and what they are given: any
// enumerator and extent, and tensors that lie within one buffer, as their callers promise.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>

#include "fuzz.h"
#include "halfbyte/halfbyte.h"

namespace {

using namespace halfbyte;

class Caller {
 public:
  Caller(const uint8_t* data, size_t size) : rest_(data), end_(data + size) {}
  ~Caller() {
    for (auto* weight : weights_) halfbyte_quantized_weight_destroy(weight);
    for (auto* plan : plans_) halfbyte_plan_destroy(plan);
    halfbyte_packed_tensor_destroy(packed_);
  }
  void run() {
    while (rest_ != end_) call();
  }

 private:
  int byte() { return rest_ == end_ ? 0 : *rest_++; }
  bool flag() { return byte() % 2 == 1; }
  // Mostly one of the first `count`.
  int32_t enumerator(int count) {
    const int value = byte();
    return value < 250 ? value % count : value - 252;
  }
  int64_t extent() {
    static constexpr int64_t kExtents[] = {0,
                                           1,
                                           2,
                                           3,
                                           4,
                                           7,
                                           8,
                                           31,
                                           32,
                                           33,
                                           63,
                                           64,
                                           65,
                                           96,
                                           127,
                                           128,
                                           129,
                                           256,
                                           -1,
                                           std::numeric_limits<int64_t>::min(),
                                           std::numeric_limits<int64_t>::max(),
                                           int64_t{1} << 62};
    return kExtents[static_cast<size_t>(byte()) % std::size(kExtents)];
  }

  // Within the buffer, whatever its dtype.
  const DLTensor* tensor() {
    const int what = byte();
    if (what % 32 == 31) return nullptr;
    static constexpr DLDataType kTypes[] = {
        {kDLUInt, 8, 1}, {kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 64, 1},
        {kDLInt, 8, 1},  {kDLInt, 32, 1},   {kDLUInt, 4, 1},   {kDLFloat, 0, 1},   {kDLInt, 64, 2}};
    Tensor& made = tensors_[next_++ % tensors_.size()];
    made.view = {};
    made.view.ndim = what % 16 == 15 ? -1 : what % 4;
    int64_t count = 1;
    for (int64_t& one : made.shape) {
      one = extent();
      if (one > 0 && one <= 256 && count * one <= 4096)
        count *= one;
      else if (one > 0)
        one = 1;  // what is beyond the buffer would be the caller's fault
    }
    made.view.dtype = kTypes[static_cast<size_t>(byte()) % std::size(kTypes)];
    made.view.shape = made.shape.data();
    made.view.data = buffer_.data() + 64 * 1024 * (next_ % 8);
    made.view.byte_offset = byte() % 64 == 63 ? 1 : 0;
    made.view.device = {kDLCPU, 0};
    return &made.view;
  }

  const halfbyte_quant_spec* spec() {
    halfbyte_quant_spec_init(&spec_, sizeof spec_);
    spec_.format = enumerator(16);
    spec_.asymmetric = flag();
    spec_.granularity = enumerator(4);
    spec_.scale_dtype = enumerator(3);
    spec_.double_quant = byte() % 8 == 7;
    for (float& value : spec_.table) value = static_cast<float>(&value - spec_.table) - 8;
    spec_.group_size = extent();
    // One that is larger than ours would promise memory behind it.
    if (const int64_t own = extent();
        byte() % 64 == 63 && (own < 0 || own <= static_cast<int64_t>(sizeof spec_)))
      spec_.struct_size = static_cast<size_t>(own);
    return byte() % 64 == 63 ? nullptr : &spec_;
  }
  const halfbyte_execution* execution() {
    halfbyte_execution_init(&execution_, sizeof execution_);
    execution_.num_threads = byte() % 32 == 31 ? -1 : 1;
    return &execution_;
  }
  const halfbyte_quantized* quantized() {
    halfbyte_quantized_init(&quantized_, sizeof quantized_);
    quantized_.codes = tensor();
    quantized_.scales = tensor();
    if (flag()) quantized_.zeros = tensor();
    if (flag()) quantized_.biases = tensor();
    return &quantized_;
  }
  halfbyte_quantized_weight*& weight() { return weights_[static_cast<size_t>(byte()) % weights_.size()]; }
  halfbyte_plan*& plan() { return plans_[static_cast<size_t>(byte()) % plans_.size()]; }

  void check(halfbyte_status status) {
    if (status == HALFBYTE_BUG) fuzz::fail(halfbyte_last_error());
  }

  void call() {
    switch (byte() % 20) {
      case 0:
        return check(halfbyte_quant_spec_check(spec()));
      case 1: {
        halfbyte_quant_shape shape = {};
        shape.struct_size = sizeof shape;
        return check(halfbyte_quant_shape_of(spec(), extent(), extent(), &shape));
      }
      case 2: {
        halfbyte_quantize_status status = {};
        status.struct_size = sizeof status;
        halfbyte_encoding encoding;
        halfbyte_encoding_init(&encoding, sizeof encoding);
        encoding.scale_rule = enumerator(6);
        return check(halfbyte_quantize(tensor(), spec(), flag() ? &encoding : nullptr, quantized(),
                                       execution(), nullptr, flag() ? &status : nullptr));
      }
      case 3:
        return check(halfbyte_dequantize(quantized(), spec(), tensor(), execution()));
      case 4: {
        float offset = 0;
        return check(halfbyte_double_quantize(tensor(), tensor(), tensor(), flag() ? &offset : nullptr));
      }
      case 5:
        return check(halfbyte_double_dequantize(tensor(), tensor(), 1, tensor()));
      case 6:
        return check(halfbyte_quantize_int4(tensor(), tensor(), tensor(), flag() ? tensor() : nullptr,
                                            extent(), extent(), flag(), execution()));
      case 7:
        return check(halfbyte_dequantize_int4(tensor(), tensor(), flag() ? tensor() : nullptr, tensor(),
                                              extent(), extent(), flag(), execution()));
      case 8:
        return check(halfbyte_quantize_nf4(tensor(), tensor(), tensor(), extent(), extent(), execution()));
      case 9:
        return check(halfbyte_dequantize_nf4(tensor(), tensor(), tensor(), extent(), extent(), execution()));
      case 10: {
        int64_t num_bytes = 0;
        return check(halfbyte_packed_weight_bytes(spec(), extent(), extent(), flag() ? &num_bytes : nullptr));
      }
      case 11: {
        const int64_t shape[] = {extent(), extent(), extent()};
        int64_t count = 1;
        for (const int64_t one : shape) count *= std::clamp<int64_t>(one, 1, 1 << 20);
        if (count > 1 << 16 && count < int64_t{1} << 40) return;
        halfbyte_quantized_weight*& made = weight();
        halfbyte_quantized_weight_destroy(made);
        made = nullptr;
        return check(halfbyte_quantized_weight_create(spec(), shape, byte() % 5 - 1, enumerator(4),
                                                      {kDLCPU, 0}, &made));
      }
      default:
        return of_handles();
    }
  }

  void of_handles() {
    switch (byte() % 8) {
      case 0: {
        halfbyte_quantized_weight_info info = {};
        info.struct_size = sizeof info;
        return check(halfbyte_quantized_weight_get_info(weight(), &info));
      }
      case 1: {
        halfbyte_quantized_weight_parts parts = {};
        parts.struct_size = sizeof parts;
        return check(halfbyte_quantized_weight_get_parts(weight(), &parts));
      }
      case 2: {
        halfbyte_weight_view view;
        halfbyte_weight_view_init(&view, sizeof view);
        return check(halfbyte_quantized_weight_get_view(weight(), extent(), &view));
      }
      case 3: {
        halfbyte_packed_tensor_destroy(packed_);
        packed_ = nullptr;
        return check(halfbyte_quantized_weight_pack(weight(), extent(), execution(), &packed_));
      }
      case 4: {
        halfbyte_linear_codes* codes = nullptr;
        check(halfbyte_quantized_weight_to_linear(weight(), execution(), &codes));
        return halfbyte_linear_codes_destroy(codes);
      }
      case 5: {
        halfbyte_quantize_descriptor descriptor;
        halfbyte_quantize_descriptor_init(&descriptor, sizeof descriptor);
        descriptor.spec = spec();
        descriptor.rows = extent();
        descriptor.cols = extent();
        halfbyte_plan*& made = plan();
        halfbyte_plan_destroy(made);
        made = nullptr;
        return check(halfbyte_quantize_select({kDLCPU, 0}, &descriptor, nullptr, &made));
      }
      case 6: {
        halfbyte_quantize_args args;
        halfbyte_quantize_args_init(&args, sizeof args);
        args.x = tensor();
        args.out = quantized();
        const halfbyte_plan* of = plan();
        if (halfbyte_quantize_can_implement(of, &args) != HALFBYTE_OK) return;
        return check(halfbyte_quantize_run(of, nullptr, nullptr, 0, &args));
      }
      default: {
        int64_t num_bytes = 0;
        return check(halfbyte_plan_workspace_size(plan(), &num_bytes));
      }
    }
  }

  struct Tensor {
    DLTensor view;
    std::array<int64_t, 3> shape;
  };

  const uint8_t* rest_;
  const uint8_t* const end_;
  alignas(64) std::array<std::byte, 9 * 64 * 1024> buffer_{};
  std::array<Tensor, 16> tensors_{};
  size_t next_ = 0;
  halfbyte_quant_spec spec_{};
  halfbyte_execution execution_{};
  halfbyte_quantized quantized_{};
  std::array<halfbyte_quantized_weight*, 4> weights_{};
  std::array<halfbyte_plan*, 2> plans_{};
  halfbyte_packed_tensor* packed_ = nullptr;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto caller = std::make_unique<Caller>(data, std::min<size_t>(size, 4096));
  caller->run();
  return 0;
}
