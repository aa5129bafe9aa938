#include "workers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
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
  Worker(std::vector<std::string> arguments, std::string error_path, int stdout_fd)
      : error_path_(std::move(error_path)) {
    arguments.insert(arguments.begin(), "halfbyte");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, stdout_fd, STDOUT_FILENO);
    ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, error_path_.c_str(),
                                       O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const int error = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    if (error != 0) throw_io("cannot start a worker process", error);
  }
  Worker(Worker&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), error_path_(std::move(other.error_path_)) {}
  Worker& operator=(Worker&&) = delete;
  ~Worker() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  // Whether it has ended; throws what it said where it failed.
  bool ended() {
    int status = 0;
    if (pid_ >= 0 && ::waitpid(pid_, &status, WNOHANG) == 0) return false;
    pid_ = -1;
    if (WIFSIGNALED(status))
      throw Error(ErrorCode::no_memory,
                  fmt::format("a worker process was killed by signal {}: fewer --jobs need less memory",
                              WTERMSIG(status)));
    if (WEXITSTATUS(status) != 0) throw Error(static_cast<ErrorCode>(WEXITSTATUS(status)), message());
    return true;
  }

 private:
  // What it said, without what print_failure() puts around it.
  std::string message() const {
    std::ifstream file(error_path_);
    std::string text(std::istreambuf_iterator<char>(file), {});
    constexpr std::string_view kPrefix = "halfbyte: error: ";
    if (text.starts_with(kPrefix)) text.erase(0, kPrefix.size());
    while (text.ends_with('\n')) text.pop_back();
    return text;
  }

  pid_t pid_ = -1;
  std::string error_path_;
};

}  // namespace

void run_workers(const std::vector<std::vector<std::string>>& arguments, const std::string& directory,
                 const std::function<bool(int64_t done)>& progress) {
  Pipe pipe;
  std::vector<Worker> workers;
  for (size_t i = 0; i < arguments.size(); ++i)
    workers.emplace_back(arguments[i], fmt::format("{}/{}.log", directory, i), pipe.write);
  pipe.close_write();  // now it ends with the last worker

  int64_t done = 0;
  for (bool all_ended = false; !all_ended;) {
    pollfd readable = {pipe.read, POLLIN, 0};
    char bytes[4096];
    if (::poll(&readable, 1, 100) > 0) done += std::max<ssize_t>(0, ::read(pipe.read, bytes, sizeof bytes));
    if (!progress(done)) throw Error(ErrorCode::cancelled, "cancelled");
    all_ended = true;
    for (Worker& worker : workers) all_ended &= worker.ended();
  }
}

}  // namespace halfbyte::cli
