// What the CUDA variants of `qgemm` share on the host.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/experts_cuda.h"
#include "ops/qgemm/weight/stage_x_cuda.h"
#include "ops/qgemm/weight/sum_cuda.h"

namespace halfbyte {

// The rows of the table of kernels (src/kernels): those of all variants.
std::vector<cuda::Kernel> qgemm_kernels();
cuda::Kernel qgemm_plain_kernel();  // one of them

// What rows of variants have in common: the keys of the weight (codec, group-size, double-quant) and of
// dtype, and the problem of their values: packed, forward, m = 1, n = k = 4096. Error(usage) where the values
// do not go together.
std::vector<KernelKey> qgemm_keys();
std::vector<KernelKey> qgemm_fragment_keys();  // the same, but for formats whose codes are bit streams
QgemmProblem qgemm_problem(const cuda::KernelValues& values);
// A key whose values are numbers; the value of one.
KernelKey number_key(const char* name, const std::vector<int>& values, const char* description);
int number_of(const cuda::KernelValues& values, std::string_view key);

// Of variants for capability 9.0: what their kernels are compiled for, and why the device is another; empty
// if it is not.
inline constexpr const char* kSm90Target = "sm_90a";
std::string refuse_other_than_sm90(const QgemmProblem& problem);
// Two neighbours of y are at a multiple of their bytes.
bool has_pairs_of_y(const QgemmProblem& problem);

// A kernel of a product; `early`: it may start before the kernel before it has ended, where the device can.
template <class Args>
void launch_qgemm(bool early, cuda::CUfunction function, cuda::Grid grid, void* stream, const Args& args) {
  if (early)
    cuda::launch_early(function, grid, stream, args);
  else
    cuda::launch(function, grid, stream, args);
}

// A product by one kernel; by qgemm_stage_x before it where it needs x in another form, and by qgemm_sum
// after it where it leaves parts of sums. A variant's constructor calls stage_x() if need be, fills in args_
// but for addresses, which place() adds for each run, and ends with load().
template <class Args>
class QgemmOneKernel : public QgemmKernel {
 public:
  std::string name() const override { return name_; }
  std::string backend() const override { return "cuda " + context_.target; }
  int64_t workspace_bytes() const override { return before_bytes() + sum_.workspace_bytes(); }
  void run(const QgemmTensors& tensors, void* stream, void* workspace) const override {
    const cuda::Scope scope(context_);
    const bool can_start_early = context_.capability >= 90;
    bool early = problem_.early_start && can_start_early;
    QgemmTensors loaded = tensors;
    void* const parts =
        sum_.workspace_bytes() == 0 ? nullptr : static_cast<std::byte*>(workspace) + before_bytes();
    if (staged_x_.is_used()) {
      staged_x_.run(tensors.x, workspace, early, stream);
      loaded.x = workspace;
      early = can_start_early;  // the weight is there before x is staged
    }
    if (expert_rows_.is_used()) {
      expert_rows_.run(tensors, workspace, parts, sum_.parts(), sum_.stride(), stream);
      expert_rows_.place(loaded, workspace);
      early = can_start_early;
    }
    Args args = args_;
    place(args, loaded, parts);
    launch_qgemm(early, function_, grid_, stream, args);
    sum_.run(tensors, stream, parts);
  }

 protected:
  explicit QgemmOneKernel(const QgemmProblem& problem)
      : problem_(problem), context_(cuda::context(problem.device.index)) {}

  // `parts`: of an element of x, 3 or 1.
  void stage_x(int parts) {
    const cuda::Scope scope(context_);
    staged_x_ = QgemmStageX(context_, problem_, parts);
  }
  // Of experts: tiles of so many rows, listed before, and x copied to their order where it lies in another
  // one and the kernel does not gather it. `given`: what its blocks give each other.
  void list_expert_rows(int64_t tile, int64_t most_width, bool copies_x = true, QgemmGivenSums given = {}) {
    const cuda::Scope scope(context_);
    expert_rows_ = QgemmExpertRows(context_, problem_, tile, most_width, copies_x, given);
  }
  // `parts`: of the sums of a tile. Those of several are left in the workspace, and of one where y cannot be
  // stored by pairs. `swiglu`: the kernel does it.
  void load(const cuda::KernelSpec& spec, const cuda::Grid& grid, int64_t parts = 1, QgemmSumTypes types = {},
            bool stores_y = true, bool swiglu = false) {
    const cuda::Scope scope(context_);
    name_ = spec.function;
    function_ = cuda::get_kernel(context_, spec);
    cuda::allow_shared_bytes(function_, grid.shared_bytes);
    grid_ = grid;
    const QgemmExperts& experts = problem_.experts;
    if (parts > 1 || !stores_y || experts.slots_per_y > 1 || experts.routing_gradient ||
        (experts.swiglu && !swiglu))
      sum_ = QgemmSum(context_, problem_, parts, types);
  }

  // Elements from one row to the next, of x as it is loaded.
  int64_t x_stride() const { return staged_x_.is_used() ? staged_x_.stride() : problem_.in_cols(); }

  const QgemmProblem problem_;
  const cuda::Context& context_;
  Args args_{};

 private:
  // tensors.x: as it was staged. `parts`: memory for sums that are left; null where none are.
  virtual void place(Args& args, const QgemmTensors& tensors, void* parts) const = 0;

  int64_t before_bytes() const { return staged_x_.workspace_bytes() + expert_rows_.workspace_bytes(); }

  std::string name_;
  cuda::CUfunction function_ = nullptr;
  cuda::Grid grid_;
  QgemmStageX staged_x_;
  QgemmExpertRows expert_rows_;  // one of the two at most
  QgemmSum sum_;
};

}  // namespace halfbyte
