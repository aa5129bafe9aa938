// Preloaded into a program (LD_PRELOAD), counts its calls of libc that touch files, and makes the one that is
// asked for fail, stop short, or be the last. std::filesystem and streams call libc too, and so are seen.
//
//   HALFBYTE_FAULTS_UNDER    directories, with colons between: only calls on what is one of them or below
//   count, and
//                            those on pipes, standard output, random numbers, starting of processes
//   HALFBYTE_FAULTS_LOG      a file: "NUMBER KIND PATH" for every call that counts, NUMBER from 0
//   HALFBYTE_FAULTS_AT       the number of the call that is meant
//   HALFBYTE_FAULTS_DO       what happens to it:
//       "error E"            it fails with errno E and does nothing
//       "late E"             it does what it should, and fails with errno E
//       "short N"            it transfers N bytes at most; 0 is the end of a file, or nothing written
//       "before S", "after S"  the process sends itself signal S, before or after the call
//   HALFBYTE_FAULTS_THEN     kinds, with spaces between: to every later call of these the same happens
//   HALFBYTE_FAULTS_LACKS    "KIND E KIND E ...": calls of these kinds always fail with errno E, as on a file
//   system that
//                            lacks them
//   HALFBYTE_FAULTS_COUNTER  a file of 8 zero bytes, mapped, where several processes count together
//   HALFBYTE_FAULTS_RECORD   a file: every change that was made, "KIND\tPATH\tPATH\tNUMBER\tSIZE\n" and SIZE
//   bytes. For
//                            write NUMBER is the offset, for truncate and allocate the size of the file, for
//                            renameat2 the flags
//
// KIND is open, create (open with O_CREAT), opendir (with O_DIRECTORY), read, write, sync, rename, stat and
// so on: CALL below. Calls that libc makes of itself are not seen: readlink within realpath, fstat within
// fdopendir.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_FDS 4096

// The function of libc that a wrapper stands before.
#define NEXT(name)                                                  \
  ({                                                                \
    static __typeof__(&name) next_;                                 \
    if (!next_) next_ = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    next_;                                                          \
  })

static const char kPipe[] = "(pipe)", kStdout[] = "(stdout)", kRandom[] = "(random)", kSpawn[] = "(spawn)";

static bool ready;
static const char *under, *then, *lacks;
static long at = -1, own_counter, *counter = &own_counter;
static int log_fd = -1, record_fd = -1;
static enum { kNothing, kError, kLate, kShort, kBefore, kAfter } action;
static int action_number;
static char* paths[MAX_FDS];  // of open descriptors that count

static int open_log(const char* variable) {
  const char* path = getenv(variable);
  if (!path) return -1;
  const long fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) abort();
  const long high = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 900);  // out of the way of the program's
  syscall(SYS_close, fd);
  return (int)high;
}

static void make_ready(void) {
  static const struct {
    const char* word;
    int action;
  } kActions[] = {
      {"error", kError}, {"late", kLate}, {"short", kShort}, {"before", kBefore}, {"after", kAfter}};
  if (ready) return;
  ready = true;
  under = getenv("HALFBYTE_FAULTS_UNDER");
  then = getenv("HALFBYTE_FAULTS_THEN");
  lacks = getenv("HALFBYTE_FAULTS_LACKS");
  log_fd = open_log("HALFBYTE_FAULTS_LOG");
  record_fd = open_log("HALFBYTE_FAULTS_RECORD");
  if (getenv("HALFBYTE_FAULTS_AT")) at = atol(getenv("HALFBYTE_FAULTS_AT"));
  char word[16] = "";
  const char* what = getenv("HALFBYTE_FAULTS_DO");
  if (what) {
    if (sscanf(what, "%15s %d", word, &action_number) != 2) abort();
    for (size_t i = 0; i < sizeof kActions / sizeof kActions[0]; ++i)
      if (strcmp(word, kActions[i].word) == 0) action = kActions[i].action;
    if (action == kNothing) abort();
  }
  const char* shared = getenv("HALFBYTE_FAULTS_COUNTER");
  if (shared) {
    const long fd = syscall(SYS_openat, AT_FDCWD, shared, O_RDWR | O_CLOEXEC, 0);
    const long address = syscall(SYS_mmap, NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || address < 0) abort();
    counter = (long*)address;
    syscall(SYS_close, fd);
  }
}

