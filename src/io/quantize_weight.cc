// A dense weight of a checkpoint, quantized in blocks.
#include "core/checks.h"
#include "cpu/parallel.h"
#include "io/block_worker.h"
#include "io/checkpoint.h"

namespace halfbyte {
namespace io {
namespace {

class WeightQuantizer {
 public:
  WeightQuantizer(const Checkpoint::Impl& checkpoint, const Weight& weight, const QuantSpec& spec,
                  const Encoding& encoding, Device device, Execution execution)
      : checkpoint_(checkpoint),
        stored_(checkpoint.tensors[static_cast<size_t>(weight.parts.front())]),
        encoding_(encoding),
        num_workers_(num_workers(device, execution.num_threads)),
        q_(spec, weight.shape, *weight.dtype, device) {
    target_.name = weight.name;
    target_.shape = weight.shape;
    target_.dtype = *weight.dtype;
    target_.spec = spec;
    const int64_t most = preferred_elements(target_, block_elements(device));
    for (int64_t begin = 0, n = num_elements(weight); begin < n; begin += blocks_.back().count)
      blocks_.push_back(block_at(target_, begin, most));
    for (int i = 0; i < std::min(num_workers_, static_cast<int>(blocks_.size())); ++i)
      workers_.emplace_back(device, most);
  }

  QuantizedTensor run() {
    if (needs_range()) find_range();
    std::vector<QuantizeStatus> status(blocks_.size());
    for_each_block([&](const Block& block, size_t i, BlockWorker& worker) {
      status[i] = quantize(read(block, worker), view_of(block, worker), encoding_, worker.execution(),
                           needs_range() ? &range_ : nullptr);
    });
    for (size_t i = 0; i < blocks_.size(); ++i) {
      HALFBYTE_CHECK(status[i].num_nonfinite == 0, bad_input,
                     "weight \"{}\" has elements that are not finite, the first at index {}",
                     printable(target_.name), blocks_[i].begin + status[i].first_nonfinite);
      HALFBYTE_CHECK(status[i].num_unheld_scales == 0, bad_input, "weight \"{}\": {} cannot hold its scales",
                     printable(target_.name), to_string(target_.spec.scale_dtype));
    }
    q_.encoding = encoding_;
    if (!q_.encoding->scale_rule) q_.encoding->scale_rule = default_scale_rule(target_.spec);
    return std::move(q_);
  }

 private:
  template <class Body>
  void for_each_block(const Body& body) {
    parallel_for(std::ssize(blocks_), 1, num_workers_, [&](int64_t begin, int64_t end, int w) {
      BlockWorker& worker = workers_[static_cast<size_t>(w)];
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
        worker.for_each_block(target_, blocks_[i].begin, blocks_[i].count,
                              [&](const Block& block) { body(block, i, worker); });
    });
  }

  TensorView read(const Block& block, BlockWorker& worker) const {
    const int64_t size = size_of(target_.dtype);
    std::byte* const data = worker.dense.reserve(block.count * size);
    checkpoint_.read(stored_, static_cast<uint64_t>(block.begin * size),
                     {data, static_cast<size_t>(block.count * size)});
    worker.dense.upload(worker.stream);
    return {worker.dense.mirror(), target_.dtype, {block.rows, block.cols}, {}, worker.device};
  }

  // Some scale is that of the whole.
  bool needs_range() const {
    return target_.spec.granularity == Granularity::tensor || has_global_scale(target_.spec);
  }

  // The block's place in the result. Blocks that share the scale of the whole each have one of their own.
  QuantizedView view_of(const Block& block, BlockWorker& worker) const {
    const bool shared = target_.spec.granularity == Granularity::tensor && block.begin > 0;
    const auto part = [&](Role role, const Tensor& of) -> std::byte* {
      if (of.num_bytes() == 0) return nullptr;
      if (!shared || role == Role::codes) return of.data() + native_offset(target_, block, role);
      Buffer& buffer = worker.native.of(role);
      buffer.reserve(native_bytes(target_, block, role));
      return buffer.mirror();
    };
    return {target_.spec,
            block.rows,
            block.cols,
            reinterpret_cast<uint8_t*>(part(Role::codes, q_.codes)),
            part(Role::scales, q_.scales),
            reinterpret_cast<uint8_t*>(part(Role::zeros, q_.zeros)),
            part(Role::biases, q_.biases),
            global_scale(block, worker)};
  }

  float* global_scale(const Block& block, BlockWorker& worker) const {
    if (!has_global_scale(target_.spec)) return nullptr;
    if (block.begin == 0) return reinterpret_cast<float*>(q_.global_scale.data());
    worker.native.global_scale.reserve(sizeof(float));
    return reinterpret_cast<float*>(worker.native.global_scale.mirror());
  }

  void find_range() {
    std::vector<ValueRange> ranges(blocks_.size());
    for_each_block([&](const Block& block, size_t i, BlockWorker& worker) {
      ranges[i] = value_range(read(block, worker), worker.execution());
    });
    for (const ValueRange& part : ranges) {  // quantize counts what is not finite
      range_.min = std::min(range_.min, part.min);
      range_.max = std::max(range_.max, part.max);
    }
  }

  const Checkpoint::Impl& checkpoint_;
  const StoredTensor& stored_;
  const Encoding encoding_;
  const int num_workers_;
  QuantizedTensor q_;
  QuantizedWeight target_;
  ValueRange range_;
  std::vector<Block> blocks_;
  std::vector<BlockWorker> workers_;
};

}  // namespace
}  // namespace io

QuantizedTensor quantize_weight(const Checkpoint& checkpoint, std::string_view name, const QuantSpec& spec,
                                const Encoding& encoding, Device device, Execution execution) {
  const Weight* const weight = checkpoint.find(name);
  HALFBYTE_CHECK(weight != nullptr, usage, "quantize_weight: \"{}\" has no weight \"{}\"",
                 io::printable(checkpoint.impl().path), io::printable(name));
  HALFBYTE_CHECK(!weight->layout && weight->foreign.empty(), usage,
                 "quantize_weight: weight \"{}\" is quantized already", io::printable(name));
  HALFBYTE_CHECK(weight->dtype && is_floating(*weight->dtype), usage,
                 "quantize_weight: weight \"{}\" is {}: only F32, F16, BF16 and F64 can be quantized",
                 io::printable(name),
                 checkpoint.impl().tensors[static_cast<size_t>(weight->parts.front())].dtype);
  HALFBYTE_CHECK(!weight->shape.empty(), usage, "quantize_weight: weight \"{}\" has no axes",
                 io::printable(name));
  check_spec(spec);
  check_encoding(spec, encoding);
  HALFBYTE_CHECK(!spec.double_quant, usage,
                 "quantize_weight: spec.double_quant must be false: see double_quantize");
  return io::WeightQuantizer(checkpoint.impl(), *weight, spec, encoding, device, execution).run();
}

}  // namespace halfbyte
