// A host of the library, which it knows through host_ops.cc only: it loads that and unloads it. Modes:
//   host OPS memory OPERATION THREADS MODEL OUTPUT FIRST LAST STEP FOREVER COLD
//       lets allocations FIRST, FIRST + STEP, ... LAST of the operation fail, by memory_shim, each once or
//       with all that follow. COLD: before it was ever run, so FIRST only.
//   host OPS unload|fork|exit|threads|fork_threads|exit_threads OPERATION THREADS MODEL OUTPUT ROUNDS
//   host OPS endurance "OPERATION OPERATION..." THREADS MODEL OUTPUT SECONDS
//       prints a line of figures every second
// Exit code: 0; 1 and a text for what must not be.
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace {

constexpr int kOk = 0, kNoMemory = 7;

void* library = nullptr;
const char* (*operation)(int);
int (*run_operation)(int, int, const char*, const char*, uint64_t*);
const char* (*error_text)();

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "host: %s\n", what);
  std::_Exit(1);
}

void load(const char* path) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  const auto find = [](const char* name) {
    void* const found = dlsym(library, name);
    if (found == nullptr) fail(dlerror());
    return found;
  };
  operation = reinterpret_cast<const char* (*)(int)>(find("campaign_operation"));
  run_operation =
      reinterpret_cast<int (*)(int, int, const char*, const char*, uint64_t*)>(find("campaign_run"));
  error_text = reinterpret_cast<const char* (*)()>(find("campaign_error"));
}

int index_of(const char* name) {
  for (int i = 0; operation(i) != nullptr; ++i)
    if (std::strcmp(operation(i), name) == 0) return i;
  fail("no such operation");
}

struct Job {
  int index;
  int threads;
  const char* model;
  const char* output;
};

uint64_t run(const Job& job) {
  uint64_t hash = 0;
  const int status = run_operation(job.index, job.threads, job.model, job.output, &hash);
  if (status != kOk) {
    std::fprintf(stderr, "host: %s: status %d: %s\n", operation(job.index), status, error_text());
    std::_Exit(1);
  }
  return hash;
}

int memory(const Job& job, long first, long last, long step, bool forever, bool cold) {
  const auto arm = reinterpret_cast<void (*)(long, int)>(dlsym(RTLD_DEFAULT, "campaign_memory_arm"));
  const auto disarm = reinterpret_cast<long (*)(long*)>(dlsym(RTLD_DEFAULT, "campaign_memory_disarm"));
  const auto live = reinterpret_cast<long (*)()>(dlsym(RTLD_DEFAULT, "campaign_memory_live"));
  if (arm == nullptr || disarm == nullptr || live == nullptr) fail("memory_shim is not preloaded");
  Job words = job;
  words.index = index_of("words");
  run(words);  // the thread-local data of the libraries, without which glibc ends the process
  // Likewise what dlerror() keeps of a thread, and the allocator that oneTBB looks for.
  dlopen("libtbbmalloc.so.2", RTLD_NOW);
  dlopen("/none", RTLD_NOW);
  uint64_t expected = 0;
  if (!cold) {
    for (int i = 0; i < 3; ++i) expected = run(job);
    arm(0, 0);
    run(job);
    const long total = disarm(nullptr);
    std::printf("%ld allocations\n", total);
    if (last > total) last = total;
  }
  long before = 0, num_failures = 0, num_survived = 0;
  for (long k = first; k <= last; k += step) {
    uint64_t hash = 0;
    if (k == first + 8 * step) before = live();  // what caches and arenas keep is there
    std::fprintf(stderr, "%ld\n", k);            // names the one that ends the process
    arm(k, forever);
    const int status = run_operation(job.index, job.threads, job.model, job.output, &hash);
    long failed = 0;
    disarm(&failed);
    if (failed == 0 && status != kOk) fail("a failure where no allocation failed");
    if (status != kOk && status != kNoMemory) {
      std::fprintf(stderr, "host: allocation %ld: status %d: %s\n", k, status, error_text());
      return 1;
    }
    if (status == kOk && !cold && hash != expected) fail("another result");
    num_failures += failed > 0;
    num_survived += failed > 0 && status == kOk;
    if (run(job) != expected && !cold) fail("another result afterwards");
    if (cold) break;
  }
  const long grown = before == 0 ? 0 : live() - before;
  std::printf("%ld failures, %ld survived, %ld blocks more\n", num_failures, num_survived, grown);
  if (grown > 64) fail("blocks of memory are lost");
  return 0;
}

void join_child(pid_t child) {
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) fail("cannot fork");
  if (status != 0) {
    std::fprintf(stderr, "host: a child ended with status %x\n", static_cast<unsigned>(status));
    std::_Exit(1);
  }
}

std::atomic<bool> done = false;
std::atomic<int64_t> num_runs = 0;

