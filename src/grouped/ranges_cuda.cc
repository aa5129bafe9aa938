#include "grouped/ranges_cuda.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/arithmetic.h"
#include "cuda/config.h"

namespace halfbyte {
namespace {

// In whole chunks, where the elements of a group that lie together are such. False: they are not.
bool to_chunks(Groups& groups, const Grouping& grouping, int64_t chunk) {
  if (groups.group_inner == grouping.inner && grouping.inner > 1 && grouping.inner % chunk == 0) {
    groups.group_inner /= chunk;
    groups.strides.inner = chunk;
    return true;
  }
  if (grouping.inner == 1 && grouping.group_size % chunk == 0 && grouping.axis % chunk == 0) {
    groups.axis /= chunk;
    groups.group_axis /= chunk;
    groups.strides.axis = chunk;
    return true;
  }
  return false;
}

}  // namespace

cuda::KernelSpec ranges_kernel(const char* name, DType dtype, bool counts, bool chunks, bool wide) {
  return {"grouped/ranges.cu", name,
          fmt::format("#define HALFBYTE_KERNEL {}\n", name) +
              cuda::config_text(cuda::element_config(dtype) +
                                fmt::format("constexpr bool kCounts = {}, kChunks = {}, kWide = {};\n",
                                            counts, chunks, wide))};
}

RangesCuda select_ranges(const char* name, const Grouping& grouping, DType dtype, bool counts, bool whole) {
  RangesCuda made;
  RangesArgs& args = made.args;
  args.groups = grouping.groups();
  const bool chunks = whole && !counts && to_chunks(args.groups, grouping, 16 / size_of(dtype));
  args.columns = grouping.side_by_side();
  const int64_t units = args.groups.longest();
  // Enough parts to fill a device, not so small that joining them counts.
  const int64_t per_part = args.columns ? 64 : 32 * 16;
  args.per_split = std::max(per_part, ceil_div(units, 65536));
  args.splits = std::max<int64_t>(1, ceil_div(units, args.per_split));
  const int64_t threads = args.groups.num_groups * args.splits * (args.columns ? 1 : 32);
  const bool wide = is_wide(std::max(threads, units));
  made.spec = ranges_kernel(name, dtype, counts, chunks, wide);
  made.grid = {grouping.num_elements() == 0 ? 0 : ceil_div(threads, kRangesThreads), kRangesThreads};
  return made;
}

}  // namespace halfbyte
