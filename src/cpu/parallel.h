// The thread pool. TBB is named in parallel.cc only.
#pragma once

#include <cstdint>

namespace halfbyte {

// Hardware threads this process may use.
int max_threads();

// Threads that parallel_for uses: 0 = all of the machine; more than it has is allowed.
int effective_threads(int num_threads);

// The number of threads for an op: as asked for, but 1 where that is left to us (0) and other threads would
// cost more than they save. `work`: elements that are read, decoded or rounded in passing, of which a core
// does 5 to 10 in a nanosecond; an op that takes longer for an element counts it several times. Results do
// not depend on it.
int threads_for(int num_threads, double work);

namespace internal {
using RangeBody = void (*)(void* context, int64_t begin, int64_t end, int worker);
void parallel_for(int64_t n, int64_t grain, int num_threads, void* context, RangeBody body);
}  // namespace internal

// Calls body(begin, end, worker) over disjoint ranges that cover [0, n), each of at most `grain`
// items, with worker in [0, threads used): no two calls with one worker number run at a time, so it
// can index scratch memory. num_threads: 0 = all, 1 = on the calling thread, in order.
// An exception of a body stops the rest and is rethrown here.
template <class Body>
void parallel_for(int64_t n, int64_t grain, int num_threads, const Body& body) {
  internal::parallel_for(n, grain, num_threads, const_cast<Body*>(&body),
                         [](void* context, int64_t begin, int64_t end, int worker) {
                           (*static_cast<const Body*>(context))(begin, end, worker);
                         });
}

}  // namespace halfbyte
