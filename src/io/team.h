// The processes of a ProcessGroup, which work on one output: they go from meeting to meeting, and fail
// together.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "halfbyte/process_group.hpp"

namespace halfbyte::io {

class Team {
 public:
  explicit Team(std::shared_ptr<ProcessGroup> group) : group_(std::move(group)) {}

  int rank() const { return group_ ? group_->rank() : 0; }
  int size() const { return group_ ? group_->size() : 1; }
  bool is_alone() const { return size() == 1; }
  bool leads() const { return rank() == 0; }

  // What each process gives, by rank. Where one has failed, throws the error of the first instead.
  std::vector<std::string> meet(const std::string& own = {});

  // Runs the part of this process, and waits for the others. An error goes to the next meeting of all.
  template <class Work>
  auto run(const Work& work) {
    try {
      auto result = work();
      if (!is_alone()) meet();  // alone, nothing allocates once the output has its name
      return result;
    } catch (const Error& error) {
      throw agreed(error);
    } catch (const std::bad_alloc&) {
      if (is_alone() || is_over_) throw;
      throw agreed({ErrorCode::no_memory, "out of memory"});
    } catch (const std::exception& error) {
      if (is_alone() || is_over_) throw;
      throw agreed({ErrorCode::bug, error.what()});
    }
  }
  // The error that all are going to throw, where this process has one: that of the first. Tells the others,
  // unless they know.
  Error agreed(const Error& error);

  // `function`, which also ends the work of this process where another has failed.
  ProgressFunction watched(ProgressFunction function);

 private:
  std::vector<std::string> exchange(const std::string& word);

  std::shared_ptr<ProcessGroup> group_;  // null: one process
  std::atomic<bool> follows_ = false;    // ends since another has failed
  bool is_over_ = false;                 // all know of an error
};

}  // namespace halfbyte::io