__attribute__((constructor)) static void start(void) { make_ready(); }

static bool counts(const char* path) {
  if (!path || !under) return false;
  if (path[0] == '(') return true;
  for (const char* directory = under; directory; directory = strchr(directory, ':')) {
    if (*directory == ':') ++directory;
    const size_t length = strcspn(directory, ":");
    if (length > 0 && strncmp(path, directory, length) == 0 && (path[length] == '\0' || path[length] == '/'))
      return true;
  }
  return false;
}

static const char* path_of(int fd) {
  make_ready();
  if (fd == STDOUT_FILENO && !paths[fd]) return kStdout;
  return fd >= 0 && fd < MAX_FDS ? paths[fd] : NULL;
}

static void set_path(int fd, const char* path) {
  if (fd < 0 || fd >= MAX_FDS) return;
  free(__atomic_exchange_n(&paths[fd], path && counts(path) ? strdup(path) : NULL, __ATOMIC_ACQ_REL));
}

typedef struct {
  char text[PATH_MAX];
} Path;

// `path`, which is relative to the directory `fd`, as an absolute one; NULL if that is not known.
static const char* absolute(Path* to, int fd, const char* path) {
  if (!path) return NULL;
  if (path[0] == '/') return path;
  char here[PATH_MAX];
  const char* directory = path_of(fd);
  if (fd == AT_FDCWD) directory = syscall(SYS_getcwd, here, sizeof here) > 0 ? here : NULL;
  if (!directory) return NULL;
  if (path[0] == '\0' || strcmp(path, ".") == 0) return directory;
  const int length = snprintf(to->text, sizeof to->text, "%s/%s", directory, path);
  return length < (int)sizeof to->text ? to->text : NULL;
}
static const char* here(Path* to, const char* path) { return absolute(to, AT_FDCWD, path); }

// What follows the word `kind` in `words`; NULL where it is not among them.
static const char* after_word(const char* words, const char* kind) {
  const size_t length = strlen(kind);
  for (const char* word = words; word && *word; word += strcspn(word, " ")) {
    word += strspn(word, " ");
    if (strncmp(word, kind, length) == 0 && (word[length] == ' ' || word[length] == '\0'))
      return word + length;
  }
  return NULL;
}

typedef struct {
  int late, signal;  // at the end; 0: none
  long limit;        // of bytes; -1: none
} Call;

// Whether the call fails now, with errno set.
static bool fails(Call* call, const char* kind, const char* path) {
  *call = (Call){0, 0, -1};
  const int error = errno;
  make_ready();
  if (!counts(path)) return false;
  const long number = __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL);
  if (log_fd >= 0) {
    char line[PATH_MAX + 64];
    const int length = snprintf(line, sizeof line, "%ld %s %s\n", number, kind, path);
    syscall(SYS_write, log_fd, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
  }
  const char* lacking = after_word(lacks, kind);
  errno = lacking ? atoi(lacking) : error;
  if (lacking) return true;
  if (number != at && !(at >= 0 && number > at && after_word(then, kind))) return false;
  switch (action) {
    case kError:
      errno = action_number;
      return true;
    case kLate:
      call->late = action_number;
      break;
    case kShort:
      call->limit = action_number;
      break;
    case kBefore:
      syscall(SYS_kill, getpid(), action_number);
      break;
    case kAfter:
      call->signal = action_number;
      break;
    case kNothing:
      break;
  }
  return false;
}

