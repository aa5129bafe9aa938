#include "ops/reorder/reorder.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/format.h"
#include "core/packed_weight.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "formats/bits.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

using formats::PackedLayout;

constexpr const char* kOp = "reorder";
constexpr int64_t kWordBytes = 4;
// Tiles that are taken at once: of a row 2 KB. A task is large against the cost of scheduling it.
constexpr int64_t kTaskTiles = 64;

bool rows_are_words(WeightLayout layout) {
  return layout == WeightLayout::compressed_tensors || layout == WeightLayout::mlx;
}
// Rows of codes follow each other without padding.
bool rows_are_joined(const WeightView& view) {
  return view.layout == WeightLayout::bitsandbytes ||
         (view.layout == WeightLayout::halfbyte && view.spec.granularity == Granularity::flat);
}

int padding_of(const WeightView& view) {
  const formats::Codec codec = make_codec(view.spec);
  if (rows_are_words(view.layout)) return 0;
  if (codec.kind == formats::Kind::table) return codec.book.zero_code;
  return codec.kind == formats::Kind::integer && !codec.asymmetric ? -codec.q_min : kPaddingOfGroup;
}

// What lies between and behind the sections.
void find_gaps(const PackedLayout& p, ReorderGap* gaps) {
  const int64_t num_parameters = p.strips * p.groups * formats::kUnitRows;
  int64_t end = p.strips * p.strip_bytes;
  const auto section = [&](int64_t begin, int64_t num_bytes) {
    *gaps++ = {end, begin};
    end = begin + num_bytes;
  };
  if (!p.inlined) {
    section(p.scales, num_parameters * p.scale_bytes);
    if (p.has_zeros) section(p.zeros, num_parameters);
    if (p.has_biases) section(p.biases, num_parameters * p.bias_bytes);
  }
  if (p.double_quant) section(p.absmax, p.offset + kWordBytes - p.absmax);
  section(p.num_bytes, 0);
}

template <class T>
T* at(void* memory, int64_t byte) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(memory) + byte);
}

// Between row-major parameters of the view and groups of 32 rows; `begin`: where those of a group of the
// strip begin. Some groups at once, so that of rows whole lines are taken.
template <class T, class Begin>
void move_parameters(const ReorderArgs& args, bool to_packed, int64_t strip, void* view, const Begin& begin) {
  constexpr int64_t kGroupsAtOnce = 64 / sizeof(T);
  const PackedLayout& p = args.layout;
  const int64_t first_row = strip * formats::kUnitRows;
  const int64_t num_rows = args.one_group && !to_packed
                               ? 1  // the first is that of all
                               : std::min<int64_t>(formats::kUnitRows, p.n - first_row);
  T* packed[kGroupsAtOnce];
  for (int64_t first = 0; first < p.padded_groups(); first += kGroupsAtOnce) {
    const int64_t num_padded = std::min<int64_t>(kGroupsAtOnce, p.padded_groups() - first),
                  num_groups = std::clamp<int64_t>(p.groups - first, 0, num_padded);
    for (int64_t i = 0; i < num_padded; ++i) packed[i] = at<T>(args.packed, begin(first + i));
    for (int64_t r = 0; r < num_rows; ++r) {
      T* const row = static_cast<T*>(view) + view_parameter(args, first_row + r, first);
      for (int64_t i = 0; i < num_groups; ++i) {
        if (to_packed)
          packed[i][r] = row[i];
        else
          row[i] = packed[i][r];
      }
    }
    for (int64_t i = 0; to_packed && i < num_padded; ++i) {
      const int64_t from = i < num_groups ? num_rows : 0;
      std::fill(packed[i] + from, packed[i] + formats::kUnitRows, T{0});
    }
  }
}
template <class Begin>
void move_parameters(const ReorderArgs& args, bool to_packed, int64_t strip, void* view, int size,
                     const Begin& begin) {
  if (size == 1) return move_parameters<uint8_t>(args, to_packed, strip, view, begin);
  if (size == 2) return move_parameters<uint16_t>(args, to_packed, strip, view, begin);
  move_parameters<uint32_t>(args, to_packed, strip, view, begin);
}

void move_zero_words(const ReorderArgs& args, bool to_packed, int64_t strip) {
  const PackedLayout& p = args.layout;
  const int64_t per_word = rows_per_word(args), first = strip * formats::kUnitRows;
  const uint32_t mask = (1u << p.bits) - 1;
  uint32_t* const words = static_cast<uint32_t*>(args.zeros);
  if (to_packed) {
    for (int64_t group = 0; group < p.padded_groups(); ++group)
      for (int64_t row = first; row < first + formats::kUnitRows; ++row) {
        const int64_t r = args.one_group ? 0 : row;
        const bool exists = row < p.n && group < p.groups;
        const uint32_t word = exists ? words[r / per_word * p.groups + group] : 0;
        args.packed[p.zero(row, group)] = static_cast<uint8_t>(word >> (r % per_word * p.bits) & mask);
      }
    return;
  }
  const int64_t end = std::min<int64_t>(first + formats::kUnitRows, zero_rows(args));
  for (int64_t row = first; row < end; row += per_word)
    for (int64_t group = 0; group < p.groups; ++group) {
      uint32_t word = 0;
      for (int64_t i = 0; i < std::min(per_word, end - row); ++i)
        word |= (args.packed[p.zero(row + i, group)] & mask) << (i * p.bits);
      words[row / per_word * p.groups + group] = word;
    }
}

