#include "cpu/parallel.h"

#include <pthread.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/fork.h"
#include "core/per_thread.h"
#include "cpu/topology.h"

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

// The next units that a worker takes: begin in the lower half, end in the upper one. Others steal from its
// end.
struct alignas(64) Share {
  std::atomic<uint64_t> range = 0;
};
constexpr uint64_t share_of(uint64_t begin, uint64_t end) { return begin < end ? end << 32 | begin : 0; }

// The workers of a NUMA node, [begin, end): neighbours, so their shares are one piece of what there is to do.
// It is the same piece in every call, of which the system puts a page where it is first written. So threads
// of a node compute with what threads of it wrote, though none is tied to one.
struct alignas(64) NodeWorkers {
  std::atomic<int> next = 0;  // the first that no thread has become; beyond `end` where all are
  int begin = 0, end = 0;
};

// One call of parallel_for. Everything that several threads touch takes no memory, and no exception reaches
// TBB: it takes memory to pass one on, and ends the process where there is none.
struct Job {
  int64_t n, grain, unit;  // of items; a unit is a number of grains
  void* context;
  internal::RangeBody body;
  std::span<Share> shares;  // of each worker
  std::span<NodeWorkers> nodes;
  std::atomic<int> num_filled = 0;  // shares that are not empty, about
  std::atomic<bool> stopped = false;
  std::exception_ptr exception = nullptr;  // of who set `stopped`
  char started = 0, finished = 0;  // their addresses name the orders: caller -> bodies, bodies -> return

  Job(int64_t n, int64_t grain, void* context, internal::RangeBody body, std::span<Share> shares,
      std::span<NodeWorkers> nodes)
      : n(n), grain(grain), context(context), body(body), shares(shares), nodes(nodes) {
    constexpr int64_t kMostUnits = INT32_MAX;
    const int64_t num_grains = (n - 1) / grain + 1, grains = (num_grains - 1) / kMostUnits + 1;
    const int64_t num_units = (num_grains - 1) / grains + 1;
    unit = grains * grain;
    const auto workers = static_cast<int64_t>(shares.size());
    const int64_t each = num_units / workers, more = num_units % workers;  // the first `more` have one more
    uint64_t begin = 0;
    for (int64_t i = 0; i < workers; ++i) {
      const uint64_t end = begin + static_cast<uint64_t>(each + (i < more));
      shares[static_cast<size_t>(i)].range = share_of(begin, end);
      num_filled += begin < end;
      begin = end;
    }
    // Nodes have workers by their CPUs.
    const std::vector<int>& num_cpus = topology().num_cpus;
    const int64_t all_cpus = std::accumulate(num_cpus.begin(), num_cpus.end(), int64_t{0});
    int64_t cpus = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      nodes[i].next = nodes[i].begin = static_cast<int>(workers * cpus / all_cpus);
      cpus += num_cpus[i];
      nodes[i].end = static_cast<int>(workers * cpus / all_cpus);
    }
  }

  // The worker that the calling thread becomes, of the node it runs on if one is left there. As many calls as
  // there are workers.
  size_t become_worker() {
    for (size_t i = 0, here = node_here();; ++i) {
      NodeWorkers& node = nodes[(here + i) % nodes.size()];
      if (node.next >= node.end) continue;
      const int worker = node.next++;
      if (worker < node.end) return static_cast<size_t>(worker);
    }
  }
  size_t node_here() const { return nodes.size() == 1 ? 0 : static_cast<size_t>(topology().node()); }

  // The first unit of the worker, or of what it steals. -1: there is none left.
  int64_t take(size_t worker) {
    std::atomic<uint64_t>& mine = shares[worker].range;
    for (uint64_t range = mine; range != 0;) {
      const uint64_t begin = range & UINT32_MAX, rest = share_of(begin + 1, range >> 32);
      if (!mine.compare_exchange_weak(range, rest)) continue;
      if (rest == 0) --num_filled;
      return static_cast<int64_t>(begin);
    }
    const auto& node = *std::ranges::find_if(
        nodes, [&](const NodeWorkers& each) { return static_cast<int>(worker) < each.end; });
    const auto first = static_cast<size_t>(node.begin), here = static_cast<size_t>(node.end) - first;
    for (size_t i = 1; i < shares.size() && num_filled > 0; ++i) {  // its own node's before those of others
      const size_t victim = i < here ? first + (worker - first + i) % here : (first + i) % shares.size();
      std::atomic<uint64_t>& other = shares[victim].range;
      for (uint64_t range = other; range != 0;) {
        const uint64_t begin = range & UINT32_MAX, end = range >> 32, middle = begin + (end - begin) / 2;
        const uint64_t rest = share_of(begin, middle), stolen = share_of(middle + 1, end);
        if (!other.compare_exchange_weak(range, rest)) continue;
        if (stolen != 0) {
          mine = stolen;
          ++num_filled;
        }
        if (rest == 0) --num_filled;
        return static_cast<int64_t>(middle);
      }
    }
    return -1;
  }

  void work() noexcept {
    acquire(&started);
    work(become_worker());
  }
  void work(size_t worker) noexcept {
    acquire(&started);
    try {
      for (int64_t taken = 0; !stopped && (taken = take(worker)) >= 0;)
        for (int64_t i = taken * unit, end = std::min(n, i + unit); i < end; i += grain)
          body(context, i, std::min(end, i + grain), static_cast<int>(worker));
    } catch (...) {
      if (!stopped.exchange(true)) exception = std::current_exception();
    }
    release(&finished);
  }
};

