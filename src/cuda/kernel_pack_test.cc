// Kernel packs as files: what comes back, and what is said of files that are damaged, forged or no packs.
#include "cuda/kernel_pack.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "core/hash.h"
#include "io/test_directory.h"

namespace halfbyte::cuda {
namespace {

namespace fs = std::filesystem;

constexpr size_t kHeaderBytes = 64, kHashAt = 32;

KernelSpec spec_of(const std::string& config) {
  return {"ops/dequantize/dequantize.cu", "dequantize", config};
}

// The bytes of a pack of kernels for sm_90a: config -> code.
std::string pack_of(const std::map<std::string, std::string>& kernels) {
  std::string bytes;
  KernelPackWriter writer([&](uint64_t offset, std::string_view part) {
    bytes.resize(std::max(bytes.size(), offset + part.size()));
    part.copy(bytes.data() + offset, part.size());
  });
  for (const auto& [config, code] : kernels) writer.add(spec_of(config), "sm_90a", code);
  const uint64_t num_bytes = writer.finish();
  EXPECT_EQ(num_bytes, bytes.size());
  return bytes;
}

uint64_t number_at(const std::string& bytes, size_t at) {
  uint64_t value = 0;
  bytes.copy(reinterpret_cast<char*>(&value), sizeof value, at);
  return value;
}
void put_number(std::string& bytes, size_t at, uint64_t value) {
  std::memcpy(&bytes[at], &value, sizeof value);
}

// With the hash that fits what was changed.
std::string sealed(std::string bytes) {
  const std::string index = bytes.substr(number_at(bytes, 16));
  put_number(bytes, 24, index.size());
  return bytes.replace(kHashAt, 32, hash_hex(bytes.substr(0, kHashAt) + index));
}

std::string code_of(const KernelPack& pack, const std::string& config, const char* target = "sm_90a") {
  const auto cubin = pack.find(spec_of(config), target);
  return cubin ? std::string(cubin->begin(), cubin->end()) : "none";
}

class KernelPackFile : public testing::Test {
 protected:
  KernelPack open(const std::string& bytes) const {
    write_file(path_, bytes);
    return KernelPack(path_);
  }
  void expect(ErrorCode code, const std::string& text, const std::string& bytes) const {
    write_file(path_, bytes);
    expect_error(code, text, [&] { KernelPack pack(path_); });
    expect_error(code, "kernel pack \"" + path_ + "\": ", [&] { KernelPack pack(path_); });
  }

