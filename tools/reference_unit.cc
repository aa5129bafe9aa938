// What tools/build_times.py compiles to learn how fast the machine is: like a unit of halfbyte, and always
// the same.
#include <algorithm>
#include <functional>
#include <map>
#include <regex>
#include <string>
#include <utility>
#include <vector>

std::vector<std::pair<std::string, std::vector<long>>> words_with_places(const std::string& text) {
  const std::regex word("[a-z]+");
  std::map<std::string, std::vector<long>> places;
  for (std::sregex_iterator i(text.begin(), text.end(), word), end; i != end; ++i)
    places[i->str()].push_back(i->position());
  std::vector<std::pair<std::string, std::vector<long>>> words(places.begin(), places.end());
  std::sort(words.begin(), words.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return words;
}
