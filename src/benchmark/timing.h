// How long work on a CUDA device takes.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "cuda/graph.h"

namespace halfbyte {

// Of the current context and one stream.
class GraphTimer {
 public:
  GraphTimer(const cuda::Context& context, void* stream);

  // Microseconds of each graph: in a round they are replayed once each, in turn, so that they see the same
  // clocks; the medians of the rounds.
  std::vector<double> medians(std::span<const cuda::Graph* const> graphs, int rounds);

 private:
  using Event = std::shared_ptr<std::remove_pointer_t<cuda::CUevent>>;

  cuda::CUfunction delay_;
  void* stream_;
  std::vector<Event> events_;
};

}  // namespace halfbyte
