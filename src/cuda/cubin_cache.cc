#include "cuda/cubin_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "core/directory.h"
#include "core/hash.h"
#include "core/temporary.h"
#include "cuda/file.h"
#include "cuda/library.h"

namespace halfbyte::cuda {
namespace {

namespace fs = std::filesystem;

// An entry: magic (with the version of this format), size of the key (u64), key, size of the cubin (u64),
// cubin, hash_hex of all before. Integers as in memory: the cache is of one machine.
constexpr std::string_view kMagic = "halfbyte cubin 1";
constexpr size_t kHashBytes = 32;
constexpr uint64_t kMaxEntryBytes = uint64_t{64} << 20;  // far beyond any kernel

constexpr std::string_view kEntry = ".cubin", kLock = ".lock";
constexpr std::chrono::hours kAbandoned{1};  // age of a lock or temporary that nobody will remove any more

// What an entry begins with: all up to the size of the cubin.
std::string entry_head(std::string_view key) {
  std::string head(kMagic);
  append_size(head, key.size());
  head += key;
  return head;
}

// Makes the missing ones of the directories on `path`, for the user alone. What fails shows when it is used.
void make_directories(const std::string& path) {
  for (size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1))
    ::mkdir(path.substr(0, slash).c_str(), 0700);
  ::mkdir(path.c_str(), 0700);
}

// Why the directory must not be used; empty if it may be.
std::string problem_of(const std::string& path) {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return std::generic_category().message(errno);
  if (S_ISLNK(status.st_mode)) return "it is a link";
  if (!S_ISDIR(status.st_mode)) return "it is not a directory";
  if (status.st_uid != ::geteuid())
    return fmt::format("it belongs to user {}, not {}", status.st_uid, ::geteuid());
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return fmt::format("others may write to it (mode {:o})", status.st_mode & 07777u);
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK | X_OK, AT_EACCESS) != 0)
    return std::generic_category().message(errno);
  return "";
}

// Where the cache of this user is, or why there is none.
std::pair<std::string, std::string> user_directory() {
  const char* own = std::getenv("HALFBYTE_CACHE_DIR");  // NOLINT(concurrency-mt-unsafe): see environment()
  if (own) {
    if (*own == '\0') return {"", "HALFBYTE_CACHE_DIR is empty"};
    return {own, ""};
  }
  if (const std::string cache = environment("XDG_CACHE_HOME"); cache.starts_with('/'))
    return {cache + "/halfbyte", ""};
  if (const std::string home = environment("HOME"); home.starts_with('/'))
    return {home + "/.cache/halfbyte", ""};
  return {"", "none of HALFBYTE_CACHE_DIR, XDG_CACHE_HOME and HOME is set"};
}