// What the call returns.
static long ends(const Call* call, long result) {
  const int error = errno;
  if (call->signal) syscall(SYS_kill, getpid(), call->signal);
  errno = error;
  if (!call->late || result < 0) return result;
  errno = call->late;
  return -1;
}

static size_t limited(const Call* call, size_t size) {
  return call->limit >= 0 && (size_t)call->limit < size ? (size_t)call->limit : size;
}

static void record(const char* kind, const char* path, const char* path2, long long number, const void* data,
                   size_t size) {
  if (record_fd < 0 || !counts(path)) return;
  const int error = errno;
  char line[2 * PATH_MAX + 64];
  const int length =
      snprintf(line, sizeof line, "%s\t%s\t%s\t%lld\t%zu\n", kind, path, path2 ? path2 : "", number, size);
  struct iovec parts[] = {{line, (size_t)length}, {(void*)data, size}};
  if (syscall(SYS_writev, record_fd, parts, size > 0 ? 2 : 1) != length + (long)size) abort();
  errno = error;
}

// A call of `name` on `path`. What follows is done where it has succeeded, with `result`.
#define CALL(kind, path, type, name, arguments, failure, ...) \
  Call call_;                                                 \
  if (fails(&call_, kind, path)) return failure;              \
  type result = NEXT(name) arguments;                         \
  if (result != (type)(failure)) {                            \
    __VA_ARGS__;                                              \
  }                                                           \
  return ends(&call_, (long)result) == (long)result ? result : (type)(failure)

// Opening.

static int opened(const char* path, int flags, int fd, bool existed) {
  if (fd < 0) return fd;
  set_path(fd, path);
  if ((flags & O_CREAT) && !existed)
    record("create", path, NULL, 0, NULL, 0);
  else if (flags & O_TRUNC)
    record("truncate", path, NULL, 0, NULL, 0);
  return fd;
}
static bool exists(const char* path, int flags) {
  struct stat status;
  const int error = errno;
  const bool found = (flags & O_CREAT) && !(flags & O_EXCL) && path &&
                     syscall(SYS_newfstatat, AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) == 0;
  errno = error;
  return found;
}
static const char* open_kind(int flags) {
  return flags & O_CREAT ? "create" : flags & O_DIRECTORY ? "opendir" : "open";
}
#define OPEN(name, directory, parameters, arguments)                                                \
  EXPORT int name parameters {                                                                      \
    mode_t mode = 0;                                                                                \
    if (flags & O_CREAT) {                                                                          \
      va_list list;                                                                                 \
      va_start(list, flags);                                                                        \
      mode = va_arg(list, mode_t);                                                                  \
      va_end(list);                                                                                 \
    }                                                                                               \
    Path buffer;                                                                                    \
    const char* whole = absolute(&buffer, directory, path);                                         \
    const bool existed = exists(whole, flags);                                                      \
    CALL(open_kind(flags), whole, int, name, arguments, -1, opened(whole, flags, result, existed)); \
  }
OPEN(open, AT_FDCWD, (const char* path, int flags, ...), (path, flags, mode))
OPEN(open64, AT_FDCWD, (const char* path, int flags, ...), (path, flags, mode))
OPEN(openat, fd, (int fd, const char* path, int flags, ...), (fd, path, flags, mode))
OPEN(openat64, fd, (int fd, const char* path, int flags, ...), (fd, path, flags, mode))

