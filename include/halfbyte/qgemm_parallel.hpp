// Products with weights of which each member of a group has a part: tensor parallelism.
//
//   colwise   each has some rows of W[n, k], so some columns of y     y_r = x . W_r^T (+ bias_r)
//   rowwise   each has some columns of W, and those of x              y = sum over r of x_r . W_r^T (+ bias)
//
// The names are those of torch.distributed, which counts the axes of W^T. One colwise product and then a
// rowwise one, as up and down of a feed-forward network, exchange data once. Transposed it is the other way
// round: colwise sums, rowwise does not.
//
//   const Slice part = part_of(1, k, 64, group.rank(), group.size());  // whole groups of columns
//   const PackedTensor w = load_weight(checkpoint, name, device, {}, part).pack();
//   const auto plan = ParallelQgemmPlan::select(
//       group, {.spec = w.view().spec, .m = m, .n = n, .k = w.view().cols}, ParallelStyle::rowwise);
//   plan.run(stream, workspace, {.x = x, .weight = w.view(), .y = y});
#pragma once

#include "halfbyte/communicator.hpp"
#include "halfbyte/qgemm.hpp"

namespace halfbyte {

enum class ParallelStyle : uint8_t { colwise, rowwise };
HALFBYTE_API const char* to_string(ParallelStyle style);  // "colwise" "rowwise"

// The part of member `rank` of `extent` elements along `axis`: whole units, which the first members have one
// more of where they do not come out even. Throws Error(usage) if the extent is no multiple of the unit, or
// there are fewer units than members.
HALFBYTE_API Slice part_of(int axis, int64_t extent, int64_t unit, int rank, int size);

// A QgemmPlan and, where members have summands, the sum: as Communicator::all_reduce, in the dtype of y. Each
// summand is rounded to it, so y differs from that of one device by half a unit of each summand at most,
// beside what QgemmPlan allows. All members get the same bytes.
class HALFBYTE_API ParallelQgemmPlan {
 public:
  // `descriptor` is of this member's part: rowwise, k is the number of its columns; colwise, n that of its
  // rows. bias and accumulate are the same for all members: summands are added to them once. Throws as
  // QgemmPlan::select.
  static ParallelQgemmPlan select(const Communicator& group, const QgemmDescriptor& descriptor,
                                  ParallelStyle style, const PlanPreference& preference = {});

  const QgemmDescriptor& descriptor() const { return descriptor_; }
  const Sku& sku() const { return product_.sku(); }
  bool sums() const { return sums_; }  // whether a run exchanges data
  int64_t workspace_size() const { return product_.workspace_size(); }
  // As QgemmPlan::run. rowwise, bias is [n] for every member, and read by the first only; with accumulate,
  // all members have the same y. Where it sums, y is contiguous.
  void run(void* stream, const Workspace& workspace, const Qgemm::Args& args) const;

 private:
  ParallelQgemmPlan(Communicator group, QgemmDescriptor descriptor, QgemmPlan product, bool sums)
      : group_(std::move(group)),
        descriptor_(std::move(descriptor)),
        product_(std::move(product)),
        sums_(sums) {}

  Communicator group_;
  QgemmDescriptor descriptor_;
  QgemmPlan product_;  // of rank 0 with bias and accumulate, of the others without
  bool sums_;
};

}  // namespace halfbyte
