#include "cpu/parallel.h"

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#ifdef HALFBYTE_TSAN
#include <sanitizer/tsan_interface.h>

// libtbb itself is seen only where it calls the C library: its workers compare and free their affinity
// masks. The name is the runtime's.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_suppressions();  // NOLINT
const char* __tsan_default_suppressions() { return "called_from_lib:libtbb.so\n"; }   // NOLINT
#endif

namespace halfbyte {
namespace {

// ThreadSanitizer cannot look into libtbb. Its build compiles this file without it (CMakeLists.txt) and is
// told here what order holds. In other builds this is nothing.
#ifdef HALFBYTE_TSAN
void acquire(void* order) { __tsan_acquire(order); }
void release(void* order) { __tsan_release(order); }
#else
void acquire(void*) {}
void release(void*) {}
#endif

template <void (*action)(void*)>
struct AtExit {  // of the scope, by an exception too
  void* order;
  ~AtExit() { action(order); }
};

// An arena of the calling thread, which keeps it for its next call: making one costs more than a small
// product takes, and as idle workers leave it late, old ones add up to hundreds of microseconds a call. It is
// taken away during a call, so one that is nested has another: there it never steals an outer task, and
// scratch memory that the worker's number indexes stays private. Workers of TBB keep none: they may end after
// what it needs.
class Arena {
 public:
  explicit Arena(int threads) : mine_(std::exchange(kept, {})) {
    if (mine_.threads != threads) mine_ = {threads, std::make_unique<tbb::task_arena>(threads)};
  }
  Arena(const Arena&) = delete;
  ~Arena() {
    if (tbb::this_task_arena::current_thread_index() < 1) kept = std::move(mine_);
  }
  tbb::task_arena& operator*() const { return *mine_.arena; }

 private:
  struct Kept {
    int threads = 0;
    std::unique_ptr<tbb::task_arena> arena;
  };
  static thread_local Kept kept;
  Kept mine_;
};
thread_local Arena::Kept Arena::kept;

}  // namespace

int max_threads() { return tbb::this_task_arena::max_concurrency(); }

int effective_threads(int num_threads) {
  constexpr int kMost = 1024;  // beyond any machine: a request for more is a mistake
  return num_threads > 0 ? std::min(num_threads, kMost) : max_threads();
}

int threads_for(int num_threads, double work) {
  // 25 to 50 microseconds of one core. A second thread pays from 10 on where it is awake, as in a row of
  // calls; where it sleeps, waking it costs the caller 6 to 10, and it pays from 60 to 200 on.
  constexpr double kAlone = 1 << 18;
  return num_threads == 0 && work < kAlone ? 1 : num_threads;
}

namespace internal {

void parallel_for(int64_t n, int64_t grain, int num_threads, void* context, RangeBody body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int threads = effective_threads(num_threads);
  if (threads == 1 || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) body(context, begin, std::min(n, begin + grain), 0);
    return;
  }
  // More threads than the machine has must be allowed first, or TBB runs fewer and says so on stderr.
  std::optional<tbb::global_control> allow;
  if (threads > max_threads())
    allow.emplace(tbb::global_control::max_allowed_parallelism, static_cast<size_t>(threads));
  char started, finished;  // their addresses name the orders: caller -> bodies, bodies -> return
  release(&started);
  const AtExit<acquire> joined{&finished};
  const Arena arena(threads);  // of so many threads: the limit holds, and worker numbers are dense
  (*arena).execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<int64_t>(0, n, static_cast<size_t>(grain)),
        [&](const tbb::blocked_range<int64_t>& range) {
          acquire(&started);
          const AtExit<release> done{&finished};
          for (int64_t begin = range.begin(); begin < range.end(); begin += grain)
            body(context, begin, std::min(range.end(), begin + grain),
                 tbb::this_task_arena::current_thread_index());
        },
        tbb::simple_partitioner());
  });
}

}  // namespace internal
}  // namespace halfbyte
