#include "halfbyte/qgemm_parallel.hpp"

#include "core/words.h"

namespace halfbyte {

namespace {

constexpr std::array<Word<ParallelStyle>, 2> kStyles{
    {{ParallelStyle::colwise, "colwise"}, {ParallelStyle::rowwise, "rowwise"}}};

}  // namespace

const char* to_string(ParallelStyle style) { return word_of(kStyles, style); }

Slice part_of(int axis, int64_t extent, int64_t unit, int rank, int size) {
  HALFBYTE_CHECK(0 <= rank && rank < size, usage, "part_of: rank must be from 0 to size - 1, got {} of {}",
                 rank, size);
  HALFBYTE_CHECK(unit > 0 && extent > 0 && extent % unit == 0, usage,
                 "part_of: extent must be a multiple of unit, got {} and {}", extent, unit);
  const int64_t units = extent / unit;
  HALFBYTE_CHECK(units >= size, usage, "part_of: {} units of {} are too few for {} members", units, unit,
                 size);
  const auto begin = [&](int64_t member) {
    return (units / size * member + std::min<int64_t>(member, units % size)) * unit;
  };
  return {axis, begin(rank), begin(rank + 1)};
}

ParallelQgemmPlan ParallelQgemmPlan::select(const Communicator& group, const QgemmDescriptor& descriptor,
                                            ParallelStyle style, const PlanPreference& preference) {
  HALFBYTE_CHECK(style == ParallelStyle::colwise || style == ParallelStyle::rowwise, usage,
                 "parallel qgemm: style must be colwise or rowwise, got {}", static_cast<int>(style));
  check_descriptor(descriptor);
  const bool sums = group.size() > 1 && (style == ParallelStyle::rowwise) != descriptor.transposed;
  QgemmDescriptor part = descriptor;
  if (sums && group.rank() != 0) part.bias = part.accumulate = false;
  return {group, descriptor, QgemmPlan::select(group.device(), part, preference), sums};
}

void ParallelQgemmPlan::run(void* stream, const Workspace& workspace, const Qgemm::Args& args) const {
  if (!sums_) return product_.run(stream, workspace, args);
  HALFBYTE_CHECK(is_contiguous(args.y), usage, "parallel qgemm: y must be contiguous where it is a sum");
  Qgemm::Args own = args;
  if (descriptor_.bias && !product_.descriptor().bias) {
    HALFBYTE_CHECK(args.bias.data != nullptr, usage, "parallel qgemm: bias must be given to every member");
    own.bias = {};
  }
  product_.run(stream, workspace, own);
  group_.all_reduce(args.y, stream);
}

}  // namespace halfbyte
