// For tests of files: a private directory and what to do in it.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "halfbyte/error.hpp"

namespace halfbyte {

// Removed with all it holds.
class TestDirectory {
 public:
  TestDirectory() : path_(::testing::TempDir() + "halfbyte-test-XXXXXX") {
    if (!::mkdtemp(path_.data())) throw std::runtime_error("mkdtemp " + path_);
  }
  TestDirectory(const TestDirectory&) = delete;
  ~TestDirectory() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // Names of all entries, temporary files included, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }

 private:
  std::string path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Called before each sync_file_range() of the program, where it is set: file_test.cc stands in for that.
inline std::function<void()> before_sync_range;

// Expects Error(code) with `text` in its message.
template <class Body>
void expect_error(ErrorCode code, const std::string& text, const Body& body) {
  try {
    body();
    ADD_FAILURE() << "no error; expected " << to_string(code) << " with \"" << text << '"';
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), std::string(to_string(code))) << error.what();
    EXPECT_TRUE(std::string(error.what()).find(text) != std::string::npos)
        << '"' << error.what() << "\" does not contain \"" << text << '"';
  }
}

}  // namespace halfbyte