  const TestDirectory dir_;
  const std::string path_ = dir_ / "kernels.hbk";
  const std::string good_ = pack_of({{"config 1", "code 1"}, {"config 2", ""}, {"config 3", "longer code"}});
};

TEST_F(KernelPackFile, gives_back_what_was_written) {
  const KernelPack pack = open(good_);
  EXPECT_EQ(pack.info().path, path_);
  EXPECT_EQ(pack.info().num_kernels, 3);
  EXPECT_EQ(pack.info().num_matching, 3);
  EXPECT_EQ(pack.info().targets, std::vector<std::string>{"sm_90a"});
  EXPECT_TRUE(pack.has("sm_90a"));
  EXPECT_FALSE(pack.has("sm_90"));
  EXPECT_EQ(code_of(pack, "config 1"), "code 1");
  EXPECT_EQ(code_of(pack, "config 2"), "");
  EXPECT_EQ(code_of(pack, "config 3"), "longer code");
  EXPECT_EQ(code_of(pack, "config 4"), "none");
  EXPECT_EQ(code_of(pack, "config 1", "sm_90"), "none");
  EXPECT_FALSE(pack.find({"ops/dequantize/dequantize.cu", "another", "config 1"}, "sm_90a"));
  EXPECT_EQ(open(pack_of({})).info().num_kernels, 0);
}

// Every length and every byte: an error, when the pack is opened or when the kernel is asked for.
TEST_F(KernelPackFile, damage_is_an_error) {
  for (size_t n = 0; n < good_.size(); ++n)
    expect(n < 14 ? ErrorCode::bad_input : ErrorCode::corrupt, n < 14 ? "no kernel pack" : "damaged",
           good_.substr(0, n));
  expect(ErrorCode::corrupt, "damaged", good_ + '\0');
  const size_t index_at = number_at(good_, 16);
  for (size_t i = 0; i < good_.size(); ++i)
    for (const int flip : {0x01, 0x80}) {
      SCOPED_TRACE(i);
      std::string bad = good_;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      if (i < kHeaderBytes || i >= index_at) {
        expect(i < 16 ? ErrorCode::bad_input : ErrorCode::corrupt,
               i < 14   ? "no kernel pack"
               : i < 16 ? "another version"
                        : "damaged",
               bad);
        continue;
      }
      const KernelPack pack = open(bad);
      const bool in_first = i < kHeaderBytes + std::strlen("code 1");
      expect_error(ErrorCode::corrupt, path_ + "\": it is damaged: the code of dequantize for sm_90a",
                   [&] { code_of(pack, in_first ? "config 1" : "config 3"); });
      EXPECT_EQ(code_of(pack, in_first ? "config 3" : "config 1"), in_first ? "longer code" : "code 1");
    }
}

TEST_F(KernelPackFile, a_file_that_shrinks_while_it_is_open) {
  const KernelPack pack = open(good_);
  fs::resize_file(path_, kHeaderBytes + 3);
  expect_error(ErrorCode::corrupt, "it ends before byte", [&] { code_of(pack, "config 1"); });
}

TEST_F(KernelPackFile, other_versions_do_not_match) {
  std::string later = good_;
  later[std::strlen("halfbyte pack ")] = '2';
  expect(ErrorCode::bad_input, "its format is of another version", sealed(later));

  std::string other = good_;
  const std::string hash = sources_hash("ops/dequantize/dequantize.cu", "");
  other.replace(other.find(hash), hash.size(), std::string(hash.size(), '0'));  // of the first kernel
  const KernelPack pack = open(sealed(other));
  EXPECT_EQ(pack.info().num_kernels, 3);
  EXPECT_EQ(pack.info().num_matching, 2);
  EXPECT_EQ(code_of(pack, "config 1"), "none");
  EXPECT_EQ(code_of(pack, "config 3"), "longer code");
}

// Hashes that fit do not make sizes true.
TEST_F(KernelPackFile, forged_sizes_are_refused) {
  const size_t index_at = number_at(good_, 16);
  const size_t version_bytes = number_at(good_, index_at), count_at = index_at + 8 + version_bytes;
  const size_t config_at = good_.find("config 1"), range_at = config_at + std::strlen("config 1");
  for (const uint64_t value : {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{1} << 40, uint64_t{1000}})
    for (const size_t at : {index_at, count_at, count_at + 8, config_at - 8, range_at, range_at + 8}) {
      std::string bad = good_;
      put_number(bad, at, value);
      expect(ErrorCode::corrupt, "in its index", sealed(bad));
    }
  for (const uint64_t offset : {uint64_t{0}, uint64_t{kHeaderBytes - 1}, uint64_t{index_at - 5}}) {
    std::string bad = good_;
    put_number(bad, range_at, offset);
    expect(ErrorCode::corrupt, "kernel 0 of 3 in its index", sealed(bad));
  }
  std::string fewer = good_, empty = good_.substr(0, index_at);
  put_number(fewer, count_at, 2);
  expect(ErrorCode::corrupt, "kernel 2 of 2", sealed(fewer));
  expect(ErrorCode::corrupt, "kernel 0 of 0", sealed(empty));
  expect(ErrorCode::corrupt, "kernel 3 of 3", sealed(good_ + "more"));
  std::string before = good_;
  put_number(before, 16, 8);
  expect(ErrorCode::corrupt, "begins at byte 8", sealed(before));
}

TEST_F(KernelPackFile, is_no_regular_file_or_too_large) {
  expect_error(ErrorCode::io, "No such file", [&] { KernelPack pack(dir_ / "none"); });
  expect_error(ErrorCode::bad_input, "not a regular file", [&] { KernelPack pack(dir_.path()); });
  ASSERT_EQ(::mkfifo((dir_ / "fifo").c_str(), 0600), 0);
  expect_error(ErrorCode::bad_input, "not a regular file", [&] { KernelPack pack(dir_ / "fifo"); });
  std::string huge = good_.substr(0, kHeaderBytes);
  put_number(huge, 16, kHeaderBytes);
  put_number(huge, 24, (uint64_t{10} << 30) - kHeaderBytes);
  write_file(path_, huge);
  fs::resize_file(path_, uint64_t{10} << 30);  // sparse
  expect_error(ErrorCode::corrupt, "more than", [&] { KernelPack pack(path_); });
}

// It is machine code.
TEST_F(KernelPackFile, that_others_could_have_written_is_refused) {
  write_file(path_, good_);
  const std::string refused = "nobody but root and this user could have written it";
  const auto expect_refused = [&](const std::string& path, const std::string& why) {
    expect_error(ErrorCode::io, why, [&] { KernelPack pack(path); });
    expect_error(ErrorCode::io, refused, [&] { KernelPack pack(path); });
  };
  for (const mode_t mode : {0400, 0644, 0755}) {
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
    EXPECT_EQ(KernelPack(path_).info().num_kernels, 3);
  }
  ASSERT_EQ(::chmod(path_.c_str(), 0646), 0);
  expect_refused(path_, "\": it may be written by others (mode 0646)");
  ASSERT_EQ(::chmod(path_.c_str(), 0644), 0);

  const std::string directory = fs::canonical(dir_.path()).native();
  ASSERT_EQ(::chmod(dir_.path().c_str(), 0777), 0);
  expect_refused(path_, "\": its directory \"" + directory + "\" may be written by others (mode 0777)");
  ASSERT_EQ(::chmod(dir_.path().c_str(), 01777), 0);  // as /tmp
  EXPECT_EQ(KernelPack(path_).info().num_kernels, 3);
  ASSERT_EQ(::chmod(dir_.path().c_str(), 0755), 0);

  if (::geteuid() != 0) GTEST_SKIP() << "the rest needs to be root";
  // Of a group that is not this user's own.
  constexpr uid_t kNobody = 65534;
  ASSERT_EQ(::chmod(path_.c_str(), 0664), 0);
  EXPECT_EQ(KernelPack(path_).info().num_kernels, 3) << "root's own group";
  ASSERT_EQ(::chown(path_.c_str(), 0, kNobody), 0);
  expect_refused(path_, "it may be written by others (mode 0664)");
  ASSERT_EQ(::chown(path_.c_str(), kNobody, kNobody), 0);
  expect_refused(path_, "it belongs to user 65534, not to root or user 0");
  ASSERT_EQ(::chown(path_.c_str(), 0, 0), 0);
  ASSERT_EQ(::chown(dir_.path().c_str(), kNobody, kNobody), 0);
  expect_refused(path_, "its directory \"" + directory + "\" belongs to user 65534, not to root or user 0");
  // What a link leads to counts.
  const TestDirectory own;
  fs::create_symlink(path_, own / "link.hbk");
  expect_refused(own / "link.hbk", directory);
  ASSERT_EQ(::chmod(path_.c_str(), 0644), 0);
  ASSERT_EQ(::seteuid(kNobody), 0);
  EXPECT_EQ(KernelPack(path_).info().num_kernels, 3) << "of root, in a directory of this user";
  ASSERT_EQ(::seteuid(0), 0);
}

}  // namespace
}  // namespace halfbyte::cuda
