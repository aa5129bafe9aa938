// affine_init: a warp has some groups that lie side by side, whose codes are whole bytes. It finds their
// ranges and parameters, then packs their codes, then refits.
#include "ops/affine_qdq/affine.cuh"

namespace halfbyte::device {

constexpr int kWarps = kAffineThreads / 32;

struct Columns {
  i64 begin, end;
};

// Of `rule`, which is a constant where group_params needs it: there is code of its own for each.
__device__ __forceinline__ Codec codec_of(const AffineInitArgs& args, Rule rule) {
  Codec codec;
  codec.kind = Kind::affine;
  codec.rule = rule;
  codec.scale_type = args.scale_type;
  codec.unrounded_code_scale = rule == Rule::mlx_edge;  // as MLX decides codes
  codec.q_min = 0;
  codec.q_max = args.levels;
  return codec;
}
__device__ __forceinline__ Codec codec_of(const AffineInitArgs& args) { return codec_of(args, Rule::minmax); }

// The groups of a warp: columns of a row.
struct Unit {
  const AffineInitArgs& args;
  i64 row;
  Columns columns;

  __device__ __forceinline__ i64 num_groups() const {
    return (columns.end - columns.begin + args.shape.group_size - 1) / args.shape.group_size;
  }
  __device__ __forceinline__ Columns group(i64 number) const {
    const i64 begin = columns.begin + number * args.shape.group_size;
    return {begin, min(columns.end, begin + args.shape.group_size)};
  }
  __device__ __forceinline__ i64 index_of_group(i64 number) const {
    return row * args.shape.groups_per_row + columns.begin / args.shape.group_size + number;
  }
  __device__ __forceinline__ float element(i64 column) const {
    return load_element(args.w, row * args.shape.cols + column);
  }
};

// The range of the finite elements; the others are counted.
__device__ __forceinline__ GroupParams<float> find_params(const Unit& unit, const Columns& columns) {
  Range<float> range = no_range<float>();
#pragma unroll 1
  for (i64 column = columns.begin + lane_index(); column < columns.end; column += 32) {
    const float w = unit.element(column);
    if (formats::is_finite(w)) {
      range = join(range, Range<float>{-w, w});
    } else {
      atomic_add(&unit.args.counts->num_nonfinite, 1);
      atomic_max(&unit.args.counts->first_nonfinite_key,
                 ~static_cast<u64>(unit.row * unit.args.shape.cols + column));
    }
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) range = join(range, shuffle_xor(range, mask));
  if (unit.args.rule == Rule::mlx_edge)
    return group_params(-range.low, range.high, codec_of(unit.args, Rule::mlx_edge));
  return group_params(-range.low, range.high, codec_of(unit.args, Rule::minmax));
}

__device__ __forceinline__ int code_of(float w, const GroupParams<float>& params, const Codec& codec) {
  return affine_encode(formats::is_finite(w) ? w : 0.0f, params, codec, kHalfAway);
}

// The sums of two terms over a step of 32 elements.
__device__ __forceinline__ double step_sums(double a, double b) {
  return lane_sum(fold_sums(a, b, 1), 2, 32);
}
__device__ __forceinline__ u64 integer_sum(u64 value) {
  for (int mask = 1; mask < 32; mask *= 2) value = value + shuffle_xor(value, mask);
  return value;
}

__device__ __forceinline__ GroupParams<float> refit(const Unit& unit, const Columns& columns,
                                                    const GroupParams<float>& start) {
  const Codec codec = codec_of(unit.args);
  RefitSums sums;
  WarpSums<double> plain;
#pragma unroll 1
  for (i64 step = columns.begin; step < columns.end; step += 32) {
    const i64 column = step + lane_index();
    double w = 0;
    u64 q = 0;
    const float value =
        column < columns.end ? unit.element(column) : bit_cast<float>(Float<float>::kInfinity);
    if (formats::is_finite(value)) {
      w = static_cast<double>(value);
      q = static_cast<u64>(code_of(value, start, codec));
      sums.q += q;
      sums.qq += q * q;
      sums.n += 1;
    }
    plain.add(step_sums(w, static_cast<double>(q) * w));
  }
  const double both = plain.total();
  sums.w = shuffle(both, 0);
  sums.qw = shuffle(both, 1);
  sums.q = integer_sum(sums.q);
  sums.qq = integer_sum(sums.qq);
  sums.n = integer_sum(sums.n);
  const GroupParams<float> fitted = refitted(sums, start, codec);
  WarpSums<double> errors;
#pragma unroll 1
  for (i64 step = columns.begin; step < columns.end; step += 32) {
    const i64 column = step + lane_index();
    const float w = column < columns.end ? unit.element(column) : bit_cast<float>(Float<float>::kInfinity);
    double before = 0, after = 0;
    if (formats::is_finite(w)) {
      const int code = code_of(w, start, codec);
      before = squared_error(code, w, start, codec);
      after = squared_error(code, w, fitted, codec);
    }
    errors.add(step_sums(before, after));
  }
  const double error = errors.total();
  return shuffle(error, 1) < shuffle(error, 0) ? fitted : start;
}

extern "C" __global__ void __launch_bounds__(kAffineThreads)
    affine_init(const __grid_constant__ AffineInitArgs args) {
  const AffineShape& shape = args.shape;
  const int lane = lane_index();
  const i64 number = block_index() * kWarps + threadIdx.x / 32;
  if (number >= shape.rows * args.units_per_row) return;
  const i64 row = number / args.units_per_row, unit_size = args.unit * shape.group_size;
  const i64 begin = (number - row * args.units_per_row) * unit_size;
  const Unit unit{args, row, {begin, min(shape.cols, begin + unit_size)}};
  const int num_groups = static_cast<int>(unit.num_groups());
  GroupParams<float> own;  // lane k has those of group k
#pragma unroll 1
  for (int g = 0; g < num_groups; ++g) {
    const GroupParams<float> params = find_params(unit, unit.group(g));
    if (lane == g) own = params;
  }

  // A lane has a code of 32. Of eight lanes, each then has all eight, and stores a byte of them.
  const i64 n = unit.columns.end - begin;
  const Codec codec = codec_of(args);
  const int bits = args.code_bits, place = lane % 8;
  u8* const codes = args.codes + row * shape.row_bytes + begin * bits / 8;
  const i64 num_bytes = packed_bytes(n, bits);
  int g = 0;
  i64 end = shape.group_size;
#pragma unroll 1
  for (i64 column = lane; column - lane < n; column += 32) {
    // Behind the end of the row, in its last byte, is the code of 0 of its last group.
    for (; column >= end && g < num_groups - 1; ++g) end += shape.group_size;
    GroupParams<float> params;
    params.code_scale = shuffle(own.code_scale, g);
    params.code_bias = shuffle(own.code_bias, g);
    const float w = column < n ? unit.element(begin + column) : 0.0f;
    u64 eight = static_cast<u64>(code_of(w, params, codec)) << (8 * place);
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) eight |= shuffle_xor(eight, mask);
    const i64 byte = column / 8 * bits + place;
    if (place < bits && byte < num_bytes) codes[byte] = static_cast<u8>(pack8(eight, bits) >> (8 * place));
  }

  if (args.refit) {
#pragma unroll 1
    for (int g = 0; g < num_groups; ++g) {
      GroupParams<float> params;
      params.scale = shuffle(own.scale, g);
      params.bias = shuffle(own.bias, g);
      params.code_scale = shuffle(own.code_scale, g);
      params.code_bias = shuffle(own.code_bias, g);
      params.held = shuffle(static_cast<u32>(own.held), g) != 0;
      params.coarse = shuffle(static_cast<u32>(own.coarse), g) != 0;
      params = refit(unit, unit.group(g), params);
      if (lane == g) own = params;
    }
  }
  if (lane < num_groups) {
    const i64 index = unit.index_of_group(lane);
    store_scale(args.scales, index, own.scale, args.scale_type);
    store_scale(args.biases, index, own.bias, args.scale_type);
    if (!own.held) atomic_add(&args.counts->num_unheld_scales, 1);
    if (own.coarse) atomic_add(&args.counts->num_coarse_scales, 1);
  }
}

}  // namespace halfbyte::device
