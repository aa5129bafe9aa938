#include "core/plan_base.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "core/expect.h"
#include "core/per_thread.h"
#include "core/plan_device.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

// Of two tensors of one address, shape and dtype, which have elements: whether each element of one is that of
// the other.
bool same_elements(const ArgumentData& a, const ArgumentData& b) {
  const std::span<const int64_t> shape = *a.shape;
  if (shape.size() != b.shape->size()) return true;  // [] and [1]
  int64_t contiguous = 1;                            // stride of a tensor without strides
  for (size_t i = shape.size(); i-- > 0;) {
    const auto stride = [&](const ArgumentData& view) {
      return view.strides->empty() ? contiguous : (*view.strides)[i];
    };
    if (shape[i] > 1 && stride(a) != stride(b)) return false;
    contiguous *= shape[i];
  }
  return true;
}

}  // namespace

// ---- Rows

ArgumentRow::ArgumentRow(std::string name, DType dtype, std::vector<int64_t> shape)
    : name_(std::move(name)),
      dtype_(dtype),
      shape_(std::move(shape)),
      is_tensor_(true),
      alignment_(is_packed(dtype) ? 1 : size_of(dtype)) {}
ArgumentRow::ArgumentRow(std::string name, int64_t num_bytes)
    : name_(std::move(name)), is_tensor_(false), num_bytes_(num_bytes) {}

ArgumentRow& ArgumentRow::written(bool value) {
  written_ = value;
  return *this;
}
ArgumentRow& ArgumentRow::aligned(int64_t alignment) {
  alignment_ = alignment;
  return *this;
}
ArgumentRow& ArgumentRow::promised(int64_t alignment) {
  promised_ = alignment_ > 1 || alignment >= 16 ? alignment : 0;
  return *this;
}
ArgumentRow& ArgumentRow::strided(bool value) {
  may_be_strided_ = value;
  contiguous_as_ = " as descriptor.strided is false";
  return *this;
}
ArgumentRow& ArgumentRow::any_leading_axes() {
  any_leading_axes_ = true;
  return *this;
}
ArgumentRow& ArgumentRow::absent_unless(bool present, std::string_view reason) {
  if (!present) absent_ = fmt::format("must have no data, as {}", reason);
  return *this;
}
ArgumentRow& ArgumentRow::null_unless(bool present, std::string_view reason) {
  if (!present) absent_ = fmt::format("must be null: {}", reason);
  return *this;
}
ArgumentRow& ArgumentRow::optional(bool value) {
  optional_ = value;
  return *this;
}

// ---- Plans

namespace {

const PerThread<Memory> kept_workspace;

}  // namespace

ThreadWorkspace::ThreadWorkspace(int64_t num_bytes) {
  if (Memory* const kept = kept_workspace.find()) memory_ = std::exchange(*kept, {});
  if (memory_.num_bytes() >= num_bytes) return;
  memory_ = {};  // before more is taken
  // By powers of two, as the rows of x grow one by one.
  const auto size = static_cast<uint64_t>(num_bytes);
  memory_ = Memory({}, num_bytes > kMostKept ? num_bytes : static_cast<int64_t>(std::bit_ceil(size)));
}
ThreadWorkspace::~ThreadWorkspace() {
  if (memory_.num_bytes() > kMostKept) return;
  if (Memory* const kept = kept_workspace.get()) *kept = std::move(memory_);
}

PlanBase::PlanBase(const char* name, Device on, DType dtype, const PlanPreference& preference)
    : op(name), device(on), num_threads(preference.num_threads) {
  HALFBYTE_MUST(num_threads >= 0, invalid_argument, op, "preference.num_threads", "be", ">= 0", num_threads);
  check_device(device);
  const bool is_cuda = device.kind == DeviceKind::cuda;
  sku = {op, is_cuda ? "" : fmt::format("{}_cpu", op),
         is_cuda ? "cuda " + target_of(device) : fmt::format("cpu {}", simd_target()), ""};
  sku.element = dtype;
  guarantee.math = guarantee.accumulator = dtype == DType::f64 ? DType::f64 : DType::f32;
}

