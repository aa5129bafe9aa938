// Kernel packs and entries of the cubin cache. What guards them is a hash, so it is made good for most
// inputs.
#include <fcntl.h>

#include <filesystem>

#include "core/hash.h"
#include "cuda/cubin_cache.h"
#include "cuda/kernel_pack.h"
#include "fuzz.h"

namespace {

using namespace halfbyte;

// Header of a pack: magic (16 bytes), where its index begins, the size of that, their hash (32).
constexpr size_t kRangeEnd = 32, kHashBytes = 32, kHeaderBytes = 64;

void read_pack(std::string bytes, bool hash) {
  static fuzz::MemoryFile file;
  if (hash && bytes.size() > kHeaderBytes) {
    uint64_t begin = 0;
    std::string_view(bytes).copy(reinterpret_cast<char*>(&begin), sizeof begin, 16);
    if (begin >= kHeaderBytes && begin <= bytes.size()) {
      const std::string good = hash_hex(bytes.substr(0, kRangeEnd) + bytes.substr(begin));
      bytes.replace(kRangeEnd, kHashBytes, good);
    }
  }
  file.set(bytes);
  const cuda::KernelPack pack(file.path());
  for (const std::string& target : pack.info().targets) {
    pack.has(target);
    for (const cuda::EmbeddedFile& source : cuda::embedded_files())
      if (std::string_view(source.name).ends_with(".cu")) {
        pack.find({source.name, "kernel", ""}, target);
        break;
      }
  }
}

void read_entry(std::string entry, bool hash) {
  static const std::string directory = [] {
    std::string made = "/tmp/halfbyte-fuzz-XXXXXX";
    if (::mkdtemp(made.data()) == nullptr) fuzz::fail("no directory");
    static const std::string removed = made;
    std::atexit([] {
      std::error_code ignored;
      std::filesystem::remove_all(removed, ignored);
    });
    return made;
  }();
  static const cuda::CubinCache cache(directory);
  static const std::string key = "key";
  static const std::string path = directory + "/" + hash_hex(key) + ".cubin";
  if (hash && entry.size() >= kHashBytes)
    entry.replace(entry.size() - kHashBytes, kHashBytes,
                  hash_hex(std::string_view(entry).substr(0, entry.size() - kHashBytes)));
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || ::write(fd, entry.data(), entry.size()) != static_cast<ssize_t>(entry.size()))
    fuzz::fail("cannot write an entry");
  ::close(fd);
  if (const auto cubin = cache.load(key); cubin && cubin->size() > entry.size())
    fuzz::fail("an entry has more than its file");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(fuzz::text_of(data, size).substr(1));
  fuzz::attempt([&] {
    if (data[0] % 4 < 2)
      read_pack(bytes, data[0] % 2 == 0);
    else
      read_entry(bytes, data[0] % 2 == 0);
  });
  return 0;
}
