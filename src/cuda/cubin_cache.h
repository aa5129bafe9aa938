// Compiled kernels on disk, shared by all processes of a user. An entry that is missing, damaged or of
// another key is a miss, never an error: results do not depend on the cache, only the time does.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace halfbyte::cuda {

class CubinCache {
 public:
  // The cache of this process: in HALFBYTE_CACHE_DIR, else $XDG_CACHE_HOME/halfbyte, else
  // ~/.cache/halfbyte. HALFBYTE_CACHE_DIR set to nothing turns it off.
  static CubinCache& instance();

  // Uses `directory`, made with mode 0700 if it is missing; only if it is a directory (no link), owned by
  // the effective user and writable by that user and nobody else. "" is no directory.
  explicit CubinCache(const std::string& directory, uint64_t max_bytes = kMaxBytes,
                      std::chrono::milliseconds max_wait = kMaxWait);

  const std::string& directory() const { return directory_; }  // empty if unusable
  const std::string& problem() const { return problem_; }      // why

  // `key` is the whole text that decides the bytes of the cubin; the file is named by its hash and holds it.
  std::optional<std::vector<char>> load(std::string_view key) const;
  // Published whole or not at all. Then the oldest entries go until the rest fits max_bytes.
  void store(std::string_view key, const std::vector<char>& cubin) const;
  // Held while a kernel is compiled, so that processes do not compile one kernel twice. Gives up waiting
  // after max_wait and returns null: the lock saves time, nothing depends on it. The result releases it.
  std::shared_ptr<void> lock(std::string_view key) const;

  static constexpr uint64_t kMaxBytes = uint64_t{256} << 20;
  static constexpr std::chrono::seconds kMaxWait{10};  // most kernels take less than one

 private:
  std::string path_of(std::string_view key, std::string_view suffix) const;
  void publish(std::string_view key, const std::vector<char>& cubin) const;
  void clean() const;

  std::string directory_, problem_;
  uint64_t max_bytes_;
  std::chrono::milliseconds max_wait_;
};

}  // namespace halfbyte::cuda
