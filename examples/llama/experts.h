// The experts of a layer: of each token, some of many feed-forward networks.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "host_math.h"
#include "linear.h"

namespace llama {

// Of all experts: of each projection a weight of two axes for each of them, or one of three for all.
struct ExpertWeights {
  int64_t num_experts = 0;
  std::vector<const halfbyte::Weight*> gate = {}, up = {}, down = {};
};

class Experts {
 public:
  virtual ~Experts() = default;
  // y[m, n] = the sum over the experts of a token of weight * down(silu(gate(x)) * up(x)), x[m, n]
  virtual void forward(const float* x, int64_t m, const Routing& routing, float* y) = 0;
  virtual std::map<Product, int64_t> products() const = 0;  // and how many linear layers have it
  virtual int64_t memory_bytes() const = 0;                 // of the weights
};

std::unique_ptr<Experts> make_experts(const halfbyte::Checkpoint& checkpoint, const ExpertWeights& weights,
                                      Workplace& workplace);

}  // namespace llama
