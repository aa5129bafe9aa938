#include "ops/reorder/reorder.h"

#include <algorithm>

#include "core/expect.h"
#include "core/format.h"
#include "core/pack_step.h"
#include "core/packed_weight.h"
#include "core/tensor_check.h"
#include "core/weight_view.h"
#include "cpu/parallel.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

using formats::PackedLayout;

constexpr const char* kOp = "reorder";
// Tiles that are taken at once: of a row 2 KB. A task is large against the cost of scheduling it.
constexpr int64_t kTaskTiles = 64;

int padding_of(const ConstWeightView& view) {
  if (view.layout == Layout::compressed_tensors || view.layout == Layout::mlx) return 0;
  const formats::Codec codec = make_codec(view.spec);
  if (codec.kind == formats::Kind::table) return codec.book.zero_code;
  return codec.kind == formats::Kind::integer && !codec.asymmetric ? -codec.q_min : kPaddingOfGroup;
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
  int64_t places[kGroupsAtOnce];  // in a row of the view
  for (int64_t first = 0; first < p.padded_groups(); first += kGroupsAtOnce) {
    const int64_t num_padded = std::min<int64_t>(kGroupsAtOnce, p.padded_groups() - first),
                  num_groups = std::clamp<int64_t>(p.groups - first, 0, num_padded);
    for (int64_t i = 0; i < num_padded; ++i) {
      packed[i] = at<T>(args.packed, begin(first + i));
      places[i] = (first + i) / p.repeats;
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      T* const row = static_cast<T*>(view) + view_parameter(args, first_row + r, 0);
      for (int64_t i = 0; i < num_groups; ++i) {
        if (to_packed)
          packed[i][r] = row[places[i]];
        else
          row[places[i]] = packed[i][r];
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
  const int64_t first = strip * formats::kUnitRows;
  for (int64_t group = 0; to_packed && group < p.padded_groups(); ++group)
    for (int64_t row = first; row < first + formats::kUnitRows; ++row)
      args.packed[p.zero(row, group)] = zero_from_words(args, row, group);
  for (int word = 0; !to_packed && word < p.bits; ++word)
    for (int64_t group = 0; group < p.weight_groups; ++group) put_zero_word(args, strip, word, group);
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

// What there is beside the scales, and the gaps.
void move_sections(const ReorderArgs& args, bool to_packed) {
  const PackedLayout& p = args.layout;
  const auto move = [&](int64_t section, float* view, int64_t count) {
    float* const packed = at<float>(args.packed, section);
    std::copy_n(to_packed ? view : packed, count, to_packed ? packed : view);
  };
  if (p.double_quant) {
    const int64_t count = num_absmax(args);
    if (args.one_group && to_packed && count > 0)
      std::fill_n(at<float>(args.packed, p.absmax), count, *args.absmax);
    else
      move(p.absmax, args.absmax, args.one_group ? std::min<int64_t>(1, count) : count);
    move(p.map, args.map, 256);
    move(p.offset, args.offset, 1);
  }
  if (p.has_global_scale) move(p.global_scale, args.global_scale, 1);
  if (!to_packed) return;
  for (const ReorderGap& gap : args.gaps)
    std::fill_n(args.packed + gap.begin, gap.end - gap.begin, uint8_t{0});
}

}  // namespace

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
  if (p.double_quant) section(p.absmax, p.offset + int64_t{sizeof(float)} - p.absmax);
  if (p.has_global_scale) section(p.global_scale, int64_t{sizeof(float)});
  section(p.num_bytes, 0);
}

void place_reorder(ReorderArgs& args, const ConstWeightView& view, const void* packed) {
  // One description for both directions: which of the two a kernel writes is its own.
  const auto pointer = [](auto* data) {
    return const_cast<std::remove_const_t<std::remove_pointer_t<decltype(data)>>*>(data);
  };
  args.packed = static_cast<uint8_t*>(pointer(packed));
  args.codes = static_cast<uint8_t*>(pointer(view.codes));
  args.scales = pointer(view.scales);
  args.zeros = pointer(view.zeros);
  args.biases = pointer(view.biases);
  args.absmax = pointer(view.absmax);
  args.map = pointer(view.map);
  args.offset = pointer(view.offset);
  args.global_scale = pointer(view.global_scale);
}

ReorderArgs make_reorder_args(const ConstWeightView& view, const void* packed) {
  ReorderArgs args{};
  args.layout = packed_layout_of(view.spec, view.rows, view.cols);
  find_gaps(args.layout, args.gaps);
  place_reorder(args, view, packed);
  const formats::WeightViewLayout v = view_layout_of(view.spec, view.rows, view.cols, view.layout);
  args.row_bits = v.flat_codes ? v.cols * v.bits : v.row_bytes * 8;
  args.num_code_bytes = v.code_bytes();
  args.scale_type = scale_type(view.spec.scale_dtype);
  args.high_first = v.high_first;
  args.one_group = v.one_group;
  args.zero_words = v.zero_words;
  args.padding = padding_of(view);
  return args;
}

namespace {

void move_all(const ReorderProblem& problem) {
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

}  // namespace

ReorderRun reorder_cpu(const ReorderProblem& problem) {
  return [problem](const ReorderArgs& args, void*) {
    ReorderProblem placed = problem;
    placed.args = args;
    move_all(placed);
  };
}

namespace {

constexpr Variant<ReorderProblem, ReorderRun> kVariants[] = {
    {"reorder_cpu", DeviceKind::cpu, [](const ReorderProblem&) { return std::string(); }, reorder_cpu},
    {"reorder_cuda", DeviceKind::cuda, refuse_reorder_cuda, reorder_cuda},
};

// Of checked arguments.
ReorderProblem problem_of(const ConstWeightView& view, const void* packed, bool to_packed, int num_threads) {
  ReorderProblem problem;
  problem.args = make_reorder_args(view, packed);
  problem.to_packed = to_packed;
  problem.device = view.device;
  // Codes are moved by vectors, 4 in the time of an element that is rounded.
  problem.num_threads =
      threads_for(num_threads, static_cast<double>(view.rows) * static_cast<double>(view.cols) / 4);
  return problem;
}
ReorderRun prepare(const ReorderProblem& problem) {
  return choose<ReorderProblem, ReorderRun>(kOp, kVariants, problem, problem.device.kind).run(problem);
}

struct PreparedStep : PackStep {
  const ReorderArgs args;
  const ReorderRun prepared;

  explicit PreparedStep(const ReorderProblem& problem) : args(problem.args), prepared(prepare(problem)) {}
  void run(const ConstWeightView& view, void* packed, void* stream) const override {
    ReorderArgs placed = args;
    place_reorder(placed, view, packed);
    prepared(placed, stream);
  }
};

// Groups that run across rows are those of rows where they divide them, and there is no packed form where
// they do not.
QuantSpec packed_spec(QuantSpec spec) {
  if (spec.granularity == Granularity::flat) spec.granularity = Granularity::group;
  return spec;
}

void check_same(const ConstWeightView& view, const char* view_name, const ConstPackedWeight& packed,
                const char* packed_name) {
  const auto same = [&](const char* field, const auto& a, const auto& b) {
    HALFBYTE_CHECK(a == b, usage, "{}: {}.{} must be that of {}, {}, got {}", kOp, view_name, field,
                   packed_name, b, a);
  };
  check_same_spec(kOp, view_name, packed_spec(view.spec), packed_spec(packed.spec), packed_name);
  same("rows", view.rows, packed.rows);
  same("cols", view.cols, packed.cols);
  same("device", to_string(view.device), to_string(packed.device));
}

// The names of the two arguments.
struct Names {
  WeightViewNames view;
  const char* packed;
};
constexpr Names kToPacked = {{"from", "from.codes", "from.scales", "from.zeros", "from.biases", "from.absmax",
                              "from.map", "from.offset", "from.global_scale"},
                             "to"};
constexpr Names kFromPacked = {{"to", "to.codes", "to.scales", "to.zeros", "to.biases", "to.absmax", "to.map",
                                "to.offset", "to.global_scale"},
                               "from"};

void run(const ConstWeightView& view, const ConstPackedWeight& packed, bool to_packed, Execution execution) {
  const Names& names = to_packed ? kToPacked : kFromPacked;
  HALFBYTE_MUST(execution.num_threads >= 0, invalid_argument, kOp, "execution.num_threads", "be", ">= 0",
                execution.num_threads);
  check_same(view, names.view.view, packed, names.packed);
  check_device(packed.device);
  const Device device = packed.device;
  std::vector<ArgumentMemory> arguments = check_view(kOp, names.view, view, device, 1, !to_packed);
  arguments.push_back(check_packed(kOp, names.packed, packed, device, to_packed));
  check_all_apart(kOp, arguments);

  const ReorderProblem problem = problem_of(view, packed.data, to_packed, execution.num_threads);
  prepare(problem)(problem.args, execution.stream);
}

}  // namespace

std::shared_ptr<const PackStep> PackStep::make(ConstWeightView view, int64_t alignment, int num_threads) {
  // The address of the codes says how they are aligned.
  view.codes = reinterpret_cast<const void*>(alignment);  // NOLINT(performance-no-int-to-ptr)
  return std::make_shared<PreparedStep>(problem_of(view, nullptr, true, num_threads));
}

void reorder(const ConstWeightView& from, const PackedWeight& to, Execution execution) {
  run(from, to, true, execution);
}
void reorder(const ConstPackedWeight& from, const WeightView& to, Execution execution) {
  run(to, from, false, execution);
}

}  // namespace halfbyte