EXPORT int creat(const char* path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
EXPORT int creat64(const char* path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

static FILE* open_stream(const char* path, const char* mode, FILE* (*next)(const char*, const char*)) {
  Path buffer;
  Call call;
  const char* whole = here(&buffer, path);
  const int flags = mode[0] == 'r' ? 0 : mode[0] == 'w' ? O_CREAT | O_TRUNC : O_CREAT;
  const bool existed = exists(whole, flags);
  if (fails(&call, flags ? "create" : "open", whole)) return NULL;
  FILE* file = next(path, mode);
  if (file) opened(whole, flags, fileno(file), existed);
  ends(&call, 0);
  return file;
}
EXPORT FILE* fopen(const char* path, const char* mode) { return open_stream(path, mode, NEXT(fopen)); }
EXPORT FILE* fopen64(const char* path, const char* mode) { return open_stream(path, mode, NEXT(fopen64)); }
EXPORT int fclose(FILE* file) {
  const int fd = fileno(file);
  Path path;  // gone once it is closed
  snprintf(path.text, sizeof path.text, "%s", path_of(fd) ? path_of(fd) : "");
  Call call;
  const bool failed = fails(&call, "close", path.text);
  const int error = errno;
  set_path(fd, NULL);
  const int result = NEXT(fclose)(file);
  if (!failed) return (int)ends(&call, result);
  errno = error;
  return EOF;
}
EXPORT size_t fread(void* data, size_t size, size_t count, FILE* file) {
  Call call;
  if (fails(&call, "read", path_of(fileno(file)))) return 0;
  const size_t result = NEXT(fread)(data, size, limited(&call, count), file);
  ends(&call, 0);
  return result;
}

// A descriptor is closed even where close() says that it failed.
EXPORT int close(int fd) {
  Call call;
  const char* path = fd == STDOUT_FILENO ? NULL : path_of(fd);
  const bool failed = fails(&call, "close", path);
  const int error = errno;
  set_path(fd, NULL);
  const int result = NEXT(close)(fd);
  if (!failed) return (int)ends(&call, result);
  errno = error;
  return -1;
}

static int duplicated(int fd, int copy) {
  if (copy >= 0 && copy != fd) set_path(copy, fd == STDOUT_FILENO ? NULL : path_of(fd));
  return copy;
}
EXPORT int dup(int fd) { CALL("dup", path_of(fd), int, dup, (fd), -1, duplicated(fd, result)); }
EXPORT int dup2(int fd, int to) { CALL("dup", path_of(fd), int, dup2, (fd, to), -1, duplicated(fd, result)); }
EXPORT int dup3(int fd, int to, int flags) {
  CALL("dup", path_of(fd), int, dup3, (fd, to, flags), -1, duplicated(fd, result));
}
EXPORT int pipe2(int ends_of[2], int flags) {
  CALL("pipe", kPipe, int, pipe2, (ends_of, flags), -1, set_path(ends_of[0], kPipe),
       set_path(ends_of[1], kPipe));
}
EXPORT int pipe(int ends_of[2]) { return pipe2(ends_of, 0); }

#define FCNTL(name)                                                                                        \
  EXPORT int name(int fd, int command, ...) {                                                              \
    va_list list;                                                                                          \
    va_start(list, command);                                                                               \
    void* argument = va_arg(list, void*);                                                                  \
    va_end(list);                                                                                          \
    const bool locks =                                                                                     \
        command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;    \
    const bool copies = command == F_DUPFD || command == F_DUPFD_CLOEXEC;                                  \
    CALL(locks ? "lock" : "dup", locks || copies ? path_of(fd) : NULL, int, name, (fd, command, argument), \
         -1, if (copies) duplicated(fd, result));                                                          \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

// Reading and writing.

EXPORT ssize_t read(int fd, void* data, size_t size) {
  CALL("read", path_of(fd), ssize_t, read, (fd, data, limited(&call_, size)), -1);
}
EXPORT ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  CALL("read", path_of(fd), ssize_t, pread, (fd, data, limited(&call_, size), offset), -1);
}
EXPORT ssize_t pread64(int fd, void* data, size_t size, off64_t offset) {
  return pread(fd, data, size, offset);
}

// To less: of the first part.
static int shortened(const Call* call, const struct iovec* parts, int count, struct iovec* first) {
  *first = count > 0 ? parts[0] : (struct iovec){NULL, 0};
  if (call->limit < 0) return count;
  first->iov_len = limited(call, first->iov_len);
  return 1;
}
EXPORT ssize_t readv(int fd, const struct iovec* parts, int count) {
  Call call;
  struct iovec first;
  if (fails(&call, "read", path_of(fd))) return -1;
  count = shortened(&call, parts, count, &first);
  return ends(&call, NEXT(readv)(fd, call.limit < 0 ? parts : &first, count));
}

static void record_write(int fd, long long offset, const void* data, ssize_t size) {
  if (record_fd >= 0 && path_of(fd) && path_of(fd)[0] == '/' && size > 0)
    record("write", path_of(fd), NULL, offset, data, (size_t)size);
}
// Where write() will begin.
static long long position(int fd) {
  const int error = errno;
  struct stat status;
  const bool appends = record_fd >= 0 && (syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND);
  const long long result = record_fd < 0 ? 0
                           : appends && syscall(SYS_fstat, fd, &status) == 0
                               ? (long long)status.st_size
                               : (long long)syscall(SYS_lseek, fd, 0, SEEK_CUR);
  errno = error;
  return result;
}
EXPORT ssize_t write(int fd, const void* data, size_t size) {
  const long long offset = position(fd);
  CALL("write", path_of(fd), ssize_t, write, (fd, data, limited(&call_, size)), -1,
       record_write(fd, offset, data, result));
}
EXPORT ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  CALL("write", path_of(fd), ssize_t, pwrite, (fd, data, limited(&call_, size), offset), -1,
       record_write(fd, offset, data, result));
}
EXPORT ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
  return pwrite(fd, data, size, offset);
}
EXPORT ssize_t writev(int fd, const struct iovec* parts, int count) {
  Call call;
  struct iovec first;
  long long offset = position(fd);
  if (fails(&call, "write", path_of(fd))) return -1;
  count = shortened(&call, parts, count, &first);
  if (call.limit >= 0) parts = &first;
  ssize_t left = NEXT(writev)(fd, parts, count);
  const ssize_t result = left;
  for (int i = 0; i < count && left > 0; ++i) {
    const ssize_t size = left < (ssize_t)parts[i].iov_len ? left : (ssize_t)parts[i].iov_len;
    record_write(fd, offset, parts[i].iov_base, size);
    offset += size;
    left -= size;
  }
  return ends(&call, result);
}

