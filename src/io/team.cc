#include "io/team.h"

#include <charconv>

#include "core/checks.h"

namespace halfbyte::io {
namespace {

// The first letter of what a process says at a meeting.
constexpr char kWell = 'w', kFailed = 'f', kFollows = 'o';

Error error_of(const std::string& word) {
  const size_t end = word.find(' ');
  int code = 0;
  std::from_chars(word.data() + 1, word.data() + end, code);
  return {static_cast<ErrorCode>(code), word.substr(end + 1)};
}

}  // namespace

std::vector<std::string> Team::exchange(const std::string& word) {
  std::vector<std::string> words = group_->gather(word);
  const std::string* worst = nullptr;  // the first that has failed; else one that only follows
  for (const char kind : {kFailed, kFollows})
    for (const std::string& each : words)
      if (worst == nullptr && each.front() == kind) worst = &each;
  if (worst != nullptr) {
    is_over_ = true;
    throw error_of(*worst);
  }
  for (std::string& each : words) each.erase(0, 1);
  return words;
}

std::vector<std::string> Team::meet(const std::string& own) {
  if (is_alone()) return {own};
  return exchange(kWell + own);
}

Error Team::agreed(const Error& error) {
  if (is_alone() || is_over_) return error;
  if (!follows_) group_->tell_failure();
  try {
    exchange(
        fmt::format("{}{} {}", follows_ ? kFollows : kFailed, static_cast<int>(error.code()), error.what()));
  } catch (const Error& first) {
    return first;
  }
  return error;  // not reached: there is one at least
}

ProgressFunction Team::watched(ProgressFunction function) {
  if (is_alone()) return function;
  return [this, function = std::move(function)](const Progress& progress) {
    if (!follows_ && group_->others_failed()) follows_ = true;
    HALFBYTE_CHECK(!follows_, cancelled, "{} ended, since another process has failed", progress.phase);
    return !function || function(progress);
  };
}

}  // namespace halfbyte::io

namespace halfbyte {

Error fail_together(ProcessGroup& group, const Error& error) {
  return io::Team(std::shared_ptr<ProcessGroup>(&group, [](ProcessGroup*) {})).agreed(error);
}

}  // namespace halfbyte
