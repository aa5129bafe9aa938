// Lists directories.
#pragma once

#include <string>
#include <system_error>
#include <vector>

namespace halfbyte {

// Names of what is in a directory, sorted, without "." and ".."; empty after an error. The iterators of
// std::filesystem end the process for want of memory, since their increments are noexcept; this
// throws std::bad_alloc.
std::vector<std::string> names_in(const std::string& directory, std::error_code& error);

}  // namespace halfbyte