void move_parameters(const ReorderArgs& args, bool to_packed, int64_t strip) {
  const PackedLayout& p = args.layout;
  if (args.one_group && !to_packed && strip > 0) return;
  const int64_t row = strip * formats::kUnitRows;
  move_parameters(args, to_packed, strip, args.scales, p.scale_bytes,
                  [&](int64_t group) { return p.scale(row, group); });
  if (p.has_zeros && args.zero_words)
    move_zero_words(args, to_packed, strip);
  else if (p.has_zeros)
    move_parameters(args, to_packed, strip, args.zeros, 1, [&](int64_t group) { return p.zero(row, group); });
  if (p.has_biases)
    move_parameters(args, to_packed, strip, args.biases, p.bias_bytes,
                    [&](int64_t group) { return p.bias(row, group); });
}

// What double quantization has beside the scales, and the gaps.
void move_sections(const ReorderArgs& args, bool to_packed) {
  const PackedLayout& p = args.layout;
  const auto move = [&](int64_t section, float* view, int64_t count) {
    float* const packed = at<float>(args.packed, section);
    std::copy_n(to_packed ? view : packed, count, to_packed ? packed : view);
  };
  if (p.double_quant) {
    const int64_t count = num_absmax(args);
    if (args.one_group && to_packed)
      std::fill_n(at<float>(args.packed, p.absmax), count, *args.absmax);
    else
      move(p.absmax, args.absmax, args.one_group ? std::min<int64_t>(1, count) : count);
    move(p.map, args.map, 256);
    move(p.offset, args.offset, 1);
  }
  if (!to_packed) return;
  for (const ReorderGap& gap : args.gaps)
    std::fill_n(args.packed + gap.begin, gap.end - gap.begin, uint8_t{0});
}

}  // namespace

ReorderArgs make_reorder_args(const WeightView& view, void* packed) {
  const PackedLayout p = packed_layout_of(view.spec, view.rows, view.cols);
  ReorderArgs args{};
  args.layout = p;
  find_gaps(p, args.gaps);
  args.packed = static_cast<uint8_t*>(packed);
  args.codes = static_cast<uint8_t*>(view.codes);
  args.scales = view.scales;
  args.zeros = view.zeros;
  args.biases = view.biases;
  args.absmax = view.absmax;
  args.map = view.map;
  args.offset = view.offset;
  if (rows_are_joined(view)) {
    args.row_codes = p.k;
    args.num_code_bytes = formats::packed_bytes(p.n * p.k, p.bits);
  } else {
    int64_t row_bytes = formats::packed_bytes(p.k, p.bits);
    if (rows_are_words(view.layout)) row_bytes = formats::round_up(row_bytes, kWordBytes);
    args.row_codes = row_bytes * 8 / p.bits;
    args.num_code_bytes = p.n * row_bytes;
  }
  args.scale_type = scale_type(view.spec.scale_dtype);
  args.high_first = view.layout == WeightLayout::bitsandbytes;
  args.one_group = view.spec.granularity == Granularity::tensor;
  args.zero_words = view.layout == WeightLayout::compressed_tensors;
  args.padding = padding_of(view);
  return args;
}

void reorder_cpu(const ReorderProblem& problem) {
  const ReorderArgs& args = problem.args;
  const int64_t tiles = args.layout.tiles_per_strip();
  const bool split = problem.to_packed || rows_begin_at_bytes(args);
  const int64_t task_tiles = split ? kTaskTiles : tiles;
  const int64_t tasks_per_strip = tiles == 0 ? 0 : (tiles - 1) / task_tiles + 1;
  parallel_for(args.layout.strips * tasks_per_strip, 1, problem.num_threads,
               [&](int64_t begin, int64_t end, int) {
                 for (int64_t task = begin; task < end; ++task) {
                   const int64_t strip = task / tasks_per_strip, first = task % tasks_per_strip * task_tiles;
                   reorder_tiles_cpu(problem, {strip, first, std::min(tiles, first + task_tiles)});
                   if (first == 0) move_parameters(args, problem.to_packed, strip);
                 }
               });
  move_sections(args, problem.to_packed);
}

