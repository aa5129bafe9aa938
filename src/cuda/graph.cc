#include "cuda/graph.h"

#include "core/checks.h"

namespace halfbyte::cuda {

Graph::~Graph() {
  if (exec_) find_driver().cuGraphExecDestroy(exec_);
}

void Graph::capture(void* stream, const std::function<void()>& body) {
  HALFBYTE_CHECK(exec_ == nullptr, bug, "graph: is captured already");
  constexpr int kThreadLocal = 1;  // a call that does not belong in a graph fails, in this thread
  const Driver& cuda = driver();
  const auto handle = static_cast<CUstream>(stream);
  CUgraph graph = nullptr;
  check(cuda.cuStreamBeginCapture_v2(handle, kThreadLocal), "cuStreamBeginCapture");
  try {
    body();
  } catch (...) {
    if (cuda.cuStreamEndCapture(handle, &graph) == 0 && graph) cuda.cuGraphDestroy(graph);
    throw;
  }
  check(cuda.cuStreamEndCapture(handle, &graph), "cuStreamEndCapture");
  const CUresult result = cuda.cuGraphInstantiateWithFlags(&exec_, graph, 0);
  cuda.cuGraphDestroy(graph);
  check(result, "cuGraphInstantiate");
}

void Graph::launch(void* stream) const {
  check(driver().cuGraphLaunch(exec_, static_cast<CUstream>(stream)), "cuGraphLaunch");
}

}  // namespace halfbyte::cuda
