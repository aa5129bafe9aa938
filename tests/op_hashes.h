// What op_hashes.cc makes its problems of: random numbers, values, tensors between guards, and draws of
// shapes and specs. Nothing of <random>, and of <cmath> only what is exact: the same problems everywhere.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "halfbyte/device.hpp"
#include "halfbyte/observe.hpp"
#include "halfbyte/qgemm.hpp"

namespace halfbyte::op_hashes {

using Shape = std::vector<int64_t>;

struct Options {
  std::vector<std::string> ops;  // empty: all
  Device device;
  int num_threads = 0;
  uint64_t seed = 1;
  int64_t first = 0, count = 200;
  std::string variant;
};

// ---- Random numbers and hashes

inline uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15;
  return hash ^ hash >> 29;
}

class Hash {
 public:
  void add(uint64_t word) { hash_ = mixed(hash_, word); }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  void add(const void* data, size_t num_bytes) {
    const auto* const bytes = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < num_bytes; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min<size_t>(8, num_bytes - i));
      add(word);
    }
    add(uint64_t{num_bytes});
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.data(), values.size() * sizeof(T));
  }
  void add(const QuantizeStatus& status) {
    for (const int64_t count :
         {status.num_nonfinite, status.first_nonfinite, status.num_unheld_scales, status.num_coarse_scales,
          status.num_invalid_scales, status.num_invalid_zero_points})
      add(static_cast<uint64_t>(count));
  }
  void add(const ValueRange& range) {
    for (const double bound : {range.min, range.max}) add(bound + 0.0);  // of zeros any is right
    for (const int64_t count : {range.num_nonfinite, range.first_nonfinite})
      add(static_cast<uint64_t>(count));
  }
  void add(const ObserverState& state) {
    for (const auto& bounds : {state.min, state.max}) add(bounds);
    // Groups that have all seen as many are as one count of all.
    std::vector<int64_t> counts = state.num_batches;
    if (std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end())
      counts = {counts.empty() ? 0 : counts[0]};
    for (const int64_t count : counts) add(static_cast<uint64_t>(count));
  }
  void add(const QParams& params) {
    add(params.scale);
    add(static_cast<uint64_t>(params.zero_point));
  }
  uint64_t value() const { return mixed(hash_, hash_ >> 32); }

 private:
  uint64_t hash_ = 0x243F6A8885A308D3;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal() {  // nearly: the sum of four uniform ones, of variance 1
    uint64_t parts = bits();
    double sum = 0;
    for (int i = 0; i < 4; ++i, parts >>= 16) sum += static_cast<double>(parts & 0xFFFF);
    return (sum * 0x1p-16 - 2) * 1.7320508075688772;
  }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  uint64_t state_;
};

// ---- Values

enum class Data {
  poison,          // outputs
  bits,            // any
  normal,          // finite and of one magnitude, with ties and zeros of both signs
  finite,          // that, or runs of all magnitudes, constants, subnormal and huge ones
  any,             // that, in one of three tensors with NaN and infinities
  scales,          // finite, >= 0
  invalid_scales,  // that, with negative ones, NaN and infinities
};

inline uint16_t to_f16(float value) {  // toward zero
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, mantissa = bits & 0x7FFFFF;
  const int exponent = static_cast<int>(bits >> 23 & 0xFF) - 112;
  if (exponent == 143) return static_cast<uint16_t>(sign | 0x7C00 | mantissa >> 13 | (mantissa ? 0x200 : 0));
  if (exponent > 30) return static_cast<uint16_t>(sign | 0x7BFF);
  if (exponent > 0)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent) << 10 | mantissa >> 13);
  return static_cast<uint16_t>(sign | (exponent < -10 ? 0 : (mantissa | 0x800000) >> (14 - exponent)));
}

