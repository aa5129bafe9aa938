// A quantized weight of a checkpoint, as the parts of the native layout.
#include <cstring>

#include "core/checks.h"
#include "core/format.h"
#include "core/quantized_tensor.h"
#include "cpu/parallel.h"
#include "formats/bits.h"
#include "io/checkpoint.h"
#include "io/experts.h"

namespace halfbyte {
namespace io {
namespace {

// Layouts fill up rows with other bits than the native one.
void set_padding(const QuantizedTensor& q) {
  const QuantShape shape = quant_shape(q.spec, q.rows(), q.cols());
  const int bits = info(q.spec.format).bits;
  const int used = static_cast<int>(shape.cols * bits % 8);
  if (used == 0) return;
  auto* const codes = reinterpret_cast<uint8_t*>(q.codes.data());
  const formats::Codec codec = make_codec(q.spec);
  for (int64_t row = 0; row < shape.rows; ++row) {
    uint8_t& last = codes[(row + 1) * shape.row_bytes - 1];
    const int64_t group =
        q.spec.granularity == Granularity::tensor ? 0 : (row + 1) * shape.groups_per_row - 1;
    int zero = 1 << (bits - 1);
    if (codec.kind == formats::Kind::table) {
      zero = codec.book.zero_code;
    } else if (has_zeros(q.spec)) {
      zero = std::to_integer<int>(q.zeros.data()[group]);
    } else if (has_biases(q.spec)) {
      formats::GroupParams<float> params;
      const auto type = scale_type(q.spec.scale_dtype);
      params.code_scale = formats::load_scale<float>(q.scales.data(), group, type);
      params.code_bias = formats::load_scale<float>(q.biases.data(), group, type);
      zero = formats::zero_code(params, codec);
    }
    unsigned padding = 0;
    for (int bit = used, i = 0; bit < 8; bit += bits, ++i) padding |= static_cast<unsigned>(zero) << bit;
    last = static_cast<uint8_t>((last & ((1u << used) - 1)) | padding);
  }
}

// What a block has of a part, to `native`.
void read_block(const Checkpoint::Impl& checkpoint, const StoredWeight& stored, const QuantizedWeight& weight,
                const Block& block, Role role, std::byte* native, Buffer& buffer) {
  const StoredRange range = stored_range(weight, block, role);
  if (weight.layout == Layout::halfbyte) {  // which stores the native one
    checkpoint.read(stored.part(role), range, {native, range.num_bytes()});
    return;
  }
  std::byte* const bytes = buffer.reserve(static_cast<int64_t>(range.num_bytes()));
  checkpoint.read(stored.part(role), range, {bytes, range.num_bytes()});
  to_native(weight, block, role, bytes, native);
}

QuantizedTensor load(const Checkpoint::Impl& checkpoint, const StoredWeight& stored, int num_threads) {
  const QuantizedWeight& weight = stored.weight;
  QuantizedTensor q(weight.spec, weight.shape, weight.dtype);
  q.encoding = weight.encoding;
  const auto whole = [&](Role role) {
    const Tensor& part = part_of(q, role);
    checkpoint.read(stored.part(role), 0, {part.data(), static_cast<size_t>(part.num_bytes())});
  };
  std::vector<Role> roles = block_roles(weight.spec);
  if (weight.spec.double_quant) {
    std::erase(roles, Role::scales);
    whole(Role::scales);
    whole(Role::scales_absmax);
    if (!weight.scales_map.empty())
      std::memcpy(q.scales_map.data(), weight.scales_map.data(), 256 * sizeof(float));
    std::memcpy(q.scales_offset.data(), &weight.scales_offset, sizeof weight.scales_offset);
  }
  if (has_global_scale(weight.spec))
    std::memcpy(q.global_scale.data(), &weight.global_scale, sizeof weight.global_scale);
  std::vector<Block> blocks;
  for (int64_t begin = 0, n = num_elements(weight.shape); begin < n; begin += blocks.back().count)
    blocks.push_back(block_at(weight, begin, preferred_elements(weight, kBlockElements)));
  std::vector<Buffer> buffers(static_cast<size_t>(effective_threads(num_threads)));
  parallel_for(std::ssize(blocks), 1, num_threads, [&](int64_t first, int64_t last, int worker) {
    for (int64_t i = first; i < last; ++i) {
      const Block& block = blocks[static_cast<size_t>(i)];
      for (const Role role : roles) {
        const bool read = role != Role::codes && weight.spec.granularity == Granularity::tensor && i > 0;
        if (read) continue;
        read_block(checkpoint, stored, weight, block, role,
                   part_of(q, role).data() + native_offset(weight, block, role),
                   buffers[static_cast<size_t>(worker)]);
      }
    }
  });
  if (!blocks.empty()) set_padding(q);
  return q;
}

// The same of a part of the weight: block by block, of each what belongs to it.
QuantizedTensor load_slice(const Checkpoint::Impl& checkpoint, const StoredWeight& stored, const Slice& slice,
                           int num_threads) {
  QuantizedWeight weight = stored.weight;
  std::vector<int64_t> kept = check_slice("load_weight", weight.spec, weight.shape, slice);
  QuantizedTensor q(weight.spec, std::move(kept), weight.dtype);
  weight.spec = by_rows(weight.spec, weight.cols());
  const Granularity granularity = weight.spec.granularity;
  // Not every row has its own codes, scales and so on.
  if (weight.spec.double_quant || granularity == Granularity::flat || granularity == Granularity::tensor ||
      (weight.spec != q.spec && weight.cols() % 8 * info(weight.spec.format).bits % 8 != 0))
    return load(checkpoint, stored, num_threads).slice(slice);
  q.encoding = weight.encoding;
  if (has_global_scale(weight.spec))
    std::memcpy(q.global_scale.data(), &weight.global_scale, sizeof weight.global_scale);

  // Runs of rows, which lie one behind the other in the result.
  const bool columns = slice.axis + 1 == std::ssize(weight.shape);
  const auto product = [&](size_t begin, size_t end) {
    return num_elements(std::span<const int64_t>(weight.shape).subspan(begin, end - begin));
  };
  const auto axis = static_cast<size_t>(slice.axis);
  const int64_t outer = columns ? 1 : product(0, axis);
  const int64_t inner = columns ? 1 : product(axis + 1, weight.shape.size() - 1);
  const int64_t extent = columns ? weight.rows() : weight.shape[axis];
  const int64_t first = columns ? 0 : slice.begin, count = columns ? extent : slice.end - slice.begin;
  const int64_t run = count * inner, cols = weight.cols();
  struct Piece {
    Block block;
    int64_t begin, end;  // rows of the weight
    int64_t to;          // row of the result
  };
  std::vector<Piece> pieces;
  if (q.rows() * q.cols() > 0)
    for (int64_t i = 0; i < outer; ++i) {
      const int64_t begin = (i * extent + first) * inner, end = begin + run;
      for (int64_t row = begin; row < end; row = pieces.back().end) {
        const Block block = block_at(weight, row * cols, preferred_elements(weight, kBlockElements));
        pieces.push_back({block, row, std::min(end, block.first_row + block.rows), i * run + row - begin});
      }
    }
  std::vector<Buffer> buffers(static_cast<size_t>(effective_threads(num_threads)));
  parallel_for(std::ssize(pieces), 1, num_threads, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& [block, first_row, end_row, to] = pieces[static_cast<size_t>(i)];
      QuantizedTensor whole(weight.spec, {block.rows, cols}, weight.dtype);
      for (const Role role : block_roles(weight.spec))
        read_block(checkpoint, stored, weight, block, role, part_of(whole, role).data(),
                   buffers[static_cast<size_t>(worker)]);
      QuantizedTensor piece = whole.slice({0, first_row - block.first_row, end_row - block.first_row});
      if (columns) piece = piece.slice({1, slice.begin, slice.end});
      for (const Role role : block_roles(weight.spec)) {
        const Tensor &from = part_of(piece, role), &part = part_of(q, role);
        if (from.num_bytes() > 0)
          std::memcpy(part.data() + to * (part.num_bytes() / q.rows()), from.data(),
                      static_cast<size_t>(from.num_bytes()));
      }
    }
  });
  if (!pieces.empty()) set_padding(q);
  return q;
}

}  // namespace
}  // namespace io