struct Working {
  pthread_t threads[64];
  int number;
  Working(const Job& job, int count) : number(count) {
    for (int i = 0; i < number; ++i)
      if (pthread_create(&threads[i], nullptr, body, const_cast<Job*>(&job)) != 0)
        fail("cannot start a thread");
  }
  void join() {
    for (int i = 0; i < number; ++i) pthread_join(threads[i], nullptr);
  }
  static void* body(void* argument) {
    const Job& job = *static_cast<const Job*>(argument);
    uint64_t first = 0;
    while (!done) {
      const uint64_t hash = run(job);
      if (first != 0 && hash != first) fail("another result in a thread");
      first = hash;
      ++num_runs;
    }
    return nullptr;
  }
};

// In a thread that ends before the next: what a thread holds of a library keeps that loaded.
uint64_t run_in_thread(const Job& job) {
  struct Call {
    const Job& job;
    uint64_t hash;
  } call = {job, 0};
  pthread_t thread;
  const auto body = [](void* argument) -> void* {
    Call& mine = *static_cast<Call*>(argument);
    mine.hash = run(mine.job);
    return nullptr;
  };
  if (pthread_create(&thread, nullptr, body, &call) != 0) fail("cannot start a thread");
  pthread_join(thread, nullptr);
  return call.hash;
}

int number_in(const char* path) {
  DIR* const directory = opendir(path);
  int number = 0;
  while (directory != nullptr && readdir(directory) != nullptr) ++number;
  if (directory != nullptr) closedir(directory);
  return number;
}

long resident_kib() {
  long size = 0, pages = 0;
  FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &size, &pages) != 2) fail("no /proc");
  std::fclose(file);
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

struct Endless {
  Job job;
  char output[4096];
};
void* run_all(void* argument) {
  Endless& endless = *static_cast<Endless*>(argument);
  constexpr int kMost = 64;
  uint64_t expected[kMost] = {};
  uint64_t state = reinterpret_cast<uintptr_t>(argument);
  int number = 0;
  while (number < kMost && operation(number) != nullptr) ++number;
  while (!done) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    Job job = endless.job;
    job.index = static_cast<int>((state >> 33) % static_cast<uint64_t>(number));
    job.threads = 1 + static_cast<int>((state >> 20) % 3);
    job.output = endless.output;
    const uint64_t hash = run(job);
    uint64_t& first = expected[job.index];
    if (first != 0 && first != hash) fail("another result than the first");
    first = hash;
    ++num_runs;
  }
  return nullptr;
}

int endurance(const Job& job, int threads, int seconds) {
  static Endless each[64];
  pthread_t ids[64];
  for (int i = 0; i < threads; ++i) {
    each[i].job = job;
    std::snprintf(each[i].output, sizeof each[i].output, "%s/%d", job.output, i);
    if (pthread_create(&ids[i], nullptr, run_all, &each[i]) != 0) fail("cannot start a thread");
  }
  for (int second = 1; second <= seconds; ++second) {
    sleep(1);
    std::printf("%" PRId64 " runs, %ld KiB, %d descriptors, %d threads\n", num_runs.load(), resident_kib(),
                number_in("/proc/self/fd"), number_in("/proc/self/task"));
    std::fflush(stdout);
  }
  done = true;
  for (int i = 0; i < threads; ++i) pthread_join(ids[i], nullptr);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) fail("too few arguments");
  const char* const ops = argv[1];
  const char* const mode = argv[2];
  const auto is = [mode](const char* name) { return std::strcmp(mode, name) == 0; };
  load(ops);
  const Job job = {is("endurance") ? 0 : index_of(argv[3]), std::atoi(argv[4]), argv[5], argv[6]};
  const long number = std::atol(argv[7]);
  if (is("memory")) {
    if (argc != 12) fail("wrong arguments");
    return memory(job, number, std::atol(argv[8]), std::atol(argv[9]), std::atoi(argv[10]) != 0,
                  std::atoi(argv[11]) != 0);
  }
  if (is("endurance")) return endurance(job, job.threads, static_cast<int>(number));
  if (is("unload")) {
    uint64_t first = 0;
    for (long i = 0; i < number; ++i) {
      const uint64_t hash = run_in_thread(job);
      if (first != 0 && hash != first) fail("another result");
      first = hash;
      if (dlclose(library) != 0) fail(dlerror());
      usleep(static_cast<useconds_t>(i % 7 * 1000));  // threads that wait look for work, and then sleep
      load(ops);
    }
    dlclose(library);
    usleep(20000);
    return 0;
  }
  if (is("fork")) {
    const uint64_t expected = run(job);
    for (long i = 0; i < number; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        alarm(30);
        std::exit(run(job) == expected ? 0 : 1);
      }
      join_child(child);
      run(job);
    }
    return 0;
  }
  if (is("exit")) {
    run(job);
    std::exit(0);
  }
  static Working working(job, 3);  // as the process ends, these compute
  while (num_runs < 3) usleep(1000);
  if (is("fork_threads")) {
    for (long i = 0; i < number; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        alarm(30);
        run(job);
        std::exit(0);
      }
      join_child(child);
    }
  } else if (is("threads")) {
    usleep(static_cast<useconds_t>(number));
  } else if (is("exit_threads")) {
    usleep(static_cast<useconds_t>(number));
    std::exit(0);
  } else {
    fail("no such mode");
  }
  done = true;
  working.join();
  return 0;
}