// Copies within the kernel are not recorded: power loss is of what goes through write().
EXPORT ssize_t copy_file_range(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t size,
                               unsigned flags) {
  CALL("copy", path_of(to), ssize_t, copy_file_range,
       (from, from_offset, to, to_offset, limited(&call_, size), flags), -1,
       if (record_fd >= 0 && path_of(to)) abort());
}
EXPORT ssize_t sendfile(int to, int from, off_t* offset, size_t size) {
  CALL("copy", path_of(to), ssize_t, sendfile, (to, from, offset, limited(&call_, size)), -1,
       if (record_fd >= 0 && path_of(to)) abort());
}
EXPORT ssize_t splice(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t size,
                      unsigned flags) {
  CALL("copy", path_of(to), ssize_t, splice, (from, from_offset, to, to_offset, limited(&call_, size), flags),
       -1, if (record_fd >= 0 && path_of(to)) abort());
}
EXPORT int poll(struct pollfd* fds, nfds_t count, int timeout) {
  CALL("poll", kPipe, int, poll, (fds, count, timeout), -1);
}
EXPORT int ioctl(int fd, unsigned long request, ...) {
  va_list list;
  va_start(list, request);
  void* argument = va_arg(list, void*);
  va_end(list);
  CALL("ioctl", fd == STDOUT_FILENO ? NULL : path_of(fd), int, ioctl, (fd, request, argument), -1);
}
EXPORT void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  CALL("mmap", fd == STDOUT_FILENO ? NULL : path_of(fd), void*, mmap,
       (address, size, protection, flags, fd, offset), MAP_FAILED);
}
EXPORT void* mmap64(void* address, size_t size, int protection, int flags, int fd, off64_t offset) {
  return mmap(address, size, protection, flags, fd, offset);
}

// Sizes and syncing.

