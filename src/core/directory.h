// Lists directories.
#pragma once

#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace halfbyte {

// Names of what is in a directory, sorted, without "." and ".."; empty after an error. The iterators of
// std::filesystem end the process for want of memory, since their increments are noexcept; this
// throws std::bad_alloc.
std::vector<std::string> names_in(const std::string& directory, std::error_code& error);

// The path of an entry. Not by the operator of std::filesystem: where memory fails, that of libstdc++ 12
// frees what it does not own if `directory` ends with a slash.
std::string join(std::string_view directory, std::string_view name);

}  // namespace halfbyte