inline void store(uint8_t* to, DType dtype, double value) {
  const auto put = [to](auto element) { std::memcpy(to, &element, sizeof(element)); };
  const auto single = static_cast<float>(value);
  if (dtype == DType::f64) return put(value);
  if (dtype == DType::f32) return put(single);
  if (dtype == DType::f16) return put(to_f16(single));
  put(static_cast<uint16_t>(std::bit_cast<uint32_t>(single) >> 16));
}

// Of every exponent of a dtype, subnormal ones included, as often.
inline double of_any_magnitude(Random& random, DType dtype) {
  const int lowest = dtype == DType::f64 ? -1074 : dtype == DType::f16 ? -24 : -149;
  const int highest = dtype == DType::f64 ? 1023 : dtype == DType::f16 ? 15 : 127;
  const double digits = dtype == DType::f64 ? 0x1p52 : 0x1p23;
  const double mantissa = 1 + std::floor(random.uniform() * digits) / digits;
  return std::ldexp(mantissa, static_cast<int>(random.between(lowest, highest)));
}

inline double nonfinite(Random& random) {
  const uint64_t bits = random.bits();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (bits & 1) return bits & 2 ? kInfinity : -kInfinity;
  return std::bit_cast<double>(bits | 0x7FF8000000000000);  // with a payload
}

inline void fill_values(Random& random, uint8_t* to, DType dtype, int64_t n, Data data) {
  const int64_t size = size_of(dtype);
  const bool wild = data != Data::normal && random.one_in(2), special = data == Data::any && random.one_in(3);
  const double unit = std::ldexp(1.0, static_cast<int>(random.between(-7, 3)));
  int64_t left = 0, kind = 0;
  double constant = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (left-- == 0) {
      left = random.below(80);
      kind = random.below(wild ? 9 : 5);
      constant = random.one_in(4) ? -0.0 : unit * random.normal();
    }
    double value = unit * random.normal();
    if (kind == 1) value = unit * 0.5 * static_cast<double>(random.between(-20, 20));  // ties
    if (kind == 2 && random.one_in(4)) value = random.one_in(2) ? 0.0 : -0.0;
    if (kind == 5) value = constant;
    if (kind == 6) {
      const double sign = random.one_in(2) ? 1 : -1;
      value = sign * of_any_magnitude(random, dtype);
    }
    if (kind == 7) value = random.one_in(2) ? 0.0 : -0.0;
    if (kind == 8) value = unit * std::ldexp(value, 3);
    store(to + i * size, dtype, value);
  }
  if (special && n > 0)
    for (int64_t i = random.between(1, 4); i > 0; --i) {
      uint8_t* const element = to + random.below(n) * size;
      store(element, dtype, nonfinite(random));
    }
}

inline void fill_scales(Random& random, uint8_t* to, DType dtype, int64_t n, bool invalid) {
  const bool wild = random.one_in(4), exact = random.one_in(3);  // powers of two: quotients are ties
  for (int64_t i = 0; i < n; ++i) {
    double value = exact ? 1 : 1 + random.uniform();
    value = std::ldexp(value, static_cast<int>(random.between(-8, 2)));
    if (wild && random.one_in(4)) value = random.one_in(4) ? 0 : of_any_magnitude(random, dtype);
    if (invalid && wild && random.one_in(8)) value = random.one_in(2) ? -value : nonfinite(random);
    store(to + i * size_of(dtype), dtype, value);
  }
}

// ---- A problem: its random numbers, tensors and line

class Problem {
 public:
  Random random;
  std::ostringstream text;
  const Options& options;
  const Device device;
  const Stream stream;
  const Execution execution;
  Hash hash;

  Problem(const Options& opts, const std::string& op, int64_t index)
      : Problem(opts, seed_of(opts, op, index), op + " " + std::to_string(index)) {}
  // The same from its start: nothing drawn, no tensors.
  explicit Problem(const Problem* other) : Problem(other->options, other->seed_, other->name_) {}

