// What a transformer computes beside products with quantized weights: on the host, in f32. Results do not
// depend on the number of threads: each element of an output is computed by one.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace llama {

// Calls task(begin, end) for ranges of at least `grain` that make up [0, count), on up to num_threads
// threads.
void parallel_for(int64_t count, int64_t grain, int num_threads,
                  const std::function<void(int64_t begin, int64_t end)>& task);

// To the nearest bf16, ties to even, and back.
uint16_t to_bf16(float value);
float from_bf16(uint16_t bits);

// A dense weight [n, k], reordered so that 16 outputs at a time are a vector.
class DenseMatrix {
 public:
  DenseMatrix(const float* weight, int64_t n, int64_t k);
  // y[m, n] = x[m, k] . W^T (+ bias[n], or null)
  void multiply(const float* x, int64_t m, const float* bias, float* y, int num_threads) const;
  int64_t num_bytes() const { return static_cast<int64_t>(panels_.size() * sizeof(float)); }

 private:
  int64_t n_, k_;
  std::vector<float> panels_;  // [ceil(n / 16)][k][16]
};

// y[m, n] = x / sqrt(mean of the squares of its row + eps) * weight[n]. y may be x.
void rms_norm(const float* x, int64_t m, int64_t n, const float* weight, float eps, float* y,
              int num_threads);

// gate = silu(gate) * up, of `count` elements
void silu_multiply(float* gate, const float* up, int64_t count, int num_threads);

// Which experts each of m tokens is given to, and what the output of each counts.
struct Routing {
  int64_t per_token = 0;
  std::vector<int32_t> experts;  // [m, per_token], the likeliest first
  std::vector<float> weights;    // [m, per_token]
};
// By the softmax of logits[m, num_experts]; of equal ones the first. normalized: the weights of a token sum
// to 1.
Routing route(const float* logits, int64_t m, int64_t num_experts, int64_t per_token, bool normalized);

// Rotates the pairs (i, i + head_dim / 2) of each of `num_heads` heads of each row by the row's position
// times frequencies[i]. x[m, num_heads * head_dim]; rows are at positions first, first + 1, ...
void rope(float* x, int64_t m, int64_t num_heads, const std::vector<float>& frequencies, int64_t first,
          int num_threads);

// Keys and values of one layer.
struct KeyValueCache {
  KeyValueCache(int64_t num_heads, int64_t head_dim, int64_t capacity);
  // k, v[m, num_heads * head_dim], at positions first, first + 1, ...
  void store(const float* k, const float* v, int64_t m, int64_t first);

  int64_t num_heads, head_dim, capacity;
  std::vector<float> keys;    // [num_heads][head_dim][capacity]: scores of many positions are a vector
  std::vector<float> values;  // [num_heads][capacity][head_dim]
};

// Causal attention of q[m, num_heads * head_dim] at positions first, first + 1, ... over the cache: y like q.
// Query heads that follow each other share a head of the cache.
void attention(const float* q, int64_t m, int64_t num_heads, const KeyValueCache& cache, int64_t first,
               float* y, int num_threads);

}  // namespace llama
