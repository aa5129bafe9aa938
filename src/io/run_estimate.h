// How long a run takes, from a sample of what it does. docs/scale.md explains the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace halfbyte::io {

// A weight, of units that a sample does not divide: rows, matrices, or all of it.
struct SampledWeight {
  int64_t num_units = 0;
  uint64_t num_bytes = 0;
};
struct SampledUnits {
  size_t weight;
  int64_t begin, end;
};
// Sets of units that differ, of about `set_bytes` each, in pieces of about `piece_bytes` from places that are
// spread evenly over the weights. In a place, one set begins where the last one ends: what the system has
// read ahead counts. A unit is taken where its first byte is: what is small has its share. Weights of few
// bytes are taken whole, by each set. In each set is at least one unit, in order, and there is at least one
// set, if there are units.
std::vector<std::vector<SampledUnits>> choose_sample(std::span<const SampledWeight> weights, int num_sets,
                                                     uint64_t set_bytes, uint64_t piece_bytes);

// What was measured: seconds for each byte of the source.
struct StageRates {
  double run = 0, verify = 0, sync = 0;
};
struct SampleRates {
  // Each stage alone; and the first beside the others, where files are completed while others are written.
  StageRates alone, beside;
  double read = 0, write = 0, compute = 0, copy = 0;  // of `run`, on all workers together
  double ranges = 0;                                  // of the pass that finds global scales
  double reserve = 0;                                 // for each byte of the output
  double start = 0;                                   // seconds: threads, devices, their memory
};

// What a process has to do.
struct RunPlan {
  std::vector<uint64_t> batch_bytes;  // of the source, of files that are written side by side, in order
  uint64_t reserved_bytes = 0, ranges_bytes = 0;
  // A batch is completed while the next one is written.
  bool overlaps = false;
  bool starts_beside = false;  // starting is done while space is reserved
};

// As in CheckpointReport, in seconds.
struct RunTimes {
  double total = 0, run = 0, sync = 0, verify = 0, read = 0, write = 0, compute = 0, copy = 0;
};
RunTimes estimate_times(const SampleRates& rates, const RunPlan& plan);

}  // namespace halfbyte::io
