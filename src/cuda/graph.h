// Launches that are enqueued once and replayed.
#pragma once

#include <functional>

#include "cuda/driver.h"

namespace halfbyte::cuda {

// Of the current context. Empty until the capture.
class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();
  // What `body` enqueues on `stream`, which is not the default stream; none of it runs now. Memory that the
  // launches use must live as long as the graph.
  void capture(void* stream, const std::function<void()>& body);
  void launch(void* stream) const;

 private:
  CUgraphExec exec_ = nullptr;
};

}  // namespace halfbyte::cuda
