// Processes of this tool that share work: NVRTC compiles one kernel at a time in each.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace halfbyte::cli {

// Starts this tool once for each list of arguments and waits for all. Each writes a byte to its standard
// output whenever something is done; `progress` is told how many there were, at least ten times a second, and
// returns false to cancel. Throws what a failed worker said on standard error: Error(its exit code);
// Error(cancelled); Error(io) where one cannot be started. None is left running.
void run_workers(const std::vector<std::vector<std::string>>& arguments,
                 const std::function<bool(int64_t done)>& progress);

}  // namespace halfbyte::cli
