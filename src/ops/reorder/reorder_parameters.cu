// reorder_parameters: scales, zero points and biases of a weight from a view to the packed form, or back
// (kToPacked), and what double quantization has beside them, or the global scale.
//
// A warp takes kGroupsPerWarp groups of the 32 rows of a strip, a lane a row: the packed side is contiguous,
// of the view each lane has a sector.
#include "cuda/device/memory.cuh"
#include "halfbyte_config.h"
#include "ops/reorder/reorder_args.h"

namespace halfbyte::device {

// Of the view, the parameters of consecutive groups.
template <class T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Run {
  T value[kGroupsPerWarp];
};

// The groups from `first` on of a row. `place`: where a parameter lies in the packed memory.
template <class T, class Place>
__device__ __forceinline__ void move_parameters(const ReorderArgs& args, i64 row, i64 first, void* view,
                                                const Place& place) {
  const PackedLayout& p = args.layout;
  T* const of_view = static_cast<T*>(view) + (args.one_group ? 0 : row * p.weight_groups + first);
  const auto packed = [&](int i) { return reinterpret_cast<T*>(args.packed + place(row, first + i)); };
  const bool in_view = row < (kToPacked ? p.n : zero_rows(args));
  const bool whole = in_view && first + kGroupsPerWarp <= p.groups && !args.one_group &&
                     reinterpret_cast<u64>(of_view) % alignof(Run<T>) == 0;
  Run<T> run = {};
  if constexpr (kToPacked) {
    if (whole) {
      run = *reinterpret_cast<const Run<T>*>(of_view);
    } else if (in_view) {
#pragma unroll
      for (int i = 0; i < kGroupsPerWarp; ++i)
        if (first + i < p.groups) run.value[i] = of_view[i];
    }
#pragma unroll
    for (int i = 0; i < kGroupsPerWarp; ++i)
      if (first + i < p.padded_groups()) *packed(i) = run.value[i];
  } else {
    if (!in_view) return;
#pragma unroll
    for (int i = 0; i < kGroupsPerWarp; ++i)
      if (first + i < p.groups) run.value[i] = *packed(i);
    if (whole) {
      *reinterpret_cast<Run<T>*>(of_view) = run;
    } else {
#pragma unroll
      for (int i = 0; i < kGroupsPerWarp; ++i)
        if (first + i < p.groups) of_view[i] = run.value[i];
    }
  }
}
// The same where a group of the view is several of the packed form.
template <class T, class Place>
__device__ __forceinline__ void repeat_parameters(const ReorderArgs& args, i64 row, i64 first, void* view,
                                                  const Place& place) {
  const PackedLayout& p = args.layout;
#pragma unroll 1
  for (i64 group = first; group < min(first + kGroupsPerWarp, kToPacked ? p.padded_groups() : p.groups);
       ++group) {
    T& packed = *reinterpret_cast<T*>(args.packed + place(row, group));
    T* const of_view = static_cast<T*>(view) + view_parameter(args, row, group);
    if constexpr (kToPacked)
      packed = row < p.n && group < p.groups ? *of_view : T{};
    else if (row < zero_rows(args) && group % p.repeats == 0)
      *of_view = packed;
  }
}
template <class T, class Place>
__device__ __forceinline__ void move_or_repeat(const ReorderArgs& args, i64 row, i64 first, void* view,
                                               const Place& place) {
  if (args.layout.repeats == 1)
    move_parameters<T>(args, row, first, view, place);
  else
    repeat_parameters<T>(args, row, first, view, place);
}
template <class Place>
__device__ __forceinline__ void move_parameters(const ReorderArgs& args, i64 row, i64 first, void* view,
                                                int size, const Place& place) {
  if (size == 1)
    move_or_repeat<u8>(args, row, first, view, place);
  else if (size == 2)
    move_or_repeat<u16>(args, row, first, view, place);
  else
    move_or_repeat<u32>(args, row, first, view, place);
}

__device__ __forceinline__ void move_zero_words(const ReorderArgs& args, i64 row, i64 first) {
  const PackedLayout& p = args.layout;
  if constexpr (kToPacked) {
    for (i64 group = first; group < min(first + kGroupsPerWarp, p.padded_groups()); ++group)
      args.packed[p.zero(row, group)] = zero_from_words(args, row, group);
  } else {
    const int lane = static_cast<int>(row % kUnitRows);
    if (lane >= p.bits) return;
    for (i64 group = first; group < min(first + kGroupsPerWarp, p.weight_groups); ++group)
      put_zero_word(args, row / kUnitRows, lane, group);
  }
}

// Between a section of the packed memory and an array of the view; `one`: which has only the first.
__device__ __forceinline__ void move_section(const ReorderArgs& args, i64 section, float* view, i64 count,
                                             bool one, i64 thread, i64 num_threads) {
  float* const packed = reinterpret_cast<float*>(args.packed + section);
  if constexpr (kToPacked) {
    for (i64 i = thread; i < count; i += num_threads) packed[i] = view[one ? 0 : i];
  } else {
    for (i64 i = thread; i < (one ? min<i64>(count, 1) : count); i += num_threads) view[i] = packed[i];
  }
}

extern "C" __global__ void __launch_bounds__(kReorderThreads)
    reorder_parameters(const __grid_constant__ ReorderArgs args) {
  const PackedLayout& p = args.layout;
  const i64 thread = block_index() * kReorderThreads + threadIdx.x, warp = thread / 32;
  const i64 warps_per_strip = (p.padded_groups() + kGroupsPerWarp - 1) / kGroupsPerWarp;
  if (warp < p.strips * warps_per_strip) {
    const i64 row = warp / warps_per_strip * kUnitRows + thread % 32,
              first = warp % warps_per_strip * kGroupsPerWarp;
    move_parameters(args, row, first, args.scales, p.scale_bytes,
                    [&](i64 r, i64 group) { return p.scale(r, group); });
    if (p.has_zeros && args.zero_words)
      move_zero_words(args, row, first);
    else if (p.has_zeros)
      move_or_repeat<u8>(args, row, first, args.zeros, [&](i64 r, i64 group) { return p.zero(r, group); });
    if (p.has_biases)
      move_parameters(args, row, first, args.biases, p.bias_bytes,
                      [&](i64 r, i64 group) { return p.bias(r, group); });
  }
  const i64 num_threads = static_cast<i64>(gridDim.x) * gridDim.y * kReorderThreads;
  if (p.double_quant) {
    move_section(args, p.absmax, args.absmax, num_absmax(args), args.one_group, thread, num_threads);
    move_section(args, p.map, args.map, 256, false, thread, num_threads);
    move_section(args, p.offset, args.offset, 1, false, thread, num_threads);
  }
  if (p.has_global_scale)
    move_section(args, p.global_scale, args.global_scale, 1, false, thread, num_threads);
  if constexpr (kToPacked) {
    for (const ReorderGap& gap : args.gaps)
      for (i64 i = gap.begin + thread; i < gap.end; i += num_threads) args.packed[i] = 0;
  }
}

}  // namespace halfbyte::device
