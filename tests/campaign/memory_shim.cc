// Preloaded: makes allocations fail. Counting begins with main(), behind the loader and the static
// initialisers, or where the program asks for it by campaign_memory_arm(). The environment of a program that
// does not ask:
//   CAMPAIGN_MEMORY_FAIL     the number of the allocation that fails, from 1 on; 0: none
//   CAMPAIGN_MEMORY_FOREVER  set: the later ones fail too
//   CAMPAIGN_MEMORY_COUNT    a file that gets the number of allocations at the end of the process
//   CAMPAIGN_MEMORY_TRACE    set: writes to stderr where the allocation is that fails first
// operator new and all of the C library come through these functions.
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

extern "C" {
// Those of glibc, which are there before dlsym() can be asked.
void* __libc_malloc(size_t);            // NOLINT
void* __libc_calloc(size_t, size_t);    // NOLINT
void* __libc_realloc(void*, size_t);    // NOLINT
void* __libc_memalign(size_t, size_t);  // NOLINT
void __libc_free(void*);                // NOLINT
}

namespace {

std::atomic<bool> armed, forever, trace;
std::atomic<long> count, target, failed, live;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Allocations from now on count; the one of this number fails, 0: none, and all later ones too if
// `all_later`.
EXPORTED void campaign_memory_arm(long number, int all_later) {
  count = 0;
  failed = 0;
  target = number;
  forever = all_later != 0;
  armed = true;
}
// How many there were since; *num_failed of them failed.
EXPORTED long campaign_memory_disarm(long* num_failed) {
  armed = false;
  if (num_failed != nullptr) *num_failed = failed;
  return count;
}
// Blocks that are allocated and not freed.
EXPORTED long campaign_memory_live() { return live; }

namespace {

bool fails() {
  if (!armed) return false;
  const long number = ++count;
  if (target == 0 || number < target || (number > target && !forever)) return false;
  if (failed++ == 0 && trace) {
    armed = false;  // backtrace() allocates
    void* frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
    armed = true;
  }
  errno = ENOMEM;
  return true;
}

void* counted(void* block) {
  if (block != nullptr) ++live;
  return block;
}

int (*program)(int, char**, char**);

void report() {
  armed = false;
  const char* const path = std::getenv("CAMPAIGN_MEMORY_COUNT");
  if (path == nullptr) return;
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (fd >= 0) dprintf(fd, "%ld %ld\n", count.load(), failed.load());
}

int counted_main(int argc, char** argv, char** environment) {
  void* frame;
  backtrace(&frame, 1);  // loads what it needs
  trace = std::getenv("CAMPAIGN_MEMORY_TRACE") != nullptr;
  if (const char* const number = std::getenv("CAMPAIGN_MEMORY_FAIL")) {
    std::atexit(report);
    campaign_memory_arm(std::atol(number), std::getenv("CAMPAIGN_MEMORY_FOREVER") != nullptr);
  }
  return program(argc, argv, environment);
}

}  // namespace

EXPORTED void* malloc(size_t size) { return fails() ? nullptr : counted(__libc_malloc(size)); }
EXPORTED void* calloc(size_t number, size_t size) {
  return fails() ? nullptr : counted(__libc_calloc(number, size));
}
EXPORTED void* realloc(void* block, size_t size) {
  if (fails()) return nullptr;
  void* const result = __libc_realloc(block, size);
  return block == nullptr ? counted(result) : result;
}
EXPORTED void* memalign(size_t alignment, size_t size) {
  return fails() ? nullptr : counted(__libc_memalign(alignment, size));
}
EXPORTED void* aligned_alloc(size_t alignment, size_t size) {
  return fails() ? nullptr : counted(__libc_memalign(alignment, size));
}
EXPORTED int posix_memalign(void** block, size_t alignment, size_t size) {
  void* const result = fails() ? nullptr : counted(__libc_memalign(alignment, size));
  if (result == nullptr) return ENOMEM;
  *block = result;
  return 0;
}
EXPORTED void free(void* block) {
  if (block != nullptr) --live;
  __libc_free(block);
}

EXPORTED int __libc_start_main(int (*start)(int, char**, char**), int argc, char** argv,
                               void (*init)(),  // NOLINT
                               void (*fini)(), void (*loader_fini)(), void* stack_end) {
  using Start = int (*)(int (*)(int, char**, char**), int, char**, void (*)(), void (*)(), void (*)(), void*);
  program = start;
  return reinterpret_cast<Start>(dlsym(RTLD_NEXT, "__libc_start_main"))(counted_main, argc, argv, init, fini,
                                                                        loader_fini, stack_end);
}