  // What descriptors promise of tensors, those made after it: that they are aligned to 16 bytes or, as often,
  // to elements of `dtype`, and then to no more.
  int64_t draw_alignment(DType dtype) {
    const int64_t alignment = random.one_in(2) ? 16 : size_of(dtype);
    misalignment_ = alignment == 16 ? 0 : alignment;
    return alignment;
  }
  TensorView tensor(DType dtype, Shape shape, Data data, Shape strides = {}) {
    int64_t num_bytes = contiguous_bytes(dtype, shape), elements = 1;
    for (size_t i = 0; i < strides.size(); ++i) elements += (shape[i] - 1) * strides[i];
    if (!strides.empty() && num_bytes > 0) num_bytes = elements * size_of(dtype);
    Array& array = add_array(num_bytes, is_packed(dtype) ? 1 : size_of(dtype));
    uint8_t* const to = array.image.data() + array.begin;
    if (data == Data::bits)
      for (int64_t i = 0; i < num_bytes; ++i) to[i] = static_cast<uint8_t>(random.bits());
    else if (data == Data::scales || data == Data::invalid_scales)
      fill_scales(random, to, dtype, num_bytes / size_of(dtype), data == Data::invalid_scales);
    else if (data != Data::poison)
      fill_values(random, to, dtype, num_bytes / size_of(dtype), data);
    return view_of(array, dtype, std::move(shape), std::move(strides));
  }
  // Of i32, i8 or u8; packed ones are any.
  TensorView integers(DType dtype, Shape shape, int64_t low, int64_t high) {
    if (is_packed(dtype)) return tensor(dtype, std::move(shape), Data::bits);
    const int64_t size = size_of(dtype), num_bytes = contiguous_bytes(dtype, shape);
    Array& array = add_array(num_bytes, size);
    for (int64_t i = 0; i < num_bytes; i += size) {
      const int64_t value = random.between(low, high);  // little-endian
      std::memcpy(array.image.data() + array.begin + i, &value, static_cast<size_t>(size));
    }
    return view_of(array, dtype, std::move(shape), {});
  }
  // What `values` are.
  TensorView copy_of(DType dtype, Shape shape, const void* values) {
    Array& array = add_array(contiguous_bytes(dtype, shape), size_of(dtype));
    std::memcpy(array.image.data() + array.begin, values,
                static_cast<size_t>(contiguous_bytes(dtype, shape)));
    return view_of(array, dtype, std::move(shape), {});
  }
  // An output at a multiple of 256 bytes.
  std::byte* packed_weight(int64_t num_bytes) {
    const int64_t before = std::exchange(misalignment_, 0);
    Array& array = add_array(num_bytes, 1);
    misalignment_ = before;
    return static_cast<std::byte*>(view_of(array, DType::u8, {num_bytes}, {}).data);
  }

  template <class Op>
  Plan<Op> select(const typename Op::Descriptor& descriptor) const {
    return Plan<Op>::select(device, descriptor, {options.num_threads});
  }
  // In a poisoned workspace. The status is hashed.
  template <class Op>
  void run(const Plan<Op>& plan, const typename Op::Args& args) {
    const Memory workspace(device, plan.workspace_size());
    const std::vector<uint8_t> poison(static_cast<size_t>(workspace.num_bytes()), kPoison);
    copy(device, workspace.data(), poison.data(), workspace.num_bytes(), stream.handle());
    plan.run(stream.handle(), workspace, args);
    hash.add(plan.status(stream.handle(), workspace));
  }
  template <class Op>
  void run(const typename Op::Descriptor& descriptor, const typename Op::Args& args) {
    run(select<Op>(descriptor), args);
  }

  // Runs `body` and prints the line of what it did: what it hashed and all tensors, which then are what they
  // were before. A line is "op number description hash", or "... refused CODE" of an Error.
  template <class Body>
  void print(const Body& body) {
    std::string result;
    try {
      body();
      for (Array& array : arrays_) add_to_hash(array);
      char word[17];
      std::snprintf(word, sizeof(word), "%016llx", static_cast<unsigned long long>(hash.value()));
      result = word;
    } catch (const Error& error) {
      stream.synchronize();
      result = "refused " + std::to_string(static_cast<int>(error.code()));
    }
    std::cout << name_ << ' ' << text.str() << ' ' << result << '\n';
    hash = {};
    text.str("");
  }

