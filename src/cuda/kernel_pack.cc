#include "cuda/kernel_pack.h"

#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <system_error>
#include <utility>

#include "core/checks.h"
#include "core/hash.h"
#include "cuda/library.h"
#include "halfbyte/version.hpp"

namespace halfbyte::cuda {
namespace {

// The header: magic (with the version of the format), offset and size of the index (u64), hash_hex of these
// and the index. Then the kernels, then the index.
constexpr std::string_view kPackMagic = "halfbyte pack 1\n", kMagicOfAll = "halfbyte pack ";
constexpr uint64_t kRangeEnd = kPackMagic.size() + 2 * sizeof(uint64_t);
constexpr uint64_t kPackHashBytes = 32;
constexpr uint64_t kHeaderBytes = kRangeEnd + kPackHashBytes;
constexpr uint64_t kMaxIndexBytes = uint64_t{1} << 30;  // far beyond all kernels for all targets
constexpr uint64_t kMaxCubinBytes = uint64_t{64} << 20;

void append_text(std::string& bytes, std::string_view text) {
  append_size(bytes, text.size());
  bytes += text;
}

// Takes values from the front of untrusted bytes. What is not there is empty, and `ok` false from then on.
struct PackReader {
  std::string_view rest;
  bool ok = true;

  std::string_view bytes(uint64_t size) {
    ok = ok && size <= rest.size();
    if (!ok) return {};
    const std::string_view result = rest.substr(0, size);
    rest.remove_prefix(size);
    return result;
  }
  uint64_t size() {
    uint64_t value = 0;
    const std::string_view from = bytes(sizeof value);
    if (ok) from.copy(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }
  std::string_view text() { return bytes(size()); }
};

// Whether the group is that of this user alone, as systems that give each user a group of the same name make
// it (and set the umask so that the group may write).
bool is_own_group(gid_t id) {
  std::array<char, 16384> user_buffer, group_buffer;
  passwd user, *found_user = nullptr;
  group group, *found_group = nullptr;
  if (::getpwuid_r(::geteuid(), &user, user_buffer.data(), user_buffer.size(), &found_user) != 0 ||
      ::getgrgid_r(id, &group, group_buffer.data(), group_buffer.size(), &found_group) != 0 || !found_user ||
      !found_group)
    return false;
  const std::string_view name = user.pw_name;
  bool is_own = name == group.gr_name;
  for (char** member = group.gr_mem; *member; ++member) is_own = is_own && name == *member;
  return is_own;
}

// Why somebody else but root could have written what has this status; empty if nobody could.
std::string why_not_trusted(const struct stat& status) {
  if (status.st_uid != 0 && status.st_uid != ::geteuid())
    return fmt::format("belongs to user {}, not to root or user {}", status.st_uid, ::geteuid());
  const unsigned mode = status.st_mode & 07777u;
  const bool is_sticky_directory = S_ISDIR(status.st_mode) && (mode & S_ISVTX) != 0;
  const bool others = (mode & S_IWOTH) != 0 || ((mode & S_IWGRP) != 0 && !is_own_group(status.st_gid));
  return others && !is_sticky_directory ? fmt::format("may be written by others (mode {:04o})", mode) : "";
}

// The file, not yet read. Links are followed first: what counts is where the file lies.
int open_pack(const std::string& path) {
  const auto check = [&](bool ok, int error) {
    HALFBYTE_CHECK(ok, io, "kernel pack \"{}\": {}", path, std::generic_category().message(error));
  };
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(path, error);
  check(!error, error.value());
  const Descriptor directory(retry_interrupted(
      [&] { return ::open(real.parent_path().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC); }));
  check(directory.fd >= 0, errno);
  const int fd = retry_interrupted([&] {
    return ::openat(directory.fd, real.filename().c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
  });
  check(fd >= 0, errno);
  Descriptor file(fd);
  struct stat status, directory_status;
  const bool known = ::fstat(fd, &status) == 0 && ::fstat(directory.fd, &directory_status) == 0;
  check(known, errno);
  HALFBYTE_CHECK(S_ISREG(status.st_mode), bad_input, "kernel pack \"{}\": it is not a regular file", path);
  std::string why = why_not_trusted(status);
  if (!why.empty())
    why = "it " + why;
  else if (why = why_not_trusted(directory_status); !why.empty())
    why = fmt::format("its directory \"{}\" {}", real.parent_path().native(), why);
  HALFBYTE_CHECK(
      why.empty(), io,
      "kernel pack \"{}\": {}; a pack is machine code, and is loaded only where nobody but root and "
      "this user could have written it: copy one that you trust to a directory of your own",
      path, why);
  return std::exchange(file.fd, -1);
}

// Within the entries of this library.
std::string key_of(std::string_view target, std::string_view source, std::string_view function,
                   std::string_view config) {
  return fmt::format("{}\n{}\n{}\n{}", target, source, function, config);
}

struct Packs {
  std::shared_mutex mutex;
  std::vector<std::unique_ptr<KernelPack>> loaded;

  Packs() {
    std::istringstream paths(environment("HALFBYTE_KERNEL_PACK"));
    for (std::string path; std::getline(paths, path, ':');)
      if (!path.empty()) loaded.push_back(std::make_unique<KernelPack>(path));
  }
};
// Where a pack that the environment names cannot be used, the next call tries and fails again.
Packs& packs() {
  static Packs& made = *new Packs;
  return made;
}

}  // namespace

void KernelPackWriter::add(const KernelSpec& spec, const std::string& target, std::string_view cubin) {
  if (end_ == 0) end_ = kHeaderBytes;
  append_text(entries_, target);
  append_text(entries_, spec.source);
  append_text(entries_, sources_hash(spec.source, spec.config));
  append_text(entries_, spec.function);
  append_text(entries_, spec.config);
  append_size(entries_, end_);
  append_size(entries_, cubin.size());
  entries_ += hash_hex(cubin);
  write_(end_, cubin);
  end_ += cubin.size();
  ++num_entries_;
}

uint64_t KernelPackWriter::finish() {
  if (end_ == 0) end_ = kHeaderBytes;
  std::string index;
  append_text(index, kVersion);
  append_size(index, num_entries_);
  index += entries_;
  std::string header(kPackMagic);
  append_size(header, end_);
  append_size(header, index.size());
  header += hash_hex(header + index);
  write_(end_, index);
  write_(0, header);
  return end_ + index.size();
}

KernelPack::KernelPack(const std::string& path) : file_(open_pack(path)) {
  info_.path = path;
  struct stat status;
  HALFBYTE_CHECK(::fstat(file_.fd, &status) == 0, io, "kernel pack \"{}\": {}", path,
                 std::generic_category().message(errno));
  const auto file_bytes = static_cast<uint64_t>(status.st_size);

  std::string header(std::min(file_bytes, kHeaderBytes), '\0');
  read(0, header);
  HALFBYTE_CHECK(header.starts_with(kMagicOfAll), bad_input, "kernel pack \"{}\": it is no kernel pack",
                 path);
  HALFBYTE_CHECK(header.starts_with(kPackMagic) || header.size() < kHeaderBytes, bad_input,
                 "kernel pack \"{}\": its format is of another version than the one that halfbyte {} reads",
                 path, kVersion);
  PackReader range{std::string_view(header).substr(std::min<size_t>(kPackMagic.size(), header.size()))};
  const uint64_t offset = range.size(), num_bytes = range.size();
  HALFBYTE_CHECK(
      header.size() == kHeaderBytes && offset >= kHeaderBytes && offset <= file_bytes &&
          num_bytes == file_bytes - offset,
      corrupt, "kernel pack \"{}\": it is damaged: {} bytes, but an index of {} bytes that begins at byte {}",
      path, file_bytes, num_bytes, offset);
  HALFBYTE_CHECK(num_bytes <= kMaxIndexBytes, corrupt,
                 "kernel pack \"{}\": it is damaged: an index of {} bytes, more than {}", path, num_bytes,
                 kMaxIndexBytes);

  std::string index(num_bytes, '\0');
  read(offset, index);
  HALFBYTE_CHECK(header.substr(kRangeEnd) == hash_hex(header.substr(0, kRangeEnd) + index), corrupt,
                 "kernel pack \"{}\": it is damaged: the index is not what was written", path);
  parse(index, offset);
}

void KernelPack::read(uint64_t offset, std::span<char> bytes) const {
  errno = 0;
  if (read_all(file_.fd, offset, bytes)) return;
  const int error = errno;
  HALFBYTE_CHECK(error == 0, io, "kernel pack \"{}\": byte {} cannot be read: {}", info_.path, offset,
                 std::generic_category().message(error));
  HALFBYTE_FAIL(corrupt, "kernel pack \"{}\": it is damaged: it ends before byte {}", info_.path,
                offset + bytes.size());
}

// What the hash guards against is damage: sizes are checked all the same.
void KernelPack::parse(std::string_view index, uint64_t index_offset) {
  PackReader reader{index};
  info_.version = reader.text();
  const uint64_t num_entries = reader.size();
  std::set<std::string, std::less<>> targets;
  for (uint64_t i = 0; i < num_entries && reader.ok; ++i) {
    const std::string_view target = reader.text(), source = reader.text(), sources = reader.text(),
                           function = reader.text(), config = reader.text();
    Entry entry{reader.size(), reader.size(), std::string(reader.bytes(kPackHashBytes))};
    reader.ok = reader.ok && entry.offset >= kHeaderBytes && entry.offset <= index_offset &&
                entry.num_bytes <= index_offset - entry.offset && entry.num_bytes <= kMaxCubinBytes;
    if (!reader.ok) break;
    targets.emplace(target);
    ++info_.num_kernels;
    if (sources_hash(source, config) != sources) continue;
    ++info_.num_matching;
    targets_.emplace(target);
    entries_.emplace(key_of(target, source, function, config), std::move(entry));
  }
  HALFBYTE_CHECK(reader.ok && reader.rest.empty(), corrupt,
                 "kernel pack \"{}\": it is damaged: kernel {} of {} in its index", info_.path,
                 info_.num_kernels, num_entries);
  info_.targets.assign(targets.begin(), targets.end());
}

std::optional<std::vector<char>> KernelPack::find(const KernelSpec& spec, const std::string& target) const {
  const auto found = entries_.find(key_of(target, spec.source, spec.function, spec.config));
  if (found == entries_.end()) return std::nullopt;
  const Entry& entry = found->second;
  std::vector<char> cubin(entry.num_bytes);
  read(entry.offset, cubin);
  HALFBYTE_CHECK(hash_hex({cubin.data(), cubin.size()}) == entry.hash, corrupt,
                 "kernel pack \"{}\": it is damaged: the code of {} for {} ({} bytes at byte {})", info_.path,
                 spec.function, target, entry.num_bytes, entry.offset);
  return cubin;
}

std::optional<PackedKernel> find_packed(const KernelSpec& spec, const std::string& target) {
  const std::shared_lock lock(packs().mutex);
  for (const auto& pack : packs().loaded)
    if (auto cubin = pack->find(spec, target)) return PackedKernel{std::move(*cubin), pack->info().path};
  return std::nullopt;
}

bool packs_have(const std::string& target) {
  const std::shared_lock lock(packs().mutex);
  return std::ranges::any_of(packs().loaded, [&](const auto& pack) { return pack->has(target); });
}

}  // namespace halfbyte::cuda

namespace halfbyte {

KernelPackInfo load_kernel_pack(const std::string& path) {
  auto pack = std::make_unique<cuda::KernelPack>(path);
  KernelPackInfo info = pack->info();
  cuda::Packs& packs = cuda::packs();
  const std::unique_lock lock(packs.mutex);
  packs.loaded.push_back(std::move(pack));
  return info;
}

std::vector<KernelPackInfo> loaded_kernel_packs() {
  cuda::Packs& packs = cuda::packs();
  const std::shared_lock lock(packs.mutex);
  std::vector<KernelPackInfo> infos;
  for (const auto& pack : packs.loaded) infos.push_back(pack->info());
  return infos;
}

}  // namespace halfbyte
