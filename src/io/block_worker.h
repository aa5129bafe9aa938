// Workers that compute blocks of weights, side by side, on the CPU or on a CUDA device: while one reads or
// writes a file, others copy and compute.
#pragma once

#include <algorithm>
#include <exception>

#include "io/layout.h"

namespace halfbyte::io {

// Elements of a block on a device. On the CPU it fits into the cache. On a CUDA device the copies take so
// long (16 MiB of bf16: about 0.3 ms) that starting and waiting, tens of microseconds, hardly count, while
// the memory of all workers remains a few hundred MiB.
int64_t block_elements(Device device);

// As many as threads. On a CUDA device at most 8: they keep a link to the device busy, and each holds
// page-locked memory, which the rest of the machine lacks.
int num_workers(Device device, int num_threads);

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

  Device device;
  Stream stream;
  int64_t max_elements;  // of a block
  Buffer dense;          // the elements of a block: as read, or as decoded
  Buffer importance;     // of its columns, where scales are searched by it
  NativeBuffers native;  // what is between
  Buffer stored;         // bytes as they are in the file; has no mirror
  Buffer untiled;        // elements of a block that are still to be tiles; likewise

 private:
  // After a failure: what is in flight must not outlive its memory.
  void drain() const noexcept;
  // Halves max_elements and gives the memory back. False where blocks are as small as they get.
  bool shrink();
};

}  // namespace halfbyte::io
