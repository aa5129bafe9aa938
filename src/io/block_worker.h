// Workers that compute blocks of weights, side by side, on the CPU or on a CUDA device: while one reads or
// writes a file, others copy and compute.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "io/layout.h"

namespace halfbyte::io {

// Elements of a block on a device. On the CPU it fits into the cache. On a CUDA device larger ones hide
// starting and waiting, and what is read into page-locked memory must still be in the cache when it is
// copied: 2 Mi elements were fastest of 1 to 8 (16 threads, one H200: 14.1 GB/s, with 8 Mi 11.3).
int64_t block_elements(Device device);

// As many as threads. On a CUDA device at most 16: 8 leave it waiting (9.3 GB/s for 14.1), 24 are no faster,
// and each holds page-locked memory, which the rest of the machine lacks.
int num_workers(Device device, int num_threads);

// Error(usage) where one is named twice, Error(device) where one cannot be used.
void check_devices(std::span<const Device> devices);

// The devices of the workers that work side by side: of each CUDA device as above, of the CPU as many as
// threads remain, and at least one. No devices: the CPU.
std::vector<Device> worker_devices(std::span<const Device> devices, int num_threads);

// Bytes of a source that a CUDA device quantizes in a second: as many as the threads that feed it copy from
// the cache of the system to its memory, and their codes back. Of an H200 behind PCIe 5, with 16 threads: 14
// GB/s on a machine that has no more, 21 on one with 32.
double device_rate(int num_threads);

// How many files of an output are written side by side. The system lets one thread at a time write to a file:
// with 32 workers on one, three quarters of their time was waiting. 16.2 GB by 32 threads, in memory, writing
// 4, 8 files at once: 0.8, 0.5 s; by 16 threads 2, 4 files: 1.2, 0.9 s.
int files_at_once(int num_workers);

// Since it was made.
class Timer {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Adds the time that it exists.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() { seconds_ += timer_.seconds(); }

 private:
  double& seconds_;
  const Timer timer_;
};

// What one worker holds.
struct BlockWorker {
  explicit BlockWorker(Device device = {}) : BlockWorker(device, block_elements(device)) {}
  BlockWorker(Device device, int64_t max_elements)
      : device(device),
        stream(device),
        max_elements(max_elements),
        dense(device),
        importance(device),
        native(device) {}

  Execution execution() const { return {1, stream.handle()}; }

  // Calls body(block) for the blocks of elements [begin, begin + count), in order; the range consists of
  // whole blocks. On a CUDA device, where body throws Error(device) or Error(no_memory), which is what want
  // of device or page-locked memory gives, the block is done again as smaller ones, down to the size of a
  // block on the CPU; if that fails too, the first error is thrown. When body returns, nothing of it may be
  // left on the stream.
  template <class Body>
  void for_each_block(const QuantizedWeight& weight, int64_t begin, int64_t count, const Body& body) {
    std::exception_ptr first;
    for (const int64_t end = begin + count; begin < end;) {
      const Block block = block_at(weight, begin, std::min(max_elements, end - begin));
      try {
        body(block);
        begin += block.count;
      } catch (const Error& error) {
        drain();
        if (!first) first = std::current_exception();
        const bool memory = error.code() == ErrorCode::device || error.code() == ErrorCode::no_memory;
        if (!memory || !shrink()) std::rethrow_exception(first);
      } catch (...) {
        drain();
        throw;
      }
    }
  }

  // Enqueues copies to a CUDA device, or back, and waits for them. Nothing on the CPU. All that comes before
  // on the stream must be done, or would count.
  template <class Copies>
  void transfer(const Copies& copies) {
    if (device.kind == DeviceKind::cpu) return;
    const Stopwatch copying(copy_seconds);
    copies();
    stream.synchronize();
  }

  Device device;
  Stream stream;
  int64_t max_elements;  // of a block
  Buffer dense;          // the elements of a block: as read, or as decoded
  Buffer importance;     // of its columns, where scales are searched by it
  NativeBuffers native;  // what is between
  Buffer stored;         // bytes as they are in the file; has no mirror
  Buffer untiled;        // elements of a block that are still to be tiles; likewise
  // Of its work: in all, and in each but computing.
  double seconds = 0, read_seconds = 0, write_seconds = 0, copy_seconds = 0;

 private:
  // After a failure: what is in flight must not outlive its memory.
  void drain() const noexcept;
  // Halves max_elements and gives the memory back. False where blocks are as small as they get.
  bool shrink();
};

// Those of calls of parallel_for, by the number of its worker. They last as long as a run: page-locked memory
// takes milliseconds to get.
class BlockWorkers {
 public:
  // `max_elements(device)`: of a block there.
  template <class MaxElements>
  BlockWorkers(std::span<const Device> of_each, const MaxElements& max_elements) {
    for (const Device device : of_each) plans_.push_back({device, max_elements(device), nullptr});
  }
  int size() const { return static_cast<int>(plans_.size()); }
  // Made when it is first asked for, by the thread that works: starting a device takes long, and others begin
  // meanwhile.
  BlockWorker& operator[](int number) {
    Plan& plan = plans_[static_cast<size_t>(number)];
    if (!plan.worker) plan.worker = std::make_unique<BlockWorker>(plan.device, plan.max_elements);
    return *plan.worker;
  }
  // Makes those of CUDA devices now.
  void start() {
    for (size_t i = 0; i < plans_.size(); ++i)
      if (plans_[i].device.kind == DeviceKind::cuda) (*this)[static_cast<int>(i)];
  }
  void add_seconds(CheckpointReport& report) const {
    for (const Plan& plan : plans_) {
      if (!plan.worker) continue;
      report.read_seconds += plan.worker->read_seconds;
      report.write_seconds += plan.worker->write_seconds;
      report.copy_seconds += plan.worker->copy_seconds;
      report.compute_seconds += plan.worker->seconds - plan.worker->read_seconds -
                                plan.worker->write_seconds - plan.worker->copy_seconds;
    }
  }

 private:
  struct Plan {
    Device device;
    int64_t max_elements;
    std::unique_ptr<BlockWorker> worker;
  };
  std::vector<Plan> plans_;
};

}  // namespace halfbyte::io
