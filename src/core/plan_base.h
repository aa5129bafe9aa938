// What the plans of all ops are made of: a table of arguments, and what follows from it. Plan<Op>::Impl
// (core/plan.h) adds the types of an op.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/scratch.h"
#include "core/tensor_check.h"
#include "halfbyte/device.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

// What one argument must be, as follows from the descriptor.
class ArgumentRow {
 public:
  ArgumentRow(std::string name, DType dtype, std::vector<int64_t> shape);  // contiguous
  ArgumentRow(std::string name, int64_t num_bytes);                        // memory without a type

  // Is written; without this it is read.
  ArgumentRow& written(bool value = true);
  // Its address is a multiple of `alignment` bytes; without this, of an element.
  ArgumentRow& aligned(int64_t alignment);
  // Likewise descriptor.alignment, on which CUDA kernels rely: the CPU takes what is aligned to its elements.
  // Bytes lie anywhere where it is less than 16: kernels for that move them one by one.
  ArgumentRow& promised(int64_t alignment);
  // The descriptor's `strided`: true: strides may be any >= 0.
  ArgumentRow& strided(bool value);
  // The shape is [rows, cols]: cols is the extent of the last axis, rows the product of those before it. One
  // column need not have an axis.
  ArgumentRow& any_leading_axes();
  // Unless `present`, it must have no data: "..., as `reason`". The last reason counts.
  ArgumentRow& absent_unless(bool present, std::string_view reason);
  // Likewise: "... must be null: `reason`".
  ArgumentRow& null_unless(bool present, std::string_view reason);
  // May have no data.
  ArgumentRow& optional(bool value = true);

 private:
  friend struct PlanBase;

  std::string name_;
  DType dtype_ = DType::u8;
  std::vector<int64_t> shape_;
  bool is_tensor_;
  int64_t num_bytes_ = 0;  // of memory without a type
  bool written_ = false, optional_ = false, any_leading_axes_ = false, may_be_strided_ = false;
  int64_t alignment_ = 1;
  int64_t promised_ = 0;            // 0: nothing is
  const char* contiguous_as_ = "";  // why it must be
  std::string absent_;              // the rule that it must have no data; empty: there is none
};

// Those that follow from its texts.
void set_enumerators(Sku& sku);

// What is wrong with a descriptor: of kind invalid_problem, where the error has none of its own.
template <class Check>
void check_problem(const Check& check) {
  try {
    check();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::usage || error.kind() != ErrorKind::general) throw;
    throw Error(error.code(), error.what(), ErrorDetails{ErrorKind::invalid_problem});
  }
}

// The memory of a run on the CPU that was given none. The calling thread keeps it for its next run, up to
// kMostKept bytes. It is taken away during the run, so one within it has memory of its own.
class ThreadWorkspace {
 public:
  static constexpr int64_t kMostKept = int64_t{32} << 20;

  explicit ThreadWorkspace(int64_t num_bytes);
  ThreadWorkspace(const ThreadWorkspace&) = delete;
  ~ThreadWorkspace();
  std::byte* data() const { return memory_.data(); }

 private:
  Memory memory_;
};

struct PlanBase {
  static constexpr size_t kMaxArguments = 12;  // so that a run allocates nothing

  const char* op;  // names it in errors and in the SKU
  Device device;
  int num_threads;
  // To begin with, what is so for most: kernel `<op>_cpu`, no dtypes; f64 for f64 tensors, else f32; a
  // QuantizeStatus. Where something else is, the constructor of the op's plan says so.
  Sku sku;
  PrecisionGuarantee guarantee;
  int64_t workspace_size = sizeof(QuantizeStatus);

  // Of a checked descriptor. Throws Error(usage) for a bad preference, Error(device) for a device that cannot
  // be used.
  PlanBase(const char* op, Device device, DType dtype, const PlanPreference& preference);
  PlanBase(const PlanBase&) = delete;
  virtual ~PlanBase() = default;

  // Waits for `stream`. On the CPU the workspace has a QuantizeStatus, on a CUDA device QuantizeCounts.
  QuantizeStatus status(void* stream, const Workspace& workspace) const;

 protected:
  // On the CPU with one thread, what `execute` takes of a scratch(workspace) is `num_bytes` in all: it
  // allocates nothing. With more threads it does as it likes.
  void needs_scratch(int64_t num_bytes);
  Scratch scratch(void* workspace) const;

  // The op finds nothing in its data: the workspace is left as it is, the status that of no data.
  void finds_nothing();

  ArgumentRow& add(ArgumentRow row);
  // These two, declared before, may be the same elements of the same memory: every element is read before it
  // is written, by the same thread.
  void in_place(std::string_view written, std::string_view read);

  // `data` and `memory`: of each row. These throw Error(usage) that names op, argument, rule and values.
  // That what must be absent is, and that the others are as their rows have it. Sets `memory` to what a run
  // touches: nothing of what is absent.
  void check_rows(std::span<const ArgumentData> data, std::span<ArgumentMemory> memory) const;
  // No two overlap of which one is written, unless they are in place.
  void check_overlap(std::span<const ArgumentData> data, std::span<const ArgumentMemory> memory) const;

 private:
  size_t row_of(std::string_view name) const;
  // Of two rows with the same address.
  bool are_in_place(size_t a, size_t b, std::span<const ArgumentData> data) const;

  std::vector<ArgumentRow> rows_;
  std::vector<std::pair<size_t, size_t>> in_place_;
  bool has_status_ = true;
  int64_t scratch_bytes_ = 0;  // behind the first kScratchBegin of the workspace
  static constexpr int64_t kScratchBegin = 64;
};

}  // namespace halfbyte