// A worker beside the calling thread. tbb::parallel_for and tbb::task_group take memory as they go, in every
// thread; a task of one's own lies where its owner wants it.
class Helper final : public tbb::detail::d1::task {
 public:
  void prepare(Job& job, tbb::detail::d1::wait_context& running) {
    job_ = &job;
    running_ = &running;
    state_ = State::waits;
  }
  // On return it does not touch the job any more, and does nothing if it has not begun.
  void withdraw() {
    State state = State::waits;
    if (state_.compare_exchange_strong(state, State::ended)) return;
    while (state_ != State::ended) std::this_thread::yield();
  }

 private:
  enum class State : uint8_t { waits, works, ended };

  task* execute(tbb::detail::d1::execution_data&) override {
    State state = State::waits;
    if (!state_.compare_exchange_strong(state, State::works)) return nullptr;
    job_->work();
    state_ = State::ended;
    running_->release();
    return nullptr;
  }
  task* cancel(tbb::detail::d1::execution_data&) override {
    running_->release();
    return nullptr;
  }

  Job* job_ = nullptr;
  tbb::detail::d1::wait_context* running_ = nullptr;
  std::atomic<State> state_ = State::ended;
};

// The first use of TBB counts the processors. Where there is no memory for that, the next use waits for ever.
bool tbb_is_usable() {
  static const bool usable = [] {
    try {
      return tbb::this_task_arena::max_concurrency() > 0;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }();
  return usable;
}

// An arena and what else a call needs, of the calling thread, which keeps it for its next call: making one
// costs more than a small product takes, and as idle workers leave it late, old ones add up to hundreds of
// microseconds a call. It is taken away during a call, so one that is nested has another: there it never
// steals an outer task, and scratch memory that the worker's number indexes stays private. Workers of TBB
// keep none: they may end after what it needs.
class Team {
 public:
  explicit Team(int threads)
      : arena_(threads),
        shares_(static_cast<size_t>(threads)),
        nodes_(topology().num_cpus.size()),
        helpers_(static_cast<size_t>(threads - 1)) {}

  static std::unique_ptr<Team> take(int threads) {
    std::unique_ptr<Team> team;
    if (Kept* const mine = kept.find()) team = std::move(mine->team);
    if (team == nullptr || team->shares_.size() != static_cast<size_t>(threads) ||
        team->nodes_.size() != topology().num_cpus.size())
      team = std::make_unique<Team>(threads);
    return team;
  }
  static void keep(std::unique_ptr<Team> team) {
    if (team->is_lost_) return static_cast<void>(team.release());
    if (tbb::this_task_arena::current_thread_index() >= 1) return;
    if (Kept* const mine = kept.get()) mine->team = std::move(team);
  }

  // The shares of the first `workers`.
  std::span<Share> shares(size_t workers) { return std::span(shares_).first(workers); }
  std::span<NodeWorkers> nodes() { return nodes_; }

  // Nothing of the job has been done where this throws.
  void run(Job& job) {
    arena_.execute([&] {
      const std::span helpers = std::span(helpers_).first(job.shares.size() - 1);
      for (Helper& helper : helpers) helper.prepare(job, running_);
      const size_t worker = job.become_worker();
      try {
        for (Helper& helper : helpers) {
          running_.reserve();
          tbb::detail::d1::spawn(helper, context_);
        }
        job.work(worker);
        tbb::detail::d1::wait(running_, context_);
      } catch (...) {
        // Without memory TBB throws before it has the task, or after, as it starts a thread for it. Then the
        // task may run at any time later, so what it needs stays for ever.
        is_lost_ = true;
        job.work(worker);
        for (Helper& helper : helpers) helper.withdraw();
      }
    });
  }

 private:
  struct Kept {
    std::unique_ptr<Team> team;
    ~Kept() {
      if (is_forked()) static_cast<void>(team.release());
    }
  };
  static const PerThread<Kept> kept;

  tbb::task_arena arena_;
  tbb::task_group_context context_{tbb::task_group_context::isolated};
  tbb::detail::d1::wait_context running_{0};
  bool is_lost_ = false;
  std::vector<Share> shares_;
  std::vector<NodeWorkers> nodes_;
  std::vector<Helper> helpers_;
};
const PerThread<Team::Kept> Team::kept;

// Where a thread that TBB wants does not start, it ends the process or waits for ever. So as many as it may
// want are started here before, and ended again. The number of those that can be, with the calling one; at
// most `wanted`.
int startable(int wanted) {
  static std::atomic<int> proven = 1;
  static auto& mutex = *new ForkSafeMutex;
  static bool failed = false;
  static auto& limit = *new std::optional<tbb::global_control>;  // others may compute while the process ends
  if (wanted <= proven) return wanted;
  const std::lock_guard lock(mutex);
  // All that TBB starts by itself, for several callers at a time.
  const int all = std::max(wanted, max_threads());
  if (!failed && proven < all) {
    std::vector<pthread_t> threads(static_cast<size_t>(all - proven));
    std::mutex held;
    size_t num_started = 0;
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, 4 << 20);  // as TBB does
    {
      const std::lock_guard until_all_are_there(held);
      const auto wait = [](void* mutex_held) -> void* {
        void* const memory = std::malloc(4096);  // a worker of TBB begins with taking some
        void* const failure = memory == nullptr ? mutex_held : nullptr;
        std::free(memory);
        const std::lock_guard all_are_there(*static_cast<std::mutex*>(mutex_held));
        return failure;
      };
      while (num_started < threads.size() &&
             ::pthread_create(&threads[num_started], &attributes, wait, &held) == 0)
        ++num_started;
    }
    ::pthread_attr_destroy(&attributes);
    int usable = proven;
    for (size_t i = 0; i < num_started; ++i) {
      void* failure = nullptr;
      ::pthread_join(threads[i], &failure);
      usable += failure == nullptr;
    }
    failed = usable < all;
    proven = usable;
  }
  if (failed && proven > 1 && !limit)
    limit.emplace(tbb::global_control::max_allowed_parallelism, static_cast<size_t>(proven));
  return std::min<int>(wanted, proven);
}

