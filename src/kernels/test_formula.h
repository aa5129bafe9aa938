// For tests: the value of a formula of a KernelDescription, as a program that launches a plain kernel would
// work it out.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

namespace halfbyte {

using FormulaNumbers = std::map<std::string, int64_t, std::less<>>;

class Formula {
 public:
  // Throws std::runtime_error where it is none, or has a name that is none of `numbers`.
  static int64_t value(std::string_view text, const FormulaNumbers& numbers) {
    Formula formula(text, numbers);
    const int64_t value = formula.sum();
    if (formula.next() != '\0') formula.fail("more than a formula");
    return value;
  }

 private:
  Formula(std::string_view text, const FormulaNumbers& numbers) : text_(text), numbers_(numbers) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(what + " at " + std::to_string(at_) + " of: " + std::string(text_));
  }
  char next() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool takes(char c) {
    if (next() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!takes(c)) fail(std::string("expected ") + c);
  }
  int64_t sum() {
    int64_t value = product();
    while (true) {
      if (takes('+'))
        value += product();
      else if (takes('-'))
        value -= product();
      else
        return value;
    }
  }
  int64_t product() {
    int64_t value = factor();
    while (true) {
      if (takes('*')) {
        value *= factor();
      } else if (takes('/')) {
        const int64_t by = factor();
        if (by == 0) fail("division by 0");
        value /= by;
      } else {
        return value;
      }
    }
  }
  int64_t factor() {
    if (takes('(')) {
      const int64_t value = sum();
      expect(')');
      return value;
    }
    next();
    const size_t begin = at_;
    const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (word.empty()) fail("expected a number or a name");
    if (std::isdigit(static_cast<unsigned char>(word[0]))) return std::stoll(std::string(word));
    if (word == "min" || word == "max") {
      expect('(');
      const int64_t a = sum();
      expect(',');
      const int64_t b = sum();
      expect(')');
      return word == "min" ? std::min(a, b) : std::max(a, b);
    }
    const auto found = numbers_.find(word);
    if (found == numbers_.end()) fail("unknown name " + std::string(word));
    return found->second;
  }

  std::string_view text_;
  const FormulaNumbers& numbers_;
  size_t at_ = 0;
};

}  // namespace halfbyte