QuantizeStatus PlanBase::status(void* stream, const Workspace& workspace) const {
  check_workspace(op, workspace, workspace_size, device);
  if (!has_status_) {
    wait_for(device, stream);
    return {};
  }
  return device.kind == DeviceKind::cuda ? read_counts(device, workspace.data, stream)
                                         : *static_cast<const QuantizeStatus*>(workspace.data);
}

void PlanBase::needs_scratch(int64_t num_bytes) {
  if (device.kind == DeviceKind::cuda || num_threads != 1 || num_bytes == 0) return;
  scratch_bytes_ = num_bytes + Scratch::kAlignment;  // wherever the workspace lies
  workspace_size = kScratchBegin + scratch_bytes_;
}
Scratch PlanBase::scratch(void* workspace) const {
  static_assert(sizeof(QuantizeStatus) <= kScratchBegin);
  return scratch_bytes_ == 0 ? Scratch()
                             : Scratch(static_cast<std::byte*>(workspace) + kScratchBegin, scratch_bytes_);
}

void PlanBase::finds_nothing() {
  has_status_ = false;
  workspace_size = 16;
}

ArgumentRow& PlanBase::add(ArgumentRow row) {
  HALFBYTE_CHECK(rows_.size() < kMaxArguments, bug, "{}: more than {} arguments", op, kMaxArguments);
  return rows_.emplace_back(std::move(row));
}

size_t PlanBase::row_of(std::string_view name) const {
  const auto found = std::ranges::find(rows_, name, &ArgumentRow::name_);
  HALFBYTE_CHECK(found != rows_.end(), bug, "{}: no argument {}", op, name);
  return static_cast<size_t>(found - rows_.begin());
}
void PlanBase::in_place(std::string_view written, std::string_view read) {
  in_place_.emplace_back(row_of(written), row_of(read));
}
bool PlanBase::are_in_place(size_t a, size_t b, std::span<const ArgumentData> data) const {
  return std::ranges::any_of(in_place_, [&](const auto& pair) {
    return (pair == std::pair(a, b) || pair == std::pair(b, a)) && same_elements(data[a], data[b]);
  });
}

void PlanBase::check_rows(std::span<const ArgumentData> data, std::span<ArgumentMemory> memory) const {
  for (size_t i = 0; i < rows_.size(); ++i)
    HALFBYTE_CHECK_AS(rows_[i].absent_.empty() || data[i].data == nullptr, usage,
                      (ErrorDetails{ErrorKind::invalid_argument, rows_[i].name_, "no data", "data"}),
                      "{}: {} {}", op, rows_[i].name_, rows_[i].absent_);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const ArgumentRow& row = rows_[i];
    const char* const name = row.name_.c_str();
    const bool promised = row.promised_ != 0 && device.kind == DeviceKind::cuda;
    const int64_t alignment = promised ? row.promised_ : row.alignment_;
    ArgumentMemory* const touched = &memory[i];  // made in place: this is most of the time of a small run
    if (!row.absent_.empty() || (row.optional_ && data[i].data == nullptr)) {
      *touched = {};
    } else if (row.is_tensor_) {
      const TensorArgument argument{
          name,      &data[i], row.dtype_,          row.shape_,         row.written_,
          alignment, promised, row.may_be_strided_, row.contiguous_as_, row.any_leading_axes_};
      new (touched) ArgumentMemory(check_tensor(op, argument, device));
    } else {
      new (touched) ArgumentMemory{name,      data[i].data, row.num_bytes_, data[i].known_bytes,
                                   alignment, promised,     row.written_};
      check_argument(op, *touched, device);
    }
  }
}

void PlanBase::check_overlap(std::span<const ArgumentData> data,
                             std::span<const ArgumentMemory> memory) const {
  for (size_t i = 0; i < memory.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const ArgumentMemory &a = memory[i], &b = memory[j];
      if ((!a.written && !b.written) || a.num_bytes == 0 || b.num_bytes == 0) continue;
      if (a.data != b.data || !are_in_place(i, j, data)) check_apart(op, a, b);
    }
}

}  // namespace halfbyte
