#include "io/run_estimate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace halfbyte::io {

std::vector<std::vector<SampledUnits>> choose_sample(std::span<const SampledWeight> weights, int num_sets,
                                                     uint64_t set_bytes, uint64_t piece_bytes) {
  uint64_t total = 0;
  for (const SampledWeight& weight : weights) total += weight.num_bytes;
  const auto count = static_cast<uint64_t>(num_sets);
  std::vector<std::vector<SampledUnits>> sets(count);
  if (total <= piece_bytes) {
    for (auto& set : sets)
      for (size_t i = 0; i < weights.size(); ++i)
        if (weights[i].num_units > 0) set.push_back({i, 0, weights[i].num_units});
    return sets;
  }
  set_bytes = std::min(set_bytes, total / count);
  const uint64_t num_places = std::max<uint64_t>(1, set_bytes / piece_bytes);
  const auto places = static_cast<double>(num_places);
  const double stride = static_cast<double>(total) / places, length = static_cast<double>(set_bytes) / places;
  double first_byte = 0;  // of the weight
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto num_bytes = static_cast<double>(weights[i].num_bytes);
    if (weights[i].num_units == 0) continue;
    const double unit = num_bytes / static_cast<double>(weights[i].num_units);
    // The first unit that begins at or behind this byte of all.
    const auto unit_at = [&](double byte) {
      return std::clamp(static_cast<int64_t>(std::ceil((byte - first_byte) / unit)), int64_t{0},
                        weights[i].num_units);
    };
    const auto low = static_cast<uint64_t>(first_byte / stride),
               high = static_cast<uint64_t>((first_byte + num_bytes) / stride);
    for (uint64_t place = low; place <= std::min(high, num_places - 1); ++place) {
      const double middle = (static_cast<double>(place) + 0.5) * stride;
      double begin = middle - length * static_cast<double>(count) / 2;
      for (auto& set : sets) {
        const SampledUnits units = {i, unit_at(begin), unit_at(begin + length)};
        if (units.begin < units.end) set.push_back(units);
        begin += length;
      }
    }
    first_byte += num_bytes;
  }
  std::erase_if(sets, [](const auto& set) { return set.empty(); });
  if (sets.empty()) {  // units are larger than what lies between two pieces
    const auto largest = std::ranges::max_element(weights, {}, &SampledWeight::num_bytes);
    sets.push_back({{static_cast<size_t>(largest - weights.begin()), 0, 1}});
  }
  return sets;
}

RunTimes estimate_times(const SampleRates& rates, const RunPlan& plan) {
  RunTimes times;
  double previous = 0;  // bytes that are still to be completed
  for (const uint64_t batch : plan.batch_bytes) {
    const auto bytes = static_cast<double>(batch);
    const bool is_alone = !plan.overlaps || previous == 0;
    const double run = (is_alone ? rates.alone : rates.beside).run * bytes;
    const double verify = rates.beside.verify * previous, sync = rates.beside.sync * previous;
    times.run += run;
    times.verify += verify;
    times.sync += sync;
    times.total += std::max(run, verify + sync);
    if (plan.overlaps) {
      previous = bytes;
    } else {
      times.verify += rates.alone.verify * bytes;
      times.sync += rates.alone.sync * bytes;
      times.total += (rates.alone.verify + rates.alone.sync) * bytes;
    }
  }
  times.verify += rates.alone.verify * previous;
  times.sync += rates.alone.sync * previous;
  times.total += (rates.alone.verify + rates.alone.sync) * previous;
  const double all = std::accumulate(plan.batch_bytes.begin(), plan.batch_bytes.end(), 0.0);
  times.read = rates.read * all;
  times.write = rates.write * all;
  times.compute = rates.compute * all;
  times.copy = rates.copy * all;
  const double reserve = rates.reserve * static_cast<double>(plan.reserved_bytes);
  times.total += plan.starts_beside ? std::max(rates.start, reserve) : rates.start + reserve;
  times.total += rates.ranges * static_cast<double>(plan.ranges_bytes);
  return times;
}

}  // namespace halfbyte::io
