// Devices that compute together, each a part: sums over all of them. Members are threads of one process, or
// processes. qgemm_parallel.hpp has products with weights that are cut.
//
//   const std::vector<Communicator> members = Communicator::of_devices(parse_devices("cuda:all"));
//   // in a thread of its own for each member:
//   members[rank].all_reduce(y, stream.handle());
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfbyte/device.hpp"

namespace halfbyte {

// How CUDA devices exchange data.
enum class Transport : uint8_t {
  automatic,  // peer for little, NCCL for more where it is found, else peer
  peer,       // each writes into the memory of the others. Only devices of one process that can
  nccl,
};
HALFBYTE_API const char* to_string(Transport transport);  // "auto" "peer" "nccl"
HALFBYTE_API Transport parse_transport(std::string_view word);

// One member of a group. Copies share it; what it has enqueued must be done before the last one goes. All
// members make the same calls in the same order; a call of one may wait for those of the others, so each
// member has a thread or process of its own. A member is used by one thread at a time, and on a CUDA device
// on one stream at a time.
class Communicator {
 public:
  // What NCCL calls a unique id: this many bytes.
  static constexpr size_t kIdBytes = 128;

  // A group within this process: a member for each device, in their order. All are of one kind. The CPU may
  // be given several times, CUDA devices differ. Throws Error(usage) for other lists, and Error(device) where
  // the devices cannot reach each other in this way, saying what is missing.
  HALFBYTE_API static std::vector<Communicator> of_devices(std::span<const Device> devices,
                                                           Transport transport = Transport::automatic);
  // A group of processes, each with one CUDA device, by NCCL: one process creates the id and hands it to the
  // others by means of its own. `connect` waits until all have called it. Throws Error(usage) for bad
  // arguments and Error(device) if there is no NCCL (HALFBYTE_NCCL may give its path), or it fails.
  HALFBYTE_API static std::string create_id();
  HALFBYTE_API static Communicator connect(Device device, const std::string& id, int rank, int size);

  HALFBYTE_API int rank() const;
  HALFBYTE_API int size() const;
  HALFBYTE_API Device device() const;
  // How data goes: "threads"; "peer memory to 8388608 bytes, NCCL 2.28.3"; "none", of one device.
  HALFBYTE_API const std::string& transport() const;

  // x of every member becomes the sum of all. x: f32, bf16 or f16, contiguous, of the same dtype and number
  // of elements for all, in memory of device(). All members get the same bytes, and again in every run. On
  // the CPU and by peer memory, sums are of f32, in the order of ranks, and rounded once. NCCL sums in the
  // dtype of x, in an order of its own.
  //
  // On a CUDA device the work is enqueued on `stream`, and a CUDA graph can capture it: then all members
  // capture and replay alike. On the CPU the call returns when the sum is there.
  //
  // Throws Error(usage) for other tensors, on the CPU in all members where they differ, Error(cancelled)
  // after abort(), and Error(device) if the device or NCCL refuses.
  HALFBYTE_API void all_reduce(const TensorView& x, void* stream = nullptr) const;

  // For a member that has failed and will make no more calls: the others stop waiting, and all later calls
  // throw Error(cancelled). What they were about to sum is lost. Of a group of processes, each calls it for
  // itself. Any thread may.
  HALFBYTE_API void abort() const;

  struct Impl;

 private:
  explicit Communicator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

}  // namespace halfbyte
