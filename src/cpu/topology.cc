#include "cpu/topology.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

namespace halfbyte {
namespace {

// A list of the kernel: "0-3,8,10-11".
std::vector<int> parse_list(std::string_view text) {
  std::vector<int> numbers;
  const auto number = [&](int& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || value < 0) return false;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return true;
  };
  const auto is_next = [&](char c) {
    if (!text.starts_with(c)) return false;
    text.remove_prefix(1);
    return true;
  };
  constexpr int kMostCpus = 1 << 16;  // beyond any machine
  for (int first = 0; number(first);) {
    int last = first;
    if (is_next('-') && !number(last)) break;
    for (int i = first; i <= std::min(last, kMostCpus); ++i) numbers.push_back(i);
    if (!is_next(',')) break;
  }
  return numbers;
}

// Of a file. Not by std::filesystem: to go through a directory ends the process where there is no memory.
std::vector<int> read_list(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  return parse_list(text);
}

// CPUs that this process may use, as many as the kernel knows.
std::vector<int> usable_cpus() {
  std::vector<int> cpus;
  for (int size = 1024; size <= 1 << 16; size *= 2) {
    cpu_set_t* const set = CPU_ALLOC(size);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(size);
    const bool fits = ::sched_getaffinity(0, bytes, set) == 0;
    if (fits)
      for (int cpu = 0; cpu < size; ++cpu)
        if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (fits) break;
  }
  return cpus;
}

const Topology* given = nullptr;

}  // namespace

int Topology::node() const {
  if (num_cpus.size() == 1) return 0;
  const int number = cpu();
  return number >= 0 && number < std::ssize(node_of_cpu) ? node_of_cpu[static_cast<size_t>(number)] : 0;
}

Topology Topology::read(const std::string& root, std::span<const int> cpus) {
  Topology topology{{}, {}, ::sched_getcpu};
  for (const int node : read_list(root + "/online")) {
    int num_cpus = 0;
    for (const int cpu : read_list(root + "/node" + std::to_string(node) + "/cpulist")) {
      if (std::ranges::find(cpus, cpu) == cpus.end()) continue;
      const auto index = static_cast<size_t>(cpu);
      if (index >= topology.node_of_cpu.size()) topology.node_of_cpu.resize(index + 1);
      topology.node_of_cpu[index] = static_cast<int>(topology.num_cpus.size());
      ++num_cpus;
    }
    if (num_cpus > 0) topology.num_cpus.push_back(num_cpus);
  }
  if (topology.num_cpus.empty()) topology.num_cpus.push_back(std::max(1, static_cast<int>(cpus.size())));
  return topology;
}

const Topology& topology() {
  if (given != nullptr) return *given;
  static const Topology& found = *new Topology(Topology::read("/sys/devices/system/node", usable_cpus()));
  return found;
}

void set_topology(const Topology* topology) { given = topology; }

}  // namespace halfbyte
