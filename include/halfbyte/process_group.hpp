// Processes that write one output together: each takes a part of its files. MPI is one way to connect them
// (docs/scale.md); whoever starts processes otherwise implements this class.
#pragma once

#include <string>
#include <vector>

#include "halfbyte/error.hpp"

namespace halfbyte {

// All processes of a group call the same operation with the same arguments, and see the same files. They fail
// together: each throws the error of the first that failed. A function is called by one thread at a time.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  virtual int rank() const = 0;  // 0 .. size() - 1. The process of rank 0 has the whole report
  virtual int size() const = 0;
  // What each process gives, by rank. Waits until all have called it.
  virtual std::vector<std::string> gather(const std::string& own) = 0;
  // Tells the others that this process has failed, and does not wait: they see it by others_failed(), which
  // is asked now and then while they work, and come to the next gather().
  virtual void tell_failure() = 0;
  virtual bool others_failed() = 0;
};

// For an error of this process before the operation: the others throw it out of theirs. Returns the error of
// the first process that failed.
HALFBYTE_API Error fail_together(ProcessGroup& group, const Error& error);

}  // namespace halfbyte
