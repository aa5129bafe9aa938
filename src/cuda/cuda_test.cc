// The CUDA runtime without a GPU: the cache of compiled kernels, and, in child processes with stand-ins for
// the driver and NVRTC (tests/stub), what happens when something is missing, old, damaged or shared.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "core/hash.h"
#include "cuda/cubin_cache.h"
#include "cuda/jit.h"
#include "cuda/launch.h"
#include "cuda/nvrtc.h"
#include "halfbyte/device.hpp"
#include "halfbyte/version.hpp"
#include "io/test_directory.h"

namespace halfbyte::cuda {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr uid_t kNobody = 65534;

std::vector<char> bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

void set_age(const std::string& path, std::chrono::seconds age) {
  fs::last_write_time(path, fs::file_time_type::clock::now() - age);
}

// Its path through the hash of the key.
std::string entry_path(const CubinCache& cache, std::string_view key) {
  return cache.directory() + "/" + hash_hex(key) + ".cubin";
}

// --- The cache on disk ---

TEST(CubinCache, makes_its_directory_private) {
  const TestDirectory dir;
  const CubinCache cache(dir / "a/b/c/");
  EXPECT_EQ(cache.problem(), "");
  EXPECT_EQ(cache.directory(), dir / "a/b/c");
  for (const char* made : {"a", "a/b", "a/b/c"}) {
    struct stat status;
    ASSERT_EQ(::stat((dir / made).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777u, 0700u) << made;
  }
}

// What is stored comes back, and another key, as long and in the same place, does not get it.
TEST(CubinCache, stores_and_loads) {
  const TestDirectory dir;
  const CubinCache cache(dir.path());
  EXPECT_FALSE(cache.load("key 1"));
  cache.store("key 1", bytes_of("cubin 1"));
  cache.store("key 2", {});
  EXPECT_EQ(cache.load("key 1"), bytes_of("cubin 1"));
  EXPECT_EQ(cache.load("key 2"), std::vector<char>());
  cache.store("key 1", bytes_of("longer than before"));
  EXPECT_EQ(cache.load("key 1"), bytes_of("longer than before"));
  EXPECT_EQ(dir.names().size(), 2u);
  fs::copy_file(entry_path(cache, "key 1"), entry_path(cache, "key 2"), fs::copy_options::overwrite_existing);
  EXPECT_FALSE(cache.load("key 2"));
}

void expect_unusable(const std::string& directory, const std::string& reason) {
  const CubinCache cache(directory);
  EXPECT_EQ(cache.directory(), "");
  EXPECT_NE(cache.problem().find(reason), std::string::npos) << cache.problem();
  cache.store("key", bytes_of("cubin"));
  EXPECT_FALSE(cache.load("key"));
  EXPECT_FALSE(cache.lock("key"));
}

TEST(CubinCache, refuses_what_others_control) {
  const TestDirectory dir;
  expect_unusable("", "no directory");
  write_file(dir / "file", "");
  expect_unusable(dir / "file", "it is not a directory");
  expect_unusable(dir / "file/below", "Not a directory");
  fs::create_directory(dir / "real");
  fs::create_directory_symlink(dir / "real", dir / "link");
  expect_unusable(dir / "link", "it is a link");
  expect_unusable(dir / "link/", "it is a link");
  for (const mode_t mode : {0770, 0707, 01777}) {
    ASSERT_EQ(::chmod((dir / "real").c_str(), mode), 0);
    expect_unusable(dir / "real", "others may write to it");
  }
  EXPECT_TRUE(fs::is_empty(dir / "real"));
}

TEST(CubinCache, refuses_directories_of_others_and_read_only_ones) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root";
  const TestDirectory dir;
  ASSERT_EQ(::chmod(dir.path().c_str(), 0755), 0);
  fs::create_directory(dir / "theirs");
  ASSERT_EQ(::chown((dir / "theirs").c_str(), kNobody, kNobody), 0);
  ASSERT_EQ(::chmod((dir / "theirs").c_str(), 0500), 0);
  expect_unusable(dir / "theirs", "it belongs to user 65534, not 0");
  ASSERT_EQ(::seteuid(kNobody), 0);  // root may write everywhere
  expect_unusable(dir / "theirs", "Permission denied");
  expect_unusable(dir / "new", "No such file or directory");
  ASSERT_EQ(::seteuid(0), 0);
}

// Left from when its directory let them.
TEST(CubinCache, entries_that_others_could_have_written_are_misses) {
  const TestDirectory dir;
  const CubinCache cache(dir.path());
  cache.store("key", bytes_of("code"));
  const std::string path = entry_path(cache, "key");
  ASSERT_TRUE(cache.load("key"));
  for (const mode_t mode : {0620, 0602}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_FALSE(cache.load("key")) << mode;
  }
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_TRUE(cache.load("key"));
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root";
  ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
  EXPECT_FALSE(cache.load("key"));
}

TEST(CubinCache, full_disk_leaves_nothing) {
  const TestDirectory dir;
  const CubinCache cache(dir.path());
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit old_limit;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const struct rlimit limit = {100, old_limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  cache.store("key", std::vector<char>(1000, 'x'));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(dir.names(), std::vector<std::string>());
}

// Every length and every byte: a miss; stored again, a hit.
TEST(CubinCache, damaged_entries_are_misses) {
  const TestDirectory dir;
  const CubinCache cache(dir.path());
  const std::string key = "the key of a kernel";
  const std::vector<char> cubin = bytes_of("the machine code of it");
  cache.store(key, cubin);
  const std::string path = entry_path(cache, key), good = read_file(path);
  ASSERT_GT(good.size(), key.size() + cubin.size());
  const auto expect_miss = [&](const std::string& bytes, const std::string& what) {
    write_file(path, bytes);
    EXPECT_FALSE(cache.load(key)) << what;
  };
  for (size_t n = 0; n < good.size(); ++n) expect_miss(good.substr(0, n), "cut to " + std::to_string(n));
  for (size_t i = 0; i < good.size(); ++i) {
    for (const int flip : {0x01, 0x80, 0xff}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      expect_miss(bad, "byte " + std::to_string(i));
    }
  }
  expect_miss(good + '\0', "a byte more");
  std::string future = good;
  ++future[std::string_view("halfbyte cubin ").size()];
  future.replace(future.size() - 32, 32, hash_hex(future.substr(0, future.size() - 32)));
  expect_miss(future, "a later version");
  cache.store(key, cubin);
  EXPECT_EQ(cache.load(key), cubin);
  EXPECT_EQ(read_file(path), good);

  fs::resize_file(path, uint64_t{10} << 30);  // sparse
  EXPECT_FALSE(cache.load(key)) << "10 GiB";
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(cache.load(key)) << "a FIFO";
  cache.store(key, cubin);
  EXPECT_EQ(cache.load(key), cubin);
}

TEST(CubinCache, oldest_entries_go_first) {
  const TestDirectory dir;
  const CubinCache unlimited(dir.path());
  const std::vector<char> cubin(1000, 'x');
  for (const char* key : {"a", "b", "c"}) unlimited.store(key, cubin);
  set_age(entry_path(unlimited, "a"), std::chrono::seconds(300));
  set_age(entry_path(unlimited, "b"), std::chrono::seconds(200));
  set_age(entry_path(unlimited, "c"), std::chrono::seconds(100));
  EXPECT_TRUE(unlimited.load("a"));  // used now
  const CubinCache cache(dir.path(), 3 * fs::file_size(entry_path(unlimited, "a")));
  cache.store("d", cubin);
  EXPECT_TRUE(cache.load("a"));
  EXPECT_FALSE(cache.load("b"));
  EXPECT_TRUE(cache.load("c"));
  EXPECT_TRUE(cache.load("d"));
}

TEST(CubinCache, removes_what_killed_processes_left_and_nothing_else) {
  const TestDirectory dir;
  const CubinCache cache(dir.path());
  const std::string name(32, 'a');
  const std::vector<std::string> abandoned = {"." + name + ".cubin.halfbyte-1-0123456789abcdef",
                                              name + ".lock"};
  std::vector<std::string> kept = {".notes.halfbyte-1-0123456789abcdef", "notes.cubin", name + ".txt"};
  for (const auto& names : {abandoned, kept})
    for (const std::string& file : names) {
      write_file(dir / file, "");
      set_age(dir / file, std::chrono::hours(2));
    }
  kept.push_back("." + name + ".cubin.halfbyte-3-0123456789abcdef");  // of a process at work
  write_file(dir / kept.back(), "");
  cache.store("key", bytes_of("cubin"));
  kept.push_back(hash_hex("key") + ".cubin");
  std::ranges::sort(kept);
  EXPECT_EQ(dir.names(), kept);
}

TEST(CubinCache, lock_is_not_waited_for_without_end) {
  const TestDirectory dir;
  const CubinCache cache(dir.path(), CubinCache::kMaxBytes, milliseconds(50));
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const auto held = cache.lock("key");
    if (::write(ready[1], held ? "1" : "0", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char answer = 0;
  ASSERT_EQ(::read(ready[0], &answer, 1), 1);
  ASSERT_EQ(answer, '1');
  ASSERT_EQ(::kill(holder, SIGSTOP), 0);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(cache.lock("key"));
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_GE(waited, milliseconds(50));
  EXPECT_LT(waited, milliseconds(5000));
  EXPECT_TRUE(cache.lock("another key"));
  ::kill(holder, SIGKILL);
  ::waitpid(holder, nullptr, 0);
  EXPECT_TRUE(cache.lock("key"));
  EXPECT_EQ(dir.names(), std::vector<std::string>()) << "released locks leave no file";
  ::close(ready[0]);
  ::close(ready[1]);
}

// --- Child processes with stand-ins ---

using Environment = std::map<std::string, std::string>;

// tests/stub/cuda_child.cc with the stand-ins; its output is collected.
class Child {
 public:
  explicit Child(std::vector<std::string> words, const Environment& changes = {}) {
    Environment environment = {{"HALFBYTE_CUDA_DRIVER", STUB_CUDA}, {"HALFBYTE_NVRTC", STUB_NVRTC}};
    for (const auto& [name, value] : changes) environment[name] = value;
    std::vector<std::string> variables;
    for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
    words.insert(words.begin(), CUDA_CHILD);
    std::vector<char*> argv = pointers(words), envp = pointers(variables);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::execve(CUDA_CHILD, argv.data(), envp.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    output_fd_ = ends[0];
  }
  Child(const Child&) = delete;
  ~Child() {
    if (output_fd_ >= 0) wait();
  }

  pid_t pid() const { return pid_; }
  void kill() const { ::kill(pid_, SIGKILL); }
  // The exit code, or -1 if it was killed.
  int wait() {
    char buffer[4096];
    for (ssize_t count; (count = ::read(output_fd_, buffer, sizeof buffer)) > 0;)
      output_.append(buffer, static_cast<size_t>(count));
    ::close(output_fd_);
    output_fd_ = -1;
    int status = 0;
    ::waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  const std::string& output() const { return output_; }

 private:
  static std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (std::string& text : texts) result.push_back(text.data());
    result.push_back(nullptr);
    return result;
  }

  pid_t pid_ = -1;
  int output_fd_ = -1;
  std::string output_;
};

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

// A cache directory, a log of what the stand-ins did, and the environment that names both.
class CudaRuntime : public testing::Test {
 protected:
  Environment environment(const Environment& more = {}) const {
    Environment result = {{"HALFBYTE_CACHE_DIR", dir_ / "cache"}, {"STUB_LOG", dir_ / "log"}};
    for (const auto& [name, value] : more) result[name] = value;
    return result;
  }
  // Runs, expects exit code 0, returns the output.
  std::string run(const std::vector<std::string>& words, const Environment& more = {}) const {
    Child child(words, environment(more));
    EXPECT_EQ(child.wait(), 0) << child.output();
    return child.output();
  }
  // Runs, expects an error with this code and text, which is not long.
  void expect_failure(const std::vector<std::string>& words, ErrorCode code, const std::string& text,
                      const Environment& more) const {
    Child child(words, environment(more));
    EXPECT_EQ(child.wait(), static_cast<int>(code));
    EXPECT_NE(child.output().find(text), std::string::npos)
        << '"' << text << "\" is not in: " << child.output();
    EXPECT_LT(child.output().size(), 10000u);
  }
  // Compilations since the last call, and different ones among them.
  std::pair<size_t, size_t> compilations() const {
    std::multiset<std::string> all;
    for (const std::string& line : lines(read_file(dir_ / "log")))
      if (line.starts_with("compile ")) all.insert(line);
    fs::remove(dir_ / "log");
    return {all.size(), std::set<std::string>(all.begin(), all.end()).size()};
  }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> result;
    for (const auto& file : fs::directory_iterator(dir_ / "cache"))
      if (file.path().extension() == ".cubin") result.push_back(file.path());
    return result;
  }

  const std::vector<std::string> one_kernel_ = {"kernels", "1", "config"};
  const TestDirectory dir_;
};

using Compilations = std::pair<size_t, size_t>;

TEST_F(CudaRuntime, kernels_are_compiled_once) {
  const std::string hashes = run({"kernels", "1", "a", "b", "a"});
  EXPECT_EQ(lines(hashes).size(), 3u);
  EXPECT_EQ(lines(hashes)[0], lines(hashes)[2]);
  EXPECT_NE(lines(hashes)[0], lines(hashes)[1]) << "another config is another kernel";
  EXPECT_EQ(compilations(), Compilations(2, 2));
  EXPECT_EQ(run({"kernels", "1", "a", "b", "a"}), hashes);
  EXPECT_EQ(compilations(), Compilations(0, 0)) << "from disk";
  EXPECT_EQ(entries().size(), 2u);
}

// Each of these is another key, and leaves the entries of the others alone.
TEST_F(CudaRuntime, key_names_all_that_decides_the_bytes) {
  run(one_kernel_);
  run({"kernels", "1", "config "});
  run(one_kernel_, {{"STUB_CUDA_CAPABILITY", "80"}});
  run(one_kernel_, {{"STUB_NVRTC_VERSION", "12080"}});
  EXPECT_EQ(compilations().first, 4u);
  EXPECT_EQ(entries().size(), 4u);
  run(one_kernel_);
  EXPECT_EQ(compilations().first, 0u);
}

TEST_F(CudaRuntime, one_thread_compiles_and_others_wait) {
  const Environment slow = {{"HALFBYTE_CACHE_DIR", ""}, {"STUB_NVRTC_SLEEP_MS", "300"}};
  run({"kernels", "16", "a"}, slow);
  EXPECT_EQ(compilations(), Compilations(1, 1));
  // Threads that want different kernels do not wait for each other: eight in the time of two.
  const auto start = std::chrono::steady_clock::now();
  run({"kernels", "8", "a", "b", "c", "d", "e", "f", "g", "h"}, slow);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
  EXPECT_EQ(compilations(), Compilations(8, 8));
}

TEST_F(CudaRuntime, failed_compilation_is_tried_again) {
  Child child({"kernels", "4", "a"}, environment({{"STUB_NVRTC_RESULT", "6"}}));
  EXPECT_EQ(child.wait(), static_cast<int>(ErrorCode::bug));
  EXPECT_EQ(compilations(), Compilations(4, 1)) << "one for each thread";
  run({"kernels", "4", "a"});
  EXPECT_EQ(compilations(), Compilations(1, 1));
}

TEST_F(CudaRuntime, damaged_entry_is_repaired) {
  const std::string hash = run(one_kernel_);
  ASSERT_EQ(entries().size(), 1u);
  const std::string good = read_file(entries()[0]);
  compilations();
  std::string flipped = good;
  flipped[good.size() / 2] ^= 1;
  for (const std::string& bad : {std::string(), good.substr(0, good.size() / 2), flipped}) {
    write_file(entries()[0], bad);
    EXPECT_EQ(run(one_kernel_), hash);
    EXPECT_EQ(compilations().first, 1u);
    EXPECT_EQ(read_file(entries()[0]), good);
  }
}

TEST_F(CudaRuntime, entry_that_the_driver_refuses_is_replaced) {
  for (const char* refusal : {"200", "209"}) {
    run(one_kernel_, {{"STUB_NVRTC_GENERATION", "old"}});
    compilations();
    const Environment newer = {
        {"STUB_NVRTC_GENERATION", "new"}, {"STUB_CUDA_REFUSE", "old"}, {"STUB_CUDA_REFUSAL", refusal}};
    run(one_kernel_, newer);
    EXPECT_EQ(compilations().first, 1u);
    run(one_kernel_, newer);
    EXPECT_EQ(compilations().first, 0u);
    fs::remove_all(dir_ / "cache");
  }
}

TEST_F(CudaRuntime, new_code_that_the_driver_refuses_is_an_error) {
  expect_failure(one_kernel_, ErrorCode::device,
                 "compiled for sm_90a by NVRTC 13.0, with a driver for CUDA 13.0",
                 {{"STUB_CUDA_REFUSE", "."}});
  EXPECT_TRUE(entries().empty()) << "it is not kept";
}

// What is wrong with the directory costs time, not the result.
TEST_F(CudaRuntime, works_without_a_cache) {
  const std::string hash = run(one_kernel_, {{"HALFBYTE_CACHE_DIR", ""}});
  EXPECT_EQ(run(one_kernel_, {{"HALFBYTE_CACHE_DIR", ""}}), hash);
  EXPECT_EQ(compilations().first, 2u);
  EXPECT_NE(run({"info"}, {{"HALFBYTE_CACHE_DIR", ""}}).find("cache  HALFBYTE_CACHE_DIR is empty\n"),
            std::string::npos);
  write_file(dir_ / "file", "");
  EXPECT_EQ(run(one_kernel_, {{"HALFBYTE_CACHE_DIR", dir_ / "file"}}), hash);
  EXPECT_NE(run({"info"}, {{"HALFBYTE_CACHE_DIR", dir_ / "file"}}).find("it is not a directory"),
            std::string::npos);
}

TEST_F(CudaRuntime, cache_directory) {
  const auto cache = [&](const Environment& environment) {
    Child child({"info"}, environment);
    EXPECT_EQ(child.wait(), 0);
    return lines(child.output()).back();
  };
  const std::string home = dir_ / "home", xdg = dir_ / "xdg";
  EXPECT_EQ(cache({}), "cache  none of HALFBYTE_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
  EXPECT_EQ(cache({{"HOME", "relative"}}), cache({}));
  EXPECT_EQ(cache({{"HOME", home}}), "cache " + home + "/.cache/halfbyte ");
  EXPECT_EQ(cache({{"HOME", home}, {"XDG_CACHE_HOME", xdg}}), "cache " + xdg + "/halfbyte ");
  EXPECT_EQ(cache({{"XDG_CACHE_HOME", xdg}, {"HALFBYTE_CACHE_DIR", dir_ / "own"}}),
            "cache " + (dir_ / "own "));
}

std::vector<std::string> eight_kernels() { return {"kernels", "1", "a", "b", "c", "d", "e", "f", "g", "h"}; }

TEST_F(CudaRuntime, many_processes_compile_each_kernel_once) {
  const std::string hashes = run(eight_kernels(), {{"HALFBYTE_CACHE_DIR", ""}});
  compilations();
  std::vector<std::unique_ptr<Child>> children;
  for (int i = 0; i < 32; ++i)
    children.push_back(
        std::make_unique<Child>(eight_kernels(), environment({{"STUB_NVRTC_SLEEP_MS", "20"}})));
  for (const auto& child : children) {
    EXPECT_EQ(child->wait(), 0) << child->output();
    EXPECT_EQ(child->output(), hashes);
  }
  EXPECT_EQ(compilations(), Compilations(8, 8));
  for (const auto& file : fs::directory_iterator(dir_ / "cache"))
    EXPECT_EQ(file.path().extension(), ".cubin") << file.path();
}

TEST_F(CudaRuntime, killed_processes_harm_no_other) {
  const std::string hashes = run(eight_kernels(), {{"HALFBYTE_CACHE_DIR", ""}});
  std::mt19937 random(1);
  for (int round = 0; round < 3; ++round) {
    fs::remove_all(dir_ / "cache");
    std::vector<std::unique_ptr<Child>> children;
    for (int i = 0; i < 32; ++i)
      children.push_back(
          std::make_unique<Child>(eight_kernels(), environment({{"STUB_NVRTC_SLEEP_MS", "5"}})));
    for (size_t i = 0; i < children.size(); i += 2) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
      children[i]->kill();
    }
    std::set<std::string> survivors;
    for (size_t i = 0; i < children.size(); ++i) {
      const int code = children[i]->wait();
      if (code == -1 && i % 2 == 0) continue;
      EXPECT_EQ(code, 0) << children[i]->output();
      EXPECT_EQ(children[i]->output(), hashes);
      survivors.insert(std::to_string(children[i]->pid()));
    }
    for (const auto& file : fs::directory_iterator(dir_ / "cache")) {  // .HASH.cubin.halfbyte-PID-...
      const std::string name = file.path().filename();
      if (!name.starts_with('.')) continue;
      const size_t pid = name.find('-') + 1;
      EXPECT_FALSE(survivors.contains(name.substr(pid, name.find('-', pid) - pid))) << name;
    }
    EXPECT_EQ(run(eight_kernels()), hashes);
  }
}

TEST_F(CudaRuntime, info_says_what_was_found) {
  EXPECT_EQ(run({"info"}), "problem \ndriver " STUB_CUDA " 13000\nnvrtc " STUB_NVRTC
                           " 13000\ndevice 0 Stub 90 sm_90a 132 1073741824 \ncache " +
                               (dir_ / "cache") + " \n");
  EXPECT_TRUE(fs::exists(dir_ / "cache"));
}

TEST_F(CudaRuntime, targets) {
  const std::map<std::string, std::string> targets = {
      {"75", "sm_75"},    {"80", "sm_80"},    {"86", "sm_86"},    {"89", "sm_89"},   {"90", "sm_90a"},
      {"100", "sm_100a"}, {"103", "sm_103a"}, {"120", "sm_120a"}, {"121", "sm_121a"}};
  for (const auto& [capability, target] : targets) EXPECT_EQ(target_of(std::stoi(capability)), target);
  expect_error(ErrorCode::device, "compute capability 7.0 is less than 7.5", [] { target_of(70); });
}

struct Fault {
  const char* name;
  Environment environment;
  std::string message;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class CudaFault : public CudaRuntime, public testing::WithParamInterface<Fault> {};

// cuda_info() tells it, an explicit request fails with it, and nothing is made on disk.
TEST_P(CudaFault, is_told) {
  const Fault& fault = GetParam();
  const std::string info = run({"info"}, fault.environment);
  EXPECT_NE(info.find(fault.message), std::string::npos) << info;
  EXPECT_FALSE(info.starts_with("problem \n")) << info;
  EXPECT_FALSE(fs::exists(dir_ / "cache"));
  expect_failure(one_kernel_, ErrorCode::device, fault.message, fault.environment);
}

std::string cu_init_message(int code) {
  return "cuInit: CUDA_ERROR_OF_STUB (" + std::to_string(code) +
         "): an error of the stub (driver " STUB_CUDA ", for CUDA 13.0)";
}

INSTANTIATE_TEST_SUITE_P(
    , CudaFault,
    testing::Values(
        Fault{"no_driver",
              {{"HALFBYTE_CUDA_DRIVER", "/none/libcuda.so.1"}},
              "no CUDA driver: /none/libcuda.so.1: "},
        Fault{"no_driver_but_another_library",
              {{"HALFBYTE_CUDA_DRIVER", STUB_NVRTC}},
              STUB_NVRTC ": lacks cuInit"},
        Fault{"no_device", {{"STUB_CUDA_INIT", "100"}}, cu_init_message(100)},
        Fault{"driver_too_old", {{"STUB_CUDA_INIT", "36"}}, cu_init_message(36)},
        Fault{"unsupported_ptx", {{"STUB_CUDA_INIT", "222"}}, cu_init_message(222)},
        Fault{"driver_mismatch", {{"STUB_CUDA_INIT", "803"}}, cu_init_message(803)},
        Fault{"no_compatibility", {{"STUB_CUDA_INIT", "804"}}, cu_init_message(804)},
        Fault{"zero_devices", {{"STUB_CUDA_DEVICES", "0"}}, "the driver has "},
        Fault{"old_device", {{"STUB_CUDA_CAPABILITY", "61"}}, "compute capability 6.1 is less than 7.5"},
        Fault{"new_device",
              {{"STUB_CUDA_CAPABILITY", "130"}},
              "NVRTC 13.0 (" STUB_NVRTC ") does not compile for sm_130"},
        Fault{"no_nvrtc", {{"HALFBYTE_NVRTC", "/none/libnvrtc.so.13"}}, "no NVRTC of CUDA 12 or 13"},
        Fault{
            "old_nvrtc", {{"STUB_NVRTC_VERSION", "11080"}}, STUB_NVRTC ": is of CUDA 11.8, older than 12.0"},
        Fault{"no_nvrtc_but_another_library",
              {{"HALFBYTE_NVRTC", STUB_CUDA}},
              STUB_CUDA ": lacks nvrtcVersion"}),
    [](const auto& info) { return std::string(info.param.name); });

// --- Products by cuBLASLt

class CudaMatmul : public CudaRuntime {};

TEST_F(CudaMatmul, EveryKind) {
  EXPECT_EQ(run({"matmul"}, {{"HALFBYTE_CUBLASLT", STUB_CUBLASLT}}), "4 right\n");
  // The workspace, sums of parts in f32 and in order (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE), alignments.
  const std::vector<std::string> log = lines(read_file(dir_ / "log"));
  EXPECT_EQ(log.size(), 4u);
  EXPECT_EQ(std::ranges::count(log, "preference 1=1048576 3=2 5=256 6=16 7=16 8=16 bias at 16"), 2);
  EXPECT_EQ(std::ranges::count(log, "preference 1=1048576 3=2 5=256 6=16 7=16 8=16 bias at 0"), 2);
}
TEST_F(CudaMatmul, WithoutLibrary) {
  expect_failure({"matmul"}, ErrorCode::device,
                 "no cuBLASLt (HALFBYTE_CUBLASLT may give its path). Tried: /none/libcublasLt.so.13: ",
                 environment({{"HALFBYTE_CUBLASLT", "/none/libcublasLt.so.13"}}));
  expect_failure({"matmul"}, ErrorCode::device, STUB_CUDA ": lacks cublasLtGetProperty",
                 environment({{"HALFBYTE_CUBLASLT", STUB_CUDA}}));
  expect_failure({"matmul"}, ErrorCode::device, "cublasLtCreate of " STUB_CUBLASLT ": status 1",
                 environment({{"HALFBYTE_CUBLASLT", STUB_CUBLASLT}, {"STUB_CUBLASLT_CREATE", "1"}}));
}

// --- Kernel packs

class CudaPacks : public CudaRuntime {
 protected:
  // Makes a pack of kernels of the stub, which follow from target and config; forgets that they were
  // compiled.
  std::string make_pack(const std::string& name, const std::string& target,
                        const std::vector<std::string>& configs) {
    std::vector<std::string> words = {"pack", dir_ / name, target};
    words.insert(words.end(), configs.begin(), configs.end());
    run(words);
    EXPECT_EQ(compilations().first, configs.size());
    return dir_ / name;
  }
  static Environment only(const std::string& packs) {
    return {{"HALFBYTE_NVRTC", "/none/libnvrtc.so.13"}, {"HALFBYTE_KERNEL_PACK", packs}};
  }
};

TEST_F(CudaPacks, take_the_place_of_nvrtc) {
  const std::string compiled = run({"kernels", "1", "a", "b"}, {{"HALFBYTE_CACHE_DIR", ""}});
  compilations();
  const std::string one = make_pack("one.hbk", "sm_90a", {"a"}),
                    two = make_pack("two.hbk", "sm_90a", {"b", "c"});
  EXPECT_EQ(run({"kernels", "4", "a", "b"}, only(one + "::" + two + ":")), compiled);
  EXPECT_EQ(compilations().first, 0u);
  EXPECT_EQ(run({"load", two, "a", "b"}, only(one)), compiled) << "a pack loaded by the program";
  const std::string info = run({"info"}, only(one));
  EXPECT_TRUE(info.starts_with("problem \n")) << info;
  EXPECT_NE(info.find("nvrtc  0\ndevice 0 Stub 90 sm_90a 132 1073741824 \n"), std::string::npos) << info;
  EXPECT_EQ(run({"memory", "1000"}, only(one)), "same true\n");
}

TEST_F(CudaPacks, a_kernel_that_is_in_none_names_both_remedies) {
  const std::string pack = make_pack("pack.hbk", "sm_90a", {"a"});
  for (const char* text :
       {"kernel kernel is in no loaded kernel pack", "no NVRTC of CUDA 12 or 13", "HALFBYTE_NVRTC",
        "HALFBYTE_KERNEL_PACK; halfbyte precompile --arch sm_90a", "Its configuration:\nconfig"})
    expect_failure(one_kernel_, ErrorCode::device, text, only(pack));
}

TEST_F(CudaPacks, of_other_targets_and_sources_do_not_count) {
  const std::string pack = make_pack("pack.hbk", "sm_90a", {"config"});
  Environment other_device = only(pack);
  other_device["STUB_CUDA_CAPABILITY"] = "80";
  const std::string missing = "no loaded kernel pack has kernels of this library for sm_";
  EXPECT_NE(run({"info"}, other_device).find(missing + "80"), std::string::npos);
  expect_failure(one_kernel_, ErrorCode::device, "kernel kernel is in no loaded kernel pack", other_device);

  const std::string compiled = run(one_kernel_, {{"HALFBYTE_CACHE_DIR", ""}});
  compilations();
  std::string bytes = read_file(pack);
  const size_t index_at = bytes.find(HALFBYTE_VERSION_STRING) - 8;
  for (const cuda::EmbeddedFile& file : embedded_files()) {
    const std::string hash = sources_hash(file.name, "");
    if (const size_t at = bytes.find(hash); at != std::string::npos) bytes.replace(at, hash.size(), 32, 'f');
  }
  bytes.replace(32, 32, hash_hex(bytes.substr(0, 32) + bytes.substr(index_at)));
  write_file(pack, bytes);
  EXPECT_NE(run({"info"}, only(pack)).find(missing + "90a"), std::string::npos);
  EXPECT_EQ(run(one_kernel_, {{"HALFBYTE_KERNEL_PACK", pack}}), compiled);
  EXPECT_EQ(compilations().first, 1u) << "NVRTC makes what the pack does not have";
}

TEST_F(CudaPacks, come_before_the_disk_cache_and_nvrtc) {
  const std::string pack = make_pack("pack.hbk", "sm_90a", {"config"});
  const std::string packed = run(one_kernel_, only(pack));
  const Environment newer = {{"STUB_NVRTC_GENERATION", "new"}};
  const std::string compiled = run(one_kernel_, newer);
  EXPECT_NE(compiled, packed);
  Environment both = newer;
  both["HALFBYTE_KERNEL_PACK"] = pack;
  EXPECT_EQ(run(one_kernel_, both), packed);
  EXPECT_EQ(run(one_kernel_, newer), compiled);
  EXPECT_EQ(compilations().first, 1u);
}

TEST_F(CudaPacks, that_cannot_be_used_are_told) {
  const std::string pack = make_pack("pack.hbk", "sm_90a", {"config"}), good = read_file(pack);
  const auto expect = [&](ErrorCode code, const std::string& text, const std::string& packs) {
    for (const bool has_nvrtc : {false, true}) {
      const Environment environment = has_nvrtc ? Environment{{"HALFBYTE_KERNEL_PACK", packs}} : only(packs);
      expect_failure(one_kernel_, code, text, environment);
      const std::string info = run({"info"}, environment);
      EXPECT_NE(info.find(text), std::string::npos) << info;
      EXPECT_FALSE(info.starts_with("problem \n")) << info;
    }
    expect_failure({"load", packs, "config"}, code, text, {});
  };
  write_file(dir_ / "bad.hbk", "PK");
  expect(ErrorCode::bad_input, "kernel pack \"" + (dir_ / "bad.hbk\": it is no kernel pack"),
         dir_ / "bad.hbk");
  write_file(dir_ / "bad.hbk", good.substr(0, good.size() - 1));
  expect(ErrorCode::corrupt, "kernel pack \"" + (dir_ / "bad.hbk\": it is damaged"), dir_ / "bad.hbk");
  expect(ErrorCode::io, "kernel pack \"/none.hbk\": No such file", "/none.hbk");
  expect_failure(one_kernel_, ErrorCode::io, "/none.hbk", only(pack + ":/none.hbk"));

  std::string bad_code = good;
  bad_code[70] ^= 1;
  write_file(pack, bad_code);
  expect_failure(one_kernel_, ErrorCode::corrupt, "it is damaged: the code of kernel for sm_90a", only(pack));
  write_file(pack, good);
  Environment refused = only(pack);
  refused["STUB_CUDA_REFUSE"] = ".";
  expect_failure(one_kernel_, ErrorCode::device,
                 "loading kernel of kernel pack \"" + pack + "\", compiled for sm_90a", refused);
}

TEST_F(CudaRuntime, errors_of_the_compiler) {
  const Environment long_log = {{"STUB_NVRTC_LOG_BYTES", "1000000"}};
  run(one_kernel_, long_log);
  fs::remove_all(dir_ / "cache");
  Environment failing = long_log;
  failing["STUB_NVRTC_RESULT"] = "6";
  expect_failure(one_kernel_, ErrorCode::bug, "does not compile for sm_90a with NVRTC 13.0:\n????", failing);
  failing["STUB_NVRTC_RESULT"] = "5";
  expect_failure(one_kernel_, ErrorCode::device, "nvrtcCompileProgram of NVRTC 13.0", failing);
}

TEST_F(CudaRuntime, memory) {
  EXPECT_EQ(run({"memory", "1000000"}), "same true\n");
  expect_failure({"memory", "2000000000"}, ErrorCode::device,
                 "cuda:0: no memory for 2000000000 bytes, 1073741824 of 1073741824 are free", {});
}

TEST_F(CudaRuntime, sticky_error_is_told_by_every_call) {
  Child child({"sticky"}, environment({{"STUB_CUDA_STICKY", "700"}}));
  EXPECT_EQ(child.wait(), static_cast<int>(ErrorCode::device)) << child.output();
  const auto told = lines(child.output());
  EXPECT_EQ(told.size(), 6u);
  for (const std::string& line : told)
    EXPECT_TRUE(line.find("CUDA_ERROR_OF_STUB (700)") != std::string::npos &&
                line.ends_with("; nothing more can run on this device in this process"))
        << line;
}

TEST_F(CudaRuntime, stream_of_another_device_is_refused_by_name) {
  Child child({"stream"}, environment({{"STUB_CUDA_DEVICES", "2"}, {"HALFBYTE_CUBLASLT", STUB_CUBLASLT}}));
  EXPECT_EQ(child.wait(), 0) << child.output();
  const std::string rule =
      ": USAGE: execution: stream must be of the primary context of cuda:0, got one of cuda:1";
  const auto told = lines(child.output());
  EXPECT_EQ(told.size(), 24u) << child.output();
  for (const std::string& line : told) EXPECT_TRUE(line.ends_with(rule)) << line;
}

TEST_F(CudaRuntime, shapes_that_share_a_kernel_keep_their_memory) { EXPECT_EQ(run({"shapes"}), "64 runs\n"); }

// The driver takes copies on streams of every device, so a stream that it does not know is not taken for
// ours.
TEST_F(CudaRuntime, stream_of_an_unknown_device_is_refused) {
  Child child({"stream"}, environment({{"STUB_CUDA_DEVICES", "2"},
                                       {"STUB_CUDA_STREAM_OF", "400"},
                                       {"HALFBYTE_CUBLASLT", STUB_CUBLASLT}}));
  EXPECT_EQ(child.wait(), 0) << child.output();
  const auto told = lines(child.output());
  EXPECT_EQ(told.size(), 24u) << child.output();
  for (const std::string& line : told)
    EXPECT_TRUE(line.find(": DEVICE: cuStreamGetCtx: CUDA_ERROR_OF_STUB (400)") != std::string::npos) << line;
}

// --- In this process ---

TEST(Launch, refuses_impossible_grids) {
  const int args = 0;
  launch(nullptr, {0, 32}, nullptr, args);  // nothing to do, no driver needed
  for (const Grid grid : {Grid{-1, 32}, Grid{int64_t{1} << 48, 32}, Grid{1, 0}, Grid{1, 1025}})
    expect_error(ErrorCode::bug, "launch: ", [&] { launch(nullptr, grid, nullptr, args); });
}

TEST(EmbeddedFiles, are_sorted_whole_and_end_with_a_zero) {
  const auto files = embedded_files();
  ASSERT_GT(files.size(), 5u);
  EXPECT_TRUE(std::ranges::is_sorted(files, {},
                                     [](const EmbeddedFile& file) { return std::string_view(file.name); }));
  for (const EmbeddedFile& file : files) {
    EXPECT_TRUE(file.text == read_file(std::string(HALFBYTE_SOURCE_DIR "/src/") + file.name)) << file.name;
    EXPECT_EQ(file.text.data()[file.text.size()], '\0') << file.name;
  }
}

TEST(SourcesHash, follows_what_source_and_config_reach) {
  std::vector<EmbeddedFile> files = {{"a.h", "#include <x>\nint a;"},
                                     {"b.h", "  #  include \t\"a.h\"  // more\n#include \"k.cu\"\n"},
                                     {"c.h", "int c;"},
                                     {"d.h", "int d;"},
                                     {"k.cu", "#include \"b.h\"\n#include \"halfbyte_config.h\"\nint k;"},
                                     {"l.cu", "// #include \"d.h\"\nint l;"}};
  const std::string config = "#pragma once\n#include \"c.h\"\n";
  std::string names;
  for (const EmbeddedFile* file : reached_files(files, "k.cu", config)) (names += file->name) += ' ';
  EXPECT_EQ(names, "a.h b.h c.h k.cu ");
  const std::string with_config = sources_hash(files, "k.cu", config),
                    without = sources_hash(files, "k.cu", "");
  EXPECT_NE(with_config, without);
  for (EmbeddedFile& file : files) {
    SCOPED_TRACE(file.name);
    const std::string_view name = file.name, old = file.text;
    const std::string text = std::string(old) + " ";
    file.text = text;
    EXPECT_EQ(sources_hash(files, "k.cu", config) != with_config, names.find(name) != names.npos);
    EXPECT_EQ(sources_hash(files, "k.cu", "") != without, name == "a.h" || name == "b.h" || name == "k.cu");
    file.text = old;
  }
}

TEST(SourcesHash, every_include_is_embedded) {
  std::set<std::string> names = {"halfbyte_config.h"};
  for (const EmbeddedFile& file : embedded_files()) names.insert(file.name);
  for (const EmbeddedFile& file : embedded_files()) {
    std::istringstream text{std::string(file.text)};
    for (std::string line; std::getline(text, line);) {
      if (!line.starts_with("#include")) continue;
      EXPECT_TRUE(names.contains(line.substr(10, line.find('"', 10) - 10))) << file.name << ": " << line;
    }
  }
}

// NOLINTBEGIN(concurrency-mt-unsafe): this process has one thread here
class SetVariable {
 public:
  SetVariable(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old, was_set_ = true;
    ::setenv(name, value.c_str(), 1);
  }
  ~SetVariable() { was_set_ ? ::setenv(name_, old_.c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::string old_;
  bool was_set_ = false;
};
// NOLINTEND(concurrency-mt-unsafe)

TEST(Nvrtc, search_order) {
  const TestDirectory dir;
  const auto touch = [&](const std::string& name) {
    fs::create_directories(fs::path(dir / name).parent_path());
    write_file(dir / name, "");
    return dir / name;
  };
  const std::string home = touch("cuda/lib64/libnvrtc.so.13");
  const std::string venv = touch("venv/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  const std::string conda = touch("conda/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
  const std::string user = touch("home/.local/lib/python3.10/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  const std::string python = touch("python/lib/python3/dist-packages/nvidia/cu13/lib/libnvrtc.so.13");
  const std::string added = touch("packages/nvidia/cu13/lib/libnvrtc.so.13");
  touch("python/lib/python3/dist-packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0");
  touch("elsewhere/python3.11");
  fs::create_directory(dir / "python/bin");
  fs::create_symlink(dir / "elsewhere/python3.11", dir / "python/bin/python3");
  const SetVariable variables[] = {
      {"CUDA_HOME", dir / "cuda"},     {"VIRTUAL_ENV", dir / "venv"},
      {"CONDA_PREFIX", dir / "conda"}, {"HOME", dir / "home"},
      {"HALFBYTE_NVRTC", ""},          {"PATH", "relative:/none:" + (dir / "python/bin")}};
  add_site_packages(dir / "packages");
  expect_error(ErrorCode::usage, "must be absolute, got \"packages\"", [] { add_site_packages("packages"); });
  std::vector<std::string> found = nvrtc_candidates();
  std::erase_if(
      found, [&](const std::string& path) { return path.starts_with('/') && !path.starts_with(dir.path()); });
  EXPECT_EQ(found, (std::vector<std::string>{added, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", home,
                                             venv, conda, python, user}));
  const SetVariable own("HALFBYTE_NVRTC", "/mine.so");
  EXPECT_EQ(nvrtc_candidates(), std::vector<std::string>{"/mine.so"});
}

TEST(Device, cpu_needs_nothing) {
  check_device({});
  for (const Memory& memory : {Memory(Device{}, 1000), Memory::host(Device{}, 1000)}) {
    EXPECT_EQ(memory.num_bytes(), 1000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 256, 0u);
    std::memset(memory.data(), 1, 1000);
    halfbyte::copy({}, memory.data(), "abc", 3);
    EXPECT_EQ(std::memcmp(memory.data(), "abc\1", 4), 0);
  }
  EXPECT_EQ(Memory(Device{}, 0).data(), nullptr);
  expect_error(ErrorCode::usage, "must not be negative", [] { Memory(Device{}, -1); });
  expect_error(ErrorCode::usage, "must not be negative", [] { halfbyte::copy({}, nullptr, nullptr, -1); });
  const Stream stream{Device{}};
  EXPECT_EQ(stream.handle(), nullptr);
  stream.synchronize();
}

}  // namespace
}  // namespace halfbyte::cuda
