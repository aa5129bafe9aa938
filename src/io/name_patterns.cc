#include "io/name_patterns.h"

#include <algorithm>
#include <utility>

namespace halfbyte::io::names {
namespace {

// A `*` at the end of a component of a pattern stands for a number.
bool same(std::string_view pattern, std::string_view part) {
  if (pattern == part) return true;
  if (pattern.empty() || pattern.back() != '*') return false;
  pattern.remove_suffix(1);
  if (!part.starts_with(pattern) || part.size() == pattern.size()) return false;
  part.remove_prefix(pattern.size());
  return part.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

Parts split(std::string_view text, char separator) {
  Parts parts;
  for (size_t begin = 0;;) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == text.size()) return parts;
    begin = end + 1;
  }
}

std::string join(const Parts& parts, size_t first, size_t last) {
  std::string text;
  for (size_t i = first; i < last; ++i) text += (i == first ? "" : ".") + parts[i];
  return text;
}

Parts components(std::string_view text) {
  if (text.empty()) return {};
  if (text.front() != '^') return split(text, '.');
  Parts parts{"^"};
  if (text.size() > 1) {
    Parts rest = split(text.substr(1), '.');
    parts.insert(parts.end(), rest.begin(), rest.end());
  }
  return parts;
}

std::vector<std::string> expand(std::string_view text) {
  std::vector<std::string> result;
  for (size_t begin = 0; begin <= text.size();) {
    size_t end = begin, open = std::string_view::npos, close = std::string_view::npos;
    for (int depth = 0; end < text.size() && (depth > 0 || text[end] != ','); ++end) {
      if (text[end] == '{' && depth++ == 0 && open == std::string_view::npos) open = end;
      if (text[end] == '}' && --depth == 0 && close == std::string_view::npos) close = end;
    }
    if (open == std::string_view::npos) {
      result.emplace_back(text.substr(begin, end - begin));
    } else {
      const std::string head(text.substr(begin, open - begin));
      const std::vector<std::string> tails = expand(text.substr(close + 1, end - close - 1));
      for (const std::string& inner : expand(text.substr(open + 1, close - open - 1))) {
        for (const std::string& tail : tails) result.push_back(head + inner + tail);
      }
    }
    begin = end + 1;
  }
  return result;
}

std::vector<Parts> patterns(std::string_view text) {
  std::vector<Parts> result;
  for (const std::string& one : expand(text)) result.push_back(split(one, '.'));
  return result;
}

bool matches(const Parts& pattern, const Parts& parts, size_t first, size_t last) {
  return last >= first && pattern.size() == last - first &&
         std::equal(pattern.begin(), pattern.end(), parts.begin() + static_cast<ptrdiff_t>(first), same);
}

Parts numbers(const Parts& source, const Parts& parts, size_t first) {
  Parts result;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == "*") result.push_back(parts[first + i]);
  }
  return result;
}

Parts with_numbers(const Parts& source, const Parts& target, const Parts& parts, size_t first) {
  const Parts found = numbers(source, parts, first);
  Parts result;
  size_t next = 0;
  for (const std::string& part : target) {
    result.push_back(part == "*" && next < found.size() ? found[next++] : part);
  }
  return result;
}

std::string renamed(const std::vector<Rule>& rules, std::string_view name) {
  Parts parts = split(name, '.'), result;
  parts.insert(parts.begin(), "^");
  for (size_t i = 0; i < parts.size();) {
    const Rule* best = nullptr;
    for (const Rule& rule : rules) {
      const size_t size = rule.source.size();
      if ((best == nullptr || size > best->source.size()) && i + size <= parts.size() &&
          matches(rule.source, parts, i, i + size)) {
        best = &rule;
      }
    }
    if (best == nullptr) {
      result.push_back(parts[i++]);
      continue;
    }
    for (std::string& part : with_numbers(best->source, best->target, parts, i))
      result.push_back(std::move(part));
    i += best->source.size();
  }
  return join(result, 1, result.size());
}

}  // namespace halfbyte::io::names
