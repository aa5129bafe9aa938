#include "cuda/kernel_pack.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <system_error>

#include "core/checks.h"
#include "cuda/hash.h"
#include "cuda/library.h"
#include "halfbyte/version.hpp"

namespace halfbyte::cuda {
namespace {

// The header: magic (with the version of the format), offset and size of the index (u64), hash_hex of these
// and the index. Then the kernels, then the index.
constexpr std::string_view kMagic = "halfbyte pack 1\n", kMagicOfAll = "halfbyte pack ";
constexpr uint64_t kRangeEnd = kMagic.size() + 2 * sizeof(uint64_t);
constexpr uint64_t kHashBytes = 32;
constexpr uint64_t kHeaderBytes = kRangeEnd + kHashBytes;
constexpr uint64_t kMaxIndexBytes = uint64_t{1} << 30;  // far beyond all kernels for all targets
constexpr uint64_t kMaxCubinBytes = uint64_t{64} << 20;

void append_text(std::string& bytes, std::string_view text) {
  append_size(bytes, text.size());
  bytes += text;
}

// Takes values from the front of untrusted bytes. What is not there is empty, and `ok` false from then on.
struct Reader {
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
  std::string header(kMagic);
  append_size(header, end_);
  append_size(header, index.size());
  header += hash_hex(header + index);
  write_(end_, index);
  write_(0, header);
  return end_ + index.size();
}

KernelPack::KernelPack(const std::string& path)
    : file_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
  info_.path = path;
  struct stat status;
  HALFBYTE_CHECK(file_.fd >= 0 && ::fstat(file_.fd, &status) == 0, io, "kernel pack \"{}\": {}", path,
                 std::generic_category().message(errno));
  HALFBYTE_CHECK(S_ISREG(status.st_mode), bad_input, "kernel pack \"{}\": it is not a regular file", path);
  const auto file_bytes = static_cast<uint64_t>(status.st_size);

  std::string header(std::min(file_bytes, kHeaderBytes), '\0');
  HALFBYTE_CHECK(read_all(file_.fd, 0, header), io, "kernel pack \"{}\": it cannot be read", path);
  HALFBYTE_CHECK(header.starts_with(kMagicOfAll), bad_input, "kernel pack \"{}\": it is no kernel pack",
                 path);
  HALFBYTE_CHECK(header.starts_with(kMagic) || header.size() < kHeaderBytes, bad_input,
                 "kernel pack \"{}\": its format is of another version than the one that halfbyte {} reads",
                 path, kVersion);
  Reader range{std::string_view(header).substr(std::min<size_t>(kMagic.size(), header.size()))};
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
  HALFBYTE_CHECK(read_all(file_.fd, offset, index), io, "kernel pack \"{}\": it cannot be read", path);
  HALFBYTE_CHECK(header.substr(kRangeEnd) == hash_hex(header.substr(0, kRangeEnd) + index), corrupt,
                 "kernel pack \"{}\": it is damaged: the index is not what was written", path);
  parse(index, offset);
}

// What the hash guards against is damage: sizes are checked all the same.
void KernelPack::parse(std::string_view index, uint64_t index_offset) {
  Reader reader{index};
  info_.version = reader.text();
  const uint64_t num_entries = reader.size();
  std::set<std::string, std::less<>> targets;
  for (uint64_t i = 0; i < num_entries && reader.ok; ++i) {
    const std::string_view target = reader.text(), source = reader.text(), sources = reader.text(),
                           function = reader.text(), config = reader.text();
    Entry entry{reader.size(), reader.size(), std::string(reader.bytes(kHashBytes))};
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
  HALFBYTE_CHECK(
      read_all(file_.fd, entry.offset, cubin) && hash_hex({cubin.data(), cubin.size()}) == entry.hash,
      corrupt, "kernel pack \"{}\": it is damaged: the code of {} for {} ({} bytes at byte {})", info_.path,
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
