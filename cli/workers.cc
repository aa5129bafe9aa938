#include "workers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "halfbyte/error.hpp"

namespace halfbyte::cli {

namespace {

[[noreturn]] void throw_io(const char* what, int error) {
  throw Error(ErrorCode::io, fmt::format("{}: {}", what, std::generic_category().message(error)));
}

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw_io("cannot make a pipe", errno);
    read = ends[0];
    write = ends[1];
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    ::close(read);
    close_write();
  }
  void close_write() {
    if (write >= 0) ::close(write);
    write = -1;
  }
};

// A child process; ended where it is not waited for.
class Worker {
 public:
  Worker(std::vector<std::string> arguments, int stdout_fd) : log_(::memfd_create("log", MFD_CLOEXEC)) {
    if (log_ < 0) throw_io("cannot make a log for a worker process", errno);
    arguments.insert(arguments.begin(), "halfbyte");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, stdout_fd, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, log_, STDERR_FILENO);
    const int error = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    if (error == 0) return;
    ::close(log_);
    throw_io("cannot start a worker process", error);
  }
  Worker(Worker&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), log_(std::exchange(other.log_, -1)) {}
  Worker& operator=(Worker&&) = delete;
  ~Worker() {
    if (log_ >= 0) ::close(log_);
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }

  // Whether it has ended; throws what it said where it failed.
  bool ended() {
    int status = 0;
    if (pid_ >= 0 && ::waitpid(pid_, &status, WNOHANG) == 0) return false;
    pid_ = -1;
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      // The system kills processes where memory is short.
      if (signal == SIGKILL)
        throw Error(ErrorCode::no_memory, "a worker process was killed: fewer --jobs need less memory");
      throw Error(ErrorCode::bug, fmt::format("a worker process was ended by signal {}", signal));
    }
    if (WEXITSTATUS(status) != 0) throw Error(static_cast<ErrorCode>(WEXITSTATUS(status)), message());
    return true;
  }

 private:
  // What it said, without what print_failure() puts around it.
  std::string message() const {
    std::string text;
    char bytes[4096];
    for (ssize_t count = 0;
         (count = ::pread(log_, bytes, sizeof bytes, static_cast<off_t>(text.size()))) > 0;)
      text.append(bytes, static_cast<size_t>(count));
    constexpr std::string_view kPrefix = "halfbyte: error: ";
    if (text.starts_with(kPrefix)) text.erase(0, kPrefix.size());
    while (text.ends_with('\n')) text.pop_back();
    return text;
  }

  pid_t pid_ = -1;
  int log_ = -1;  // in memory, without a name: what it writes to standard error
};

}  // namespace

void run_workers(const std::vector<std::vector<std::string>>& arguments,
                 const std::function<bool(int64_t done)>& progress) {
  Pipe pipe;
  std::vector<Worker> workers;
  for (const std::vector<std::string>& words : arguments) workers.emplace_back(words, pipe.write);
  pipe.close_write();  // now it ends with the last worker

  int64_t done = 0;
  pollfd readable = {pipe.read, POLLIN, 0};
  int milliseconds = 100;
  for (bool all_ended = false; !all_ended;) {
    char bytes[4096];
    if (::poll(&readable, 1, milliseconds) > 0) {
      const ssize_t count = ::read(pipe.read, bytes, sizeof bytes);
      done += std::max<ssize_t>(0, count);
      if (count == 0) {  // all have closed it and are about to end
        readable.fd = -1;
        milliseconds = 1;
      }
    }
    if (!progress(done)) throw Error(ErrorCode::cancelled, "cancelled");
    all_ended = true;
    for (Worker& worker : workers) all_ended &= worker.ended();
  }
}

}  // namespace halfbyte::cli