 private:
  Problem(const Options& opts, uint64_t seed, std::string name)
      : random(seed),
        options(opts),
        device(opts.device),
        stream(opts.device),
        execution{opts.num_threads, stream.handle()},
        seed_(seed),
        name_(std::move(name)) {}

  static constexpr uint8_t kPoison = 0xA5;
  static constexpr int64_t kGuard = 256;  // bytes before and behind a tensor

  struct Array {
    Memory memory;
    std::vector<uint8_t> image;  // of all of the memory, as it is before
    int64_t begin = 0;           // of the tensor
  };

  static uint64_t seed_of(const Options& options, const std::string& op, int64_t index) {
    Hash hash;
    hash.add(options.seed);
    hash.add(op.data(), op.size());
    hash.add(static_cast<uint64_t>(index));
    return hash.value();
  }
  Array& add_array(int64_t num_bytes, int64_t size) {
    Array array;
    array.begin = kGuard + (misalignment_ == 0 ? 0 : std::max(misalignment_, size));
    array.memory = Memory(device, array.begin + num_bytes + kGuard);
    array.image.assign(static_cast<size_t>(array.memory.num_bytes()), kPoison);
    arrays_.push_back(std::move(array));
    return arrays_.back();
  }
  void upload(const Array& array) const {
    copy(device, array.memory.data(), array.image.data(), array.memory.num_bytes(), stream.handle());
  }
  TensorView view_of(const Array& array, DType dtype, Shape shape, Shape strides) {
    upload(array);
    stream.synchronize();  // arrays move with their vector
    return {array.memory.data() + array.begin, dtype, std::move(shape), std::move(strides), device};
  }
  void add_to_hash(Array& array) {
    std::vector<uint8_t> bytes(array.image.size());
    copy(device, bytes.data(), array.memory.data(), array.memory.num_bytes(), stream.handle());
    stream.synchronize();
    hash.add(bytes);
    upload(array);
    stream.synchronize();
  }

  uint64_t seed_;
  std::string name_;
  int64_t misalignment_ = 0;  // bytes beyond a multiple of 256; 0: none
  std::vector<Array> arrays_;
};

// ---- Draws

inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << to_string(dtype); }
inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (size_t i = 0; i < shape.size(); ++i) out << (i ? "," : "") << shape[i];
  return out << ']';
}

inline DType draw_float(Random& random) {
  return random.pick({DType::f32, DType::f16, DType::bf16, DType::f64});
}
inline DType draw_short_float(Random& random) { return random.pick({DType::f32, DType::f16, DType::bf16}); }
// Of scales of linear and fake quantization.
inline DType draw_scale_dtype(Random& random, DType dtype) { return random.one_in(2) ? DType::f32 : dtype; }