namespace {

constexpr Variant<ReorderProblem, void> kVariants[] = {
    {"reorder_cpu", DeviceKind::cpu, [](const ReorderProblem&) { return std::string(); }, reorder_cpu},
    {"reorder_cuda", DeviceKind::cuda, refuse_reorder_cuda, reorder_cuda},
};

// Groups that run across rows are those of rows where they divide them, and there is no packed form where
// they do not.
QuantSpec packed_spec(QuantSpec spec) {
  if (spec.granularity == Granularity::flat) spec.granularity = Granularity::group;
  return spec;
}

void check_same(const WeightView& view, const char* view_name, const PackedWeight& packed,
                const char* packed_name) {
  const auto same = [&](const char* field, const auto& a, const auto& b) {
    HALFBYTE_CHECK(a == b, usage, "{}: {}.{} must be that of {}, {}, got {}", kOp, view_name, field,
                   packed_name, b, a);
  };
  check_same_spec(kOp, view_name, packed_spec(view.spec), packed_name, packed_spec(packed.spec));
  same("rows", view.rows, packed.rows);
  same("cols", view.cols, packed.cols);
  same("device", to_string(view.device), to_string(packed.device));
}

void run(const WeightView& view, const char* view_name, const PackedWeight& packed, const char* packed_name,
         bool to_packed, Execution execution) {
  HALFBYTE_CHECK(packed.version == kPackedWeightVersion, usage, "{}: {}.version must be {}, got {}", kOp,
                 packed_name, kPackedWeightVersion, packed.version);
  HALFBYTE_CHECK(execution.num_threads >= 0, usage, "{}: execution.num_threads must be >= 0, got {}", kOp,
                 execution.num_threads);
  check_same(view, view_name, packed, packed_name);
  const QuantShape shape = quant_shape(view.spec, view.rows, view.cols);
  HALFBYTE_CHECK(view.layout != WeightLayout::bitsandbytes || info(view.spec.format).bits == 4, usage,
                 "{}: {}.layout bitsandbytes has codes of 4 bits, got {}", kOp, view_name,
                 info(view.spec.format).name);
  const auto part = [&](const char* name, const void* data, bool wanted, const char* rule) {
    HALFBYTE_CHECK(wanted || data == nullptr, usage, "{}: {}.{} must be null: only {}", kOp, view_name, name,
                   rule);
  };
  const bool nested = view.spec.double_quant;
  part("zeros", view.zeros, has_zeros(view.spec), "asymmetric integer formats have zero points");
  part("biases", view.biases, has_biases(view.spec), "affine formats have biases");
  part("absmax", view.absmax, nested, "double quantization has one");
  part("map", view.map, nested, "double quantization has one");
  part("offset", view.offset, nested, "double quantization has one");
  check_device(packed.device);

  ReorderProblem problem;
  ReorderArgs& args = problem.args = make_reorder_args(view, packed.data);
  const PackedLayout& p = args.layout;
  // An empty matrix has no place for the one scale of a tensor.
  const int64_t num_scales = p.n * p.k == 0 ? 0 : shape.num_groups;
  const int64_t num_zeros = !p.has_zeros || num_scales == 0 ? 0
                            : args.zero_words               ? (zero_rows(args) + rows_per_word(args) - 1) /
                                                    rows_per_word(args) * p.groups * kWordBytes
                                              : num_scales;
  const auto name = [&](const char* part) { return fmt::format("{}.{}", view_name, part); };
  const std::array<std::string, 7> names = {name("codes"),  name("scales"), name("zeros"), name("biases"),
                                            name("absmax"), name("map"),    name("offset")};
  const std::string data_name = fmt::format("{}.data", packed_name);
  const bool out = !to_packed;
  const int64_t scale_size = p.scale_bytes, absmax_bytes = (num_scales + 255) / 256 * kWordBytes;
  const std::array<ArgumentMemory, 8> arguments{
      {{data_name.c_str(), packed.data, p.num_bytes, packed.num_bytes, formats::kPackedAlignment, false,
        to_packed},
       {names[0].c_str(), view.codes, args.num_code_bytes, -1, 1, false, out},
       {names[1].c_str(), view.scales, num_scales * scale_size, -1, scale_size, false, out},
       {names[2].c_str(), view.zeros, num_zeros, -1, args.zero_words ? kWordBytes : 1, false, out},
       {names[3].c_str(), view.biases, num_scales * p.bias_bytes, -1, scale_size, false, out},
       {names[4].c_str(), view.absmax, nested ? absmax_bytes : 0, -1, kWordBytes, false, out},
       {names[5].c_str(), view.map, nested ? 256 * kWordBytes : 0, -1, kWordBytes, false, out},
       {names[6].c_str(), view.offset, nested ? kWordBytes : 0, -1, kWordBytes, false, out}}};
  for (const ArgumentMemory& argument : arguments) check_argument(kOp, argument, packed.device);
  check_all_apart(kOp, arguments);
  problem.to_packed = to_packed;
  problem.device = packed.device;
  problem.num_threads = execution.num_threads;
  problem.stream = execution.stream;
  choose<ReorderProblem, void>(kOp, kVariants, problem, packed.device.kind).run(problem);
}

}  // namespace

void reorder(const WeightView& from, const PackedWeight& to, Execution execution) {
  run(from, "from", to, "to", true, execution);
}
void reorder(const PackedWeight& from, const WeightView& to, Execution execution) {
  run(to, "to", from, "from", false, execution);
}

}  // namespace halfbyte
