// What the files of `all_reduce` share.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "halfbyte/communicator.hpp"

namespace halfbyte {

inline constexpr const char* kGroupAborted = "all_reduce: abort() has ended the group";

struct Communicator::Impl {
  int rank = 0, size = 1;
  Device device;
  std::string transport;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  virtual ~Impl() = default;
  // x is checked.
  virtual void all_reduce(const TensorView& x, void* stream) = 0;
  virtual void abort() = 0;
};

std::vector<std::shared_ptr<Communicator::Impl>> communicators_of_cuda(std::span<const Device> devices,
                                                                       Transport transport);
std::shared_ptr<Communicator::Impl> connect_cuda(Device device, const std::string& id, int rank, int size);
std::string create_nccl_id();

}  // namespace halfbyte
