#include "cpu/topology.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
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
  std::map<int, std::vector<int>> nodes;  // by the system's numbers
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(root, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename();
    int number = 0;
    if (!name.starts_with("node") ||
        std::from_chars(name.data() + 4, name.data() + name.size(), number).ec != std::errc{})
      continue;
    std::ifstream file(entry->path() / "cpulist");
    std::string text;
    std::getline(file, text);
    for (const int cpu : parse_list(text))
      if (std::ranges::find(cpus, cpu) != cpus.end()) nodes[number].push_back(cpu);
  }
  Topology topology{{}, {}, ::sched_getcpu};
  for (const auto& [number, own] : nodes) {
    for (const int cpu : own) {
      const auto index = static_cast<size_t>(cpu);
      if (index >= topology.node_of_cpu.size()) topology.node_of_cpu.resize(index + 1);
      topology.node_of_cpu[index] = static_cast<int>(topology.num_cpus.size());
    }
    topology.num_cpus.push_back(static_cast<int>(own.size()));
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