EXPORT int ftruncate(int fd, off_t size) {
  CALL("truncate", path_of(fd), int, ftruncate, (fd, size), -1,
       record("truncate", path_of(fd), NULL, size, NULL, 0));
}
EXPORT int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
EXPORT int truncate(const char* path, off_t size) {
  Path buffer;
  const char* whole = here(&buffer, path);
  CALL("truncate", whole, int, truncate, (path, size), -1, record("truncate", whole, NULL, size, NULL, 0));
}
EXPORT int fallocate(int fd, int mode, off_t offset, off_t size) {
  CALL("fallocate", path_of(fd), int, fallocate, (fd, mode, offset, size), -1,
       if (mode == 0) record("allocate", path_of(fd), NULL, offset + size, NULL, 0));
}
EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
  return fallocate(fd, mode, offset, size);
}
// This one returns its error.
EXPORT int posix_fallocate(int fd, off_t offset, off_t size) {
  Call call;
  if (fails(&call, "fallocate", path_of(fd))) return errno;
  const int result = NEXT(posix_fallocate)(fd, offset, size);
  if (result == 0) record("allocate", path_of(fd), NULL, offset + size, NULL, 0);
  return ends(&call, 0) < 0 ? errno : result;
}
EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  return posix_fallocate(fd, offset, size);
}
#define SYNC(name)                                                                                 \
  EXPORT int name(int fd) {                                                                        \
    CALL("sync", path_of(fd), int, name, (fd), -1, record("sync", path_of(fd), NULL, 0, NULL, 0)); \
  }
SYNC(fsync)
SYNC(fdatasync)
SYNC(syncfs)
EXPORT int sync_file_range(int fd, off64_t offset, off64_t size,
                           unsigned flags) {  // no promise after a crash
  CALL("sync", path_of(fd), int, sync_file_range, (fd, offset, size, flags), -1);
}

// Names.

// Files that are open go on under their new name.
static void renamed(const char* kind, const char* from, const char* to, unsigned flags) {
  record(kind, from, to, flags, NULL, 0);
  if (strcmp(kind, "rename") != 0 || !from || !to) return;
  for (int fd = 0; fd < MAX_FDS; ++fd)
    if (paths[fd] && strcmp(paths[fd], from) == 0) set_path(fd, to);
}

#define RENAME(name, kind, from_fd, to_fd, flags, parameters, arguments)                                    \
  EXPORT int name parameters {                                                                              \
    Path from_buffer, to_buffer;                                                                            \
    const char *whole = absolute(&from_buffer, from_fd, from), *whole_to = absolute(&to_buffer, to_fd, to); \
    CALL(kind, whole, int, name, arguments, -1, renamed(kind, whole, whole_to, flags));                     \
  }
RENAME(rename, "rename", AT_FDCWD, AT_FDCWD, 0, (const char* from, const char* to), (from, to))
RENAME(renameat, "rename", from_fd, to_fd, 0, (int from_fd, const char* from, int to_fd, const char* to),
       (from_fd, from, to_fd, to))
RENAME(renameat2, "renameat2", from_fd, to_fd, flags,
       (int from_fd, const char* from, int to_fd, const char* to, unsigned flags),
       (from_fd, from, to_fd, to, flags))
RENAME(link, "link", AT_FDCWD, AT_FDCWD, 0, (const char* from, const char* to), (from, to))
RENAME(linkat, "link", from_fd, to_fd, 0,
       (int from_fd, const char* from, int to_fd, const char* to, int flags),
       (from_fd, from, to_fd, to, flags))

// A function of a path, or of a path below a directory.
#define NAME(name, kind, directory, parameters, arguments, recorded)                                      \
  EXPORT int name parameters {                                                                            \
    Path buffer;                                                                                          \
    const char* whole = absolute(&buffer, directory, path);                                               \
    CALL(kind, whole, int, name, arguments, -1, if (recorded) record(recorded, whole, NULL, 0, NULL, 0)); \
  }