struct Lock {
  std::string path;
  Descriptor file;
  bool held = false;
  explicit Lock(std::string path)
      : path(std::move(path)), file(retry_interrupted([this] {
          return ::open(this->path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
        })) {}
  // Removing the name first is safe: whoever still waits for this file will find the entry, and so will
  // whoever makes a new one.
  ~Lock() {
    if (held) ::unlink(path.c_str());
  }
};

// Files of the cache are named by 32 digits of a hash; others in its directory are left alone.
bool is_ours(std::string_view name) {
  return name.size() > kHashBytes &&
         name.substr(0, kHashBytes).find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

CubinCache& CubinCache::instance() {
  static CubinCache& cache = *[] {  // never destroyed: threads may compile until the process ends
    const auto [directory, problem] = user_directory();
    auto* made = new CubinCache(directory);
    if (!problem.empty()) made->problem_ = problem;
    return made;
  }();
  return cache;
}

CubinCache::CubinCache(const std::string& directory, uint64_t max_bytes, std::chrono::milliseconds max_wait)
    : max_bytes_(max_bytes), max_wait_(max_wait) {
  std::error_code error;
  std::string path = directory.empty() ? "" : fs::absolute(directory, error).native();
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();  // lstat would follow "link/"
  if (path.empty()) {
    problem_ = "no directory";
    return;
  }
  make_directories(path);
  problem_ = problem_of(path);
  if (problem_.empty())
    directory_ = path;
  else
    problem_ = fmt::format("\"{}\" is not used: {}", path, problem_);
}

std::string CubinCache::path_of(std::string_view key, std::string_view suffix) const {
  return fmt::format("{}/{}{}", directory_, hash_hex(key), suffix);
}

std::optional<std::vector<char>> CubinCache::load(std::string_view key) const {
  if (directory_.empty()) return std::nullopt;
  const Descriptor file(retry_interrupted(
      [&] { return ::open(path_of(key, kEntry).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); }));
  struct stat status;
  if (file.fd < 0 || ::fstat(file.fd, &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  // What others made or can write to, left from when the directory let them.
  if (status.st_uid != ::geteuid() || (status.st_mode & (S_IWGRP | S_IWOTH)) != 0) return std::nullopt;
  const uint64_t file_bytes = static_cast<uint64_t>(status.st_size);
  std::string head = entry_head(key);
  const size_t frame_bytes = head.size() + sizeof(uint64_t) + kHashBytes;  // all but the cubin
  if (file_bytes < frame_bytes || file_bytes > kMaxEntryBytes) return std::nullopt;
  std::string entry(file_bytes, '\0');
  if (!read_all(file.fd, 0, entry)) return std::nullopt;

  append_size(head, entry.size() - frame_bytes);
  const std::string_view hashed(entry.data(), entry.size() - kHashBytes);
  if (!entry.starts_with(head) || !entry.ends_with(hash_hex(hashed))) return std::nullopt;
  ::futimens(file.fd, nullptr);  // used now: the oldest entries are the first to go
  return std::vector<char>(hashed.begin() + static_cast<ptrdiff_t>(head.size()), hashed.end());
}

void CubinCache::store(std::string_view key, const std::vector<char>& cubin) const {
  if (directory_.empty()) return;
  try {
    publish(key, cubin);
    clean();
  } catch (const std::exception&) {  // no memory, no place: there is no entry then
  }
}

void CubinCache::publish(std::string_view key, const std::vector<char>& cubin) const {
  std::string entry = entry_head(key);
  append_size(entry, cubin.size());
  entry.append(cubin.begin(), cubin.end());
  entry += hash_hex(entry);

  const std::string path = path_of(key, kEntry);
  const TemporaryFile temporary = make_temporary_file(path, 0600);
  const Descriptor file(temporary.fd);
  const bool complete = write_all(file.fd, entry) && retry_interrupted([&] { return ::fsync(file.fd); }) == 0;
  if (!complete || ::rename(temporary.path.c_str(), path.c_str()) != 0) ::unlink(temporary.path.c_str());
}

// Removes the oldest entries beyond max_bytes_, and what killed processes left.
void CubinCache::clean() const {
  struct Entry {
    fs::file_time_type time;
    uint64_t num_bytes;
    std::string path;
  };
  std::vector<Entry> entries;
  uint64_t total_bytes = 0;
  const auto now = fs::file_time_type::clock::now();
  std::error_code error;
  for (const std::string& name : names_in(directory_, error)) {
    const std::string file = join(directory_, name);
    const bool is_temporary = is_temporary_name(name);
    if (!is_ours(is_temporary ? std::string_view(name).substr(1) : name)) continue;
    std::error_code gone;  // removed by another process in the meantime
    const auto time = fs::last_write_time(file, gone);
    const uint64_t num_bytes = gone ? 0 : fs::file_size(file, gone);
    if (gone) continue;
    if (!is_temporary && name.ends_with(kEntry)) {
      entries.push_back({time, num_bytes, file});
      total_bytes += num_bytes;
    } else if ((is_temporary || name.ends_with(kLock)) && now - time > kAbandoned) {
      fs::remove(file, gone);
    }
  }
  std::ranges::sort(entries, {}, &Entry::time);
  for (auto entry = entries.begin(); entry != entries.end() && total_bytes > max_bytes_; ++entry) {
    fs::remove(entry->path, error);
    total_bytes -= entry->num_bytes;
  }
}

std::shared_ptr<void> CubinCache::lock(std::string_view key) const {
  if (directory_.empty()) return nullptr;
  const auto lock = std::make_shared<Lock>(path_of(key, kLock));
  if (lock->file.fd < 0) return nullptr;
  const auto give_up = std::chrono::steady_clock::now() + max_wait_;
  while (::flock(lock->file.fd, LOCK_EX | LOCK_NB) != 0) {
    const bool may_wait = errno == EWOULDBLOCK || errno == EINTR;
    if (!may_wait || std::chrono::steady_clock::now() >= give_up) return nullptr;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  lock->held = true;
  return lock;
}

}  // namespace halfbyte::cuda
