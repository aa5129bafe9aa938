// Enumerators and their words, in one table each.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "core/checks.h"

namespace halfbyte {

// ASCII letters only.
inline std::string lower_case(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

template <class Enum>
struct Word {
  Enum value;
  const char* text;
};

template <class Enum, size_t N>
const char* word_of(const std::array<Word<Enum>, N>& words, Enum value) {
  for (const auto& word : words)
    if (word.value == value) return word.text;
  HALFBYTE_FAIL(bug, "no word for enumerator {}", static_cast<int>(value));
}

// `what` names the kind of thing in the message: "dtype".
template <class Enum, size_t N>
Enum value_of(const std::array<Word<Enum>, N>& words, std::string_view text, const char* what) {
  std::string known;
  for (const auto& word : words) {
    if (text == word.text) return word.value;
    known += known.empty() ? "" : ", ";
    known += word.text;
  }
  HALFBYTE_FAIL(usage, "unknown {} '{}': must be one of {}", what, text, known);
}

}  // namespace halfbyte
