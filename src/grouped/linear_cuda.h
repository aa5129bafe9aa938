// The CUDA kernels of every LinearOp, specialised.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "grouped/linear.h"

namespace halfbyte {

// What kernels are compiled for; everything else is given at run time.
struct LinearTypes {
  DType dtype = DType::f32;  // of x, y, gradients
  int bits = 8;              // of a code; 4
  ZeroType zero_type = ZeroType::none;
  bool fake = false;                                   // fake quantization, forward or backward
  bool mask = false;                                   // fake_quantize writes it
  std::optional<formats::CodeBook> book = {};          // of a table, where it is not integers
  std::optional<formats::ScaleType> byte_scales = {};  // of scales of 8 bits; others are told by an argument
  bool bins = true;  // values of tables are found by bins, which kernels are compiled for; not of f64

  // Of a kernel whose table is an argument.
  LinearTypes without_bins() const {
    LinearTypes types = *this;
    types.bins = false;
    return types;
  }
  // Of a kernel for which the type of zero points is an argument.
  LinearTypes any_zeros() const {
    LinearTypes types = *this;
    if (!book) types.zero_type = ZeroType::any;
    return types;
  }
};
// A kernel whose source includes linear.cuh, with `lines` more of "halfbyte_config.h"; HALFBYTE_KERNEL is its
// name.
cuda::KernelSpec linear_kernel(const char* source, const std::string& name, const LinearTypes& types,
                               const std::string& lines);

LinearTypes types_of(const LinearProblem& problem);
// As kernels are given it.
LinearTable linear_table(const formats::CodeBook& book);
cuda::KernelSpec linear_chunks_kernel(const LinearTypes& types, LinearOp op);
cuda::KernelSpec linear_columns_kernel(const LinearTypes& types, LinearOp op);
cuda::KernelSpec linear_elements_kernel(const LinearTypes& types, LinearOp op);
// block_batch: 0: lanes share a group; 4 or 8: a block has one, of so many chunks a thread.
cuda::KernelSpec linear_fused_kernel(const LinearTypes& types, LinearOp op, int block_batch);
cuda::KernelSpec linear_params_kernel(const LinearTypes& types, LinearOp op);
// wide: 2^31 pieces of work and more.
cuda::KernelSpec mask_gradients_kernel(DType dtype, bool chunks, bool wide);

}  // namespace halfbyte
