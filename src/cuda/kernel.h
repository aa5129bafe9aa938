// A kernel as a row of the table of its op: what listing, emission, packs and tests know of it.
#pragma once

#include <map>
#include <string>

#include "cuda/jit.h"
#include "halfbyte/format.hpp"
#include "halfbyte/kernels.hpp"

namespace halfbyte::cuda {

// The value of every key of a kernel; each is one that the key takes.
using KernelValues = std::map<std::string, std::string, std::less<>>;

struct Kernel {
  KernelInfo info;
  // The kernel that the op's code runs for these values, made by the functions that it uses itself. Follows
  // no pointer, needs no device. Error(usage) where the values do not go together.
  KernelSpec (*specialise)(const KernelValues& values);
  // The configuration chooses the first of these kernels of the op that takes it. An op with several kernels
  // has one.
  bool chosen_by_config = false;
  // Of plain kernels: all but op, kernel and config, for values that go together. Else null.
  KernelDescription (*describe)(const KernelValues& values) = nullptr;

  bool is_for(std::string_view target) const { return info.target.empty() || info.target == target; }
};

// Keys that ops share, and what their values mean.
KernelKey dtype_key(const char* description);
DType dtype_of(const KernelValues& values);
KernelKey flag_key(const char* name, const char* description);
bool is_set(const KernelValues& values, std::string_view flag);
// What a codec is made of: format, table, asymmetric and scale-dtype.
std::vector<KernelKey> codec_keys();
KernelKey scale_dtype_key(const char* description);
// For kernels to which the dtype of scales is an argument: one that the format may have.
std::string any_scale_dtype(const KernelValues& values);
QuantSpec spec_of(const KernelValues& values);
// A value of group-size: "128", "channel" or "tensor". Error(usage) for others. Formats of one group size
// keep it.
void set_group_size(QuantSpec& spec, const std::string& value);

}  // namespace halfbyte::cuda