// Allows more threads than the machine has, or TBB runs fewer and says so on stderr. What TBB keeps of this
// ends with the process, while others may still compute: who comes then computes alone.
class Allowance {
 public:
  explicit Allowance(int threads) {
    static const bool hears_of_exit = [] {
      // Called before the destructors of TBB, which was loaded before.
      if (::on_exit([](int, void*) { end(); }, nullptr) != 0) throw std::bad_alloc();
      return true;
    }();
    static_cast<void>(hears_of_exit);
    const std::lock_guard lock(mutex());
    if (has_ended_) throw std::bad_alloc();
    control_ = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism,
                                                     static_cast<size_t>(threads));
  }
  ~Allowance() {
    const std::lock_guard lock(mutex());
    if (has_ended_) static_cast<void>(control_.release());
    control_.reset();
  }
  Allowance(const Allowance&) = delete;

 private:
  static void end() {
    const std::lock_guard lock(mutex());
    has_ended_ = true;
  }
  static ForkSafeMutex& mutex() {
    static auto& mutex = *new ForkSafeMutex;
    return mutex;
  }
  static inline bool has_ended_ = false;
  std::unique_ptr<tbb::global_control> control_;
};

}  // namespace

int max_threads() { return tbb_is_usable() ? tbb::this_task_arena::max_concurrency() : 1; }

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
  // Without memory or threads for a team, the calling thread does all.
  std::unique_ptr<Team> team;
  std::unique_ptr<const Allowance> allow;
  std::optional<Job> job;
  try {
    // In a child of fork() locks of TBB may be held for ever, by threads that are not there.
    const int started = sees_forks() && !is_forked() && tbb_is_usable() ? startable(threads) : 1;
    if (started > 1) {
      if (started > max_threads()) allow = std::make_unique<Allowance>(started);
      team = Team::take(started);
      const int64_t num_grains = (n - 1) / grain + 1;
      job.emplace(n, grain, context, body,
                  team->shares(static_cast<size_t>(std::min<int64_t>(started, num_grains))), team->nodes());
      release(&job->started);
      team->run(*job);
    }
  } catch (const std::bad_alloc&) {
    team.reset();
    job.reset();
  }
  if (!job) {
    for (int64_t begin = 0; begin < n; begin += grain) body(context, begin, std::min(n, begin + grain), 0);
    return;
  }
  acquire(&job->finished);
  Team::keep(std::move(team));
  if (job->exception) std::rethrow_exception(job->exception);
}

}  // namespace internal
}  // namespace halfbyte