// 1 to about `most`, each magnitude as often, powers of two and their neighbours more often.
inline int64_t draw_extent(Random& random, int64_t most) {
  const int64_t magnitude = int64_t{1} << random.below(std::bit_width(static_cast<uint64_t>(most)));
  const int64_t kind = random.below(8);
  if (kind < 3) return std::max<int64_t>(1, magnitude + kind - 1);
  return std::min(magnitude + random.below(magnitude), most);
}
inline Shape draw_shape(Random& random, int64_t lowest_rank, int64_t highest_rank) {
  int64_t left = random.pick({256, 256, 4096, 4096, 4096, 20000, 20000, 150000});
  if (random.one_in(40)) left = 400000;
  Shape shape(static_cast<size_t>(random.between(lowest_rank, highest_rank)));
  for (int64_t& extent : shape) {
    extent = &extent == &shape.back() && random.one_in(2) ? left : draw_extent(random, left);
    left = std::max<int64_t>(1, left / extent);
  }
  for (size_t i = shape.size(); i > 1; --i)
    std::swap(shape[i - 1], shape[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  if (!shape.empty() && random.one_in(50)) shape[0] = 0;
  return shape;
}
inline int64_t rows_of(const Shape& shape) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return rows;
}
inline int64_t draw_group_size(Random& random) {
  return random.pick<int64_t>({1, 2, 7, 8, 16, 32, 32, 64, 64, 100, 128, 128, 256, 1000});
}

// shape, granularity, axis and group_size of the descriptors that have them.
template <class Descriptor>
void draw_grouping(Problem& p, Descriptor& d) {
  Random& r = p.random;
  d.shape = draw_shape(r, 0, 4);
  const auto rank = static_cast<int>(d.shape.size());
  p.text << d.shape << ' ';
  if (rank == 0 || r.one_in(4)) return;
  d.granularity = r.one_in(3) ? Granularity::channel : Granularity::group;
  d.axis = static_cast<int>(r.between(-rank, rank - 1));
  p.text << to_string(d.granularity);
  if (d.granularity == Granularity::group) {
    d.group_size = draw_group_size(r);
    if (r.one_in(6)) d.group_size = d.shape[static_cast<size_t>((d.axis + rank) % rank)];  // per token
    p.text << d.group_size;
  }
  p.text << '@' << d.axis << ' ';
}

// Formats are the first sixteen: a new one changes no problem.
inline constexpr int64_t kNumFormats = 16;  // the first, so that draws are the same

inline void draw_table(Random& random, Format format, std::array<float, 16>& table) {
  if (format != Format::lut4) return;
  table = {-7, -5, -3.5f, -3, -2.25f, -2, -1, -0.125f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if (random.one_in(2)) table = {-20, -13, -8, -7, -5, -3, -2, -1, 0, 1, 2, 4, 6, 7, 11, 16};
}
struct EncodedSpec : QuantSpec {
  Encoding encoding = {};
};
inline std::ostream& operator<<(std::ostream& out, const EncodedSpec& spec) {
  out << info(spec.format).name << (spec.asymmetric ? "+zero " : " ") << to_string(spec.granularity);
  if (spec.granularity == Granularity::group || spec.granularity == Granularity::flat) out << spec.group_size;
  return out << ' ' << to_string(spec.encoding.scale_rule.value_or(default_scale_rule(spec))) << ' '
             << spec.scale_dtype << (spec.encoding.code_scale == CodeScale::unrounded ? " unrounded" : "")
             << (spec.double_quant ? " double" : "");
}
inline EncodedSpec draw_spec(Random& random, DType dtype) {
  EncodedSpec spec;
  const FormatInfo& format = all_formats()[static_cast<size_t>(random.below(kNumFormats))];
  spec.format = format.format;
  draw_table(random, spec.format, spec.table);
  spec.asymmetric = format.kind == FormatKind::integer && random.one_in(2);
  spec.encoding.scale_rule = format.default_rule;
  if (spec.asymmetric)
    spec.encoding.scale_rule = ScaleRule::minmax;
  else if (format.kind == FormatKind::integer)
    spec.encoding.scale_rule = random.pick({ScaleRule::absmax, ScaleRule::half_range, ScaleRule::signed_max});
  else if (format.kind == FormatKind::affine)
    spec.encoding.scale_rule = random.pick({ScaleRule::minmax, ScaleRule::mlx_edge});
  if (random.one_in(40))
    spec.encoding.scale_rule = static_cast<ScaleRule>(random.below(5));  // some are refused
  spec.granularity = random.pick({Granularity::tensor, Granularity::channel, Granularity::group,
                                  Granularity::group, Granularity::group, Granularity::flat});
  spec.group_size = draw_group_size(random);
  spec.scale_dtype = draw_short_float(random);
  if (dtype == DType::f64 && random.one_in(2)) spec.scale_dtype = DType::f64;
  if (format.kind == FormatKind::affine && random.one_in(3)) spec.encoding.code_scale = CodeScale::unrounded;
  return spec;
}

inline QParamsConfig draw_qparams(Random& random) {
  const int bits = static_cast<int>(random.between(2, 8));
  QParamsConfig config = QParamsConfig::of_bits(bits, random.one_in(2));
  if (random.one_in(2)) {
    config.q_min = -static_cast<int>(random.below(129));
    config.q_max = static_cast<int>(random.between(2, 127));
  } else if (random.one_in(4)) {
    config.q_max -= config.q_min;  // unsigned
    config.q_min = 0;
  }
  if (!config.asymmetric && random.one_in(2)) config.scale_rule = ScaleRule::half_range;
  config.eps = random.pick({0.0, 0.0, 0x1p-23, 1e-3});
  return config;
}
inline std::ostream& operator<<(std::ostream& out, const QParamsConfig& config) {
  return out << config.q_min << ".." << config.q_max << ' ' << to_string(config.scale_rule) << ' '
             << config.eps;
}

inline ObserverConfig draw_observer(Random& random, int64_t num_kinds) {
  ObserverConfig config;
  config.kind = static_cast<ObserverKind>(random.below(num_kinds));
  config.momentum = random.pick({0.99, 0.9, 0.5, 0.123});
  config.percentile = random.pick({99.99, 99.0, 75.0, 50.5, 100.0});
  config.qparams = draw_qparams(random);
  config.qparams.eps = 0;
  return config;
}
inline std::ostream& operator<<(std::ostream& out, const ObserverConfig& config) {
  out << to_string(config.kind);
  if (config.kind == ObserverKind::moving_average) out << config.momentum;
  if (config.kind == ObserverKind::percentile) out << config.percentile;
  if (config.kind == ObserverKind::mse) out << ' ' << config.qparams;
  return out;
}

// Of a weight that can be packed, nearly always; its codes in fragments, or bit streams.
inline EncodedSpec draw_weight_spec(Random& random, bool streams) {
  EncodedSpec spec;
  int bits = 0;
  do {
    spec = draw_spec(random, DType::f32);
    bits = info(spec.format).bits;
  } while ((bits != 4 && bits != 8) != streams);
  spec.encoding.code_scale = CodeScale::stored;
  spec.group_size = random.pick<int64_t>({32, 32, 64, 64, 64, 128, 128, 256, 16, 48, 100, 1, 7, 512});
  spec.double_quant = spec.scale_dtype == DType::f32 && !has_biases(spec) && random.one_in(2);
  return spec;
}
inline Shape draw_weight_shape(Random& random, const QuantSpec& spec) {
  const int64_t unit = random.pick<int64_t>({1, 1, 2, 8, 8, 64, 64, 64});
  Shape shape = {1, 1};
  for (int i = 0; i < 2; ++i) {  // the larger of two draws
    shape[0] = std::max(shape[0], draw_extent(random, 600));
    shape[1] = std::max(shape[1], draw_extent(random, 1500));
  }
  for (int64_t& extent : shape) extent = (extent + unit - 1) / unit * unit;
  if (spec.granularity == Granularity::flat && !random.one_in(8))  // groups that divide the rows
    shape[1] = (shape[1] + spec.group_size - 1) / spec.group_size * spec.group_size;
  if (random.one_in(60)) shape[static_cast<size_t>(random.below(2))] = 0;
  return shape;
}
inline Layout draw_layout(Random& random, const QuantSpec& spec) {
  const Layout layout =
      random.pick({Layout::halfbyte, Layout::compressed_tensors, Layout::mlx, Layout::bitsandbytes});
  return layout == Layout::bitsandbytes && info(spec.format).bits != 4 ? Layout::halfbyte : layout;
}

}  // namespace halfbyte::op_hashes
