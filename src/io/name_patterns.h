// Names of tensors and modules, and the patterns of the table of architectures that stand for many of them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace halfbyte::io::names {

using Parts = std::vector<std::string>;  // components of a name

Parts split(std::string_view text, char separator);
std::string join(const Parts& parts, size_t first, size_t last);

// The components of a part of a name; `^`, which stands before the name, is the first of those at its
// beginning.
Parts components(std::string_view text);

// The patterns of an expression with braces and commas, as of a shell: a.{b,c.d}.
std::vector<std::string> expand(std::string_view text);
// The same, in components.
std::vector<Parts> patterns(std::string_view text);

// Whether the pattern matches parts[first, last). A `*` at the end of a component of a pattern stands for a
// number.
bool matches(const Parts& pattern, const Parts& parts, size_t first, size_t last);

// The components of parts[first, ...) that `source` has a `*` for.
Parts numbers(const Parts& source, const Parts& parts, size_t first);
// `target` with the numbers that `source` matched in parts[first, ...) in place of its `*`.
Parts with_numbers(const Parts& source, const Parts& target, const Parts& parts, size_t first);

struct Rule {
  Parts source, target;
};

// The name with each part that a rule has replaced, from left to right; of several rules the longest is
// taken.
std::string renamed(const std::vector<Rule>& rules, std::string_view name);

}  // namespace halfbyte::io::names