#define NO_RECORD ((const char*)NULL)
NAME(symlink, "symlink", AT_FDCWD, (const char* target, const char* path), (target, path), "symlink")
NAME(symlinkat, "symlink", fd, (const char* target, int fd, const char* path), (target, fd, path), "symlink")
NAME(mkdir, "mkdir", AT_FDCWD, (const char* path, mode_t mode), (path, mode), "mkdir")
NAME(mkdirat, "mkdir", fd, (int fd, const char* path, mode_t mode), (fd, path, mode), "mkdir")
NAME(rmdir, "rmdir", AT_FDCWD, (const char* path), (path), "rmdir")
NAME(unlink, "unlink", AT_FDCWD, (const char* path), (path), "unlink")
NAME(remove, "unlink", AT_FDCWD, (const char* path), (path), "unlink")
NAME(unlinkat, flags& AT_REMOVEDIR ? "rmdir" : "unlink", fd, (int fd, const char* path, int flags),
     (fd, path, flags), flags& AT_REMOVEDIR ? "rmdir" : "unlink")
NAME(chmod, "chmod", AT_FDCWD, (const char* path, mode_t mode), (path, mode), NO_RECORD)
NAME(fchmodat, "chmod", fd, (int fd, const char* path, mode_t mode, int flags), (fd, path, mode, flags),
     NO_RECORD)
NAME(chown, "chmod", AT_FDCWD, (const char* path, uid_t user, gid_t group), (path, user, group), NO_RECORD)
NAME(lchown, "chmod", AT_FDCWD, (const char* path, uid_t user, gid_t group), (path, user, group), NO_RECORD)
NAME(access, "access", AT_FDCWD, (const char* path, int mode), (path, mode), NO_RECORD)
NAME(faccessat, "access", fd, (int fd, const char* path, int mode, int flags), (fd, path, mode, flags),
     NO_RECORD)
NAME(utimensat, "utime", fd, (int fd, const char* path, const struct timespec times[2], int flags),
     (fd, path, times, flags), NO_RECORD)
NAME(chdir, "chdir", AT_FDCWD, (const char* path), (path), NO_RECORD)

NAME(stat, "stat", AT_FDCWD, (const char* path, struct stat* status), (path, status), NO_RECORD)
NAME(stat64, "stat", AT_FDCWD, (const char* path, struct stat64* status), (path, status), NO_RECORD)
NAME(lstat, "stat", AT_FDCWD, (const char* path, struct stat* status), (path, status), NO_RECORD)
NAME(lstat64, "stat", AT_FDCWD, (const char* path, struct stat64* status), (path, status), NO_RECORD)
NAME(fstatat, "stat", fd, (int fd, const char* path, struct stat* status, int flags),
     (fd, path, status, flags), NO_RECORD)
NAME(fstatat64, "stat", fd, (int fd, const char* path, struct stat64* status, int flags),
     (fd, path, status, flags), NO_RECORD)
NAME(statx, "stat", fd, (int fd, const char* path, int flags, unsigned mask, struct statx* status),
     (fd, path, flags, mask, status), NO_RECORD)
NAME(statfs, "statfs", AT_FDCWD, (const char* path, struct statfs* status), (path, status), NO_RECORD)
NAME(statfs64, "statfs", AT_FDCWD, (const char* path, struct statfs64* status), (path, status), NO_RECORD)
NAME(statvfs, "statfs", AT_FDCWD, (const char* path, struct statvfs* status), (path, status), NO_RECORD)
NAME(statvfs64, "statfs", AT_FDCWD, (const char* path, struct statvfs64* status), (path, status), NO_RECORD)

// The names under which programs of older libcs call stat.
EXPORT int __xstat(int version, const char* path, struct stat* status) {
  return version < 0 ? -1 : stat(path, status);
}
EXPORT int __lxstat(int version, const char* path, struct stat* status) {
  return version < 0 ? -1 : lstat(path, status);
}
EXPORT int __fxstat(int version, int fd, struct stat* status) { return version < 0 ? -1 : fstat(fd, status); }
EXPORT int __fxstatat(int version, int fd, const char* path, struct stat* status, int flags) {
  return version < 0 ? -1 : fstatat(fd, path, status, flags);
}

