// Which NUMA node of the machine a thread runs on.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace halfbyte {

struct Topology {
  // Of each node, those that this process may use. At least one node, and one CPU of each.
  std::vector<int> num_cpus;
  std::vector<int> node_of_cpu;  // by the system's numbers; nodes count as in num_cpus, 0 for other CPUs
  int (*cpu)();                  // the number of the CPU that the calling thread runs on

  // At the moment: the system may move the thread at any time.
  int node() const;

  // What `root`, Linux' /sys/devices/system/node, says of these CPUs. One node where it says nothing of use.
  static Topology read(const std::string& root, std::span<const int> cpus);
};

// Of this process, read at the first call.
const Topology& topology();

// For tests: stands in for that of the machine until the next call; nullptr: that of the machine. Not while
// other threads compute.
void set_topology(const Topology* topology);

}  // namespace halfbyte