QuantizedTensor load_weight(const Checkpoint& checkpoint, std::string_view name, Device device,
                            Execution execution, const std::optional<Slice>& slice) {
  const Checkpoint::Impl& impl = checkpoint.impl();
  const Weight* const weight = checkpoint.find(name);
  HALFBYTE_CHECK(weight != nullptr, usage, "load_weight: \"{}\" has no weight \"{}\"",
                 io::printable(impl.path), io::printable(name));
  HALFBYTE_CHECK(weight->layout, usage,
                 "load_weight: weight \"{}\" is {}, not in a layout that halfbyte reads", io::printable(name),
                 weight->foreign.empty() ? "dense" : weight->foreign);
  HALFBYTE_CHECK(
      impl.quantized_weight(*weight)->weight.words.order.empty(), bad_input,
      "load_weight: the groups of weight \"{}\" are of columns in another order (act-order), which a "
      "QuantizedTensor does not have: decode it",
      io::printable(name));
  HALFBYTE_CHECK(
      !impl.quantized_weight(*weight)->weight.e5m2_codes, bad_input,
      "load_weight: the codes of weight \"{}\" are of E5M2, which no format of halfbyte has: decode it",
      io::printable(name));
  const io::StoredWeight& stored = *impl.quantized_weight(*weight);
  const QuantizedTensor q = slice ? io::load_slice(impl, stored, *slice, execution.num_threads)
                                  : io::load(impl, stored, execution.num_threads);
  return q.to(device, execution.stream);
}

}  // namespace halfbyte
