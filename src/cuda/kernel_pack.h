// Kernel packs: files of compiled kernels for machines without NVRTC. docs/kernels.md shows the bytes.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda/file.h"
#include "cuda/jit.h"
#include "halfbyte/kernels.hpp"

namespace halfbyte::cuda {

// Makes the bytes of a pack. Where they go is the caller's.
class KernelPackWriter {
 public:
  using Write = std::function<void(uint64_t offset, std::string_view bytes)>;
  explicit KernelPackWriter(Write write) : write_(std::move(write)) {}

  void add(const KernelSpec& spec, const std::string& target, std::string_view cubin);
  // Writes what finds the kernels; returns the size of the file.
  uint64_t finish();

 private:
  Write write_;
  std::string entries_;
  uint64_t num_entries_ = 0, end_ = 0;
};

// A pack, open. The index is in memory, kernels are read when they are asked for. Thread safe.
class KernelPack {
 public:
  // Nothing in the file is trusted. Error(io) where it cannot be read, or where somebody else but root could
  // have written it: file and directory belong to root or this user, and nobody else may write to them (to
  // the directory, unless it is sticky). Error(bad_input) where it is no pack, or one of another version of
  // the format; Error(corrupt) where it is damaged.
  explicit KernelPack(const std::string& path);

  const KernelPackInfo& info() const { return info_; }
  // Whether it has kernels of this library for the target.
  bool has(const std::string& target) const { return targets_.contains(target); }
  // Nothing where it does not have this kernel. Error(io) where it cannot be read, Error(corrupt) where its
  // bytes are not those that were written.
  std::optional<std::vector<char>> find(const KernelSpec& spec, const std::string& target) const;

 private:
  struct Entry {
    uint64_t offset, num_bytes;
    std::string hash;
  };
  void read(uint64_t offset, std::span<char> bytes) const;
  void parse(std::string_view index, uint64_t index_offset);

  KernelPackInfo info_;
  Descriptor file_;
  std::unordered_map<std::string, Entry> entries_;  // of this library
  std::set<std::string, std::less<>> targets_;      // of those
};

// The packs of this process: those that HALFBYTE_KERNEL_PACK names, then those of load_kernel_pack. These
// throw as KernelPack where one that HALFBYTE_KERNEL_PACK names cannot be used.
struct PackedKernel {
  std::vector<char> cubin;
  std::string pack;  // the path
};
std::optional<PackedKernel> find_packed(const KernelSpec& spec, const std::string& target);
bool packs_have(const std::string& target);

}  // namespace halfbyte::cuda