// A function of a descriptor.
#define DESCRIPTOR(name, kind, parameters, arguments)                               \
  EXPORT int name parameters {                                                      \
    CALL(kind, fd == STDOUT_FILENO ? NULL : path_of(fd), int, name, arguments, -1); \
  }
DESCRIPTOR(fstat, "stat", (int fd, struct stat* status), (fd, status))
DESCRIPTOR(fstat64, "stat", (int fd, struct stat64* status), (fd, status))
DESCRIPTOR(fstatfs, "statfs", (int fd, struct statfs* status), (fd, status))
DESCRIPTOR(fstatfs64, "statfs", (int fd, struct statfs64* status), (fd, status))
DESCRIPTOR(fstatvfs, "statfs", (int fd, struct statvfs* status), (fd, status))
DESCRIPTOR(fstatvfs64, "statfs", (int fd, struct statvfs64* status), (fd, status))
DESCRIPTOR(flock, "lock", (int fd, int operation), (fd, operation))
DESCRIPTOR(fchmod, "chmod", (int fd, mode_t mode), (fd, mode))
DESCRIPTOR(fchown, "chmod", (int fd, uid_t user, gid_t group), (fd, user, group))
DESCRIPTOR(futimens, "utime", (int fd, const struct timespec times[2]), (fd, times))
DESCRIPTOR(fchdir, "chdir", (int fd), (fd))

EXPORT ssize_t readlink(const char* path, char* target, size_t size) {
  Path buffer;
  CALL("readlink", here(&buffer, path), ssize_t, readlink, (path, target, size), -1);
}
EXPORT ssize_t readlinkat(int fd, const char* path, char* target, size_t size) {
  Path buffer;
  CALL("readlink", absolute(&buffer, fd, path), ssize_t, readlinkat, (fd, path, target, size), -1);
}
EXPORT char* realpath(const char* path, char* resolved) {
  Path buffer;
  CALL("realpath", here(&buffer, path), char*, realpath, (path, resolved), NULL);
}

// Directories.

EXPORT DIR* opendir(const char* path) {
  Path buffer;
  const char* whole = here(&buffer, path);
  CALL("opendir", whole, DIR*, opendir, (path), NULL, set_path(dirfd(result), whole));
}
EXPORT DIR* fdopendir(int fd) { CALL("opendir", path_of(fd), DIR*, fdopendir, (fd), NULL); }
EXPORT struct dirent* readdir(DIR* directory) {
  CALL("readdir", path_of(dirfd(directory)), struct dirent*, readdir, (directory), NULL);
}
EXPORT struct dirent64* readdir64(DIR* directory) {
  CALL("readdir", path_of(dirfd(directory)), struct dirent64*, readdir64, (directory), NULL);
}
EXPORT int closedir(DIR* directory) {
  Call call;
  const int fd = dirfd(directory);
  const bool failed = fails(&call, "close", path_of(fd));
  const int error = errno;
  set_path(fd, NULL);
  const int result = NEXT(closedir)(directory);
  if (!failed) return (int)ends(&call, result);
  errno = error;
  return -1;
}

// What else the outside gives.

EXPORT ssize_t getrandom(void* data, size_t size, unsigned flags) {
  CALL("random", kRandom, ssize_t, getrandom, (data, limited(&call_, size), flags), -1);
}
EXPORT int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                       const posix_spawnattr_t* attributes, char* const argv[], char* const environment[]) {
  Call call;
  if (fails(&call, "spawn", kSpawn)) return errno;  // this one returns its error
  const int result = NEXT(posix_spawn)(pid, path, actions, attributes, argv, environment);
  ends(&call, 0);
  return result;
}
